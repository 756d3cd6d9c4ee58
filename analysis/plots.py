"""Plots from records, as matplotlib figures; each returns None where the records hold nothing to draw.

Colours are Okabe and Ito's, which stay apart for colour-blind readers; every method also has its own marker.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from analysis.comparison import Comparison, compare, group_by_task, method_rank
from analysis.formatting import format_number
from analysis.results import Record

METHOD_STYLES = {  # method -> colour, marker
    "dense": ("#000000", "o"),
    "oracle": ("#009E73", "^"),
    "predictor": ("#0072B2", "o"),
    "cats": ("#CC79A7", "D"),
    "teal": ("#D55E00", "s"),
    "static": ("#E69F00", "v"),
    "random": ("#7F7F7F", "X"),
}
SPARE_STYLES = (("#56B4E9", "P"), ("#8C6D00", "h"), ("#5D3A9B", "*"), ("#994F00", "<"))
DASHES = ("-", "--", ":", "-.")
BLOCK_NAMES = {"mlp": "MLP neurons", "attention": "attention heads"}


def all_figures(records: Sequence[Record]) -> dict[str, Figure]:
    """Every figure that the records can fill, by title."""
    figures: dict[str, Figure | None] = {}
    for (model, task, metric), rows in group_by_task(compare(records)).items():
        subject = f"{model}, {task}"
        figures[f"{subject}: {metric} against MLP density"] = plot_against_density(rows)
        figures[f"{subject}: {metric} against head density"] = plot_against_density(rows, block="attention")
        figures[f"{subject}: {metric} against MLP bytes read"] = plot_against_bytes(rows)
        figures[f"{subject}: decoding speed"] = plot_speed(rows)
        figures[f"{subject}: recall and precision a layer"] = plot_layer_quality(rows)
        figures[f"{subject}: achieved density a layer"] = plot_layer_density(rows)
    return {title: figure for title, figure in figures.items() if figure is not None}


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
    """Ratio to dense over one kind of block's density (the achieved one, where known), a line a method."""
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
    """Ratio to dense over the bytes that the MLPs read, predictors included."""
    return _plot_ratio(rows, lambda row: row.bytes_read_share, "MLP bytes read (share of dense, with predictors)")


