"""Estimates with their 95 % intervals: Student's t over few replicates, differences, shares of a loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, correlation, mean, stdev
from typing import Any

CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A value between the ends of its interval; one replicate alone has no interval (both ends None)."""

    value: float
    low: float | None
    high: float | None

    @property
    def holds_zero(self) -> bool:
        """Whether no effect is among what the interval allows; without an interval everything is."""
        return self.low is None or self.high is None or self.low <= 0 <= self.high

    @property
    def largest(self) -> float:
        """The largest size of effect, of either sign, that the interval allows."""
        return math.inf if self.low is None or self.high is None else max(abs(self.low), abs(self.high))

    def __neg__(self) -> Estimate:
        return Estimate(
            value=-self.value,
            low=None if self.high is None else -self.high,
            high=None if self.low is None else -self.low,
        )


def estimate_of(record: dict[str, Any]) -> Estimate:
    """A record's value with its `interval`, where it has one."""
    low, high = record.get("interval") or (None, None)
    return Estimate(value=record["value"], low=low, high=high)


def mean_with_interval(values: Sequence[float], *, confidence: float = CONFIDENCE) -> Estimate:
    """The mean of independent replicates with Student's t interval; of one replicate without an interval."""
    if not values:
        raise ValueError("a mean needs at least one value")
    centre = mean(values)
    if len(values) == 1:
        return Estimate(value=centre, low=None, high=None)
    half = t_quantile((1 + confidence) / 2, len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return Estimate(value=centre, low=centre - half, high=centre + half)


def t_quantile(probability: float, degrees_of_freedom: int) -> float:
    """The quantile of Student's t distribution, for a probability of at least one half.

    By bisection of the distribution function, which is a finite sum for whole degrees of freedom (Abramowitz and
    Stegun 1964, 26.7.3 and 26.7.4).
    """
    if not 0.5 <= probability < 1 or degrees_of_freedom < 1:
        raise ValueError(f"no t quantile at {probability} with {degrees_of_freedom} degrees of freedom")

    def central_share(t: float) -> float:
        angle = math.atan(t / math.sqrt(degrees_of_freedom))
        is_odd = degrees_of_freedom % 2
        term, total = (math.cos(angle) if is_odd else 1.0), 0.0
        for power in range(1 + is_odd, degrees_of_freedom, 2):
            total += term
            term *= math.cos(angle) ** 2 * power / (power + 1)
        total *= math.sin(angle)
        return 2 / math.pi * (angle + total) if is_odd else total

    low, high = 0.0, 1.0
    while (1 + central_share(high)) / 2 < probability:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if (1 + central_share(middle)) / 2 < probability else (low, middle)
    return high


def difference(after: Estimate, before: Estimate) -> Estimate:
    """after - before of two estimates that were not paired, with the interval of Zou and Donner (2008, MOVER).

    Where both were measured on the same tokens, their errors go together and the true interval is narrower.
    """
    value = after.value - before.value
    if after.low is None or after.high is None or before.low is None or before.high is None:
        return Estimate(value=value, low=None, high=None)
    return Estimate(
        value=value,
        low=value - math.hypot(after.value - after.low, before.high - before.value),
        high=value + math.hypot(after.high - after.value, before.value - before.low),
    )


def share_of_loss(part: Estimate, rest: Estimate) -> Estimate:
    """part / (part + rest): how much of a loss comes from one cause, from the far ends of both intervals.

    `rest` is what is lost without that cause, and positive. Both intervals hold together at 90 % or more.
    """
    if part.low is None or part.high is None:
        return Estimate(value=_share(part.value, rest.value), low=None, high=None)
    rest_low, rest_high = (rest.value if end is None else end for end in (rest.low, rest.high))
    ends = [_share(one, other) for one in (part.low, part.high) for other in (rest_low, rest_high)]
    return Estimate(value=_share(part.value, rest.value), low=min(ends), high=max(ends))


def _share(part: float, rest: float) -> float:
    whole = part + max(rest, 0.0)
    return part / whole if whole > 0 else 0.0


def rank_correlation(pairs: Sequence[tuple[float, float]], *, confidence: float = CONFIDENCE) -> Estimate:
    """Spearman's rank correlation of at least four pairs, with Bonett and Wright's (2000) interval."""
    if len(pairs) < 4:
        raise ValueError(f"a rank correlation with an interval needs at least four pairs, not {len(pairs)}")
    first, second = (_ranks(numbers) for numbers in zip(*pairs, strict=True))
    if len(set(first)) == 1 or len(set(second)) == 1:
        return Estimate(value=0.0, low=-1.0, high=1.0)
    value = correlation(first, second)
    quantile = NormalDist().inv_cdf((1 + confidence) / 2)
    half = quantile * math.sqrt((1 + value**2 / 2) / (len(pairs) - 3))
    centre = math.atanh(max(-1 + 1e-12, min(1 - 1e-12, value)))
    return Estimate(value=value, low=math.tanh(centre - half), high=math.tanh(centre + half))


def _ranks(numbers: Sequence[float]) -> list[float]:
    """Ranks from 1; equal numbers share the mean of theirs."""
    ordered = sorted(numbers)
    return [ordered.index(number) + (ordered.count(number) + 1) / 2 for number in numbers]
