#!/usr/bin/env bash
# How far a preset's embeddings drift, and what explains what predictors lose: bash scripts/drift.sh [PRESET] [flags of
# python -m scripts.studies.drift]. PRESET is SmolLM2 if none is given, which is sampled: to fit 5 minutes on two cores,
# 1 on a GPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/presets.sh
source scripts/usage.sh
case "${1:-}" in
"" | -*) set -- SmolLM2 "$@" ;;
esac
preset="$1"
use_preset "$preset" drift
shift

flags=(--model "$checkpoint" --corpus "$test_corpus" --calibration-corpus "$train_corpus" --output-dir "$run_dir/drift")
if [ "$preset" = SmolLM2 ] && ! nvidia-smi -L >/dev/null 2>&1; then
    flags+=(--test-tokens 6144 --calibration-tokens 12288 --distance-layers 10 --activation-windows 16)
    flags+=(--perplexity-windows 8)
    # A CPU that multiplies bfloat16 in hardware is two to three times faster with it; any other one is slower.
    if grep -qE 'avx512_bf16|amx_bf16' /proc/cpuinfo 2>/dev/null; then flags+=(--dtype bfloat16); fi
elif [ "$preset" = SmolLM2 ]; then # its text has to be written first
    flags+=(--test-tokens 16384 --calibration-tokens 32768 --distance-layers 10 --perplexity-windows 32)
fi
run_python studies.drift "${flags[@]}" "$@"
