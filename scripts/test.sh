#!/usr/bin/env bash
# Everything that must hold before a commit, formatting, lint, types, tests: bash scripts/test.sh
# Needs nothing but Python >= 3.11.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/usage.sh
source scripts/environment.sh
# No bytecode of what nothing imports: it would be half of the installation. (To pip, 0 here is --no-compile.)
export PIP_NO_COMPILE=0
ensure_environment test

python=.venv/bin/python
sources=()
for source in modules pipeline_parallel sparse_predictor data analysis scripts convert_llama_checkpoint.py; do
    if [ -e "$source" ]; then sources+=("$source"); fi
done

# Four parts run side by side, one of which starts up to four ranks: more threads each would only wait for each other.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

echo "==> ruff format --check"
$python -m ruff format --check "${sources[@]}" tests
echo "==> ruff check"
$python -m ruff check "${sources[@]}" tests
# Side by side even on two cores: ranks wait for each other, and what is written waits for the disk. Triton reads
# TRITON_INTERPRET when it is imported, and then compiles nothing: hence a process of its own.
logs="$(mktemp -d)"
trap 'rm -rf "$logs"' EXIT
run_pytest() {
    echo "==> pytest $*"
    $python -m pytest "$@"
}
ranks() {
    local failed=0
    run_pytest tests/pipeline_parallel || failed=1
    TRITON_INTERPRET=1 run_pytest tests/kernels_interpreter || failed=1
    return "$failed"
}
stages() { run_pytest tests/scripts --ignore tests/scripts/studies; }
models() { run_pytest tests/modules tests/sparse_predictor tests/scripts/studies; }
rest() {
    local failed=0
    echo "==> mypy ${sources[*]}"
    $python -m mypy "${sources[@]}" || failed=1
    run_pytest tests --ignore tests/pipeline_parallel --ignore tests/scripts --ignore tests/modules \
        --ignore tests/sparse_predictor || failed=1
    return "$failed"
}
pids=()
for part in ranks stages models; do
    "$part" >"$logs/$part" 2>&1 &
    pids+=("$!")
done
failed=0  # a part that fails must not hide what the others say
rest || failed=1
for pid in "${pids[@]}"; do wait "$pid" || failed=1; done
cat "$logs"/*
exit "$failed"
