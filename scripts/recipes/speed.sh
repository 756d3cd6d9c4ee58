#!/usr/bin/env bash
# The README's tables of speed on random weights, measured anew: bash scripts/recipes/speed.sh OUTPUT_DIR
# On one GPU decoding and one MLP; with NUM_GPUS=N, N of 2 or more, also the all-reduce and what the GPUs do together
# (say first whether NVLink multicast may be used: TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NCCL_NVLS_ENABLE=0, or 0 and 1).
# Variables: NUM_GPUS (1); STEPS, some of the names below; TUNED, where --tune writes its choice file (OUTPUT_DIR).
# CALLS (1): measure each step that often, each in processes of its own, whose medians and ranges the tables print.
# TRAINED, a checkpoint, with PREDICTORS, folders of scripts.train as FOLDER:DENSITY (several: in quotes), also measures
# speed and perplexity on TEST (wikitext) of each, from one process. TEAL=MODULE:FUNCTION and KRAKEN=MODULE:FUNCTION time
# those kernels beside ours (see --peer of benchmark.kernels and benchmark.communication).
# A step that is done is not run again; one that fails does not stop the next, and is named at the end (run again, it
# appends its records anew).
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/usage.sh
source scripts/presets.sh

out="${1:?where to write the records}" num_gpus="${NUM_GPUS:-1}"
one_gpu=(llama-3.2-3b llama-3.1-8b opt-6.7b density-1 baselines kernels thinned)
if [ -n "${TRAINED:-}" ]; then one_gpu+=(trained); fi
many_gpus=(stress tune communication cut-8b cut-70b prefill splits)
steps=("${one_gpu[@]}")
if [ "$num_gpus" -gt 1 ]; then steps+=("${many_gpus[@]}"); fi
if [ -n "${STEPS:-}" ]; then read -ra steps <<<"$STEPS"; fi
if [ "$num_gpus" -gt 1 ] && { [ -z "${TORCH_SYMM_MEM_DISABLE_MULTICAST:-}" ] || [ -z "${NCCL_NVLS_ENABLE:-}" ]; }; then
    echo "error: set TORCH_SYMM_MEM_DISABLE_MULTICAST and NCCL_NVLS_ENABLE (1 and 0: no multicast; 0 and 1: multicast)" >&2
    exit 2
fi
mkdir -p "$out"

# `decode FLAGS...` on one GPU, `together STAGE FLAGS...` on all of them.
decode() { NUM_GPUS=1 run_python benchmark.decode --output "$out/decode.jsonl" "$@"; }
together() { NUM_GPUS="$num_gpus" run_python "benchmark.$1" "${@:2}"; }
predictor=(--method predictor --lookahead 1 --standin-rank 0)

measure() {
    case "$1" in
    llama-3.2-3b)
        decode --shape llama-3.2-3b "${predictor[@]}" --mlp-density 0.25 --batch-size 1 4 8 &&
            decode --shape llama-3.2-3b --baseline hf-compiled --batch-size 1 4 8
        ;;
    llama-3.1-8b) decode --shape llama-3.1-8b "${predictor[@]}" --mlp-density 0.25 && decode --shape llama-3.1-8b ;;
    opt-6.7b)
        decode --shape opt-6.7b "${predictor[@]}" --mlp-density 0.1 --head-density 0.5 --baseline hf-compiled --batch-size 1 4 8 &&
            decode --shape opt-6.7b --batch-size 1 4 8
        ;;
    density-1)
        decode --shape llama-3.2-3b "${predictor[@]}" --mlp-density 1.0 &&
            decode --shape opt-6.7b "${predictor[@]}" --mlp-density 1.0
        ;;
    baselines)
        decode --shape llama-3.2-3b --method cats --mlp-density 0.25 &&
            decode --shape llama-3.2-3b --method teal --mlp-density 0.5
        ;;
    kernels)
        for shape in llama-3.2-3b llama-3.1-8b opt-6.7b; do
            NUM_GPUS=1 run_python benchmark.kernels --shape "$shape" --density 1.0 0.85 0.5 0.25 0.1 --output "$out/kernels.jsonl" || return
        done
        ;;
    thinned)
        for shape in llama-3.2-3b llama-3.1-8b opt-6.7b; do
            NUM_GPUS=1 run_python benchmark.kernels --operator thinned_rows --shape "$shape" --density 0.5 0.25 \
                ${TEAL:+--peer "$TEAL" --peer-name TEAL} --output "$out/kernels.jsonl" || return
        done
        ;;
    trained)
        for predictors in ${PREDICTORS:?folders of predictors, as FOLDER:DENSITY}; do
            decode --model "${TRAINED:?a checkpoint}" --corpus "${TEST:-wikitext}" --method predictor \
                --predictors "${predictors%:*}" --mlp-density "${predictors##*:}" || return
        done
        ;;
    stress) together communication --stress --output "$out/communication.jsonl" ;;
    tune) together communication --tune --output "${TUNED:-$out/choices.json}" ;;
    communication) together communication ${KRAKEN:+--peer "$KRAKEN" --peer-name kraken} --output "$out/communication.jsonl" ;;
    cut-8b | cut-70b)
        local shape=llama-3.1-8b
        if [ "$1" = cut-70b ]; then shape=llama-3.1-70b-8-layers; fi
        together decode --shape "$shape" --tp-size "$num_gpus" --batch-size 1 16 --output "$out/engine.jsonl"
        ;;
    prefill) together prefill --tp-size "$num_gpus" --batch-size 2 4 8 16 --output "$out/engine.jsonl" ;;
    splits) together prefill --tp-size "$num_gpus" --tune-splits --output "$out/splits.json" ;;
    *)
        echo "error: STEPS: $1 is not one of ${one_gpu[*]} ${many_gpus[*]}" >&2
        return 2
        ;;
    esac
}

failed=()
for step in "${steps[@]}"; do
    case "$step" in stress | tune | splits) calls=1 ;; *) calls="${CALLS:-1}" ;; esac
    for call in $(seq "$calls"); do
        finished="$out/$step-$call.done"
        if [ -e "$finished" ]; then continue; fi
        if measure "$step"; then touch "$finished"; else failed+=("$step") && break; fi
    done
done
if [ "${#failed[@]}" -gt 0 ]; then
    echo "error: not measured: ${failed[*]} (the others are in $out)" >&2
    exit 1
fi
