#!/usr/bin/env bash
# The controlled experiment, from SmolLM2 to its records: bash scripts/recipes/ablation.sh [FLAGS of
# python -m scripts.studies.ablation]
# SmolLM2 writes a text; eight kinds of small model (activation, positions, norm), three seeds each, are trained on it and
# studied; then SmolLM2 itself is trained on it, with its SiLU and with ReLU (FLAGS are not for that).
# Variables: NUM_GPUS (1); MODEL, another checkpoint that writes; RUN_DIR (outputs/ablation); TEXT_TOKENS (20000000);
# EXTRA_TEXT, further files to train on; TEST_CORPUS (wikitext), another text to test on; STEPS ("text models relufy").
# Safe to run again: what is complete is kept.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/usage.sh
source scripts/presets.sh

if [ -z "${MODEL:-}" ]; then
    use_preset SmolLM2 ablation
    MODEL="$checkpoint"
fi
num_gpus="${NUM_GPUS:-1}" run_dir="${RUN_DIR:-outputs/ablation}" steps=" ${STEPS:-text models relufy} "
test_corpus="${TEST_CORPUS:-wikitext}"
set -m # a process group for each job, so that nothing is left running when this ends
trap 'for job in $(jobs -p); do kill -- "-$job" 2>/dev/null || true; done' EXIT

# `on_gpu N STAGE FLAGS...`: in the background, seeing this GPU alone; `all_done` waits, and fails if one has failed.
on_gpu() {
    local gpu="$1"
    shift
    CUDA_VISIBLE_DEVICES="$gpu" OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}" NUM_GPUS=1 run_python "$@" &
    pids+=("$!")
}
all_done() {
    local pid
    for pid in "${pids[@]}"; do wait "$pid"; done
    pids=()
}
pids=() texts=()

for ((gpu = 0; gpu < num_gpus; gpu++)); do
    texts+=("$run_dir/text-$gpu.jsonl")
    if [[ $steps = *" text "* ]]; then
        on_gpu "$gpu" write_text --model "$MODEL" --output "${texts[gpu]}" --resume --seed "$gpu" --batch-size 1024 \
            --dtype bfloat16 --max-tokens "$((${TEXT_TOKENS:-20000000} / num_gpus))"
    fi
done
all_done

text=(--corpus "${texts[@]}" ${EXTRA_TEXT:-} --test-corpus "$test_corpus")
if [[ $steps = *" models "* ]]; then
    # Four at a time on each GPU: a step is many small kernels, and no process alone keeps a GPU busy.
    variants=({relu,silu}-{learned,rotary}-{layer,rms}) count=$((num_gpus < 2 ? 4 : 8))
    for ((process = 0; process < count; process++)); do
        mine=()
        for ((i = process; i < 8; i += count)); do mine+=("${variants[i]}"); done
        on_gpu "$((process % num_gpus))" studies.ablation "${text[@]}" --output-dir "$run_dir/models" \
            --output "$run_dir/ablation.jsonl" --variants "${mine[@]}" "$@"
    done
    all_done
fi

if [[ $steps = *" relufy "* ]]; then
    on_gpu 0 studies.relufy --model "$MODEL" "${text[@]}" --output-dir "$run_dir/relufy" --output "$run_dir/relufication.jsonl"
    all_done
fi
