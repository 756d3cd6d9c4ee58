"""Timed records become tables: decoding in one process, the engine on ranks, kernels, links. No number is measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import analysis.comparison
from analysis.comparison import CEILINGS_FILE, ceiling_text, ceilings_of, with_one_ceiling
from analysis.formatting import Table
from analysis.results import Record, make_record, read_records
from analysis.speed_tables import communication_tables, decode_tables, engine_tables, is_of_engine, is_one_gpu_decode
from analysis.tables import all_tables, summary_markdown
from data.files import read_json

ENVIRONMENT = {"device": "Example GPU", "num_devices": 1, "date": "2026-01-02T03:04:05+00:00"}
Beside = tuple[str, float] | None


def timed(name: str, metric: str, labels: dict[str, Any], value: float, beside: Beside = None, **more: Any) -> Record:
    baseline = None if beside is None else {"name": beside[0], "value": beside[1]}
    stamp = ENVIRONMENT | more.pop("stamp", {})
    return make_record(name, labels, metric, value, metric, baseline=baseline, environment=stamp, **more)


def decode(value: float, beside: Beside = None, more: dict[str, Any] | None = None, **labels: Any) -> Record:
    settings = {"shape": "Shape-3B", "weights": "random", "method": "dense", "mlp_density": 1.0, "head_density": 1.0}
    settings |= {"dtype": "bfloat16", "batch_size": 1, "execution": "graph", "prompt_tokens": 512} | labels
    extras = {"share_of_ceiling": 0.87, "achieved_gb_per_s": 2660.0, **(more or {})}
    return {**timed("decode", "tokens_per_s", settings, value, beside, **extras), "unit": "tokens/s"}


def engine(value: float, beside: Beside = None, **labels: Any) -> Record:
    settings: dict[str, Any] = {"shape": "Shape-8B", "method": "dense", "tp_size": 2, "pp_size": 1, "dp_size": 1}
    settings |= {"batch_size": 2, "all_reduce": "nccl", "overlap_tokens": 0} | labels
    return timed("prefill", "tokens_per_s", settings, value, beside, share_of_ceiling=value / 1000)


def kernel(value: float, beside: tuple[str, float], **labels: Any) -> Record:
    settings = {"operator": "thinned_rows", "shape": "A", "density": 0.5, "batch_size": 1, "dtype": "bfloat16"} | labels
    return timed("kernel", "us", settings, value, beside, ratio=beside[1] / value, share_of_ceiling=0.5)


def link(method: str, num_tokens: int, value: float, other: str, theirs: float, **more: Any) -> Record:
    labels = {"tp_size": 2, "transport": "p2p", "dtype": "bfloat16", "hidden_size": 4096, "num_tokens": num_tokens}
    beside = f"{other} all-reduce + fused add-norm", theirs
    return timed("communication", "us", {**labels, "method": method}, value, beside, ratio=theirs / value, **more)


def rows_of(table: Table) -> list[dict[str, str]]:
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


def decodes() -> list[Record]:
    sparse = {"method": "predictor", "mlp_density": 0.25, "predictor_rank": 336}
    achieved = {"achieved": {"mlp_density": 0.2534, "head_density": 1.0, "union_mlp_density": 0.61}}
    scored = {"perplexity": 20.5, "dense_perplexity": 20.5}
    return [
        decode(690.0, ("our dense", 400.0), achieved, **sparse),
        decode(690.0, ("Hugging Face compiled", 200.0), achieved, **sparse),
        decode(1900.0, ("our dense", 1600.0), achieved, **{**sparse, "batch_size": 8}),
        decode(400.0, ("Hugging Face compiled", 200.0)),
        decode(399.0, None, scored, shape=None, model="Small", weights="trained"),
        timed("decode", "tokens_per_s", {"tp_size": 2}, 5.0),
    ]


def test_a_setting_is_one_line_with_the_ratio_to_each_baseline() -> None:
    (table,) = decode_tables([each for each in decodes() if is_one_gpu_decode(each)])
    assert table.title == "decode, one Example GPU"
    assert table.columns == (
        "model", "weights", "method", "batch", "MLP density", "head density", "union", "tokens/s", "GB/s",
        "of the ceiling", "× our dense", "× Hugging Face compiled", "perplexity there",
    )  # fmt: skip
    assert table.rows == (
        ("Shape-3B", "random", "dense", "1", "1.0", "1.0", "–", "400.0", "2660", "87.0 %", "–", "2.000×", "–"),
        ("Shape-3B", "random", "predictor", "1", "0.253", "1.0", "–", "690.0", "2660", "87.0 %", "1.725×", "3.450×")
        + ("–",),
        ("Shape-3B", "random", "predictor", "8", "0.253", "1.0", "0.61", "1900", "2660", "87.0 %", "1.188×", "–", "–"),
        ("Small", "trained", "dense", "1", "1.0", "1.0", "–", "399.0", "2660", "87.0 %", "–", "–", "20.50"),
    )  # fmt: skip
    assert table.caption == "dtype bfloat16, execution graph, prompt tokens 512"
    assert set(all_tables(decodes())) == {"one_gpu_decode", "decode"}, "ranks have a table of their own"


def test_each_card_has_a_table_of_its_own() -> None:
    other = {"stamp": {"device": "Other GPU"}}
    first, second = decode_tables(
        [decode(400.0), decode(900.0, None, other), decode(690.0, ("our dense", 400.0), method="predictor")]
    )
    assert (first.title, second.title) == ("decode, one Example GPU", "decode, one Other GPU")
    assert [row["tokens/s"] for row in rows_of(first)] == ["400.0", "690.0"]
    assert [row["tokens/s"] for row in rows_of(second)] == ["900.0"] and "× our dense" not in second.columns


def test_calls_on_one_card_are_merged_into_medians_and_ranges() -> None:
    """A call is recorded once for each baseline, and counts once; ratios are of the calls that had that baseline."""

    def newest(dense: float) -> dict[str, Any]:
        timing = {"samples": [380.0, 410.0, 412.0], "baseline_samples": [dense]}
        return {"timing": timing, "stamp": {"date": "2026-02-03"}}

    measured = [
        decode(410.0, ("our dense", 205.0), newest(205.0)),
        decode(410.0, ("Hugging Face eager", 41.0), newest(41.0)),
        decode(400.0, ("our dense", 100.0)),
        decode(400.0, ("Hugging Face compiled", 100.0)),
        decode(390.0, ("our dense", 100.0)),
    ]
    for order in (measured, measured[::-1], [*measured, measured[0]]):
        (table,) = decode_tables(order)
        (row,) = rows_of(table)
        assert row["tokens/s"] == "400.0 [380.0, 412.0]"
        assert row["× our dense"] == "3.900× [2.000×, 4.000×]" and row["× Hugging Face compiled"] == "4.000×"
        assert "medians of 3 calls [lowest, highest]" in table.caption
        assert all(table.numeric_columns()[table.columns.index(name)] for name in ("tokens/s", "× our dense"))
    later = decode(500.0, ("our dense", 100.0), {"stamp": {"date": "2026-03-04", "commit": "abc"}})
    (row,) = rows_of(decode_tables([*measured, later])[0])
    assert row["tokens/s"] == "500.0", "calls of another commit are not of the same code"


def test_rows_of_other_predictors_say_how_they_differ() -> None:
    trained = {"shape": None, "model": "Small", "weights": "trained", "method": "predictor", "mlp_density": 0.5}
    measured = [
        decode(400.0, ("our dense", 500.0), None, **trained, lookahead=lookahead, standin_rank=rank, predictors=name)
        for lookahead, rank, name in ((0, 64, "near"), (1, 0, "far"))
    ]
    (table,) = decode_tables(measured)
    assert "predictors" not in table.columns
    assert [(row["look-ahead"], row["stand-in rank"]) for row in rows_of(table)] == [("0", "64"), ("1", "0")]
    # Nothing but the folder differs, or nothing but what is in it.
    folder = {**measured[0], "labels": {**measured[0]["labels"], "predictors": "other"}}
    content = {**measured[0], "sources": {"predictors": "0123456789ab"}}
    for more, name in ((folder, "other"), (content, "near (012345)")):
        assert [row["predictors"] for row in rows_of(decode_tables([*measured, more])[0])] == ["near", "far", name]
    (table,) = decode_tables([decode(400.0, None, None, **trained, label="refined", density_budget=None)])
    assert "budget" not in table.caption and rows_of(table)[0]["method"] == "predictor, refined"


def test_a_perplexity_stands_beside_the_density_on_its_own_text() -> None:
    more = {"perplexity": 25.0, "dense_perplexity": 20.0, "ratio_interval": [1.2, 1.31]}
    more |= {"achieved": {"mlp_density": 0.404}, "text_achieved": {"mlp_density": 0.502}}
    labels = {"shape": None, "model": "Small", "weights": "trained", "method": "predictor", "mlp_density": 0.5}
    (table,) = decode_tables([decode(400.0, None, more, **labels, task="perplexity:text", num_tokens=1000)])
    (row,) = rows_of(table)
    assert (row["MLP density"], row["MLP density on the text"]) == ("0.404", "0.502")
    assert (row["perplexity there"], row["to dense"]) == ("25.0", "1.250× [1.200×, 1.310×]")
    assert "MLP density: while generating" in table.caption and "num tokens 1000" in table.caption


@pytest.mark.parametrize("name", ["method", "mlp_density", "head_density", "batch_size", "weights", "tp_size"])
def test_records_without_a_label_of_a_table_are_shown_all_the_same(name: str) -> None:
    found = decodes()
    next(each["labels"] for each in found if name in each["labels"])[name] = None
    assert sum(len(table.rows) for tables in all_tables(found).values() for table in tables) >= 4
    summary_markdown(found)


FUSED = {"all_reduce": "one-shot/two-shot p2p"}
PREFILLS = [
    engine(300.0, ("one rank", 200.0)),
    engine(150.0, ("one rank", 200.0), overlap_tokens=1024),
    engine(150.0, ("NCCL", 300.0), overlap_tokens=1024),
    engine(360.0, ("one rank", 200.0), **FUSED),
    engine(360.0, ("NCCL", 300.0), **FUSED),
    engine(90.0, ("fused", 360.0), overlap_tokens=1024, **FUSED),
    engine(500.0, ("one rank", 250.0), batch_size=16),
]


def test_a_batch_is_one_line_with_the_ways_and_the_ratios_that_are_asked_of_them() -> None:
    (table,) = engine_tables(PREFILLS, "prefill")
    assert table.title == "prefill, tokens/s" and table.caption.startswith("method dense; the share")
    assert table.columns == (
        "model", "ranks", "batch", "one rank", "NCCL", "NCCL, split", "fused", "fused, split", "NCCL × one rank",
        "NCCL, split × NCCL", "fused × one rank", "fused × NCCL", "fused, split × fused", "of the ceiling",
    )  # fmt: skip
    assert table.rows == (
        ("Shape-8B", "tp 2", "2", "200.0", "300.0", "150.0", "360.0", "90.0",
         "1.500×", "0.500×", "1.800×", "1.200×", "0.250×", "36.0 %"),
        ("Shape-8B", "tp 2", "16", "250.0", "500.0", *["–"] * 3, "2.000×", *["–"] * 4, "50.0 %"),
    )  # fmt: skip


def test_other_cuts_have_lines_of_their_own_and_older_records_say_nothing_of_the_sum() -> None:
    older = engine(700.0, ("Hugging Face, one rank", 350.0), tp_size=4)
    del older["labels"]["all_reduce"]
    pipeline = engine(800.0, tp_size=1, pp_size=4, all_reduce="none")
    (table,) = engine_tables([older, pipeline], "decode")
    assert table.columns[3:] == (
        "Hugging Face, one rank", "NCCL", "pipeline", "NCCL × Hugging Face, one rank", "of the ceiling",
    )  # fmt: skip
    assert [row[1:6] for row in table.rows] == [("pp 4", "2", "–", "–", "800.0"), ("tp 4", "2", "350.0", "700.0", "–")]


def test_only_the_engines_records_go_there() -> None:
    assert all(map(is_of_engine, PREFILLS)) and not is_of_engine(PREFILLS[0] | {"metric": "tokens"})
    assert all_tables(PREFILLS)["prefill"] == engine_tables(PREFILLS, "prefill")
    odd = timed("prefill", "tokens_per_s", {"method": "dense"}, 5.0)
    assert "one rank" not in all_tables([odd])["prefill"][0].columns


def test_a_line_of_kernels_has_ours_and_each_other_kernel_of_its_calls() -> None:
    thinned, mlp = all_tables(
        [
            kernel(10.0, ("library, dense", 20.0)),
            kernel(10.0, ("TEAL", 15.0)),
            kernel(12.0, ("library, dense", 24.0)),
            kernel(6.0, ("library, dense", 20.0), density=0.25),
            kernel(40.0, ("library, dense", 50.0), operator="sparse_mlp"),
        ]
    )["kernel"]
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


def test_a_size_of_all_reduce_is_a_line_with_the_ratios_of_what_is_chosen() -> None:
    records = [
        link("one-shot", 16, 4.0, "nccl", 8.0),
        link("one-shot", 16, 4.0, "torch one-shot", 6.0),
        link("two-shot", 16, 5.0, "nccl", 8.0),
        link("auto", 16, 4.0, "torch one-shot", 6.0, share_of_ceiling=0.25),
        link("one-shot", 4, 2.0, "nccl", 3.0),
    ]
    (table,) = communication_tables(records)
    assert table.columns[3:] == (
        "one-shot", "two-shot", "nccl", "torch one-shot", "× nccl", "× torch one-shot", "of the link",
    )  # fmt: skip
    few, many = table.rows
    assert few == ("2, p2p", "4096", "4", "2.0", "–", "3.0", "–", "–", "–", "–"), "nothing was chosen there"
    assert many == ("2, p2p", "4096", "16", "4.0", "5.0", "8.0", "6.0", "2.000×", "1.500×", "25.0 %")
    (table,) = communication_tables([link("one-shot", 16, value, "nccl", 8.0, call=value) for value in (4.0, 5.0, 4.5)])
    assert table.rows[0][3:5] == ("4.500 [4.0, 5.0]", "8.0")
    assert table.caption.endswith("medians of 3 calls [lowest, highest]")
    assert communication_tables([timed("communication", "replays_without_error", {"tp_size": 2}, 10000)]) == []


def shared(achieved: float, ceiling: float, name: str = "kernel", device: str = "Example GPU") -> Record:
    bandwidth = {"achieved_gb_per_s": achieved, "ceiling_gb_per_s": ceiling, "share_of_ceiling": achieved / ceiling}
    return timed(name, "us", {"operator": "sparse_mlp"}, 10.0, **bandwidth, stamp={"device": device})


def test_shares_are_of_the_highest_ceiling_of_the_card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    slow, fast, other = shared(2000.0, 4000.0), shared(2000.0, 5000.0), shared(2000.0, 2500.0, device="Other GPU")
    assert [one["share_of_ceiling"] for one in with_one_ceiling([slow, fast, other])] == [0.4, 0.4, 0.8]
    assert "ceiling 5000 GB/s read, the highest seen on this card" in ceiling_text(with_one_ceiling([slow, fast]))
    bare, of_a_link = {**slow, "share_of_ceiling": None}, shared(200.0, 400.0, name="communication")
    assert with_one_ceiling([of_a_link, bare, shared(1.0, 9000.0)])[:2] == [of_a_link, bare]
    # The file holds where these records are lower.
    (tmp_path / "c.json").write_text('{"Example GPU": {"read_gb_per_s": 8000.0}}')
    monkeypatch.setattr(analysis.comparison, "CEILINGS_FILE", tmp_path / "c.json")
    (found,) = with_one_ceiling([slow])
    assert found["share_of_ceiling"] == 0.25 and found["ceiling_gb_per_s"] == 8000.0
    assert rows_of(all_tables([slow])["kernel"][0])[0]["of the ceiling"] == "25.0 %"


def test_the_committed_file_is_no_lower_than_any_committed_record() -> None:
    """Raise the number in analysis/results/ceilings.json where a card was seen to be faster."""
    known = read_json(CEILINGS_FILE, dict[str, dict[str, float]])
    records = read_records(*sorted(CEILINGS_FILE.parent.glob("*.jsonl")))
    for device, ceilings in ceilings_of([one for one in records if one["environment"].get("device") != "cpu"]).items():
        for kind, ceiling in ceilings.items():
            assert known[device][kind] >= ceiling, (device, kind)
