"""Further figures of the drift study: rank and text, energy and reuse of neurons, and the effects of the ablation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from analysis.ablation_effects import ReportedEffects, reported_effects
from analysis.drift_facts import BLOCKS, DENSITY_LABELS, by_label, chosen, compared_models, pooled, usual_density
from analysis.drift_plots import BLOCK_STYLES, SERIES_COLOURS, draw_estimates, finish
from analysis.factor_effects import FACTORS, LEVEL_NAMES
from analysis.intervals import Estimate, estimate_of
from analysis.results import Record

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
            draw_estimates(axes, estimates, f"{BLOCKS[block]}, look-ahead {lookahead}", colour, marker, dash, scale=100)
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
        draw_estimates(axes, shown, name, *model_style(i), scale=100)
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
        name: {metric: _at_lowest_density(chosen(found, metric)) for metric in ("reuse_tokens", "reuse_layers")}
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
                line = _mean_layers([record.get("per_layer") or [] for record in found])
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


def _at_lowest_density(records: Sequence[Record]) -> list[Record]:
    densities = [record["labels"].get("density") for record in records]
    lowest = min((density for density in densities if density is not None), default=None)
    return [record for record in records if record["labels"].get("density") == lowest]


def _mean_layers(models: Sequence[Sequence[float | None]]) -> dict[int, float]:
    """The mean over models of what is known of each layer."""
    means = {}
    for layer in range(max(map(len, models), default=0)):
        known = [value for each in models if layer < len(each) and (value := each[layer]) is not None]
        if known:
            means[layer] = sum(known) / len(known)
    return means


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
