"""How estimates are put into words: never stronger than their intervals.

Ends are rounded outwards; an interval that holds 0 is no effect found, and says how large an effect it leaves open.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

from analysis.intervals import Estimate

CANNOT_TELL = "These records cannot tell"
HALF = 0.5
LITTLE = 0.05

Judgement = Literal[
    "unmeasured", "improvement", "no cost", "no effect", "open", "hardly", "in part", "at least in part", "yes"
]
SENTENCES: dict[Judgement, str] = {
    "unmeasured": "one measurement has no interval, so these records cannot tell",
    "improvement": "no, the change that was measured is an improvement",
    "no cost": "no cost was found",
    "no effect": "no effect was found, and none that is half of what is lost lies within the interval",
    "open": "these records cannot tell, the interval holds both no effect and half of what is lost",
    "hardly": "hardly, for less than a twentieth of what is lost",
    "in part": "in part, for less than half of what is lost",
    "at least in part": "in part; whether for more than half of what is lost, these records cannot tell",
    "yes": "yes, for more than half of what is lost",
}
# Where the numbers stand beside it.
WORDS: dict[Judgement, str] = {
    "unmeasured": "these records cannot tell",
    "improvement": "an improvement",
    "no cost": "no cost found",
    "no effect": "no effect found",
    "open": "these records cannot tell",
    "hardly": "hardly",
    "in part": "in part",
    "at least in part": "in part, perhaps most",
    "yes": "most of it",
}
# Yes or no; of several judgements the answer that comes last here counts.
ANSWER_ORDER = ("no", "these records cannot tell", "in part", "yes")
SHORT_ANSWERS: dict[Judgement, str] = {
    "unmeasured": "these records cannot tell",
    "improvement": "no",
    "no cost": "no",
    "no effect": "no",
    "open": "these records cannot tell",
    "hardly": "no",
    "in part": "in part",
    "at least in part": "in part",
    "yes": "yes",
}


def judge(loss: Estimate, share: Estimate | None) -> Judgement:
    """Whether a cause explains a loss: what it costs, and its share of the whole, decide.

    `loss` is positive where the cause does harm; the share is None where the whole may be nothing. Nothing is claimed
    that either interval leaves open; an improvement only where the share, too, is certainly more than a little.
    """
    if loss.low is None or loss.high is None or (share is not None and (share.low is None or share.high is None)):
        return "unmeasured"
    low, high = (-math.inf, math.inf) if share is None else (share.low, share.high)
    assert low is not None and high is not None
    if loss.high < 0:
        return "improvement" if high < -LITTLE else "no cost"
    if loss.holds_zero:
        return "no effect" if high < HALF else "open"
    if high < LITTLE:
        return "hardly"
    if high < HALF:
        return "in part"
    return "yes" if low > HALF else "at least in part"


def headline(loss: Estimate, share: Estimate | None) -> str:
    """The judgement in a sentence."""
    return SENTENCES[judge(loss, share)]


def no_larger_than(what: str, estimate: Estimate, unit: str, *, scale: float = 1.0) -> str:
    """'no change found larger than 0.3 points', of an estimate whose interval holds 0."""
    if estimate.largest == 0:
        return f"no {what} at all"
    return f"no {what} found larger than {_with_unit(at_most(estimate.largest, scale=scale), unit)}"


def with_interval(estimate: Estimate, unit: str = "", *, scale: float = 1.0, signed: bool = False) -> str:
    """'12.3 points [11.8, 12.9]': as many digits as the interval's width earns, its ends rounded outwards."""
    sign = "+" if signed else ""
    if estimate.low is None or estimate.high is None:
        return f"{_with_unit(f'{scale * estimate.value:{sign}.4g}', unit)} (no interval)"
    low, high = scale * estimate.low, scale * estimate.high
    if low == high:
        return f"{_with_unit(f'{scale * estimate.value:{sign}.4g}', unit)} [{low:{sign}.4g}, {high:{sign}.4g}]"
    decimals = _decimals(high - low, scale)
    # An end that is not 0 must not be printed as 0: it would be read as no effect found.
    while (low > 0 and not _rounded(low, decimals, math.floor)) or (
        high < 0 and not _rounded(high, decimals, math.ceil)
    ):
        decimals += 1
    value = f"{round(scale * estimate.value, decimals) + 0.0:{sign}.{decimals}f}"
    ends = [_rounded(low, decimals, math.floor), _rounded(high, decimals, math.ceil)]
    return f"{_with_unit(value, unit)} [{', '.join(f'{end:{sign}.{decimals}f}' for end in ends)}]"


def at_most(size: float, *, scale: float = 1.0) -> str:
    """A positive bound with two digits, rounded up."""
    decimals = _decimals(scale * size, scale)
    return f"{_rounded(scale * size, decimals, math.ceil):.{decimals}f}"


def _decimals(width: float, scale: float) -> int:
    """Decimals that show two digits of a positive width, as far as they are worth reading: hundredths of a percent."""
    return min(4 if scale == 1 else 2, max(0, 1 - math.floor(math.log10(width))))


def _with_unit(number: str, unit: str) -> str:
    return f"{number} {unit}" if unit else number


def _rounded(number: float, decimals: int, towards: Callable[[float], int]) -> float:
    # What is a whole number of the last digit, but for float arithmetic, stays so.
    nearest = round(number * 10**decimals)
    is_whole = math.isclose(number * 10**decimals, nearest, rel_tol=1e-9, abs_tol=1e-9)
    # Without -0.0, which would be printed as such.
    return (nearest if is_whole else towards(number * 10**decimals)) / 10**decimals + 0.0
