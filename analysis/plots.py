"""Plots of quality records, as matplotlib figures; each returns None where the records hold nothing to draw."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, zip_longest
from statistics import mean
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from analysis.accuracy import AccuracyComparison, AccuracyRow
from analysis.comparison import Comparison, method_rank
from analysis.formatting import format_number
from analysis.intervals import Estimate
from analysis.results import grouped
from sparse_predictor.methods.registry import all_methods, thins_attention

# Method -> colour and marker. Colours begin with Okabe and Ito's, which stay apart for colour-blind readers.
METHOD_STYLES = {"dense": ("#000000", "o")}
METHOD_STYLES |= {name: (method.colour, method.marker) for name, method in all_methods().items()}
SPARE_STYLES = (("#40B0A6", ">"), ("#994F00", "<"), ("#B8B800", "p"))
# Their MLP density is that of attention's inputs, too, so it needs no naming.
THIN_ATTENTION = tuple(name for name in all_methods() if thins_attention(name))
DASHES = ("-", "--", ":", "-.")
NEARLY_ALL = 0.9995  # printed as 100 %
BLOCK_NAMES = {"mlp": "MLP neurons", "attention": "attention heads"}
# Ratios above it are cut off: a random choice's would leave no room for those that anybody would use.
HIGHEST_RATIO = 20.0


@dataclass(frozen=True)
class Point:
    """One setting's place in a plot; `stderr` of y, where it has one."""

    setting: Comparison
    x: float
    y: float
    stderr: float | None = None


def series_of(points: Iterable[Point]) -> dict[str, list[Point]]:
    """Points by the label of their line, each line by rising x; lines in the order of methods."""

    def place(point: Point) -> tuple[int, str, str, float]:
        method = point.setting.method
        return method_rank(method), method, series_label(point.setting), point.x

    return grouped(sorted(points, key=place), lambda point: series_label(point.setting))


def draw_lines(axes: Axes, points: Sequence[Point]) -> None:
    """A line per series; bars of one standard error where the points have one."""
    styles = styles_of([point.setting for point in points])
    for label, members in series_of(points).items():
        spread = [(point, point.stderr or 0.0) for point in members]
        estimates = [(p.x, Estimate(value=p.y, low=p.y - stderr, high=p.y + stderr)) for p, stderr in spread]
        draw_estimates(axes, estimates, label, *styles[label], size=5)


def draw_estimates(
    axes: Axes,
    points: Iterable[tuple[Any, Estimate]],
    label: str,
    colour: str,
    marker: str = "o",
    dash: str = "-",
    *,
    scale: float = 1.0,
    size: int = 4,
) -> None:
    """A line of estimates with their intervals as bars."""
    points = list(points)
    x, y = [place for place, _ in points], [scale * each.value for _, each in points]
    axes.plot(x, y, label=label, color=colour, marker=marker, linestyle=dash, markersize=size)
    bars = [
        (0.0, 0.0)
        if each.low is None or each.high is None
        else (max(0.0, scale * (each.value - each.low)), max(0.0, scale * (each.high - each.value)))
        for _, each in points
    ]
    if any(map(any, bars)):
        axes.errorbar(x, y, np.array(bars).T, fmt="none", ecolor=colour, elinewidth=0.8, capsize=2)


def draw_dense(axes: Axes, value: float, *, is_best: Literal["lowest", "highest"]) -> None:
    """The dense model as a line of its own across the plot, named on the side where nothing else is."""
    axes.axhline(value, color=METHOD_STYLES["dense"][0], linewidth=1, zorder=1)
    axes.annotate(
        "dense",
        (0.99, value),
        xycoords=("axes fraction", "data"),
        xytext=(0, -3 if is_best == "lowest" else 3),
        textcoords="offset points",
        ha="right",
        va="top" if is_best == "lowest" else "bottom",
        fontsize=8,
    )


def draw_legend(axes: Axes) -> None:
    """Beside the plot where it would cover the lines."""
    if len(axes.get_legend_handles_labels()[1]) > 6:
        axes.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    else:
        axes.legend(frameon=False, fontsize=9)


def series_label(row: Comparison) -> str:
    """The name of a setting's line: alike at all its densities."""
    label = row.series
    if row.mlp_density < 1 and row.head_density < 1 and row.method not in THIN_ATTENTION:
        label += f", head density {format_number(row.head_density)}"
    return label + (f" ({row.phase})" if row.phase not in ("", "all") else "")


def styles_of(rows: Iterable[Comparison]) -> dict[str, tuple[str, str, str]]:
    """Colour and marker by method; further variants of one method differ by their dashes."""
    known, spare = dict(METHOD_STYLES), cycle(SPARE_STYLES)
    styles: dict[str, tuple[str, str, str]] = {}
    num_variants: Counter[str] = Counter()
    for row in sorted(rows, key=lambda row: (method_rank(row.method), row.method, series_label(row))):
        if row.method not in known:
            known[row.method] = next(spare)
        if series_label(row) not in styles:
            styles[series_label(row)] = (*known[row.method], DASHES[num_variants[row.method] % len(DASHES)])
            num_variants[row.method] += 1
    return styles


