#!/usr/bin/env bash
# The accuracy tables of the README, from a checkpoint to records, on GPUs: bash scripts/recipes/accuracy.sh CHECKPOINT
# Rivals get what the predictor gets: thresholds set in their own sparse run on CALIBRATION_TOKENS of text, and those in
# BUDGETS a division of the density over layers (TEAL: over matrices, too).
# STEPS, each of which may be a call of its own (none takes ten minutes on two H200 for SmolLM2):
#   collect     the activations
#   brief       per density a brief training, and the budget that it says the predictor needs; Deja Vu's recipe; the
#               calibration of all other methods
#   train       the predictors for these budgets, and at CURVE (0.22) one of uniform density, the low end of the curve
#               against bytes read; beside them the budgets of the methods in BUDGETS
#   perplexity  of the whole test text: dense, then all METHODS at DENSITIES (0.7 0.5 0.3), uniform and with a budget
#   tasks       likewise
# Records are in RUN_DIR/perplexity_METHOD.jsonl and accuracy_METHOD.jsonl; their label density_budget is `trained`, the
# budget's file, or none (uniform). Jobs of a step run side by side, on GPUS (1) GPUs in turn.
# Variables: STEPS (all of these); GPUS; RUN_DIR (outputs/accuracy); CALIBRATION (c4) and TEST (wikitext), corpora or text
# files; TOKENS (440000) to collect, kept in ACTIVATIONS (RUN_DIR/activations; SmolLM2 takes 127 kB per token);
# CALIBRATION_TOKENS (16384); REFINE_STEPS (800), and BRIEF_STEPS (150) before the budgets; REFINE_CORPUS and
# REFINE_TOKENS, more text to refine on (none by default); METHODS, beside the predictor (leave cats out for models
# without gates), and BUDGETS, those of them that get a budget; TASKS, comma-separated, with INCLUDE_PATH, a folder of
# task files; REQUESTS, a file that `scripts.carried_tasks export` wrote, where lm-eval is not to be had.
# Safe to run again with the same variables: what is complete is kept.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/usage.sh
source scripts/presets.sh

if [ $# != 1 ]; then
    echo "error: give one checkpoint: bash scripts/recipes/accuracy.sh CHECKPOINT (--help says more)" >&2
    exit 2
fi
model=(--model "$1") run_dir="${RUN_DIR:-outputs/accuracy}" num_gpus="${GPUS:-1}"
read -ra densities <<<"${DENSITIES:-0.7 0.5 0.3}"
read -ra curve <<<"${CURVE-0.22}"
read -ra methods <<<"${METHODS:-oracle cats teal static random teal-all wina-unrotated griffin}"
read -ra budgets <<<"${BUDGETS-cats teal teal-all}"
read -ra steps <<<"${STEPS:-collect brief train perplexity tasks}"
calibration="${CALIBRATION:-c4}" activations="${ACTIVATIONS:-${RUN_DIR:-outputs/accuracy}/activations}"
calibration_tokens="${CALIBRATION_TOKENS:-16384}"
tasks="${TASKS:-arc_easy,arc_challenge,openbookqa,winogrande,boolq,lambada_openai,arithmetic_words}"
refinement=(--refine-steps "${REFINE_STEPS:-800}" ${REFINE_CORPUS:+--refine-corpus "$REFINE_CORPUS"})
refinement+=(${REFINE_TOKENS:+--refine-tokens "$REFINE_TOKENS"})
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}" NUM_GPUS=1
set -m # a process group for each job, so that nothing is left running when this ends
trap 'for job in $(jobs -p); do kill -- "-$job" 2>/dev/null || true; done' EXIT

# `begin COMMAND...`: beside the others, on the next GPU. `finish`: until all that has begun has ended well.
pids=() num_begun=0
begin() {
    if [ "$num_gpus" -gt 1 ]; then
        CUDA_VISIBLE_DEVICES=$((num_begun % num_gpus)) "$@" &
    else
        "$@" &
    fi
    pids+=("$!") num_begun=$((num_begun + 1))
}
finish() {
    local pid
    for pid in "${pids[@]}"; do wait "$pid"; done
    pids=()
}
# `is_in WORD WORDS...`
is_in() {
    local word
    for word in "${@:2}"; do
        if [ "$word" = "$1" ]; then return; fi
    done
    return 1
}

