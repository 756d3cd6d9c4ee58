"""Records of one-GPU decoding become one readable table, apart from that of several ranks. No number is measured."""

from pathlib import Path
from typing import Any

import pytest

from analysis.results import Record, append_record, make_record, read_records
from analysis.speed_tables import decode_tables, is_one_gpu_decode
from analysis.tables import all_tables, summary_markdown, update_readmes

ENVIRONMENT = {"device": "Example GPU", "num_devices": 1, "date": "2026-01-02T03:04:05+00:00"}


def record(
    value: float,
    baseline: tuple[str, float] | None,
    more: dict[str, Any] | None = None,
    stamp: dict[str, Any] | None = None,
    **labels: Any,
) -> Record:
    settings: dict[str, Any] = {
        "shape": "Shape-3B",
        "weights": "random",
        "method": "dense",
        "mlp_density": 1.0,
        "head_density": 1.0,
    }
    settings |= {"dtype": "bfloat16", "batch_size": 1, "execution": "graph", "prompt_tokens": 512} | labels
    against = None if baseline is None else {"name": baseline[0], "value": baseline[1]}
    extras = {"share_of_ceiling": 0.87, "achieved_gb_per_s": 2660.0, **(more or {})}
    environment = {**ENVIRONMENT, **(stamp or {})}
    return make_record(
        "decode", settings, "tokens_per_s", value, "tokens/s", baseline=against, environment=environment, **extras
    )


def records() -> list[Record]:
    sparse = {"method": "predictor", "mlp_density": 0.25, "predictor_rank": 336}
    achieved = {"achieved": {"mlp_density": 0.2534, "head_density": 1.0, "union_mlp_density": 0.61}}
    return [
        record(690.0, ("our dense", 400.0), achieved, **sparse),
        record(690.0, ("Hugging Face compiled", 200.0), achieved, **sparse),
        record(1900.0, ("our dense", 1600.0), achieved, **{**sparse, "batch_size": 8}),
        record(400.0, ("Hugging Face compiled", 200.0)),
        record(
            399.0, None, {"perplexity": 20.5, "dense_perplexity": 20.5}, shape=None, model="Small", weights="trained"
        ),
        make_record("decode", {"tp_size": 2}, "tokens_per_s", 5.0, "tokens/s", environment=ENVIRONMENT),
    ]


def test_a_setting_is_one_line_with_the_ratio_to_each_baseline() -> None:
    (table,) = decode_tables([each for each in records() if is_one_gpu_decode(each)])
    assert table.title == "decode, one Example GPU"
    assert table.columns == (
        "model", "weights", "method", "batch", "MLP density", "head density", "union", "tokens/s", "GB/s",
        "of the ceiling", "× our dense", "× Hugging Face compiled", "perplexity there",
    )  # fmt: skip
    assert table.rows == (
        ("Shape-3B", "random", "dense", "1", "1.0", "1.0", "–", "400.0", "2660", "87.0 %", "–", "2.000×", "–"),
        ("Shape-3B", "random", "predictor", "1", "0.253", "1.0", "–", "690.0", "2660", "87.0 %", "1.725×", "3.450×")
        + ("–",),
        (
            "Shape-3B",
            "random",
            "predictor",
            "8",
            "0.253",
            "1.0",
            "0.61",
            "1900",
            "2660",
            "87.0 %",
            "1.188×",
            "–",
            "–",
        ),
        ("Small", "trained", "dense", "1", "1.0", "1.0", "–", "399.0", "2660", "87.0 %", "–", "–", "20.50"),
    )
    assert table.caption == "dtype bfloat16, execution graph, prompt tokens 512"


def test_each_card_has_a_table_of_its_own() -> None:
    other = {"device": "Other GPU"}
    measured = [
        record(400.0, ("Hugging Face compiled", 200.0)),
        record(900.0, ("Hugging Face compiled", 300.0), stamp=other),
        record(690.0, ("our dense", 400.0), method="predictor", mlp_density=0.25),
    ]
    first, second = decode_tables(measured)
    assert (first.title, second.title) == ("decode, one Example GPU", "decode, one Other GPU")
    assert [row[first.columns.index("tokens/s")] for row in first.rows] == ["400.0", "690.0"]
    assert [row[second.columns.index("tokens/s")] for row in second.rows] == ["900.0"]
    assert "× our dense" not in second.columns


