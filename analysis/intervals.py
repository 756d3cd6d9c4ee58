"""Estimates with 95 % intervals: Student's t over few replicates, differences, shares; and how they are printed."""

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

    def __add__(self, shift: float) -> Estimate:
        low, high = (None if end is None else end + shift for end in (self.low, self.high))
        return Estimate(value=self.value + shift, low=low, high=high)

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


def share_of_gain(part: Estimate, gain: Estimate) -> Estimate | None:
    """part / gain: how much of a gain a cause takes away, at its least and its most over all corners of both intervals.

    Wider than if both were drawn together. An end that is not known is the value. None where there may be no gain.
    """
    parts, gains = ([end.value if bound is None else bound for bound in (end.low, end.high)] for end in (part, gain))
    if min(gain.value, *gains) <= 0:
        return None
    value = part.value / gain.value
    if part.low is None or part.high is None:
        return Estimate(value=value, low=None, high=None)
    ends = [one / whole for one in parts for whole in gains]
    return Estimate(value=value, low=min(ends), high=max(ends))


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> Estimate:
    """Spearman's rank correlation of at least four pairs, with Bonett and Wright's (2000) interval."""
    if len(pairs) < 4:
        raise ValueError(f"a rank correlation with an interval needs at least four pairs, not {len(pairs)}")
    first, second = (_ranks(numbers) for numbers in zip(*pairs, strict=True))
    if len(set(first)) == 1 or len(set(second)) == 1:
        return Estimate(value=0.0, low=-1.0, high=1.0)
    value = correlation(first, second)
    quantile = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    half = quantile * math.sqrt((1 + value**2 / 2) / (len(pairs) - 3))
    centre = math.atanh(max(-1 + 1e-12, min(1 - 1e-12, value)))
    return Estimate(value=value, low=math.tanh(centre - half), high=math.tanh(centre + half))


def _ranks(numbers: Sequence[float]) -> list[float]:
    """Ranks from 1; equal numbers share the mean of theirs."""
    ordered = sorted(numbers)
    return [ordered.index(number) + (ordered.count(number) + 1) / 2 for number in numbers]


def with_interval(estimate: Estimate, unit: str = "", *, scale: float = 1.0, signed: bool = False) -> str:
    """'12.3 points [11.8, 12.9]': as many digits as the interval's width earns, its ends rounded outwards."""
    sign, unit = "+" if signed else "", unit and f" {unit}"
    if estimate.low is None or estimate.high is None:
        return f"{scale * estimate.value:{sign}.4g}{unit} (no interval)"
    low, high = scale * estimate.low, scale * estimate.high
    if low == high:
        return f"{scale * estimate.value:{sign}.4g}{unit} [{low:{sign}.4g}, {high:{sign}.4g}]"
    # Two digits of the width, as far as they are worth reading: hundredths of a percent.
    decimals = min(4 if scale == 1 else 2, max(0, 1 - math.floor(math.log10(high - low))))
    # An end that is not 0 must not be printed as 0: it would be read as no effect found.
    while (low > 0 and not _rounded(low, decimals, math.floor)) or (
        high < 0 and not _rounded(high, decimals, math.ceil)
    ):
        decimals += 1
    ends = _rounded(low, decimals, math.floor), _rounded(high, decimals, math.ceil)
    value, *told = (f"{end:{sign}.{decimals}f}" for end in (round(scale * estimate.value, decimals) + 0.0, *ends))
    return f"{value}{unit} [{', '.join(told)}]"


def _rounded(number: float, decimals: int, towards: Callable[[float], int]) -> float:
    # What is a whole number of the last digit, but for float arithmetic, stays so.
    nearest = round(number * 10**decimals)
    is_whole = math.isclose(number * 10**decimals, nearest, rel_tol=1e-9, abs_tol=1e-9)
    # Without -0.0, which would be printed as such.
    return (nearest if is_whole else towards(number * 10**decimals)) / 10**decimals + 0.0
