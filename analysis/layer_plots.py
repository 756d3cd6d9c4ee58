"""Heat maps over layers: a line per setting, a column per layer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from analysis.comparison import Comparison
from analysis.formatting import format_number
from analysis.method_styles import series_label

NEARLY_ALL = 0.9995  # printed as 100 %
BLOCK_NAMES = {"mlp": "MLP neurons", "attention": "attention heads"}


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
        num_layers = max(len(row.layers[block][quantity]) for row in chosen)
        values = np.full((len(chosen), num_layers), np.nan)
        for line, row in zip(values, chosen, strict=True):
            per_layer = row.layers[block][quantity]
            line[: len(per_layer)] = [np.nan if share is None else share for share in per_layer]
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
