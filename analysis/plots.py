"""Plots from records, as matplotlib figures; each returns None where the records hold nothing to draw."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from analysis.accuracy import compare_accuracy
from analysis.accuracy_plot import plot_accuracy, plot_accuracy_layers
from analysis.comparison import Comparison, compare, group_by_task
from analysis.drift_facts import studied_models
from analysis.drift_plots import plot_cosine_layers, plot_distance
from analysis.drift_trait_plots import plot_effects, plot_energy, plot_rank_and_text, plot_reuse
from analysis.formatting import format_number
from analysis.layer_plots import plot_layer_density, plot_layer_quality
from analysis.method_styles import (
    METHOD_STYLES,
    SPARE_STYLES,
    Point,
    draw_dense,
    draw_legend,
    draw_lines,
    one_panel,
    series_label,
    series_of,
)
from analysis.results import Record

# Ratios above it are cut off: a random choice's would leave no room for those that anybody would use.
HIGHEST_RATIO = 20.0


def all_figures(records: Sequence[Record]) -> dict[str, Figure]:
    """Every figure that the records can fill, by title."""
    figures: dict[str, Figure | None] = {}
    for found in compare_accuracy(records):
        figures[f"{found.model}: accuracy against MLP density"] = plot_accuracy(found)
        figures[f"{found.model}, accuracy tasks: recall and precision per layer"] = plot_accuracy_layers(found)
    scored = [row for row in compare(records) if row.name == "perplexity"]
    for (model, task, metric), rows in group_by_task(scored).items():
        subject = f"{model}, {task}"
        figures[f"{subject}: {metric} against MLP density"] = plot_against_density(rows)
        figures[f"{subject}: {metric} against head density"] = plot_against_density(rows, block="attention")
        figures[f"{subject}: {metric} against MLP bytes read"] = plot_against_bytes(rows)
        figures[f"{subject}: {metric} against layer bytes read"] = plot_against_layer_bytes(rows)
        figures[f"{subject}: decoding speed"] = plot_speed(rows)
        figures[f"{subject}: recall and precision per layer"] = plot_layer_quality(rows)
        figures[f"{subject}: achieved density per layer"] = plot_layer_density(rows)
    figures |= drift_figures(records)
    return {title: figure for title, figure in figures.items() if figure is not None}


def drift_figures(records: Sequence[Record]) -> dict[str, Figure | None]:
    """The figures of the drift study by title; None where the records do not fill one."""
    figures: dict[str, Figure | None] = {}
    for model, found in studied_models(records).items():
        figures[f"{model}, drift: cosine between layers"] = plot_cosine_layers(found)
        figures[f"{model}, drift: what distance costs"] = plot_distance(found)
        figures[f"{model}, drift: recall against rank and text"] = plot_rank_and_text(found)
    figures["drift: energy in the largest neurons"] = plot_energy(records)
    figures["drift: active neurons shared by consecutive tokens"] = plot_reuse(records)
    figures["ablation: effects on prediction"] = plot_effects(records)
    return figures


def save_figures(figures: Iterable[tuple[str, Figure]], output_dir: str | os.PathLike[str]) -> dict[str, Path]:
    """Writes each (title, figure) as a PNG named after its title; returns the paths by title."""
    output_dir = Path(output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    paths: dict[str, Path] = {}
    for title, figure in figures:
        stem = re.sub(r"[^a-z0-9]+", "_", title.lower()).strip("_")[:120]
        while output_dir / f"{stem}.png" in paths.values():
            stem += "_"
        paths[title] = output_dir / f"{stem}.png"
        figure.savefig(paths[title], dpi=130)
    return paths


def plot_against_density(rows: Sequence[Comparison], *, block: str = "mlp") -> Figure | None:
    """Ratio to dense over one kind of block's density (the achieved one, where known), a line per method."""
    if block == "mlp":
        chosen = [row for row in rows if row.mlp_density < 1 or row.head_density == 1]
        axis = "MLP density (share of neurons active)"
    else:
        chosen = [row for row in rows if row.mlp_density == 1]
        axis = "head density (share of attention heads active)"

    def density(row: Comparison) -> float:
        requested, achieved = (
            (row.mlp_density, row.achieved_mlp_density)
            if block == "mlp"
            else (row.head_density, row.achieved_head_density)
        )
        return requested if achieved is None else achieved

    return _plot_ratio(chosen, density, axis)


