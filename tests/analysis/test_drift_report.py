"""Figures, tables, report and README of the drift study, on made-up records."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path

import pytest

from analysis.drift import study_tables
from analysis.drift_plots import plot_distance, plot_effects, plot_energy, plot_layers, plot_reuse
from analysis.effects import reported_effects
from analysis.report import all_figures, build_report, save_figures
from analysis.results import Record
from analysis.studies import FACTORS, compared_models, cosine_records, lost_by_layer, pooled, studied_models
from analysis.tables import all_tables, summary_markdown, update_readmes
from tests.analysis.made_up_drift import ablation_record, lookahead_record, record, whole_study


@pytest.fixture(scope="module")
def study() -> list[Record]:
    return whole_study(num_layers=5, seeds=2)


def test_every_figure_of_the_study_is_drawn(tmp_path: Path, study: list[Record]) -> None:
    figures = all_figures(study)
    assert list(figures) == [
        "Small-135M, drift: cosine between layers",
        "Small-135M, drift: what distance costs",
        "Small-135M, drift: recall against rank and text",
        "drift: energy in the largest neurons",
        "drift: active neurons shared by consecutive tokens",
        "ablation: effects on prediction",
    ]
    for path in save_figures(figures.items(), tmp_path).values():
        assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000


def test_figures_hold_the_values_of_the_records(study: list[Record]) -> None:
    found = studied_models(study)["Small-135M"]
    distance = plot_distance(found)
    assert distance is not None
    similar, recall, loss = distance.axes
    lines = {str(line.get_label()): line for line in recall.lines}
    values = {
        one["labels"]["lookahead"]: one["value"]
        for one in found
        if one["metric"] == "recall" and one["labels"]["block"] == "mlp" and one["labels"]["study"] == "lookahead"
    }
    assert list(lines["neurons"].get_xdata()) == list(range(5))
    assert list(lines["neurons"].get_ydata()) == pytest.approx([100 * values[lookahead] for lookahead in range(5)])
    assert {str(line.get_label()) for line in similar.lines} >= {"raw", "centred", "standardised", "no massive"}
    assert [round(float(nats), 3) for nats in loss.lines[0].get_ydata()][0] == pytest.approx(
        math.log(next(one["ratio"] for one in found if one["metric"] == "perplexity")), abs=1e-3
    )
    effects = plot_effects(study)
    assert effects is not None and [axes.get_xlabel() for axes in effects.axes] == ["effect (points)", "effect (nats)"]
    for plot in (plot_energy, plot_reuse):
        figure = plot(study)
        assert figure is not None
        names = {str(line.get_label()) for line in figure.axes[0].lines}
        expected = {"Small-135M", "ablation, ReLU", "ablation, gated SiLU", "relufication, SiLU", "relufication, ReLU"}
        assert names >= expected


def test_layers_of_one_lookahead_are_lined_up_at_the_layer_that_is_predicted() -> None:
    labels = {"model": "Small", "point": "after_attention", "lookahead": 1, "variant": "raw", "tokens": "all"}
    records = [
        record("drift", "cosine", 0.85, per_layer=[0.8, 0.9, None], **labels),
        {**lookahead_record("recall", 0, 0.7, 0.01), "per_layer": [0.9, 0.7, 0.5]},
        {**lookahead_record("recall", 1, 0.5, 0.01), "per_layer": [None, 0.6, 0.25]},
    ]
    assert lost_by_layer(records, "mlp") == {1: [None, pytest.approx(0.1), 0.25]}
    figure = plot_layers(records, 1)
    assert figure is not None
    similar, lost = (axes.lines[0] for axes in figure.axes)
    assert (list(similar.get_xdata()), list(similar.get_ydata())) == ([1, 2], [0.8, 0.9])
    assert (list(lost.get_xdata()), list(lost.get_ydata())) == ([1, 2], pytest.approx([10, 25]))
    assert plot_layers(records, 2) is None


def test_without_records_there_are_no_figures_and_no_tables() -> None:
    assert all_figures([record("drift", "cka", 0.9, model="Small", point="after_mlp", lookahead=1)]) == {}
    for name in ("drift", "ablation", "relufication"):
        assert study_tables(name, [record(name, "relative_update", 0.1, model="Small", point="after_mlp")]) == []


def test_of_one_model_under_two_conditions_the_newest_counts_by_metric() -> None:
    older, newer = (
        lookahead_record("recall", 0, value, 0.1, corpus=corpus) for value, corpus in ((0.5, "a"), (0.6, "b"))
    )
    newer["environment"] = {**newer["environment"], "date": "2027-01-01T00:00:00+00:00"}
    drop = lookahead_record("recall_drop", 1, 0.1, 0.01, corpus="a")
    for order in ([older, newer, drop], [newer, drop, older]):
        found = studied_models(order)["Small"]
        assert [one["value"] for one in found if one["metric"] == "recall"] == [0.6] and drop in found


def test_cosines_of_ordinary_tokens_at_the_input_of_mlps_come_first() -> None:
    labels = {"model": "Small", "lookahead": 1, "variant": "raw"}
    records = [
        record("drift", "cosine", 0.1, point=point, tokens=tokens, **labels)
        for point in ("block_input", "after_attention")
        for tokens in ("all", "first", "ordinary")
    ]
    assert [(one["labels"]["point"], one["labels"]["tokens"]) for one in cosine_records(records)] == [
        ("after_attention", "ordinary")
    ]
    assert cosine_records(records[:3])[0]["labels"]["tokens"] == "ordinary"


def test_the_tables_hold_values_with_their_intervals(study: list[Record]) -> None:
    tables = all_tables(study)
    assert {name: [table.title for table in found] for name, found in tables.items()} == {
        "drift": ["Small-135M: what distance costs", "drift: sets of active neurons"],
        "ablation": ["ablation: effects", "ablation: models", "ablation: sets of active neurons"],
        "relufication": ["relufication: ReLU instead of SiLU in one model", "relufication: sets of active neurons"],
    }
    distance, traits = tables["drift"]
    row = dict(zip(distance.columns, distance.rows[1], strict=True))
    (drop,) = (
        one
        for one in study
        if (one["name"], one["metric"]) == ("drift", "recall_drop")
        and (one["labels"]["block"], one["labels"]["lookahead"]) == ("mlp", 1)
    )
    low, high = (100 * end for end in drop["interval"])
    told = row["recall of neurons lost (points)"]
    assert row["look-ahead"] == "1" and told.startswith(f"+{100 * drop['value']:.2f} [+")
    assert float(told.split("[")[1].split(",")[0]) <= low and float(told.split(", ")[1].rstrip("]")) >= high
    assert dict(zip(traits.columns, traits.rows[0], strict=True))["exactly zero (%)"] == "0 [0, 0]"
    effects = tables["ablation"][0]
    assert effects.columns[2:5] == (
        "gated SiLU instead of ReLU", "RoPE instead of learned positions", "RMSNorm instead of LayerNorm",
    )  # fmt: skip
    zeros = next(row for row in effects.rows if row[0] == "activations that are exactly zero")
    assert zeros[1:5] == ("points", "-90 [-90, -90]", "+0 [+0, +0]", "+0 [+0, +0]")
    assert effects.caption.startswith("16 models, seeds 0, 1; paired differences")
    assert len(tables["ablation"][1].rows) == 8
    perplexity = next(row for row in tables["relufication"][0].rows if row[0] == "held-out perplexity")
    # hypot(0.4, 0.4) = 0.566 to either side of 0.8.
    assert perplexity[2:] == ("20.70 [20.30, 21.10]", "21.50 [21.10, 21.90]", "+0.8 [+0.2, +1.4]")


def test_verdict_and_tables_are_in_the_report_the_summary_and_the_readme(tmp_path: Path, study: list[Record]) -> None:
    (tmp_path / "plot.png").write_bytes(b"\x89PNG")
    page = build_report(study, figures={"a plot": tmp_path / "plot.png"})
    assert "<strong>Does RoPE explain it?</strong>" in page and "<h3>drift: what it costs a predictor</h3>" in page
    assert "<h2>Drift</h2>" in page and page.count("data:image/png") == 1
    assert "**Does the norm explain it?** " in summary_markdown(study)
    readme = tmp_path / "README.md"
    names = ("drift_verdict", "drift", "ablation", "relufication")
    readme.write_text("".join(f"<!-- table:{name} -->\n<!-- /table:{name} -->\n" for name in names))
    assert update_readmes([readme], study) == {readme: list(names)}
    once = readme.read_text()
    assert re.search(r"<!-- table:drift_verdict -->\n\*\*Does drift explain it\?\*\* .*closed-form.*Small-135M", once)
    assert "**ablation: effects**" in once and "Measured on 1 × Example GPU" in once
    update_readmes([readme], study)
    assert readme.read_text() == once


def test_a_record_without_its_lookahead_is_left_out_of_the_effects(study: list[Record]) -> None:
    without = [
        {**each, "labels": {name: label for name, label in each["labels"].items() if name != "lookahead"}}
        for each in study
        if each["name"] == "ablation"
    ]
    assert [each.title for each in reported_effects([*study, *without])] == [
        each.title for each in reported_effects(study)
    ]


def test_reports_of_other_records_have_no_verdict(sample_records: list[Record]) -> None:
    assert "explain it" not in build_report(sample_records)


def test_seeds_that_lack_a_model_of_the_ablation_are_in_no_curve_and_no_table() -> None:
    kinds = list(itertools.product(*FACTORS.values()))
    records = [
        ablation_record("energy_share", kind, seed, 0.5 + 0.4 * seed, top_share=0.1)
        for seed in (0, 1)
        for kind in kinds[: len(kinds) - seed]  # of seed 1 a model of gated SiLU has not run yet
    ]
    assert effects_of(records) == (0,)
    for level in ("ReLU", "gated SiLU"):
        found = compared_models(records)[f"ablation, {level}"]
        assert {one["labels"]["seed"] for one in found} == {0} and len(found) == 4
        assert pooled(found, "top_share")[0.1].value == pytest.approx(0.5)
    # Number by number: another one that all models have of both seeds keeps both.
    zeros = [ablation_record("exact_zeros", kind, seed, 0.5) for seed in (0, 1) for kind in kinds]
    found = compared_models([*records, *zeros])["ablation, ReLU"]
    assert {one["labels"]["seed"] for one in found if one["metric"] == "exact_zeros"} == {0, 1}


def effects_of(records: list[Record]) -> tuple[int, ...]:
    """The seeds that effects are of."""
    (found,) = reported_effects(records)
    return found.effects.seeds
