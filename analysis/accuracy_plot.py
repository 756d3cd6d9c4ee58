"""Mean accuracy against density, a line per method, and how well each layer was chosen on the accuracy tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import mean

from matplotlib.figure import Figure

from analysis.accuracy import AccuracyComparison, AccuracyRow
from analysis.comparison import Comparison
from analysis.layer_plots import plot_layer_quality
from analysis.method_styles import METHOD_STYLES, Point, draw_dense, draw_legend, draw_lines, one_panel


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
    known = [cell.layers for cell in row.cells.values()]
    blocks = dict.fromkeys(block for layers in known for block in layers)
    return replace(
        row.setting, layers={block: _mean_of_block([each.get(block, {}) for each in known]) for block in blocks}
    )


def _mean_of_block(tasks: Sequence[dict[str, list[float | None]]]) -> dict[str, list[float | None]]:
    quantities = dict.fromkeys(quantity for each in tasks for quantity in each)
    return {
        quantity: _mean_of_layers([each[quantity] for each in tasks if quantity in each]) for quantity in quantities
    }


def _mean_of_layers(tasks: Sequence[Sequence[float | None]]) -> list[float | None]:
    layers = []
    for shares in zip(*tasks, strict=True):
        known = [share for share in shares if share is not None]
        layers.append(mean(known) if known else None)
    return layers
