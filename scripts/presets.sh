# Sourced by the stages' .sh files. `use_preset NAME STAGE` sets run_dir, checkpoint, train_corpus, test_corpus,
# max_tokens and is_gated (whether the MLPs have a gate). `run_python STAGE FLAGS...` prints the Python command and runs
# it, under torchrun if NUM_GPUS > 1 or NNODES > 1; then start the same on each of the NNODES hosts, with
# RDZV_ENDPOINT=HOST:PORT of one of them.
# `value_of FLAG DEFAULT FLAGS...` says what a flag is given.

preset_names="SmolLM2 Llama-3.2-3B Llama-3.1-8B OPT-125M OPT-6.7B"

use_preset() {
    local name="${1:-}" stage="$2" source_id="" make_checkpoint
    # Text for calibration and for testing; SmolLM2's needs no network.
    train_corpus=c4 test_corpus=wikitext max_tokens=262144 is_gated=yes
    case "$name" in
    SmolLM2) run_dir=outputs/smollm2 train_corpus=self test_corpus=self max_tokens=24576 ;;
    Llama-3.2-3B) run_dir=outputs/llama-3.2-3b source_id=meta-llama/Llama-3.2-3B ;;
    Llama-3.1-8B) run_dir=outputs/llama-3.1-8b source_id=meta-llama/Llama-3.1-8B ;;
    OPT-125M) run_dir=outputs/opt-125m source_id=facebook/opt-125m is_gated=no ;;
    OPT-6.7B) run_dir=outputs/opt-6.7b source_id=facebook/opt-6.7b is_gated=no ;;
    *)
        echo "usage: bash scripts/$stage.sh PRESET [FLAGS of python -m scripts.$stage]" >&2
        echo "error: preset '${name}' is not one of: ${preset_names}" >&2
        return 2
        ;;
    esac
    checkpoint="$run_dir/checkpoint"
    if [ -n "$source_id" ]; then
        make_checkpoint="python convert_llama_checkpoint.py --source $source_id --output-dir $checkpoint"
    else
        make_checkpoint="bash scripts/quickstart.sh"
    fi
    if ! [ -f "$checkpoint/config.json" ]; then
        echo "error: there is no checkpoint in $checkpoint; make it with: $make_checkpoint" >&2
        return 2
    fi
}

run_python() {
    local stage="$1" python="${PYTHON:-python3}" command
    shift
    # PYTHON may name what .venv was made with; the packages are in .venv.
    if [ -x .venv/bin/python ]; then python=.venv/bin/python; fi
    command=("$python")
    if [ "${NNODES:-1}" -gt 1 ]; then
        command+=(-m pipeline_parallel.torchrun --nnodes "$NNODES" --nproc-per-node "${NUM_GPUS:-1}")
        command+=(--rdzv-backend c10d --rdzv-endpoint "${RDZV_ENDPOINT:?give HOST:PORT of one of the hosts}")
    elif [ "${NUM_GPUS:-1}" -gt 1 ]; then
        command+=(-m pipeline_parallel.torchrun --standalone --nproc-per-node "$NUM_GPUS")
    fi
    # Without it torch prints a C++ backtrace for every connection that a failed rank leaves open.
    export TORCH_CPP_LOG_LEVEL="${TORCH_CPP_LOG_LEVEL:-ERROR}"
    command+=(-m "scripts.$stage" "$@")
    { printf '+' && printf ' %q' "${command[@]}" && printf '\n'; } >&2
    "${command[@]}"
}

# What a flag was given in a list of flags (--flag VALUE or --flag=VALUE; the last one counts), or the default.
value_of() {
    local name="$1" value="$2" previous="" flag
    shift 2
    for flag in "$@"; do
        if [ "$previous" = "$name" ]; then value="$flag"; fi
        case "$flag" in "$name="*) value="${flag#"$name="}" ;; esac
        previous="$flag"
    done
    printf '%s\n' "$value"
}
