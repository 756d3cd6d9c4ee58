"""The outcomes of the controlled experiment that are reported, each with the effects of its factors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from analysis.drift_facts import BLOCKS, DENSITY_LABELS, chosen, is_of_lookahead_study, lookahead_outcome, usual_density
from analysis.factor_effects import FactorEffects, Outcome, factor_effects
from analysis.results import Record

# Deja Vu predicts one layer ahead.
USUAL_LOOKAHEAD = 1
# What the models are like, beside what a predictor of them loses: title, metric, labels (the first that are found).
TRAITS: tuple[tuple[str, str, tuple[dict[str, Any], ...]], ...] = (
    (
        "cosine between the inputs of neighbouring layers",
        "cosine",
        tuple(
            {"point": "block_input", "lookahead": 1, "variant": "raw", "tokens": tokens}
            for tokens in ("ordinary", "all")
        ),
    ),
    (
        "energy in the top tenth of neurons",
        "energy_share",
        ({"top_share": 0.1},),
    ),
    ("activations that are exactly zero", "exact_zeros", ({},)),
    ("held-out loss of the dense model", "loss", ({},)),
)
# Of these: what is found of the units that always the same ones miss.
GAIN_SHARES = {"recall": "gain_share", "r_precision": "r_gain_share"}


@dataclass(frozen=True, kw_only=True)
class ReportedEffects:
    """Effects on one outcome with what it is called; `scale` turns its values into `unit`."""

    title: str
    unit: str
    scale: float
    effects: FactorEffects


def reported_effects(records: Sequence[Record]) -> list[ReportedEffects]:
    """All outcomes that the ablation's records hold; first recall of neurons, which the verdict is about."""
    ablation = with_derived([record for record in records if record["name"] == "ablation"])
    found = []
    for title, outcome in [*_prediction_outcomes(ablation), *_trait_outcomes(ablation)]:
        effects = factor_effects(ablation, outcome)
        if effects is not None:
            in_nats = outcome.metric in ("perplexity", "loss")
            unit, scale = ("nats", 1.0) if in_nats else ("", 1.0) if outcome.metric == "cosine" else ("points", 100.0)
            found.append(ReportedEffects(title=title, unit=unit, scale=scale, effects=effects))
    return found


def _prediction_outcomes(records: Sequence[Record]) -> Iterable[tuple[str, Outcome]]:
    for metric, title in (
        ("recall", "recall of {units} at density {density:g}, look-ahead {lookahead}"),
        ("recall_drop", "recall of {units} lost to look-ahead {lookahead}"),
        ("perplexity", "ln(perplexity / dense) with sparse {units}, look-ahead {lookahead}"),
        ("gain_share", "share of what always the same {units} miss that is found, look-ahead {lookahead}"),
        ("true_density", "{units} that are to be found"),
        ("implied_precision", "precision of {units} at density {density:g}, look-ahead {lookahead}"),
        ("r_precision", "R-precision of {units}, look-ahead {lookahead}"),
        ("r_gain_share", "share of what always the same {units} miss that is found at R picks, look-ahead {lookahead}"),
    ):
        for block, units in BLOCKS.items():
            studied = [
                record for record in chosen(records, metric, block=block) if is_of_lookahead_study(record, block)
            ]
            density = usual_density(studied, block)
            at_density = chosen(studied, metric, **{DENSITY_LABELS[block]: density})
            known = (record["labels"].get("lookahead") for record in at_density)
            lookaheads = {lookahead for lookahead in known if lookahead is not None}
            if not lookaheads:
                continue
            usual = USUAL_LOOKAHEAD if USUAL_LOOKAHEAD in lookaheads else min(lookaheads)
            lookahead = max(lookaheads) if metric == "recall_drop" else usual
            outcome = lookahead_outcome(metric, block, lookahead, density)
            yield title.format(units=units, lookahead=lookahead, density=density), outcome


def _trait_outcomes(records: Sequence[Record]) -> Iterable[tuple[str, Outcome]]:
    for title, metric, candidates in TRAITS:
        for labels in candidates:
            if chosen(records, metric, **labels):
                yield title, Outcome(metric=metric, labels=tuple(labels.items()))
                break


def with_derived(records: Sequence[Record]) -> list[Record]:
    """The records and, of recalls, how many units the true set holds and the precision (of exactly as many picked as
    the density says); of recalls and R-precisions, what is found of the rest where the same units for every token have
    some of it.

    R-precision is that among a token's R best-scored units, R its own number of true ones. Recall at equal picks
    favours the smaller true set, chance finds more of the larger at R picks, so both are told with these beside them.
    """
    found = list(records)
    for record in records:
        share_name = GAIN_SHARES.get(record["metric"])
        if share_name is None or record["labels"].get("study") != "lookahead":
            continue
        true_density = record.get("true_density") if record["metric"] == "recall" else None
        if true_density is not None and record["labels"]["block"] == "mlp":  # groups of heads have no zeros
            precision = record["value"] * true_density / record["labels"]["mlp_density"]
            found.append({**record, "metric": "true_density", "value": true_density, "interval": None})
            found.append({**record, "metric": "implied_precision", "value": precision, "interval": None})
        baseline = record.get("baseline") or {}
        if baseline.get("name") == "static" and baseline["value"] < 1.0:
            share = (record["value"] - baseline["value"]) / (1.0 - baseline["value"])
            found.append({**record, "metric": share_name, "value": share, "interval": None})
    return found
