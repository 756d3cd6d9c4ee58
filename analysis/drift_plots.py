"""Figures of the studies, from records; each returns None where the records hold nothing to draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from analysis.effects import ReportedEffects, reported_effects
from analysis.intervals import Estimate, estimate_of
from analysis.plots import draw_estimates, grid_of_layers, mean_of_layers
from analysis.results import Record
from analysis.studies import (
    BLOCKS,
    COSINE_VARIANTS,
    DENSITY_LABELS,
    FACTORS,
    LEVEL_NAMES,
    at_lowest_density,
    by_label,
    chosen,
    compared_models,
    cosine_records,
    cosines,
    distance_facts,
    lost_by_layer,
    pooled,
    usual_density,
)

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
    grids = {
        variant: grid_of_layers([record["per_layer"] for record in by_lookahead.values()])
        for variant, by_lookahead in panels.items()
    }
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
            draw_estimates(axes, by_lookahead.items(), variant.replace("_", " "), colour, marker)
        point = POINT_NAMES[cosine_records(records)[0]["labels"]["point"]]
        finish(axes, "look-ahead (layers)", f"cosine, {point}")
        axes.set_ylim(top=1)
    axes = all_axes.pop(0)
    for found in facts:
        colour, marker = BLOCK_STYLES[found.block]
        draw_estimates(axes, found.recall.items(), BLOCKS[found.block], colour, marker, scale=100)
        own = {lookahead: 100 * own.value for lookahead, own in found.own.items()}
        static = {lookahead: 100 * share.value for lookahead, share in found.static.items()}
        for line, dash in ((own, "--"), (static, ":")):
            axes.plot(list(line), list(line.values()), color=colour, linestyle=dash, linewidth=1)
    for dash, label in (("--", "own input, same layers"), (":", "the same units always")):
        axes.plot([], [], color="#7F7F7F", linestyle=dash, linewidth=1, label=label)
    finish(axes, "look-ahead (layers)", "recall (%)")
    if with_loss:
        axes = all_axes.pop(0)
        for found in with_loss:
            colour, marker = BLOCK_STYLES[found.block]
            draw_estimates(axes, found.loss.items(), f"sparse {BLOCKS[found.block]}", colour, marker)
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


def finish(axes: Axes, x_label: str, y_label: str, *, legend: bool = True) -> None:
    """What all panels share."""
    axes.set_xlabel(x_label, fontsize=9)
    axes.set_ylabel(y_label, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if legend:
        axes.legend(frameon=False, fontsize=8)


STUDIES = {
    "rank": ("predictor_rank", "predictor rank"),
    "calibration_tokens": ("calibration_tokens", "calibration tokens"),
}
PREDICTION_METRICS = ("recall", "recall_drop", "perplexity")
MARKERS = "os^DvP"
FACTOR_COLOURS = dict(zip(FACTORS, SERIES_COLOURS, strict=False))


def plot_rank_and_text(records: Sequence[Record]) -> Figure | None:
    """Recall against the predictor's rank and against the amount of calibration text, a line per look-ahead."""
    panels = {}
    for study, (label, title) in STUDIES.items():
        lines: dict[tuple[str, int], Mapping[Any, Estimate]] = {}
        for block in BLOCKS:
            found = chosen(records, "recall", study=study, block=block)
            found = chosen(found, "recall", **{DENSITY_LABELS[block]: usual_density(found, block)})
            for lookahead in sorted({record["labels"].get("lookahead") or 0 for record in found}):
                at = [record for record in found if (record["labels"].get("lookahead") or 0) == lookahead]
                found_there = by_label(at, label)
                if len(found_there) > 1:
                    lines[block, lookahead] = {size: estimate_of(record) for size, record in found_there.items()}
        if lines:
            panels[title] = lines
    if not panels:
        return None
    figure = Figure(figsize=(1.0 + 3.6 * len(panels), 3.2), layout="constrained")
    all_axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axes, (title, lines) in zip(all_axes, panels.items(), strict=True):
        lookaheads = sorted({lookahead for _, lookahead in lines})
        for (block, lookahead), estimates in lines.items():
            colour, marker = BLOCK_STYLES[block]
            dash = ("-", "--", ":", "-.")[lookaheads.index(lookahead) % 4]
            draw_estimates(
                axes, estimates.items(), f"{BLOCKS[block]}, look-ahead {lookahead}", colour, marker, dash, scale=100
            )
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda size, _: f"{size:g}")
        finish(axes, title, "recall (%)" if axes is all_axes[0] else "", legend=axes is all_axes[0])
    return figure


def model_style(i: int) -> tuple[str, str, str]:
    """Colour, marker and dash of the i-th model: dashed where the colours begin again."""
    turn, place = divmod(i, len(SERIES_COLOURS))
    return SERIES_COLOURS[place], MARKERS[(place + turn) % len(MARKERS)], ("-", "--", "-.")[turn % 3]


