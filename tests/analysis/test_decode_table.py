"""Records of one-GPU decoding become one readable table, apart from that of several ranks. No number is measured."""

from pathlib import Path
from typing import Any

from analysis.decode_table import decode_tables, is_one_gpu_decode
from analysis.results import Record, append_record, make_record, read_records
from analysis.tables import all_tables, update_readme

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
        "of the ceiling", "× our dense", "× Hugging Face compiled", "perplexity", "dense perplexity",
    )  # fmt: skip
    assert table.rows == (
        ("Shape-3B", "random", "dense", "1", "1.0", "1.0", "–", "400.0", "2660", "87.0 %", "–", "2.000×", "–", "–"),
        ("Shape-3B", "random", "predictor", "1", "0.253", "1.0", "–", "690.0", "2660", "87.0 %", "1.725×", "3.450×")
        + ("–", "–"),
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
            "–",
        ),
        ("Small", "trained", "dense", "1", "1.0", "1.0", "–", "399.0", "2660", "87.0 %", "–", "–", "20.50", "20.50"),
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


def test_of_two_timings_on_one_card_the_newer_counts_whole() -> None:
    later = {"date": "2026-02-03T04:05:06+00:00"}
    measured = [
        record(410.0, ("our dense", 205.0), stamp=later),
        record(400.0, ("our dense", 100.0)),
        record(400.0, ("Hugging Face compiled", 100.0)),
    ]
    for order in (measured, measured[::-1]):
        (table,) = decode_tables(order)
        (row,) = (dict(zip(table.columns, cells, strict=True)) for cells in table.rows)
        assert (row["tokens/s"], row["× our dense"]) == ("410.0", "2.000×")
        assert "× Hugging Face compiled" not in row


def test_the_readme_has_a_table_for_one_gpu_and_one_for_ranks(tmp_path: Path) -> None:
    for each in records():
        append_record(tmp_path / "decode_h100.jsonl", each)
    found = read_records(tmp_path / "decode_h100.jsonl")
    assert set(all_tables(found)) == {"one_gpu_decode", "decode"}
    readme = tmp_path / "README.md"
    readme.write_text(
        "<!-- table:one_gpu_decode -->\n<!-- /table:one_gpu_decode -->\n<!-- table:decode -->\n<!-- /table:decode -->\n"
    )
    assert update_readme(readme, found) == ["one_gpu_decode", "decode"]
    one_gpu, _, ranks = readme.read_text().partition("<!-- table:decode -->")
    assert "| Shape-3B | random | dense | 1 |" in one_gpu and "Measured on 1 × Example GPU" in one_gpu
    assert "Shape-3B" not in ranks
