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

# Two halves run side by side, one of which starts up to four ranks: more threads each would only wait for each other.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

echo "==> ruff format --check"
$python -m ruff format --check "${sources[@]}" tests
echo "==> ruff check"
$python -m ruff check "${sources[@]}" tests
# Two halves side by side; mypy is in the one whose tests take less. Triton reads TRITON_INTERPRET when it is imported,
# and then compiles nothing: hence a process of its own.
log="$(mktemp)"
trap 'rm -f "$log"' EXIT
{
    failed=0
    echo "==> pytest tests/kernels_interpreter, under Triton's interpreter"
    TRITON_INTERPRET=1 $python -m pytest tests/kernels_interpreter || failed=1
    echo "==> pytest tests/pipeline_parallel"
    $python -m pytest tests/pipeline_parallel || failed=1
    echo "==> mypy ${sources[*]}"
    $python -m mypy "${sources[@]}" || failed=1
    exit "$failed"
} >"$log" 2>&1 &
other_half=$!
failed=0  # a half that fails must not hide what the other says
echo "==> pytest tests, without the two in the other half"
$python -m pytest tests --ignore tests/pipeline_parallel || failed=1
wait "$other_half" || failed=1
cat "$log"
exit "$failed"