def plot_against_bytes(rows: Sequence[Comparison]) -> Figure | None:
    """Ratio to dense over the bytes that the MLPs read; predictor, gate and stand-in included."""
    return _plot_ratio(
        rows, lambda row: row.bytes_read_share, "MLP bytes read (share of dense; predictor, gate and stand-in included)"
    )


def plot_against_layer_bytes(rows: Sequence[Comparison]) -> Figure | None:
    """Ratio to dense over the bytes of attention and the MLPs together, where some method is sparse in both."""
    if all(row.head_density == 1 for row in rows):
        return None
    axis = "bytes read of attention and MLPs (share of dense; predictor, gate and stand-in included)"
    return _plot_ratio(rows, lambda row: row.layer_bytes_read_share, axis)


def ratio_points(rows: Sequence[Comparison], position: Callable[[Comparison], float | None]) -> list[Point]:
    """Every sparse row at (position, ratio to dense), as far as both are known."""
    return [
        Point(row, x, row.ratio)
        for row in rows
        if row.method != "dense" and row.ratio is not None and (x := position(row)) is not None
    ]


def _plot_ratio(
    rows: Sequence[Comparison], position: Callable[[Comparison], float | None], axis_label: str
) -> Figure | None:
    points = ratio_points(rows, position)
    shown = [point for point in points if point.y <= HIGHEST_RATIO]
    if not any(point.x != 1 for point in shown):
        return None
    figure, axes = one_panel()
    draw_dense(axes, 1.0, is_best="lowest")
    draw_lines(axes, points)
    axes.set(xlabel=axis_label, ylabel=f"{points[0].setting.metric}, ratio to dense")
    axes.set_yscale("log")
    if len(shown) < len(points):
        axes.set_ylim(min([1.0, *(point.y for point in shown)]) / 1.15, HIGHEST_RATIO)
        beyond = [
            f"{label} to {_rounded(max(point.y for point in members))}×"
            for label, members in series_of(points).items()
            if any(point.y > HIGHEST_RATIO for point in members)
        ]
        axes.set_title(f"above the plot: {', '.join(beyond)}", fontsize=7, loc="left", wrap=True)
    if len(shown) > 1:  # a line that leaves at the top need not be followed
        axes.set_xlim(min(point.x for point in shown) - 0.05, max(point.x for point in shown) + 0.05)
    low, high = axes.get_ylim()
    # Decades alone would leave a short axis without numbers.
    axes.yaxis.set_major_locator(MaxNLocator(6) if high / low < 5 else LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda ratio, _: f"{ratio:.4g}×"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    draw_legend(axes)
    return figure


def _rounded(ratio: float) -> str:
    return f"{ratio:,.0f}" if ratio < 1e6 else f"{ratio:.0e}"


def plot_speed(rows: Sequence[Comparison]) -> Figure | None:
    """Decoding speed: dense, then each sparse setting with its speed-up over its own dense run."""
    sparse = [row for row in rows if row.method != "dense" and row.tokens_per_s is not None]
    dense = next((row.dense_tokens_per_s for row in rows if row.dense_tokens_per_s is not None), None)
    if not sparse or dense is None:
        return None
    names = ["dense", *(f"{series_label(row)}, {format_number(row.mlp_density)}" for row in sparse)]
    speeds = [dense, *(row.tokens_per_s or 0.0 for row in sparse)]
    colours = ["#000000", *(METHOD_STYLES.get(row.method, SPARE_STYLES[0])[0] for row in sparse)]
    figure = Figure(figsize=(7.0, 1.3 + 0.3 * len(names)), layout="constrained")
    axes = figure.add_subplot()
    bars = axes.barh(range(len(names)), speeds, color=colours, height=0.7)
    notes = [format_number(dense)]
    for row in sparse:
        own_dense = row.dense_tokens_per_s
        speedup = f" ({(row.tokens_per_s or 0.0) / own_dense:.2f}×)" if own_dense else ""
        notes.append(f"{format_number(row.tokens_per_s)}{speedup}")
    axes.bar_label(bars, notes, padding=3, fontsize=8)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.18)
    axes.axvline(dense, color="#000000", linewidth=0.8, linestyle=":")
    axes.set_xlabel("decoding speed (tokens/s; label: method, MLP density)")
    axes.spines[["top", "right"]].set_visible(False)
    return figure
