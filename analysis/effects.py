"""What each factor of the controlled experiment does to an outcome: a full factorial of small models, several seeds.

Models that differ in one factor only are a pair. For each seed the paired differences are averaged over the other
factors; seeds are the replicates of Student's t interval (a randomised block design, each seed a block). So settings
of the other factors are not counted as independent, and what the seed does to all models alike cancels.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from analysis.comparison import latest_records
from analysis.intervals import Estimate, estimate_of, mean_with_interval
from analysis.results import Record
from analysis.studies import (
    BLOCKS,
    DENSITY_LABELS,
    FACTORS,
    Levels,
    Outcome,
    chosen,
    of_study,
    outcome_values,
    usual_density,
)
from data.student_t import CONFIDENCE


def lookahead_outcome(metric: str, block: str, lookahead: int, density: float | None) -> Outcome:
    """An outcome of the look-ahead study."""
    labels = {"study": "lookahead", "block": block, "lookahead": lookahead, DENSITY_LABELS[block]: density}
    return Outcome(metric=metric, labels=tuple(labels.items()))


@dataclass(frozen=True, kw_only=True)
class FactorEffects:
    """The effects of all factors that vary on one outcome."""

    outcome: Outcome
    main: Mapping[str, Estimate]  # by factor: its second level minus its first
    # By factor, for each seed: the means over the other factors at its first level and at its second.
    levels_by_seed: Mapping[str, tuple[tuple[float, float], ...]]
    # By pair of factors: how much larger the first's effect is at the second's second level. Their intervals hold
    # together (Bonferroni), since it is the largest that is looked at.
    interactions: Mapping[tuple[str, str], Estimate]
    num_models: int
    seeds: tuple[int, ...]
    incomplete_seeds: tuple[int, ...]  # left out: some of their models are missing

    def largest_interaction(self) -> tuple[tuple[str, str], Estimate] | None:
        """The interaction of the largest size, whatever its sign."""
        return max(self.interactions.items(), key=lambda item: abs(item[1].value), default=None)

    def lead(self, first: str, second: str) -> Estimate:
        """How much larger in size the first factor's effect is than the second's, paired over seeds."""
        signs = [math.copysign(1.0, self.main[factor].value) for factor in (first, second)]
        pairs = zip(self.by_seed(first), self.by_seed(second), strict=True)
        return mean_with_interval([signs[0] * one - signs[1] * other for one, other in pairs])

    def by_seed(self, factor: str) -> list[float]:
        """The effects whose mean is the main effect."""
        return [second - first for first, second in self.levels_by_seed[factor]]

    def level_means(self, factor: str) -> tuple[float, float]:
        """The outcome at the first level and at the second."""
        first, second = zip(*self.levels_by_seed[factor], strict=True)
        return mean(first), mean(second)

    def share_of_missed(self, factor: str) -> Estimate:
        """Of a share that is 1 at best: how much of what is missed at the second level is not missed at the first.

        Seed by seed (first - second) / (1 - second), 0 where nothing is missed.
        """
        return mean_with_interval(
            [(first - second) / (1 - second) if second < 1 else 0.0 for first, second in self.levels_by_seed[factor]]
        )


def factor_effects(records: Sequence[Record], outcome: Outcome) -> FactorEffects | None:
    """Main effects and two-factor interactions on an outcome; None where no two models differ in one factor only.

    Takes the records named "ablation". Raises ValueError where a model has several values of the outcome: its labels
    then leave something open.
    """
    found = outcome_values(records, outcome)
    present = {seed: cells.keys() for seed, cells in found.items() if cells}
    settings = set().union(*present.values())
    complete = sorted(seed for seed, cells in present.items() if set(cells) == settings)
    levels_by_seed = {}
    for i, factor in enumerate(FACTORS):
        pairs = _pairs(settings, i)
        if pairs and complete:
            levels_by_seed[factor] = tuple(
                (mean(found[seed][low] for low, _ in pairs), mean(found[seed][high] for _, high in pairs))
                for seed in complete
            )
    if not levels_by_seed:
        return None
    return FactorEffects(
        outcome=outcome,
        main={
            factor: mean_with_interval([second - first for first, second in levels])
            for factor, levels in levels_by_seed.items()
        },
        levels_by_seed=levels_by_seed,
        interactions=_interactions(found, settings, complete),
        num_models=len(complete) * len(settings),
        seeds=tuple(complete),
        incomplete_seeds=tuple(sorted(set(present) - set(complete))),
    )


def _pairs(settings: set[Levels], factor: int) -> list[tuple[Levels, Levels]]:
    """Models that differ in one factor only: (at its first level, at its second)."""
    first, second = list(FACTORS.values())[factor]
    pairs = []
    for low in sorted(settings):
        high = (*low[:factor], second, *low[factor + 1 :])
        if low[factor] == first and high in settings:
            pairs.append((low, high))
    return pairs


def _mean_difference(cells: Mapping[Levels, float], pairs: Sequence[tuple[Levels, Levels]]) -> float:
    return mean(cells[high] - cells[low] for low, high in pairs)


def _interactions(
    found: Mapping[int, Mapping[Levels, float]], settings: set[Levels], seeds: Sequence[int]
) -> dict[tuple[str, str], Estimate]:
    """Per pair of factors that vary: the first's effect at the second's second level minus that at its first."""
    by_factors: dict[tuple[str, str], list[float]] = {}
    for (i, factor), (j, other) in itertools.combinations(enumerate(FACTORS), 2):
        halves: list[list[tuple[Levels, Levels]]] = [[], []]
        for low, high in _pairs(settings, i):
            halves[FACTORS[other].index(low[j])].append((low, high))
        # Over the same settings of the third factor, or its effect would pass for an interaction.
        if len(halves[0]) == len(halves[1]) > 0 and seeds:
            by_factors[factor, other] = [
                _mean_difference(found[seed], halves[1]) - _mean_difference(found[seed], halves[0]) for seed in seeds
            ]
    confidence = 1 - (1 - CONFIDENCE) / max(1, len(by_factors))
    return {factors: mean_with_interval(values, confidence=confidence) for factors, values in by_factors.items()}


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

    def is_of_neurons(self, metric: str) -> bool:
        """Whether it is this number of the MLPs' neurons."""
        outcome = self.effects.outcome
        return outcome.metric == metric and dict(outcome.labels).get("block") == "mlp"


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
            studied = chosen(of_study(records, block), metric)
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