def one_panel() -> tuple[Figure, Axes]:
    """An empty figure of the size of all line plots."""
    figure = Figure(figsize=(7.0, 4.3), layout="constrained")
    axes = figure.add_subplot()
    axes.grid(alpha=0.3, which="both")
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def plot_layer_quality(rows: Sequence[Comparison]) -> Figure | None:
    """Heat maps of each layer's recall and precision: a line per setting, a column per layer."""
    return _plot_layers(rows, ("recall", "precision"))


def plot_layer_density(rows: Sequence[Comparison]) -> Figure | None:
    """A heat map of the density that each layer really ran at."""
    return _plot_layers(rows, ("density",))


def _tells_something(per_layer: Sequence[float | None]) -> bool:
    """Whether some layer is not at 100 %: an oracle's recall, and the density of heads that are all computed, are."""
    return any(share is not None and share < NEARLY_ALL for share in per_layer)


def _plot_layers(rows: Sequence[Comparison], quantities: Sequence[str]) -> Figure | None:
    panels = []
    for block in BLOCK_NAMES:
        for quantity in quantities:
            chosen = [
                row
                for row in rows
                if row.method != "dense" and _tells_something(row.layers.get(block, {}).get(quantity) or ())
            ]
            if chosen:
                panels.append((block, quantity, chosen))
    if not panels:
        return None
    heights = [1.1 + 0.22 * len(chosen) for _, _, chosen in panels]
    figure = Figure(figsize=(7.5, sum(heights)), layout="constrained")
    all_axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (block, quantity, chosen) in zip(all_axes, panels, strict=True):
        values = grid_of_layers([row.layers[block][quantity] for row in chosen])
        image = axes.imshow(values, aspect="auto", cmap="cividis", vmin=0, vmax=1, interpolation="nearest")
        densities = [row.mlp_density if block == "mlp" else row.head_density for row in chosen]
        names = [
            f"{series_label(row)}, {format_number(density)}" for row, density in zip(chosen, densities, strict=True)
        ]
        axes.set_yticks(range(len(names)), names, fontsize=7)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("layer")
        axes.set_title(f"{quantity}, {BLOCK_NAMES[block]} (line: method, density)", fontsize=9, loc="left")
        figure.colorbar(image, ax=axes, format=lambda share, _: f"{100 * share:.0f} %")
    return figure


def accuracy_points(found: AccuracyComparison) -> list[Point]:
    """Every setting that has a mean, dense included, at (achieved MLP density, mean accuracy in %)."""
    points = []
    for row in found.rows:
        if row.mean is None:
            continue
        achieved = row.achieved(lambda cell: cell.achieved_mlp_density)
        density = row.setting.mlp_density if achieved is None else achieved
        stderr = None if row.mean.stderr is None else 100 * row.mean.stderr
        points.append(Point(row.setting, density, 100 * row.mean.value, stderr))
    return points


def plot_accuracy(found: AccuracyComparison) -> Figure | None:
    """The mean over the tasks that tell something; dense as a line with one standard error around it."""
    points = accuracy_points(found)
    sparse = [point for point in points if point.setting.method != "dense"]
    dense = next((point for point in points if point.setting.method == "dense"), None)
    if not any(point.x != 1 for point in sparse):
        return None
    figure, axes = one_panel()
    if dense is not None:
        draw_dense(axes, dense.y, is_best="highest")
        spread = dense.stderr or 0.0
        axes.axhspan(dense.y - spread, dense.y + spread, color=METHOD_STYLES["dense"][0], alpha=0.1, linewidth=0)
    draw_lines(axes, sparse)
    axes.set_xlabel("MLP density (share of neurons active)")
    axes.set_ylabel(f"accuracy (%), mean of {len(found.counted)} tasks ± standard error")
    draw_legend(axes)
    return figure


def plot_accuracy_layers(found: AccuracyComparison) -> Figure | None:
    """Recall and precision per layer, the mean over tasks."""
    return plot_layer_quality([_with_mean_layers(row) for row in found.rows])


def _with_mean_layers(row: AccuracyRow) -> Comparison:
    tasks = [
        (block, quantity, layers)
        for cell in row.cells.values()
        for block, quantities in cell.layers.items()
        for quantity, layers in quantities.items()
    ]
    means: dict[str, dict[str, list[float | None]]] = {}
    for (block, quantity), found in grouped(tasks, lambda task: task[:2]).items():
        means.setdefault(block, {})[quantity] = mean_of_layers([layers for _, _, layers in found])
    return replace(row.setting, layers=means)


def mean_of_layers(models: Sequence[Sequence[float | None]]) -> list[float | None]:
    """The mean over models of what is known of each layer."""
    known = [[share for share in layer if share is not None] for layer in zip_longest(*models)]
    return [mean(shares) if shares else None for shares in known]


def grid_of_layers(lines: Sequence[Sequence[float | None]]) -> np.ndarray:
    """[lines, layers], NaN where there is no such layer."""
    grid = np.full((len(lines), max(map(len, lines))), np.nan)
    for row, values in zip(grid, lines, strict=True):
        row[: len(values)] = [np.nan if value is None else value for value in values]
    return grid


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