def _plot_ratio(
    rows: Sequence[Comparison], position: Callable[[Comparison], float | None], axis_label: str
) -> Figure | None:
    points = [row for row in rows if row.method != "dense" and row.ratio is not None and position(row) is not None]
    if not any(position(row) != 1 for row in points):
        return None
    figure, axes = _one_panel()
    axes.axhline(1.0, color="#000000", linewidth=1, zorder=1)
    axes.annotate(
        "dense",
        (0.99, 1.0),
        xycoords=("axes fraction", "data"),
        xytext=(0, -3),
        textcoords="offset points",
        ha="right",
        va="top",
        fontsize=8,
    )
    _draw_lines(axes, points, position, lambda row: row.ratio)
    axes.set(xlabel=axis_label, ylabel=f"{points[0].metric}, ratio to dense")
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    # Decades alone would leave a short axis without numbers.
    axes.yaxis.set_major_locator(MaxNLocator(6) if high / low < 5 else LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda ratio, _: f"{ratio:.4g}×"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.legend(frameon=False, fontsize=9)
    return figure


def _draw_lines(
    axes: Axes,
    rows: Sequence[Comparison],
    x: Callable[[Comparison], float | None],
    y: Callable[[Comparison], float | None],
) -> None:
    styles = _styles(rows)
    series: dict[str, list[Comparison]] = {}
    for row in rows:
        series.setdefault(_series_label(row), []).append(row)
    for label, members in series.items():
        colour, marker, dash = styles[label]
        members = sorted(members, key=lambda row: x(row) or 0.0)
        axes.plot(
            [x(row) or 0.0 for row in members],
            [y(row) or 0.0 for row in members],
            label=label,
            color=colour,
            marker=marker,
            linestyle=dash,
            markersize=5,
        )


def _series_label(row: Comparison) -> str:
    label = row.variant
    if row.mlp_density < 1 and row.head_density < 1:
        label += f", head density {format_number(row.head_density)}"
    return label + (f" ({row.phase})" if row.phase not in ("", "all") else "")


def _styles(rows: Iterable[Comparison]) -> dict[str, tuple[str, str, str]]:
    """Colour and marker by method; further variants of one method differ by their dashes."""
    styles: dict[str, tuple[str, str, str]] = {}
    num_variants: dict[str, int] = {}
    for row in sorted(rows, key=lambda row: (method_rank(row.method), row.method, _series_label(row))):
        if _series_label(row) in styles:
            continue
        if row.method not in num_variants and row.method not in METHOD_STYLES:
            spare = sum(method not in METHOD_STYLES for method in num_variants)
            num_variants[row.method] = 0
            colour, marker = SPARE_STYLES[spare % len(SPARE_STYLES)]
        elif row.method in METHOD_STYLES:
            colour, marker = METHOD_STYLES[row.method]
        else:
            colour, marker = next(
                (colour, marker) for label, (colour, marker, _) in styles.items() if label.startswith(row.method)
            )
        dash = DASHES[num_variants.get(row.method, 0) % len(DASHES)]
        num_variants[row.method] = num_variants.get(row.method, 0) + 1
        styles[_series_label(row)] = (colour, marker, dash)
    return styles


def plot_speed(rows: Sequence[Comparison]) -> Figure | None:
    """Decoding speed: dense, then each sparse setting with its speed-up over its own dense run."""
    sparse = [row for row in rows if row.method != "dense" and row.tokens_per_s is not None]
    dense = next((row.dense_tokens_per_s for row in rows if row.dense_tokens_per_s is not None), None)
    if not sparse or dense is None:
        return None
    names = ["dense", *(f"{_series_label(row)}, {format_number(row.mlp_density)}" for row in sparse)]
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


def plot_layer_quality(rows: Sequence[Comparison]) -> Figure | None:
    """Heat maps of each layer's recall and precision: a line a setting, a column a layer."""
    return _plot_layers(rows, ("recall", "precision"))


def plot_layer_density(rows: Sequence[Comparison]) -> Figure | None:
    """A heat map of the density that each layer really ran at."""
    return _plot_layers(rows, ("density",))


def _plot_layers(rows: Sequence[Comparison], quantities: Sequence[str]) -> Figure | None:
    panels = []
    for block in BLOCK_NAMES:
        for quantity in quantities:
            chosen = [row for row in rows if row.method != "dense" and row.layers.get(block, {}).get(quantity)]
            if chosen:
                panels.append((block, quantity, chosen))
    if not panels:
        return None
    heights = [1.1 + 0.22 * len(chosen) for _, _, chosen in panels]
    figure = Figure(figsize=(7.5, sum(heights)), layout="constrained")
    all_axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (block, quantity, chosen) in zip(all_axes, panels, strict=True):
        num_layers = max(len(row.layers[block][quantity]) for row in chosen)
        values = np.full((len(chosen), num_layers), np.nan)
        for line, row in zip(values, chosen, strict=True):
            per_layer = row.layers[block][quantity]
            line[: len(per_layer)] = [np.nan if share is None else share for share in per_layer]
        image = axes.imshow(values, aspect="auto", cmap="cividis", vmin=0, vmax=1, interpolation="nearest")
        densities = [row.mlp_density if block == "mlp" else row.head_density for row in chosen]
        names = [
            f"{_series_label(row)}, {format_number(density)}" for row, density in zip(chosen, densities, strict=True)
        ]
        axes.set_yticks(range(len(names)), names, fontsize=7)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("layer")
        axes.set_title(f"{quantity}, {BLOCK_NAMES[block]} (line: method, density)", fontsize=9, loc="left")
        figure.colorbar(image, ax=axes, format=lambda share, _: f"{100 * share:.0f} %")
    return figure


def _one_panel() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7.0, 4.3), layout="constrained")
    axes = figure.add_subplot()
    axes.grid(alpha=0.3, which="both")
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes
