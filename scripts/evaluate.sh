#!/usr/bin/env bash
# Score a preset, dense and sparse: bash scripts/evaluate.sh PRESET [flags of python -m scripts.evaluate]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/presets.sh
use_preset "${1:-}" evaluate
shift

flags=(--model "$checkpoint" --corpus "$test_corpus" --output "$run_dir/results.jsonl")
if [ -d "$run_dir/predictors" ]; then flags+=(--predictors "$run_dir/predictors"); fi
run_python evaluate "${flags[@]}" "$@"