RELUFICATION = "relufication"
# The sides as records name them: the activation, and whether the model was trained on.
VARIANTS = {
    "silu before training": ("silu", False),
    "relu before training": ("relu", False),
    "silu": ("silu", True),
    "relu": ("relu", True),
}
BEFORE_TRAINING, SIDES = (
    tuple(name for name, (_, is_trained) in VARIANTS.items() if is_trained == wanted) for wanted in (False, True)
)
# Labels that only records of one study, of sparse runs or of another text have.
PLAIN: dict[str, Any] = {"study": None, "method": None, "corpus": None}
SIDE_LABELS = ("variant", "activation", "model")


@dataclass(frozen=True, kw_only=True)
class RelufiedPair:
    """One number of both sides; `scale` turns its values into `unit`."""

    title: str
    unit: str
    scale: float
    silu: Estimate
    relu: Estimate


def relufied_pairs(records: Sequence[Record]) -> list[RelufiedPair]:
    """What is told of it: zeros, energy, held-out perplexity, recall and R-precision one layer ahead, sparse perplexity
    and speed."""
    found = latest_records([record for record in records if record["name"] == RELUFICATION])
    pairs = [
        _first(found, "exact zeros", "%", 100.0, metric="exact_zeros"),
        _first(found, "energy in the top tenth of neurons", "%", 100.0, metric="energy_share", top_share=0.1),
        _first(found, "held-out perplexity before training", "", 1.0, BEFORE_TRAINING, metric="perplexity", **PLAIN),
        _first(found, "held-out perplexity", "", 1.0, metric="perplexity", **PLAIN),
    ]
    for metric, title, block in (
        *(("recall", f"recall of {units}", block) for block, units in BLOCKS.items()),
        ("r_precision", "R-precision of neurons", "mlp"),
    ):
        labels: dict[str, Any] = {"metric": metric, "study": "lookahead", "block": block, "lookahead": 1}
        pairs.append(_first(found, f"{title}, look-ahead 1", "%", 100.0, **labels))
    timed = [record for record in found if record["metric"] == "tokens_per_s" and record["labels"].get("mlp_density")]
    for density in sorted({record["labels"]["mlp_density"] for record in timed}, reverse=True):
        sparse = {"mlp_density": density, "study": None}
        pairs.append(_first(found, f"perplexity at density {density:g}", "", 1.0, metric="perplexity", **sparse))
        speeds = [{**record, "value": record["ratio"]} for record in timed if record.get("ratio")]
        pairs.append(
            _first(speeds, f"speed over dense at density {density:g}", "×", 1.0, metric="tokens_per_s", **sparse)
        )
    return [pair for pair in pairs if pair is not None]


def _first(
    records: Sequence[Record],
    title: str,
    unit: str,
    scale: float,
    sides: tuple[str, ...] = SIDES,
    *,
    metric: str,
    **labels: Any,
) -> RelufiedPair | None:
    """The first two records of these labels whose other labels are the same."""
    for silu, relu in _alike(*(chosen(records, metric, variant=side, **labels) for side in sides)):
        return RelufiedPair(title=title, unit=unit, scale=scale, silu=estimate_of(silu), relu=estimate_of(relu))
    return None


def _alike(first: Sequence[Record], second: Sequence[Record]) -> Iterator[tuple[Record, Record]]:
    for one in first:
        for other in second:
            if _conditions(one) == _conditions(other):
                yield one, other


def _conditions(record: Record) -> dict[str, object]:
    """The labels that do not say which side a record is of."""
    return {name: value for name, value in record["labels"].items() if name not in SIDE_LABELS}
