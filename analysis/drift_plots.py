"""Figures of the drift study, from records; each returns None where the records hold nothing to draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from analysis.drift_distance_facts import distance_facts
from analysis.drift_facts import (
    BLOCKS,
    COSINE_VARIANTS,
    by_label,
    chosen,
    cosine_records,
    cosines,
    lost_by_layer,
)
from analysis.intervals import Estimate
from analysis.results import Record

# Okabe and Ito's colours, which stay apart for colour-blind readers; the marker tells the rest.
VARIANT_STYLES = {
    "raw": ("#000000", "o"), "centred": ("#0072B2", "s"), "standardised": ("#D55E00", "^"),
    "no_massive": ("#009E73", "D"),
}  # fmt: skip
BLOCK_STYLES = {"mlp": ("#0072B2", "o"), "attention": ("#D55E00", "s")}
SERIES_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
POINT_NAMES = {
    "after_attention": "MLP input (after attention)", "block_input": "layer input", "after_mlp": "after the MLP",
}  # fmt: skip


def plot_cosine_layers(records: Sequence[Record]) -> Figure | None:
    """Heat maps of the cosine between layers: a panel per variant, a column per layer, a line per look-ahead."""
    found = cosine_records(records)
    panels = {variant: by_label(chosen(found, "cosine", variant=variant), "lookahead") for variant in COSINE_VARIANTS}
    panels = {
        variant: drawn
        for variant, by_lookahead in panels.items()
        if (drawn := {key: each for key, each in by_lookahead.items() if each.get("per_layer")})
    }
    if not panels:
        return None
    figure = Figure(figsize=(8.0, 0.8 + 1.9 * ((len(panels) + 1) // 2)), layout="constrained")
    all_axes = figure.subplots((len(panels) + 1) // 2, min(2, len(panels)), squeeze=False).ravel()
    grids = {variant: _grid(by_lookahead) for variant, by_lookahead in panels.items()}
    lowest = min(float(np.nanmin(grid)) for grid in grids.values())
    for axes, (variant, grid) in zip(all_axes, grids.items(), strict=False):
        image = axes.imshow(
            grid, aspect="auto", cmap="cividis", vmin=min(0.0, lowest), vmax=1, interpolation="nearest", origin="lower"
        )
        lookaheads = list(panels[variant])
        axes.set_yticks(range(len(lookaheads)), [str(lookahead) for lookahead in lookaheads], fontsize=8)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_title(variant.replace("_", " "), fontsize=9, loc="left")
        axes.set_xlabel("from layer", fontsize=8)
        axes.set_ylabel("look-ahead", fontsize=8)
        axes.tick_params(labelsize=8)
    for axes in all_axes[len(grids) :]:
        axes.set_visible(False)
    labels = found[0]["labels"]
    figure.colorbar(image, ax=list(all_axes), label="cosine", shrink=0.8)
    figure.suptitle(f"{POINT_NAMES[labels['point']]}, {labels['tokens']} tokens", fontsize=9)
    return figure


def _grid(by_lookahead: Mapping[int, Record]) -> np.ndarray:
    """[look-aheads, layers], NaN where there is no such layer."""
    num_layers = max(len(record["per_layer"]) for record in by_lookahead.values())
    grid = np.full((len(by_lookahead), num_layers), np.nan)
    for line, record in zip(grid, by_lookahead.values(), strict=True):
        line[: len(record["per_layer"])] = [np.nan if each is None else each for each in record["per_layer"]]
    return grid


def plot_distance(records: Sequence[Record]) -> Figure | None:
    """Against look-ahead, side by side: the cosine, recall of neurons and heads, and perplexity over dense."""
    facts = [found for block in BLOCKS if (found := distance_facts("", records, block)) is not None]
    facts = [found for found in facts if len(found.recall) > 1]
    if not facts:
        return None
    similar = cosines(records)
    with_loss = [found for found in facts if found.loss]
    figure = Figure(figsize=(3.4 * (1 + bool(similar) + bool(with_loss)), 3.2), layout="constrained")
    all_axes = list(figure.subplots(1, 1 + bool(similar) + bool(with_loss), squeeze=False)[0])
    if similar:
        axes = all_axes.pop(0)
        for variant, by_lookahead in similar.items():
            colour, marker = VARIANT_STYLES[variant]
            draw_estimates(axes, by_lookahead, variant.replace("_", " "), colour, marker)
        point = POINT_NAMES[cosine_records(records)[0]["labels"]["point"]]
        finish(axes, "look-ahead (layers)", f"cosine, {point}")
        axes.set_ylim(top=1)
    axes = all_axes.pop(0)
    for found in facts:
        colour, marker = BLOCK_STYLES[found.block]
        draw_estimates(axes, found.recall, BLOCKS[found.block], colour, marker, scale=100)
        own = {lookahead: 100 * (1 - missed.value) for lookahead, missed in found.missed.items()}
        static = {lookahead: 100 * share for lookahead, share in found.static_recall.items()}
        for line, dash in ((own, "--"), (static, ":")):
            axes.plot(list(line), list(line.values()), color=colour, linestyle=dash, linewidth=1)
    for dash, label in (("--", "own input, same layers"), (":", "the same units always")):
        axes.plot([], [], color="#7F7F7F", linestyle=dash, linewidth=1, label=label)
    finish(axes, "look-ahead (layers)", "recall (%)")
    if with_loss:
        axes = all_axes.pop(0)
        for found in with_loss:
            colour, marker = BLOCK_STYLES[found.block]
            draw_estimates(axes, found.loss, f"sparse {BLOCKS[found.block]}", colour, marker)
        finish(axes, "look-ahead (layers)", "ln(perplexity / dense)")
        axes.set_ylim(bottom=0)
    return figure


def plot_layers(records: Sequence[Record], lookahead: int) -> Figure | None:
    """At one look-ahead, layer by layer: the cosine between the two layers, and recall lost at the one predicted."""
    similar = {
        str(record["labels"]["variant"]): record["per_layer"]
        for record in chosen(cosine_records(records), "cosine", lookahead=lookahead)
        if record.get("per_layer")
    }
    lost = {
        block: [None if less is None else 100 * less for less in by_lookahead[lookahead]]
        for block in BLOCKS
        if lookahead in (by_lookahead := lost_by_layer(records, block))
    }
    if not similar and not lost:
        return None
    figure = Figure(figsize=(3.8 * (bool(similar) + bool(lost)), 3.2), layout="constrained")
    all_axes = list(figure.subplots(1, bool(similar) + bool(lost), squeeze=False)[0])
    if similar:
        axes = all_axes.pop(0)
        for variant, values in similar.items():
            colour, marker = VARIANT_STYLES[variant]
            # It stands at the layer it starts from; here, as recall, at the one it leads to.
            _draw_layers(axes, [None] * lookahead + values, variant.replace("_", " "), colour, marker)
        finish(axes, "layer", f"cosine with {lookahead} layer{'s' if lookahead > 1 else ''} back")
    if lost:
        axes = all_axes.pop(0)
        for block, values in lost.items():
            _draw_layers(axes, values, BLOCKS[block], *BLOCK_STYLES[block])
        axes.axhline(0, color="#000000", linewidth=0.8)
        finish(axes, "layer", f"recall lost at look-ahead {lookahead} (points)")
    return figure


def _draw_layers(axes: Axes, values: Sequence[float | None], label: str, colour: str, marker: str) -> None:
    known = {layer: value for layer, value in enumerate(values) if value is not None}
    axes.plot(list(known), list(known.values()), label=label, color=colour, marker=marker, markersize=4)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def draw_estimates(
    axes: Axes,
    by_x: Mapping[Any, Estimate],
    label: str,
    colour: str,
    marker: str = "o",
    dash: str = "-",
    *,
    scale: float = 1.0,
) -> None:
    """A line of estimates with their intervals as bars."""
    x, y = list(by_x), [scale * each.value for each in by_x.values()]
    axes.plot(x, y, label=label, color=colour, marker=marker, linestyle=dash, markersize=4)
    bars = [
        (0.0, 0.0)
        if each.low is None or each.high is None
        else (max(0.0, scale * (each.value - each.low)), max(0.0, scale * (each.high - each.value)))
        for each in by_x.values()
    ]
    if any(map(any, bars)):
        axes.errorbar(x, y, np.array(bars).T, fmt="none", ecolor=colour, elinewidth=0.8, capsize=2)


def finish(axes: Axes, x_label: str, y_label: str, *, legend: bool = True) -> None:
    """What all panels share."""
    axes.set_xlabel(x_label, fontsize=9)
    axes.set_ylabel(y_label, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if legend:
        axes.legend(frameon=False, fontsize=8)
