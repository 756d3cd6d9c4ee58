"""Estimates with their 95 % intervals: Student's t over few replicates, differences, shares of a loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist, correlation, mean, stdev
from typing import Any

from data.student_t import CONFIDENCE, t_quantile


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

    def __add__(self, shift: float) -> Estimate:
        low, high = (None if end is None else end + shift for end in (self.low, self.high))
        return Estimate(value=self.value + shift, low=low, high=high)

    def __rsub__(self, whole: float) -> Estimate:
        return -self + whole

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


def share_of_loss(part: Estimate, rest: Estimate) -> Estimate | None:
    """part / (part + rest): how much of a loss comes from one cause; `rest` is what is lost without it.

    From the far ends of both intervals, which hold together at 90 % or more. None where nothing in all may be lost.
    """
    return _far_ends(part, rest, lambda one, other: one + other)


def share_of_gain(part: Estimate, gain: Estimate) -> Estimate | None:
    """part / gain: how much of a gain a cause takes away, by the far ends of both intervals.

    Wider than if both were drawn together. None where there may be no gain at all.
    """
    return _far_ends(part, gain, lambda _, gain: gain)


def _far_ends(part: Estimate, other: Estimate, whole: Callable[[float, float], float]) -> Estimate | None:
    """part / whole(part, other) at its values and, over all corners of the two intervals, at its least and its most.

    An end that is not known is the value. None unless the whole is positive all over, where the share has no bounds.
    """
    parts, others = ([end.value if bound is None else bound for bound in (end.low, end.high)] for end in (part, other))
    if min(whole(one, another) for one in (part.value, *parts) for another in (other.value, *others)) <= 0:
        return None
    value = part.value / whole(part.value, other.value)
    if part.low is None or part.high is None:
        return Estimate(value=value, low=None, high=None)
    ends = [one / whole(one, another) for one in parts for another in others]
    return Estimate(value=value, low=min(ends), high=max(ends))


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
