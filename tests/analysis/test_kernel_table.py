"""Kernels side by side: a line per setting, ours and what was timed in the same calls."""

from typing import Any

from analysis.results import Record, make_record
from analysis.tables import all_tables


def record(value: float, baseline: tuple[str, float], **labels: Any) -> Record:
    settings = {
        "operator": "thinned_rows",
        "shape": "A",
        "density": 0.5,
        "batch_size": 1,
        "dtype": "bfloat16",
        **labels,
    }
    return make_record(
        "kernel",
        settings,
        "us",
        value,
        "us",
        baseline={"name": baseline[0], "value": baseline[1]},
        ratio=baseline[1] / value,
        share_of_ceiling=0.5,
        environment={"device": "Example GPU"},
    )


def test_a_line_has_ours_and_each_other_kernel_of_its_calls() -> None:
    measured = [
        record(10.0, ("library, dense", 20.0)),
        record(10.0, ("TEAL", 15.0)),
        record(12.0, ("library, dense", 24.0)),
        record(6.0, ("library, dense", 20.0), density=0.25),
        record(40.0, ("library, dense", 50.0), operator="sparse_mlp"),
    ]
    thinned, mlp = all_tables(measured)["kernel"]
    assert thinned.title == "one matrix, inputs thinned out, Example GPU, µs"
    assert thinned.columns == (
        "shape", "density", "µs", "of the ceiling", "library, dense, µs", "× library, dense", "TEAL, µs", "× TEAL",
    )  # fmt: skip
    assert thinned.rows == (
        ("A", "0.5", "11.0 [10.0, 12.0]", "50.0 %", "22.0", "2.000× [2.000×, 2.000×]", "15.0", "1.500×"),
        ("A", "0.25", "6.0", "50.0 %", "20.0", "3.333×", "–", "–"),
    )
    assert "medians of 1 to 2 calls" in thinned.caption and "dtype bfloat16" in thinned.caption
    assert mlp.rows == (("A", "0.5", "40.0", "50.0 %", "50.0", "1.250×"),)