def plot_energy(records: Sequence[Record]) -> Figure | None:
    """How much of the MLP's output the largest neurons hold, a line per model; of the ablation one per activation."""
    lines = {}
    for name, found in compared_models(records).items():
        estimates = pooled(chosen(found, "energy_share"), "top_share")
        if len(estimates) > 1:
            lines[name] = {0.0: Estimate(value=0.0, low=None, high=None), **estimates}
    if not lines:
        return None
    figure = Figure(figsize=(5.6, 3.8), layout="constrained")
    axes = figure.add_subplot()
    for i, (name, estimates) in enumerate(lines.items()):
        shown = {100 * share: estimate for share, estimate in estimates.items()}
        draw_estimates(axes, shown.items(), name, *model_style(i), scale=100)
    right = max(100 * max(estimates) for estimates in lines.values())
    axes.plot([0, right], [0, right], color="#7F7F7F", linestyle=":", linewidth=1, label="all alike")
    finish(axes, "largest neurons of each token (%)", "energy of the MLP's output (%)")
    axes.set_ylim(0, 100)
    return figure


def plot_reuse(records: Sequence[Record]) -> Figure | None:
    """Active neurons that are active again, a line per model: at the next token, layer by layer; and layers later.

    Dotted: what the records compare it with, chance or neurons that are often active anyway.
    """
    models = {
        name: {metric: at_lowest_density(chosen(found, metric)) for metric in ("reuse_tokens", "reuse_layers")}
        for name, found in compared_models(records).items()
    }
    models = {name: each for name, each in models.items() if any(each.values())}
    metrics = [metric for metric in ("reuse_tokens", "reuse_layers") if any(each[metric] for each in models.values())]
    if not metrics:
        return None
    figure = Figure(figsize=(1.0 + 3.8 * len(metrics), 3.6), layout="constrained")
    all_axes = dict(zip(metrics, figure.subplots(1, len(metrics), squeeze=False)[0], strict=True))
    for i, (name, by_metric) in enumerate(models.items()):
        style = dict(zip(("color", "marker", "linestyle"), model_style(i), strict=True))
        for metric, axes in all_axes.items():
            found = by_metric[metric]
            if metric == "reuse_tokens":
                means = mean_of_layers([record.get("per_layer") or [] for record in found])
                line = {layer: share for layer, share in enumerate(means) if share is not None}
                axes.set_xlabel("layer")
            else:
                line = {distance: each.value for distance, each in pooled(found, "lookahead").items()}
            shares = [100 * share for share in line.values()]
            axes.plot(list(line), shares, label=name, markersize=4, **style)
            known = [record["baseline"]["value"] for record in found if record.get("baseline")]
            if known:
                axes.axhline(100 * sum(known) / len(known), color=style["color"], linestyle=":", linewidth=1)
    titles = {"reuse_tokens": ("layer", "active neurons active at the next token (%)")}
    titles["reuse_layers"] = ("layers later", "the same, layers later at the same index (%)")
    for metric, axes in all_axes.items():
        finish(axes, *titles[metric], legend=axes is all_axes[metrics[0]])
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylim(0, 100)
    against = {
        record["baseline"]["name"]
        for each in models.values()
        for found in each.values()
        for record in found
        if record.get("baseline")
    }
    if against:
        figure.suptitle(f"dotted: {', '.join(sorted(against))}", fontsize=8)
    return figure


def plot_effects(records: Sequence[Record]) -> Figure | None:
    """The factors' effects on prediction with their intervals: a panel per unit, a line per outcome and factor.

    What models are like beside that (zeros, energy, cosines) is in the tables: it would set the scale.
    """
    panels: dict[str, list[ReportedEffects]] = {}
    for each in reported_effects(records):
        if each.effects.outcome.metric in PREDICTION_METRICS:
            panels.setdefault(each.unit, []).append(each)
    if not panels:
        return None
    heights = [0.9 + 0.18 * sum(len(each.effects.main) + 1 for each in members) for members in panels.values()]
    figure = Figure(figsize=(8.5, sum(heights)), layout="constrained")
    all_axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (unit, members) in zip(all_axes, panels.items(), strict=True):
        place, ticks, names = 0.0, [], []
        for each in members:
            for factor, estimate in each.effects.main.items():
                bars = None
                value = each.scale * estimate.value
                if estimate.low is not None and estimate.high is not None:
                    bars = [[value - each.scale * estimate.low], [each.scale * estimate.high - value]]
                axes.errorbar(
                    [value], [place], xerr=bars, color=FACTOR_COLOURS[factor], marker="o", markersize=4, capsize=2
                )
                ticks.append(place)
                names.append(each.title if factor == next(iter(each.effects.main)) else "")
                place += 1
            place += 0.6
        axes.set_yticks(ticks, names, fontsize=8)
        axes.tick_params(axis="y", length=0)
        axes.invert_yaxis()
        axes.axvline(0, color="#000000", linewidth=0.8)
        finish(axes, f"effect ({unit})", "", legend=False)
        axes.grid(False, axis="y")
    for factor in panels and next(iter(panels.values()))[0].effects.main:
        first, second = (LEVEL_NAMES[level] for level in FACTORS[factor])
        all_axes[0].plot([], [], "o-", color=FACTOR_COLOURS[factor], markersize=4, label=f"{second} instead of {first}")
    figure.legend(loc="outside upper center", ncols=3, frameon=False, fontsize=8)
    return figure
