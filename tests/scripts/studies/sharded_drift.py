"""The runs of test_drift_on_ranks.py, by `python -m tests.scripts.studies.sharded_drift FOLDER` on every rank: one
start of the ranks makes all of them, of which only one is reported in full."""

import json
import sys
from pathlib import Path
from typing import Any

from analysis.results import Record
from pipeline_parallel.launch import current_launch, distributed
from scripts.studies.drift import Options, main, records_of_model

MESHES = {"tp2-pp2": (2, 2), "pp2-dp2": (1, 2)}  # tp, pp; of four ranks the rest is dp


def options(folder: Path, output: str, **more: Any) -> Options:
    """Of one process, unless `more` says otherwise."""
    return Options(
        model=str(folder / "model"),
        corpus=str(folder / "test.jsonl"),
        output_dir=folder / output,
        dtype="float64",
        window=16,
        test_tokens=11 * 16,
        calibration_tokens=32,
        batch_size=2,
        quiet=True,
        **more,
    )


def records(of: Options) -> list[Record]:
    """Without a report."""
    return records_of_model(of.load(), of, ["drift"])


if __name__ == "__main__":
    root = Path(sys.argv[1])
    with distributed("cpu", interval_s=0.2, patience_s=3.0):
        main(options(root, "tp2-pp2", tp_size=2, pp_size=2))
        found = records(options(root, "pp2-dp2", pp_size=2))
        (root / f"{current_launch().rank}.json").write_text(json.dumps(found))
