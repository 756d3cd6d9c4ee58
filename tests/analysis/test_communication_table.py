"""The table of all-reduces: every size once, ratios of what is chosen to what others take."""

from typing import Any

from analysis.results import Record, make_record
from analysis.speed_tables import communication_tables

STAMP = {"device": "GPU", "date": "2026-11-28"}


def record(method: str, num_tokens: int, value: float, other: str, theirs: float, **more: Any) -> Record:
    labels = {"tp_size": 2, "transport": "p2p", "dtype": "bfloat16", "hidden_size": 4096}
    return make_record(
        "communication",
        {**labels, "num_tokens": num_tokens, "method": method},
        "us",
        value,
        "us",
        baseline={"name": f"{other} all-reduce + fused add-norm", "value": theirs},
        ratio=theirs / value,
        environment=STAMP,
        **more,
    )


def test_a_size_is_a_line_with_the_ratios_of_what_is_chosen() -> None:
    records = [
        record("one-shot", 16, 4.0, "nccl", 8.0),
        record("one-shot", 16, 4.0, "torch one-shot", 6.0),
        record("two-shot", 16, 5.0, "nccl", 8.0),
        record("auto", 16, 4.0, "torch one-shot", 6.0, share_of_ceiling=0.25),
        record("one-shot", 4, 2.0, "nccl", 3.0),
    ]
    (table,) = communication_tables(records)
    assert table.columns[3:] == (
        "one-shot", "two-shot", "nccl", "torch one-shot", "× nccl", "× torch one-shot", "of the link",
    )  # fmt: skip
    few, many = table.rows
    assert few == ("2, p2p", "4096", "4", "2.0", "–", "3.0", "–", "–", "–", "–"), "nothing was chosen there"
    assert many == ("2, p2p", "4096", "16", "4.0", "5.0", "8.0", "6.0", "2.000×", "1.500×", "25.0 %")


def test_several_calls_are_a_median_with_its_range() -> None:
    values = (4.0, 5.0, 4.5)
    (table,) = communication_tables([record("one-shot", 16, value, "nccl", 8.0, call=value) for value in values])
    assert table.rows[0][3:5] == ("4.500 [4.0, 5.0]", "8.0")
    assert table.caption.endswith("medians of 3 calls [lowest, highest]")


def test_a_stress_alone_makes_no_table() -> None:
    stress = make_record("communication", {"tp_size": 2}, "replays_without_error", 10000, "", environment=STAMP)
    assert communication_tables([stress]) == []