# `train FOLDER FLAGS...`
train() {
    local folder="$1"
    shift
    run_python train "${model[@]}" --dtype bfloat16 --activations "$activations" --output-dir "$run_dir/$folder" \
        --units mlp --calibration-tokens "$calibration_tokens" "$@"
}
# `perplexity NAME FLAGS...` and `answers NAME FLAGS...`: records in perplexity_NAME.jsonl, and in accuracy_NAME.jsonl or
# answers_NAME.jsonl. What dense gave is taken from the files of NAME dense.
perplexity() {
    local file="$run_dir/perplexity_$1.jsonl"
    shift
    begin_with_dense "$file" "$run_dir/perplexity_dense.jsonl"
    run_python evaluate "${model[@]}" --dtype float32 --tasks perplexity --corpus "${TEST:-wikitext}" \
        --output "$file" --resume "$@"
}
answers() {
    local name="$1" kind=accuracy
    shift
    local asked=("${model[@]}" --dtype float32 --batch-size 128 --resume "$@")
    if [ -n "${REQUESTS:-}" ]; then kind=answers; fi
    begin_with_dense "$run_dir/${kind}_$name.jsonl" "$run_dir/${kind}_dense.jsonl"
    if [ -n "${REQUESTS:-}" ]; then
        run_python carried_tasks answer --requests "$REQUESTS" --output "$run_dir/answers_$name.jsonl" "${asked[@]}"
    else
        run_python evaluate --tasks "$tasks" ${INCLUDE_PATH:+--include-path "$INCLUDE_PATH"} \
            --output "$run_dir/accuracy_$name.jsonl" "${asked[@]}"
    fi
}
begin_with_dense() {
    if ! [ -e "$1" ] && [ -e "$2" ]; then cp "$2" "$1"; fi
}
# `budget METHOD DENSITY FOLDER`: divide the bytes over the layers, into budget_METHOD_DENSITY.json.
budget() {
    local file="$run_dir/budget_$1_$2.json"
    if ! [ -f "$file" ]; then
        run_python budget "${model[@]}" --dtype float32 --corpus "$calibration" --output "$file" --method "$1" \
            --mlp-density "$2" --predictors "$run_dir/$3" --tokens "$calibration_tokens" --batch-size 8
    fi
}
brief() {
    train "brief_$1" --densities "$1" --refine-steps "${BRIEF_STEPS:-150}"
    budget predictor "$1" "brief_$1"
}
# `score_ours KIND`, `score_method KIND METHOD`: one after the other, into one file.
score_ours() {
    local density
    for density in "${densities[@]}"; do
        "$1" predictor --method predictor --mlp-density "$density" --predictors "$run_dir/predictors_$density"
    done
    if [ "$1" = perplexity ]; then
        for density in "${curve[@]}"; do
            "$1" predictor --method predictor --mlp-density "$density" --predictors "$run_dir/predictors_$density"
        done
    fi
}
score_method() {
    local density
    "$1" "$2" --method "$2" --mlp-density "${densities[@]}" --predictors "$run_dir/calibration"
    if is_in "$2" "${budgets[@]}"; then
        for density in "${densities[@]}"; do # which the budget says: of teal-all, MLPs may have more of it, or less
            "$1" "$2" --method "$2" --predictors "$run_dir/calibration" \
                --density-budget "$run_dir/budget_$2_$density.json"
        done
    fi
}
score_all() {
    local method
    "$1" dense --method dense
    begin score_ours "$1"
    begin "$1" deja_vu --label "deja vu" --method predictor --mlp-density "${densities[@]}" \
        --predictors "$run_dir/deja_vu"
    for method in "${methods[@]}"; do begin score_method "$1" "$method"; done
    finish
}

for step in "${steps[@]}"; do
    case "$step" in
    collect)
        run_python collect "${model[@]}" --dtype bfloat16 --corpus "$calibration" --output-dir "$activations" \
            --units mlp --max-tokens "${TOKENS:-440000}" --resume
        ;;
    brief) # side by side: a step of training is many small kernels, and no process alone keeps a GPU busy
        for density in "${densities[@]}"; do begin brief "$density"; done
        begin train calibration --densities "${densities[@]}" --steps 0 --initialisation random --standin-rank 0 \
            --refine-steps 0
        begin train deja_vu --densities "${densities[@]}" --loss bce --initialisation random --label-density 0.5 \
            --rule topk --predictor-rank auto --standin-rank 0 --refine-steps 0
        finish
        ;;
    train)
        for density in "${densities[@]}"; do
            begin train "predictors_$density" --densities "$density" \
                --density-budget "$run_dir/budget_predictor_$density.json" "${refinement[@]}"
        done
        for density in "${curve[@]}"; do
            begin train "predictors_$density" --densities "$density" "${refinement[@]}"
        done
        for method in "${methods[@]}"; do
            if is_in "$method" "${budgets[@]}"; then
                for density in "${densities[@]}"; do begin budget "$method" "$density" calibration; done
            fi
        done
        finish
        ;;
    perplexity) score_all perplexity ;;
    tasks) score_all answers ;;
    *)
        echo "error: STEPS: $step is not one of collect brief train perplexity tasks" >&2
        exit 2
        ;;
    esac
done
if [ -n "${REQUESTS:-}" ] && is_in tasks "${steps[@]}"; then
    echo "answers lie in $run_dir; where lm-eval is, python -m scripts.carried_tasks fold makes records of them" >&2
fi
