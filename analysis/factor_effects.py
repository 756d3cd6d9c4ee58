"""What each factor of the controlled experiment does to an outcome: a full factorial of small models, several seeds.

Models that differ in one factor only are a pair. For each seed the paired differences are averaged over the other
factors; seeds are the replicates of Student's t interval (a randomised block design, each seed a block). So settings
of the other factors are not counted as independent, and what the seed does to all models alike cancels.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from analysis.comparison import latest_records
from analysis.intervals import CONFIDENCE, Estimate, mean_with_interval
from analysis.results import Record

# The level of OPT, on which Deja Vu works, then Llama's: an effect is the second minus the first.
FACTORS = {"activation": ("relu", "silu gated"), "positions": ("learned", "rotary"), "norm": ("layer", "rms")}
LEVEL_NAMES = {
    "relu": "ReLU", "silu": "SiLU", "silu gated": "gated SiLU", "learned": "learned positions", "rotary": "RoPE",
    "layer": "LayerNorm", "rms": "RMSNorm",
}  # fmt: skip
Levels = tuple[str, ...]  # one level a factor, in the order of FACTORS


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One number that every model of the experiment has: a metric and the labels that tell it from its others."""

    metric: str
    labels: tuple[tuple[str, Any], ...] = ()

    def matches(self, record: Record) -> bool:
        """Whether a record is of this outcome; records of other factor levels and seeds are, too."""
        return record["metric"] == self.metric and all(
            record["labels"].get(name) == setting for name, setting in self.labels
        )

    def value(self, record: Record) -> float:
        """Perplexities are compared as logarithms (nats), of ratios to dense where they have one."""
        if self.metric != "perplexity":
            return float(record["value"])
        return math.log(record["ratio"] if record.get("ratio") is not None else record["value"])


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


def outcome_values(records: Sequence[Record], outcome: Outcome) -> dict[int, dict[Levels, float]]:
    """The outcome by seed and levels.

    Models trained on different texts are experiments of their own, never one: of several that have the outcome, the
    one with the most models (then the newest).
    """
    by_text: dict[Any, list[Record]] = {}
    for record in latest_records(record for record in records if record["name"] == "ablation"):
        if outcome.matches(record):
            by_text.setdefault(record["labels"].get("text"), []).append(record)
    found: dict[int, dict[Levels, float]] = {}
    for record in max(by_text.values(), key=_extent, default=()):
        labels = record["labels"]
        levels = tuple(labels.get(factor) for factor in FACTORS)
        if not all(level in known for level, known in zip(levels, FACTORS.values(), strict=True)):
            continue
        cells = found.setdefault(int(labels.get("seed") or 0), {})
        if levels in cells:
            told = ", ".join(f"{name} {setting}" for name, setting in labels.items())
            raise ValueError(f"several values of {outcome.metric} for one model of the ablation ({told})")
        cells[levels] = outcome.value(record)
    return found


def _extent(records: Sequence[Record]) -> tuple[int, str]:
    """Of one experiment's records of an outcome: how many, and their newest date."""
    return len(records), max(str(record["environment"].get("date") or "") for record in records)


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
