"""Where the predictor stands is read off the records: at equal bytes and in a sentence; numbers are made up."""

from __future__ import annotations

import math
from typing import Any

import pytest

from analysis.comparison import compare
from analysis.plots import HIGHEST_RATIO, plot_against_bytes, plot_against_layer_bytes, ratio_points, series_label
from analysis.results import Record, make_record
from analysis.rivals import curves_of, equal_bytes_tables, findings

ENVIRONMENT = {"device": "Example GPU", "date": "2026-01-02T03:04:05+00:00"}
# ln(ratio) at bytes b: predictor 0.95 - b, teal 2.15 - 3 b, cats 0.4 throughout.
MEASURED = {"predictor": (0.35, 0.75), "teal": (0.3, 0.7), "cats": (0.5, 0.8), "oracle": (0.3, 0.5), "random": (0.3,)}
LOGARITHMS = {
    "predictor": lambda share: 0.95 - share,
    "teal": lambda share: 2.15 - 3 * share,
    "cats": lambda share: 0.4,
    "oracle": lambda share: 0.01,
    "random": lambda share: 9.0,
}


def record(method: str, share: float | None, logarithm: float, **labels: Any) -> Record:
    """A perplexity of 10 for dense, and of 10 exp(logarithm) at so many bytes."""
    settings = {"model": "Small", "task": "perplexity:text", "phase": "all", "head_density": 1.0, "method": method}
    settings |= {"mlp_density": 1.0 if share is None else share} | labels
    more: dict[str, Any] = {}
    if share is not None:
        more = {"baseline": {"name": "dense", "value": 10.0}, "achieved": {"bytes_read_share": share}}
    value = 10 * math.exp(logarithm)
    return make_record("perplexity", settings, "perplexity", value, "", environment=ENVIRONMENT, **more)


def records(*methods: str) -> list[Record]:
    chosen = methods or tuple(MEASURED)
    sparse = [record(method, share, LOGARITHMS[method](share)) for method in chosen for share in MEASURED[method]]
    return [record("dense", None, 0.0), *sparse]


def test_the_lowest_is_named_in_each_row() -> None:
    (table,) = equal_bytes_tables(records())
    assert [(row[0], row[-1]) for row in table.rows] == [
        ("35 %", "predictor"), ("40 %", "predictor"), ("45 %", "predictor"), ("50 %", "cats"), ("55 %", "predictor"),
        ("60 %", "predictor"), ("65 %", "teal"), ("70 %", "teal"),
    ]  # fmt: skip


def test_the_lowest_changes_with_the_records() -> None:
    behind = [record("predictor", share, 3.0) for share in (0.3, 0.7)]
    (table,) = equal_bytes_tables([*records("teal"), *behind])
    assert len(table.rows) == 9 and {row[-1] for row in table.rows} == {"teal"}
    ahead = [record("predictor", share, 0.01) for share in (0.3, 0.7)]
    (table,) = equal_bytes_tables([*records("teal"), *ahead])
    assert len(table.rows) == 9 and {row[-1] for row in table.rows} == {"predictor"}


def test_of_few_points_there_is_no_table_of_dashes() -> None:
    """As after the quickstart: each method at two densities."""
    few = [record("predictor", share, 0.5) for share in (0.38, 0.58)]
    few += [record(method, share, 0.4) for method in ("teal", "cats") for share in (0.5, 0.68)]
    assert equal_bytes_tables([record("dense", None, 0.0), *few]) == []
    assert plot_against_bytes(compare([record("dense", None, 0.0), *few])) is not None
    alone = [record("teal", 0.5, 0.1), record("static", 0.5, 5.0)]
    assert equal_bytes_tables([*records("predictor"), *alone]) == []


def test_only_runs_over_the_same_text_are_compared() -> None:
    def of(num_tokens: int, *methods: str) -> list[Record]:
        chosen = records(*methods)
        return [{**one, "labels": {**one["labels"], "num_tokens": num_tokens}} for one in chosen]

    assert equal_bytes_tables([*of(100, "predictor"), *of(200, "teal")]) == []
    tables = equal_bytes_tables([*of(100, "predictor", "cats"), *of(200, "predictor", "teal")])
    assert [table.columns[1:-1] for table in tables] == [("predictor", "cats"), ("predictor", "teal")]
    assert "num tokens 100" in tables[0].title and "num tokens 200" in tables[1].title


def test_the_table_interpolates_logarithms_between_points_only() -> None:
    (table,) = equal_bytes_tables(records())
    assert table.columns == ("MLP bytes read", "predictor", "cats", "teal", "lowest")
    rows = {row[0]: row[1:-1] for row in table.rows}
    assert list(rows) == ["35 %", "40 %", "45 %", "50 %", "55 %", "60 %", "65 %", "70 %"]
    # exp(0.95 - 0.4) = 1.733, exp(2.15 - 1.2) = 2.586.
    assert rows["40 %"] == ("1.733×", "–", "2.586×")
    assert rows["70 %"][1:] == ("1.492×", "1.051×")


def test_a_recipe_that_another_beats_everywhere_does_not_stand_for_the_method() -> None:
    worse = [record("predictor", share, 2.0, label="old") for share in (0.3, 0.6)]
    other = [record("predictor", share, value, label="other") for share, value in ((0.35, 0.2), (0.75, 0.9))]
    curves = curves_of(compare([*records("predictor", "teal"), *worse, *other]))
    assert [curve.method for curve in curves] == ["predictor", "predictor", "teal"]
    rival = [record("teal", share, 3.0, label="old") for share in (0.2, 0.7)]
    assert len(curves_of(compare([*records("predictor", "teal"), *rival]))) == 3


