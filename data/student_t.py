"""Quantiles of Student's t distribution, for the intervals of a few replicates."""

from __future__ import annotations

import math

CONFIDENCE = 0.95


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
