#!/usr/bin/env bash
# The accuracy tables of the README, from a checkpoint to records, on a GPU: bash scripts/recipes/accuracy.sh CHECKPOINT
# Predictors are trained first and alone, one folder a density, side by side (six took 8 minutes on two H200): briefly,
# to divide the density over layers by what it costs there (scripts.budget), then for that budget. Then come their
# perplexity, calibration and Deja Vu's recipe, and every method's perplexity and tasks at 0.7, 0.5 and 0.3. At CURVE
# (0.22) there is the perplexity of a predictor of uniform density alone: the low end of the curve against bytes read.
# Variables: RUN_DIR (outputs/accuracy); CALIBRATION (c4) and TEST (wikitext), corpora or text files; TOKENS (440000) of
# calibration, kept in ACTIVATIONS (RUN_DIR/activations; SmolLM2 takes 127 kB a token); REFINE_STEPS (800), and
# BRIEF_STEPS (150) before the budgets; REFINE_CORPUS and REFINE_TOKENS, more text to refine on (none by default);
# METHODS, beside the predictor (leave cats out for models without gates); TASKS, comma-separated, with INCLUDE_PATH, a
# folder of task files; REQUESTS, a file that `scripts.carried_tasks export` wrote, where lm-eval is not to be had.
# Safe to run again with the same variables: what is complete is kept.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/usage.sh
source scripts/presets.sh

if [ $# != 1 ]; then
    echo "error: give one checkpoint: bash scripts/recipes/accuracy.sh CHECKPOINT (--help says more)" >&2
    exit 2
fi
model=(--model "$1") run_dir="${RUN_DIR:-outputs/accuracy}" densities=(0.7 0.5 0.3)
read -ra curve <<<"${CURVE-0.22}"
calibration="${CALIBRATION:-c4}" activations="${ACTIVATIONS:-${RUN_DIR:-outputs/accuracy}/activations}"
methods="${METHODS:-oracle cats teal static random teal-all wina-unrotated griffin}"
tasks="${TASKS:-arc_easy,arc_challenge,openbookqa,winogrande,boolq,lambada_openai,arithmetic_words}"
refinement=(--refine-steps "${REFINE_STEPS:-800}" ${REFINE_CORPUS:+--refine-corpus "$REFINE_CORPUS"})
refinement+=(${REFINE_TOKENS:+--refine-tokens "$REFINE_TOKENS"})
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}" NUM_GPUS=1
set -m # a process group for each job, so that nothing is left running when this ends
trap 'for job in $(jobs -p); do kill -- "-$job" 2>/dev/null || true; done' EXIT

# `train FOLDER FLAGS...`
train() {
    local folder="$1"
    shift
    run_python train "${model[@]}" --dtype bfloat16 --activations "$activations" --output-dir "$run_dir/$folder" \
        --units mlp "$@"
}
# `perplexity FLAGS...` of the whole text, and `answers FLAGS...`: records in perplexity.jsonl, and in accuracy.jsonl or
# answers.jsonl.
perplexity() {
    run_python evaluate "${model[@]}" --dtype float32 --tasks perplexity --corpus "${TEST:-wikitext}" \
        --output "$run_dir/perplexity.jsonl" --resume "$@"
}
answers() {
    local asked
    asked=("${model[@]}" --dtype float32 --batch-size 128 --resume "$@")
    if [ -n "${REQUESTS:-}" ]; then
        run_python carried_tasks answer --requests "$REQUESTS" --output "$run_dir/answers.jsonl" "${asked[@]}"
    else
        run_python evaluate --tasks "$tasks" ${INCLUDE_PATH:+--include-path "$INCLUDE_PATH"} \
            --output "$run_dir/accuracy.jsonl" "${asked[@]}"
    fi
}
# `budget METHOD DENSITY FOLDER`: divide the bytes over the layers, into budget_METHOD_DENSITY.json.
budget() {
    local file="$run_dir/budget_$1_$2.json"
    if ! [ -f "$file" ]; then
        run_python budget "${model[@]}" --dtype float32 --corpus "$calibration" --output "$file" --method "$1" \
            --mlp-density "$2" --predictors "$run_dir/$3"
    fi
}
# `predictors DENSITY`: trained for the budget that they were found to need.
predictors() {
    train "brief_$1" --densities "$1" --refine-steps "${BRIEF_STEPS:-150}"
    budget predictor "$1" "brief_$1"
    train "predictors_$1" --densities "$1" --density-budget "$run_dir/budget_predictor_$1.json" "${refinement[@]}"
}

run_python collect "${model[@]}" --dtype bfloat16 --corpus "$calibration" --output-dir "$activations" --units mlp \
    --max-tokens "${TOKENS:-440000}" --resume
# Side by side: a step is many small kernels, and no process alone keeps a GPU busy.
pids=()
for density in "${densities[@]}"; do
    predictors "$density" &
    pids+=("$!")
done
for density in "${curve[@]}"; do
    train "predictors_$density" --densities "$density" "${refinement[@]}" &
    pids+=("$!")
done
for pid in "${pids[@]}"; do wait "$pid"; done
for density in "${densities[@]}" "${curve[@]}"; do
    perplexity --method predictor --mlp-density "$density" --predictors "$run_dir/predictors_$density"
done
train calibration --densities "${densities[@]}" --steps 0 --initialisation random --standin-rank 0 --refine-steps 0
train deja_vu --densities "${densities[@]}" --loss bce --initialisation random --label-density 0.5 --rule topk \
    --predictor-rank auto --standin-rank 0 --refine-steps 0

for density in "${densities[@]}"; do
    answers --method predictor --mlp-density "$density" --predictors "$run_dir/predictors_$density"
done
for score in perplexity answers; do
    # shellcheck disable=SC2086  (a list of words)
    "$score" --method $methods --mlp-density "${densities[@]}" --predictors "$run_dir/calibration"
    "$score" --label "deja vu" --method predictor --mlp-density "${densities[@]}" --predictors "$run_dir/deja_vu"
done
case " $methods " in *" cats "*)
    budget cats 0.5 calibration
    perplexity --method cats --mlp-density 0.5 --predictors "$run_dir/calibration" \
        --density-budget "$run_dir/budget_cats_0.5.json"
    ;;
esac
if [ -n "${REQUESTS:-}" ]; then
    echo "answers lie in $run_dir; where lm-eval is, python -m scripts.carried_tasks fold makes records of them" >&2
fi
