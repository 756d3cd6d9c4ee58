"""How a method looks in every plot: one colour and one marker each, dashes for its further variants.

Colours begin with Okabe and Ito's, which stay apart for colour-blind readers; the marker tells the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.comparison import Comparison, method_rank
from analysis.formatting import format_number

METHOD_STYLES = {  # method -> colour, marker
    "dense": ("#000000", "o"),
    "oracle": ("#009E73", "^"),
    "predictor": ("#0072B2", "o"),
    "cats": ("#CC79A7", "D"),
    "teal": ("#D55E00", "s"),
    "teal-all": ("#5D3A9B", "*"),
    "wina-unrotated": ("#56B4E9", "P"),
    "griffin": ("#8C6D00", "h"),
    "static": ("#E69F00", "v"),
    "random": ("#7F7F7F", "X"),
}
# Their MLP density is that of attention's inputs, too, so it needs no naming.
THIN_ATTENTION = ("teal-all", "wina-unrotated")
SPARE_STYLES = (("#40B0A6", ">"), ("#994F00", "<"), ("#B8B800", "p"))
DASHES = ("-", "--", ":", "-.")


@dataclass(frozen=True)
class Point:
    """One setting's place in a plot; `stderr` of y, where it has one."""

    setting: Comparison
    x: float
    y: float
    stderr: float | None = None


def series_of(points: Iterable[Point]) -> dict[str, list[Point]]:
    """Points by the label of their line, each line by rising x; lines in the order of methods."""
    series: dict[str, list[Point]] = {}
    for point in sorted(points, key=_line_order):
        series.setdefault(series_label(point.setting), []).append(point)
    return series


def _line_order(point: Point) -> tuple[int, str, str, float]:
    return method_rank(point.setting.method), point.setting.method, series_label(point.setting), point.x


def draw_lines(axes: Axes, points: Sequence[Point]) -> None:
    """A line per series; bars of one standard error where the points have one."""
    styles = styles_of([point.setting for point in points])
    for label, members in series_of(points).items():
        colour, marker, dash = styles[label]
        x, y = [point.x for point in members], [point.y for point in members]
        axes.plot(x, y, label=label, color=colour, marker=marker, linestyle=dash, markersize=5)
        stderrs = [point.stderr or 0.0 for point in members]
        if any(stderrs):
            axes.errorbar(x, y, stderrs, fmt="none", ecolor=colour, elinewidth=0.8, capsize=2)


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
    styles: dict[str, tuple[str, str, str]] = {}
    num_variants: dict[str, int] = {}
    for row in sorted(rows, key=lambda row: (method_rank(row.method), row.method, series_label(row))):
        if series_label(row) in styles:
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
        styles[series_label(row)] = (colour, marker, dash)
    return styles


def one_panel() -> tuple[Figure, Axes]:
    """An empty figure of the size of all line plots."""
    figure = Figure(figsize=(7.0, 4.3), layout="constrained")
    axes = figure.add_subplot()
    axes.grid(alpha=0.3, which="both")
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes
