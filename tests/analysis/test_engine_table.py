"""Records of the engine on several ranks become one line a batch. No number is measured."""

from typing import Any

from analysis.results import Record, make_record
from analysis.speed_tables import engine_tables, is_of_engine
from analysis.tables import all_tables

ENVIRONMENT = {"device": "Example GPU", "num_devices": 2, "date": "2026-01-02T03:04:05+00:00"}


def record(value: float, baseline: tuple[str, float] | None = None, name: str = "prefill", **labels: Any) -> Record:
    settings: dict[str, Any] = {"shape": "Shape-8B", "method": "dense", "tp_size": 2, "pp_size": 1, "dp_size": 1}
    settings |= {"batch_size": 2, "all_reduce": "nccl", "overlap_tokens": 0} | labels
    against = None if baseline is None else {"name": baseline[0], "value": baseline[1]}
    extras = {"share_of_ceiling": value / 1000.0}
    return make_record(
        name, settings, "tokens_per_s", value, "tokens/s", baseline=against, environment=ENVIRONMENT, **extras
    )


FUSED = {"all_reduce": "one-shot/two-shot p2p"}
RECORDS = [
    record(300.0, ("one rank", 200.0)),
    record(150.0, ("one rank", 200.0), overlap_tokens=1024),
    record(150.0, ("NCCL", 300.0), overlap_tokens=1024),
    record(360.0, ("one rank", 200.0), **FUSED),
    record(360.0, ("NCCL", 300.0), **FUSED),
    record(90.0, ("fused", 360.0), overlap_tokens=1024, **FUSED),
    record(500.0, ("one rank", 250.0), batch_size=16),
]


def test_a_batch_is_one_line_with_the_ways_and_the_ratios_that_are_asked_of_them() -> None:
    (table,) = engine_tables(RECORDS, "prefill")
    assert table.title == "prefill, tokens/s" and table.caption.startswith("method dense; the share")
    assert table.columns == (
        "model", "ranks", "batch", "one rank", "NCCL", "NCCL, split", "fused", "fused, split", "NCCL × one rank",
        "NCCL, split × NCCL", "fused × one rank", "fused × NCCL", "fused, split × fused", "of the ceiling",
    )  # fmt: skip
    assert table.rows == (
        ("Shape-8B", "tp 2", "2", "200.0", "300.0", "150.0", "360.0", "90.0")
        + ("1.500×", "0.500×", "1.800×", "1.200×", "0.250×", "36.0 %"),
        ("Shape-8B", "tp 2", "16", "250.0", "500.0", *["–"] * 3, "2.000×", *["–"] * 4, "50.0 %"),
    )  # fmt: skip


def test_other_cuts_have_lines_of_their_own_and_older_records_say_nothing_of_the_sum() -> None:
    older = record(700.0, ("Hugging Face, one rank", 350.0), tp_size=4)
    del older["labels"]["all_reduce"]
    pipeline = record(800.0, tp_size=1, pp_size=4, all_reduce="none")
    (table,) = engine_tables([older, pipeline], "decode")
    assert table.columns[3:] == (
        "Hugging Face, one rank", "NCCL", "pipeline", "NCCL × Hugging Face, one rank", "of the ceiling",
    )  # fmt: skip
    assert [row[1:6] for row in table.rows] == [
        ("pp 4", "2", "–", "–", "800.0"),
        ("tp 4", "2", "350.0", "700.0", "–"),
    ]


def test_only_the_engines_records_go_there() -> None:
    assert all(map(is_of_engine, RECORDS)) and not is_of_engine(RECORDS[0] | {"metric": "tokens"})
    assert all_tables(RECORDS)["prefill"] == engine_tables(RECORDS, "prefill")
    odd = make_record("prefill", {"method": "dense"}, "tokens_per_s", 5.0, "tokens/s", environment=ENVIRONMENT)
    assert "one rank" not in all_tables([odd])["prefill"][0].columns
