#!/usr/bin/env bash
# Record a preset's activations: bash scripts/collect.sh PRESET [flags of python -m scripts.collect]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/presets.sh
source scripts/usage.sh
use_preset "${1:-}" collect
shift

run_python collect --model "$checkpoint" --corpus "$train_corpus" --max-tokens "$max_tokens" \
    --output-dir "$run_dir/activations" "$@"
