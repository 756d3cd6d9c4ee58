#!/usr/bin/env bash
# Everything that must hold before a commit: formatting, lint, types, tests. Needs nothing but Python >= 3.11.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
ensure_environment test

python=.venv/bin/python
sources=()
for source in modules pipeline_parallel sparse_predictor data analysis scripts convert_llama_checkpoint.py; do
    if [ -e "$source" ]; then sources+=("$source"); fi
done

OMP_NUM_THREADS="${OMP_NUM_THREADS:-$(getconf _NPROCESSORS_ONLN)}"
export OMP_NUM_THREADS

echo "==> ruff format --check"
$python -m ruff format --check "${sources[@]}" tests
echo "==> ruff check"
$python -m ruff check "${sources[@]}" tests
# Triton reads TRITON_INTERPRET when it is imported, and then compiles nothing: hence a process of its own, beside mypy.
interpreter_log="$(mktemp)"
trap 'rm -f "$interpreter_log"' EXIT
TRITON_INTERPRET=1 $python -m pytest tests/kernels_interpreter >"$interpreter_log" 2>&1 &
interpreter=$!
echo "==> mypy ${sources[*]}"
$python -m mypy "${sources[@]}"
echo "==> pytest tests/kernels_interpreter, under Triton's interpreter"
interpreted=0
wait "$interpreter" || interpreted=$?
cat "$interpreter_log"
[ "$interpreted" -eq 0 ]
echo "==> pytest tests"
$python -m pytest tests