def test_calls_on_one_card_are_merged_into_medians_and_ranges() -> None:
    """A call is recorded once for each baseline, and counts once; ratios are of the calls that had that baseline."""
    newest, samples = {"date": "2026-02-03"}, [380.0, 410.0, 412.0]
    measured = [
        record(410.0, ("our dense", 205.0), {"timing": {"samples": samples, "baseline_samples": [205.0]}}, newest),
        record(
            410.0, ("Hugging Face eager", 41.0), {"timing": {"samples": samples, "baseline_samples": [41.0]}}, newest
        ),
        record(400.0, ("our dense", 100.0)),
        record(400.0, ("Hugging Face compiled", 100.0)),
        record(390.0, ("our dense", 100.0)),
    ]
    for order in (measured, measured[::-1], [*measured, measured[0]]):
        (table,) = decode_tables(order)
        (row,) = (dict(zip(table.columns, cells, strict=True)) for cells in table.rows)
        assert row["tokens/s"] == "400.0 [380.0, 412.0]"
        assert row["× our dense"] == "3.900× [2.000×, 4.000×]" and row["× Hugging Face compiled"] == "4.000×"
        assert "medians of 3 calls [lowest, highest]" in table.caption
        assert all(table.numeric_columns()[table.columns.index(name)] for name in ("tokens/s", "× our dense"))


def test_rows_of_other_predictors_say_how_they_differ() -> None:
    trained: dict[str, Any] = {"shape": None, "model": "Small", "weights": "trained", "method": "predictor"}
    trained |= {"mlp_density": 0.5}
    measured = [
        record(400.0, ("our dense", 500.0), None, **trained, lookahead=lookahead, standin_rank=rank, predictors=name)
        for lookahead, rank, name in ((0, 64, "near"), (1, 0, "far"))
    ]
    (table,) = decode_tables(measured)
    place = table.columns.index("look-ahead")
    assert table.columns[place + 1] == "stand-in rank" and "predictors" not in table.columns
    assert [row[place : place + 2] for row in table.rows] == [("0", "64"), ("1", "0")]
    # Nothing but the folder differs, or nothing but what is in it.
    again = [{**measured[0], "labels": {**measured[0]["labels"], "predictors": "other"}}]
    (table,) = decode_tables([*measured, *again])
    assert [row[table.columns.index("predictors")] for row in table.rows] == ["near", "far", "other"]
    changed = [{**measured[0], "sources": {"predictors": "0123456789ab"}}]
    (table,) = decode_tables([*measured, *changed])
    assert [row[table.columns.index("predictors")] for row in table.rows] == ["near", "far", "near (012345)"]
    (table,) = decode_tables([record(400.0, None, None, **trained, label="refined", density_budget=None)])
    assert "budget" not in table.caption, "what nobody set is not told"
    assert table.rows[0][table.columns.index("method")] == "predictor, refined"


def test_a_perplexity_stands_beside_the_density_on_its_own_text() -> None:
    more = {"perplexity": 25.0, "dense_perplexity": 20.0, "ratio_interval": [1.2, 1.31]}
    more |= {"achieved": {"mlp_density": 0.404}, "text_achieved": {"mlp_density": 0.502}}
    labels = {"shape": None, "model": "Small", "weights": "trained", "method": "predictor", "mlp_density": 0.5}
    (table,) = decode_tables([record(400.0, None, more, **labels, task="perplexity:text", num_tokens=1000)])
    row = dict(zip(table.columns, table.rows[0], strict=True))
    assert (row["MLP density"], row["MLP density on the text"]) == ("0.404", "0.502")
    assert (row["perplexity there"], row["to dense"]) == ("25.0", "1.250× [1.200×, 1.310×]")
    assert "MLP density: while generating" in table.caption
    assert "task perplexity:text, num tokens 1000" in table.caption


@pytest.mark.parametrize("name", ["method", "mlp_density", "head_density", "batch_size", "weights", "tp_size"])
def test_records_without_a_label_of_a_table_are_shown_all_the_same(name: str) -> None:
    found = records()
    labels = next(each["labels"] for each in found if name in each["labels"])
    labels[name] = None
    tables = [table for each in all_tables(found).values() for table in each]
    assert sum(len(table.rows) for table in tables) >= 4
    summary_markdown(found)


def test_the_readme_has_a_table_for_one_gpu_and_one_for_ranks(tmp_path: Path) -> None:
    for each in records():
        append_record(tmp_path / "decode_h100.jsonl", each)
    found = read_records(tmp_path / "decode_h100.jsonl")
    assert set(all_tables(found)) == {"one_gpu_decode", "decode"}
    readme = tmp_path / "README.md"
    readme.write_text(
        "<!-- table:one_gpu_decode -->\n<!-- /table:one_gpu_decode -->\n<!-- table:decode -->\n<!-- /table:decode -->\n"
    )
    assert update_readmes([readme], found) == {readme: ["one_gpu_decode", "decode"]}
    one_gpu, _, ranks = readme.read_text().partition("<!-- table:decode -->")
    assert "| Shape-3B | random | dense | 1 |" in one_gpu and "Measured on 1 × Example GPU" in one_gpu
    assert "Shape-3B" not in ranks