def test_budgets_named_after_their_density_are_one_line_and_folders_with_other_numbers_are_not() -> None:
    budgets = [record("predictor", share, 0.5, density_budget=f"greedy_{share}") for share in (0.3, 0.5)]
    rows = compare([*records("predictor"), *budgets])
    budgeted = [row for row in rows if row.labels.get("density_budget")]
    assert [row.variant for row in budgeted] == [f"predictor, budget greedy_{share}" for share in (0.5, 0.3)]
    assert {row.series for row in budgeted} == {"predictor, budget greedy"}
    assert len(curves_of(rows)) == 2
    folders = [record("predictor", 0.3, 0.5, predictors=f"run_{number}") for number in (1, 2)]
    assert {row.series for row in compare(folders)} == {"predictor, predictors run_1", "predictor, predictors run_2"}


def test_there_is_no_table_without_a_rival() -> None:
    assert equal_bytes_tables(records("predictor", "oracle")) == []
    assert equal_bytes_tables(records("teal", "cats")) == []
    heads = [record("teal", 0.4, 0.1, head_density=0.5), record("cats", 0.4, 0.1, phase="decode")]
    assert equal_bytes_tables([*records("predictor"), *heads]) == []


def test_methods_that_thin_out_attention_are_compared_at_the_bytes_of_layers() -> None:
    rows = []
    for method, values in (("predictor", (0.4, 0.2)), ("wina-unrotated", (0.3, 0.3)), ("teal", (0.9, 0.8))):
        for share, value in zip((0.4, 0.6), values, strict=True):
            head_density = share if method == "wina-unrotated" else 1.0
            found = record(method, share, value, head_density=head_density)
            rows.append({**found, "achieved": {**found["achieved"], "layer_bytes_share": share + 0.05}})
    mlp, layer = equal_bytes_tables([record("dense", None, 0.0), *rows])
    assert mlp.columns == ("MLP bytes read", "predictor", "teal", "lowest")
    assert layer.columns == ("layer bytes read", "predictor", "teal", "wina-unrotated", "lowest")
    # 0.4 falls to 0.2 between 45 and 65 % of the bytes, and wina stays at 0.3.
    assert [row[-1] for row in layer.rows] == ["wina-unrotated"] * 2 + ["predictor"] * 3
    (line,) = (line for line in compare(rows) if (line.method, line.mlp_density) == ("wina-unrotated", 0.4))
    assert series_label(line) == "wina-unrotated"
    figure = plot_against_layer_bytes(compare(rows))
    assert figure is not None and "bytes read of attention and MLPs" in figure.axes[0].get_xlabel()
    assert plot_against_layer_bytes(compare(records())) is None


def test_the_plot_holds_the_measured_points_and_dense_as_a_line() -> None:
    rows = compare(records())
    points = {
        (point.setting.method, point.x): point.y for point in ratio_points(rows, lambda row: row.bytes_read_share)
    }
    assert points[("teal", 0.7)] == pytest.approx(math.exp(0.05)) and len(points) == 9
    figure = plot_against_bytes(rows)
    assert figure is not None
    axes = figure.axes[0]
    assert axes.get_yscale() == "log" and axes.get_ylim()[1] == HIGHEST_RATIO
    assert "random to 8,103×" in axes.get_title(loc="left")
    assert "predictor, gate and stand-in included" in axes.get_xlabel()
    assert any(list(line.get_ydata()) == [1.0, 1.0] for line in axes.lines)


def scored(method: str, ratio: float, density: float = 0.5, share: float = 0.5) -> Record:
    return record(method, share, math.log(ratio), mlp_density=density)


def timed(speed: float) -> Record:
    labels = {"model": "Small", "head_density": 1.0, "phase": "decode", "batch_size": 1, "mlp_density": 0.5}
    baseline = {"name": "dense", "value": 25.0}
    labels["method"] = "predictor"
    return make_record("decode", labels, "tokens_per_s", speed, "tokens/s", baseline=baseline, environment=ENVIRONMENT)


def test_a_predictor_is_said_to_be_behind_or_ahead_and_slower_or_faster() -> None:
    others = [scored("teal", 1.57), scored("cats", 1.33, share=0.67), scored("static", 9.0), scored("oracle", 1.02)]
    (told,) = findings([scored("predictor", 1.65, share=0.58), scored("predictor", 3.0, 0.3), *others, timed(21.0)])
    for words in (
        "Small, perplexity:text: with 50% of the neurons the predictor's perplexity is 1.65 times dense, reading 58%",
        "behind CATS (1.33 times dense, reading 67% of the MLPs) and TEAL (1.57 times dense, reading 50% of the MLPs).",
        "Decoding with it is slower than dense: 21.0 tokens/s against 25.0, 0.84 times the speed.",
    ):
        assert words in told
    (told,) = findings([scored("predictor", 1.2), scored("cats", 1.3), scored("teal", 1.1), timed(30.0)])
    assert "It is behind TEAL (1.10" in told and "ahead of CATS (1.30" in told and "is faster than dense: 30.0" in told


def test_only_what_is_known_is_told_at_a_density_that_the_others_have() -> None:
    (told,) = findings([scored("predictor", 1.65), scored("predictor", 3.0, 0.3), scored("cats", 4.0, 0.3)])
    assert "with 30% of the neurons" in told and "ahead of CATS" in told
    (alone,) = findings([scored("predictor", 1.65)])
    assert alone.endswith("1.65 times dense, reading 50% of the MLPs.")
    assert findings([scored("cats", 1.3)]) == [] and findings([]) == []
