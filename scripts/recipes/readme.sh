#!/usr/bin/env bash
# The tables and plots of README.md and docs/results from the committed records: bash scripts/recipes/readme.sh
# After new records are in analysis/results; it measures nothing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/usage.sh
source scripts/presets.sh

results=analysis/results
scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT
# `tables FOLDER RECORDS...`: reports go to the folder, tables to the pages that have their markers.
tables() {
    local folder="$scratch/$1" files=()
    shift
    while [ $# -gt 0 ] && [ "$1" != -- ]; do files+=("$results/$1.jsonl") && shift; done
    run_python summarize --results "${files[@]}" --output-dir "$folder" --readme README.md docs/results/*.md --quiet "${@:2}" >/dev/null
}
tables all smollm2_wikitext2 smollm2_tasks_h200 decode_h200 kernels_h200 engine_h200 communication_h200 drift_smollm2_cpu ablation_h200
# Curves want more densities than a table.
tables bytes smollm2_wikitext2 smollm2_wikitext2_equal_bytes -- --tables equal_bytes

plot() { cp "$scratch/$1.png" "$results/$2.png"; }
plot bytes/smollm2_135m_instruct_q4_1_perplexity_wikitext_2_raw_test_perplexity_against_mlp_bytes_read perplexity_against_bytes
plot all/smollm2_135m_instruct_drift_cosine_between_layers drift_cosine
plot all/smollm2_135m_instruct_drift_what_distance_costs drift_distance
plot all/smollm2_135m_instruct_drift_recall_against_rank_and_text drift_rank_and_text
plot all/drift_energy_in_the_largest_neurons drift_energy
plot all/drift_active_neurons_shared_by_consecutive_tokens drift_reuse
plot all/ablation_effects_on_prediction ablation_effects
