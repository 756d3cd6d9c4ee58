#!/usr/bin/env bash
# Train a preset's predictors on what collect.sh recorded: bash scripts/train.sh PRESET [flags of python -m scripts.train]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/presets.sh
source scripts/usage.sh
use_preset "${1:-}" train
shift

run_python train --model "$checkpoint" --activations "$run_dir/activations" --output-dir "$run_dir/predictors" "$@"
