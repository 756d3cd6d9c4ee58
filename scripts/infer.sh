#!/usr/bin/env bash
# Continue prompts: bash scripts/infer.sh PRESET --input prompts.jsonl [flags of python -m scripts.infer]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/presets.sh
source scripts/usage.sh
use_preset "${1:-}" infer
shift

flags=(--model "$checkpoint" --output "$run_dir/answers.jsonl")
if [ -d "$run_dir/predictors" ]; then flags+=(--predictors "$run_dir/predictors"); fi
run_python infer "${flags[@]}" "$@"
