"""The runs of test_evaluate_on_ranks.py, by `python -m tests.scripts.sharded_evaluation FOLDER` on every rank: one
start of the ranks makes all of them. `RUN MESH.jsonl` holds the records of each."""

import sys
from pathlib import Path
from typing import Any

from pipeline_parallel.launch import current_launch, distributed
from scripts.evaluate import Options, main
from tests.modules.tiny_kinds import KINDS

MODELS = {name: KINDS[name] for name in ("llama", "opt-post-norm-projected")}
MESHES = {"tp4": (4, 1), "tp2-pp2": (2, 2), "pp2-dp2": (1, 2), "dp4": (1, 1)}  # tp, pp; of four ranks the rest is dp
HEADS = {"head_density": 0.5, "method": ("predictor", "oracle", "static", "random")}
# Six windows in three batches, so that one of four replicas has none; quality is measured on the first two batches.
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "neurons": ("llama", {"method": ("predictor", "oracle", "cats", "teal"), "mlp_density": (0.3,)}),
    "heads": ("llama", HEADS),
    "post-norm": ("opt-post-norm-projected", {"method": ("predictor", "oracle", "teal")}),
    "post-norm-heads": ("opt-post-norm-projected", HEADS),
    "few-rows": ("llama", {"method": ("predictor", "cats"), "window": 8, "max_windows": 8, "batch_size": 1}),
    "dense-phase": ("llama", {"method": ("random", "teal"), "sparse_phases": "decode"}),
    # Only the last layer's heads choose: the first stage of a pipeline has nothing sparse, and must act as if it had.
    "last-layer": ("llama", {"method": ("oracle",), "max_windows": 2, "decode_tokens": 2}),
    "own-text": ("llama", {"method": ("random",), "corpus": "self:1", "max_tokens": 60, "decode_tokens": 2}),
}
LAST_LAYER = {"mlp": [1, 1, 1], "attention": [1, 1, 0.5]}
# Every run on a cut of layers and one of replicas; four ranks on two cores are slow.
ONLY = {
    "post-norm-heads": ("tp4", "pp2-dp2"),
    "few-rows": ("tp2-pp2", "dp4"),
    "dense-phase": ("tp2-pp2", "pp2-dp2"),
    "last-layer": ("pp2-dp2",),
    "own-text": ("tp2-pp2", "dp4"),
}
CASES = [(run, mesh) for mesh in MESHES for run in RUNS if mesh in ONLY.get(run, MESHES)]


def options(folder: Path, run: str, output: Path, **more: Any) -> Options:
    """Of a run; without `tp_size` and `pp_size` and without a launcher those of one process."""
    kind, changes = RUNS[run]
    if run == "last-layer":
        changes = {**changes, "density_budget": folder / "budget.json"}
    found = {"corpus": str(folder / "test.jsonl"), "dtype": "float64", "window": 32, "batch_size": 2, **changes, **more}
    return Options(
        model=str(folder / kind / "model"), predictors=folder / kind / "predictors", output=output, quiet=True, **found
    )


def refused(folder: Path) -> str:
    """What is said when the ranks read different texts."""
    output = folder / "refused.jsonl"
    try:
        main(options(folder, "heads", output, corpus=str(folder / f"text-{min(current_launch().rank, 1)}.jsonl")))
    except ValueError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    root = Path(sys.argv[1])
    with distributed("cpu", interval_s=0.2, patience_s=3.0):
        for name, mesh in CASES:
            tp_size, pp_size = MESHES[mesh]
            main(options(root, name, root / f"{name} {mesh}.jsonl", tp_size=tp_size, pp_size=pp_size))
        (root / f"refused-{current_launch().rank}").write_text(refused(root))
