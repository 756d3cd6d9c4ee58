"""The runs of test_evaluate_tasks.py on two ranks, by `python -m tests.scripts.ranked_tasks FOLDER` on each: one start
makes all of them, and one of lm-eval's own command line."""

import sys
from pathlib import Path
from typing import Any

import lm_eval.tasks

import scripts.lm_eval
from pipeline_parallel.launch import distributed
from scripts.evaluate import Options, main
from tests.scripts.tiny_tasks import LocalTaskManager

TASKS = {"tasks": "tiny_choices,tiny_texts,tiny_answers", "method": ("oracle",), "limit": 3}
RUNS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "pp2": ({"tp_size": 1, "pp_size": 2, "dp_size": 1}, TASKS),
    "dp2": ({"tp_size": 1, "pp_size": 1, "dp_size": 2}, TASKS),
}


def options(folder: Path, output: Path, **changes: Any) -> Options:
    """Of a run; without a launcher those of one process."""
    found = {"corpus": str(folder / "text.jsonl"), "include_path": folder / "tasks", "dtype": "float64", **changes}
    return Options(model=str(folder / "model"), output=output, quiet=True, **{"batch_size": 2, **found})


if __name__ == "__main__":
    root = Path(sys.argv[1])
    with distributed("cpu", interval_s=0.2, patience_s=3.0):
        for name, (sizes, changes) in RUNS.items():
            cut = {size: sizes[size] for size in ("tp_size", "pp_size")}
            main(options(root, root / f"{name}.jsonl", **changes, **cut))
        lm_eval.tasks.TaskManager = LocalTaskManager
        arguments = f"model={root / 'model'},dtype=float64,tp_size=2,quiet=True"
        sys.argv = ["lm_eval", "--model", "dejavu-lab", "--model_args", arguments, "--tasks", "tiny_choices"]
        sys.argv += ["--include_path", str(root / "tasks"), "--output_path", str(root / "cli"), "--limit", "3"]
        scripts.lm_eval.main(scripts.lm_eval.LaunchOptions())
