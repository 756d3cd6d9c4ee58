#!/usr/bin/env bash
# Score a preset, dense and sparse: bash scripts/evaluate.sh PRESET [flags of python -m scripts.evaluate]
# Many methods at all densities on all tasks: bash scripts/evaluate.sh PRESET --sweep [flags that replace the sweep's]
# The sweep appends to sweep.jsonl in the run's folder and ends with its report in sweep/. Started again, it goes on
# where it was interrupted; with --output FILE the report is beside that file.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/presets.sh
source scripts/usage.sh
use_preset "${1:-}" evaluate
shift

flags=(--model "$checkpoint" --corpus "$test_corpus")
if [ -d "$run_dir/predictors" ]; then flags+=(--predictors "$run_dir/predictors"); fi
if [ "${1:-}" != --sweep ]; then
    run_python evaluate "${flags[@]}" --output "$run_dir/results.jsonl" "$@"
    exit
fi
shift

methods=(dense oracle predictor teal teal-all wina-unrotated griffin static random)
if [ "$is_gated" = yes ]; then methods+=(cats); fi
flags+=(--method "${methods[@]}" --mlp-density 0.7 0.5 0.3)
flags+=(--tasks perplexity,zero-shot,arithmetic_words --resume)
results=$(value_of --output "$run_dir/sweep.jsonl" "$@")
# A text that the model writes itself has no end.
case "$(value_of --corpus "$test_corpus" "$@")" in self | self:*) flags+=(--max-tokens "$max_tokens") ;; esac
run_python evaluate "${flags[@]}" --output "$results" "$@"
if ! [ -f "$results" ]; then
    echo "$results: no records on this host, so no report" >&2
    exit
fi
NUM_GPUS=1 NNODES=1 run_python summarize --results "$results" --output-dir "${results%.jsonl}"
