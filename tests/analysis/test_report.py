from __future__ import annotations

import base64
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from analysis.comparison import compare
from analysis.plots import plot_against_density, plot_layer_density, plot_layer_quality
from analysis.report import all_figures, build_report, save_figures

Records = list[dict[str, Any]]


def test_every_plot_is_drawn_with_labels_and_units(tmp_path: Path, sample_records: Records) -> None:
    figures = all_figures(sample_records)
    kinds = {title.rpartition(": ")[2] for title in figures}
    assert kinds == {
        "perplexity against MLP density",
        "perplexity against MLP bytes read",
        "decoding speed",
        "recall and precision per layer",
        "achieved density per layer",
    }
    for title, path in save_figures(figures.items(), tmp_path).items():
        assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000
        assert re.fullmatch(r"[a-z0-9_]+\.png", path.name)
        axes = figures[title].axes[0]
        assert axes.get_xlabel()


def test_the_density_plot_shows_ratios_on_a_log_axis(sample_records: Records) -> None:
    figure = plot_against_density(compare(sample_records))
    assert figure is not None
    axes = figure.axes[0]
    assert axes.get_yscale() == "log"
    lines = {str(line.get_label()): line for line in axes.lines}
    assert {"oracle", "predictor", "cats", "teal", "static", "random"} <= lines.keys()
    assert list(lines["predictor"].get_xdata()) == [0.304, 0.504, 0.704]
    assert list(lines["predictor"].get_ydata()) == [1.49, 1.25, 1.09]
    assert len({str(line.get_color()) for line in lines.values()}) == 6 + 1


def test_records_without_anything_to_plot_give_no_figure(sample_records: Records) -> None:
    assert all_figures(sample_records[:1]) == {}
    assert all_figures([record for record in sample_records if record["name"] == "training"]) == {}


def test_rows_at_100_percent_and_points_beyond_the_axis_make_no_plot(sample_records: Records) -> None:
    whole = {"mlp": {"recall": [1.0] * 4, "precision": [1.0] * 4, "density": [0.5] * 4}}
    rows = [replace(row, layers=whole) if row.method == "oracle" else row for row in compare(sample_records)]
    figure = plot_layer_quality(rows)
    assert figure is not None
    names = [label.get_text() for axes in figure.axes[:2] for label in axes.get_yticklabels()]
    assert not any(name.startswith("oracle") for name in names) and any(name.startswith("cats") for name in names)
    assert plot_layer_quality([row for row in rows if row.method == "oracle"]) is None
    density = plot_layer_density(rows)
    assert density is not None and "attention" not in "".join(axes.get_title(loc="left") for axes in density.axes)
    assert plot_against_density([replace(row, ratio=25.0) for row in rows]) is None


def test_definitions_are_a_list_and_wide_tables_can_be_scrolled(sample_records: Records) -> None:
    page = build_report(sample_records)
    assert page.count("<dt>") == page.count("<dd>") > 8 and "<dt>Recall</dt>" in page
    assert page.count('<div class="scroll"><table>') == page.count("<table>") and ".scroll { overflow-x: auto;" in page


def test_plots_with_equal_names_do_not_overwrite_each_other(tmp_path: Path) -> None:
    paths = save_figures([("a/b", Figure(figsize=(1, 1))), ("a b", Figure(figsize=(1, 1)))], tmp_path)
    assert len(set(paths.values())) == 2


class References(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.found += [value or "" for name, value in attrs if name in ("src", "href")]


def test_the_report_is_self_contained_and_escaped(sample_records: Records, tmp_path: Path) -> None:
    drawn = {f"plot {number}": tmp_path / "plot.png" for number in range(5)}
    (tmp_path / "plot.png").write_bytes(b"\x89PNG")
    page = build_report(sample_records, title="<script>alert(1)</script>", figures=drawn)
    parser = References()
    parser.feed(page)
    assert "script" not in parser.tags and "b" not in parser.tags and "link" not in parser.tags
    assert "&lt;script&gt;alert(1)" in page and "Tiny|&lt;b&gt;model&lt;/b&gt;" in page
    assert len(parser.found) == 5
    for reference in parser.found:
        kind, _, content = reference.partition(",")
        assert kind == "data:image/png;base64"
        assert base64.b64decode(content, validate=True) == b"\x89PNG"
    assert 'name="viewport"' in page
    assert "density is the share of units that are active" in page
    assert "Example CPU &lt;1&gt;" in page
    assert page.count("<tr>") == (1 + 19) + (1 + 8) + (1 + 6) + (1 + 4)
