"""Who has the lowest perplexity at the same bytes read: where the predictor stands against every other method.

Between two measured points the logarithm of perplexity is taken as linear in bytes, a share of dense (predictor, gate
and stand-in included); beyond a method's measured points nothing is said about it. Methods that leave attention dense
are compared at the bytes of the MLPs; where some method is sparse in both, all are at the bytes of whole layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Any

from analysis.comparison import Comparison, compare, group_by_task, method_rank
from analysis.formatting import Table, format_ratio
from analysis.results import Record

NAME = "equal_bytes"
LOW, HIGH = 0.3, 0.7
SHOWN_BYTES = (0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7)
# Oracle knows the outputs that it saves, and random knows nothing: bounds, not methods. Dense reads everything.
NOT_RIVALS = ("dense", "oracle", "random")
SAME_TEXT = ("dtype", "num_tokens", "window", "stride")
TOLERANCE = 1e-9
SAME_BYTES = 5e-4  # how many neurons are kept is rounded, so a density of 0.3 may read 0.3001


@dataclass(frozen=True)
class Axis:
    """Which bytes, and of which rows."""

    name: str
    share: Callable[[Comparison], float | None]
    attention_may_be_sparse: bool


MLP_BYTES = Axis("MLP", lambda row: row.bytes_read_share, attention_may_be_sparse=False)
LAYER_BYTES = Axis("layer", lambda row: row.layer_bytes_read_share, attention_may_be_sparse=True)


@dataclass(frozen=True)
class Curve:
    """Measured (bytes, ln of perplexity over dense) of one series, by rising bytes."""

    method: str
    points: tuple[tuple[float, float], ...]

    def at(self, share: float) -> float | None:
        """Interpolated; None outside of what was measured."""
        if not self.points[0][0] - SAME_BYTES <= share <= self.points[-1][0] + SAME_BYTES:
            return None
        share = max(share, self.points[0][0])
        for (left, low), (right, high) in pairwise(self.points):
            if share <= right:
                return low + (high - low) * (share - left) / (right - left)
        return self.points[-1][1]


@dataclass(frozen=True)
class Stretch:
    """A range of bytes on which the same methods are ahead of the predictor; None: it was not measured there.
    `alone`: no other method was."""

    low: float
    high: float
    ahead: tuple[str, ...] | None
    alone: bool = False


def equal_bytes_tables(records: Sequence[Record]) -> list[Table]:
    """Tables by model and text: interpolated ratios to dense at the same bytes, and under it who is ahead where.

    None for records without a predictor and a rival of it at the same bytes.
    """
    tables = []
    for (model, task, metric), alike in group_by_task(compare(records)).items():
        if metric != "perplexity":
            continue
        texts: dict[tuple[Any, ...], list[Comparison]] = {}  # another text, or precision, has another dense model
        for row in alike:
            texts.setdefault(tuple(row.labels.get(label) for label in SAME_TEXT), []).append(row)
        for text, rows in texts.items():
            told = [f"{label.replace('_', ' ')} {value}" for label, value in zip(SAME_TEXT, text, strict=True)]
            subject = ", ".join([model, task, *(told if len(texts) > 1 else [])])
            axes = [MLP_BYTES, *([LAYER_BYTES] if any(row.head_density < 1 for row in rows) else [])]
            tables += [table for axis in axes for table in _table(subject, axis, curves_of(rows, axis))]
    return tables


def _table(subject: str, axis: Axis, curves: Sequence[Curve]) -> list[Table]:
    methods = _methods(curves)
    if not any(
        curve.at(share) is not None and lowest(curves, "predictor", share) is not None
        for curve in curves
        for share in SHOWN_BYTES
        if curve.method != "predictor"
    ):
        return []
    lines = [[format_ratio(_exp(lowest(curves, method, share))) for method in methods] for share in SHOWN_BYTES]
    return [
        Table(
            title=f"{subject}: ratio to dense at equal {axis.name} bytes",
            columns=(f"{axis.name} bytes read", *methods),
            rows=tuple((_percent(share), *line) for share, line in zip(SHOWN_BYTES, lines, strict=True)),
            caption=statement(curves, axis),
        )
    ]


def curves_of(rows: Iterable[Comparison], axis: Axis = MLP_BYTES) -> list[Curve]:
    """One curve a series of the methods that can be run; of points with the same bytes the lowest.

    A recipe of the predictor that another one beats wherever both were measured does not stand for it, not even where
    it alone was measured; rivals keep all of theirs.
    """
    found: dict[tuple[str, str], dict[float, float]] = {}
    for row in rows:
        share = axis.share(row)
        if row.name != "perplexity" or row.method in NOT_RIVALS or row.phase == "decode" or share is None:
            continue
        if (row.head_density < 1 and not axis.attention_may_be_sparse) or not row.ratio or not math.isfinite(row.ratio):
            continue
        points = found.setdefault((row.method, row.series), {})
        points[share] = min(math.log(row.ratio), points.get(share, math.inf))
    curves = [Curve(method, tuple(sorted(points.items()))) for (method, _), points in found.items()]
    return [curve for curve in curves if not any(_is_beaten(curve, other) for other in curves)]


def _is_beaten(curve: Curve, other: Curve) -> bool:
    if curve is other or {curve.method, other.method} != {"predictor"}:
        return False
    bends = [share for share, _ in (*curve.points, *other.points)]
    gaps = [a - b for share in bends if (a := curve.at(share)) is not None and (b := other.at(share)) is not None]
    return bool(gaps) and min(gaps) >= 0 and max(gaps) > 0


def _methods(curves: Iterable[Curve]) -> list[str]:
    return sorted({curve.method for curve in curves}, key=lambda method: (method_rank(method), method))


def lowest(curves: Iterable[Curve], method: str, share: float) -> float | None:
    """A method's lowest value over its series at so many bytes."""
    return min((at for curve in curves if curve.method == method and (at := curve.at(share)) is not None), default=None)


def stretches(curves: Sequence[Curve], low: float = LOW, high: float = HIGH) -> list[Stretch]:
    """[low, high] cut where the set of methods ahead of the predictor changes, in order of bytes."""
    cuts = sorted({low, high, *(cut for cut in _cuts(curves) if low < cut < high)})
    found: list[Stretch] = []
    for left, right in pairwise(cuts):
        if right - left <= TOLERANCE:
            continue
        middle = (left + right) / 2
        ahead = _ahead(curves, middle)
        rivals = [curve for curve in curves if curve.method != "predictor" and curve.at(middle) is not None]
        alone = ahead is not None and not rivals
        if found and (found[-1].ahead, found[-1].alone) == (ahead, alone):
            left = found.pop().low
        found.append(Stretch(left, right, ahead, alone))
    return found


def statement(curves: Sequence[Curve], axis: Axis = MLP_BYTES) -> str:
    """In words: where the predictor is at or below every other method, who is ahead of it where, what is not known."""
    parts: dict[tuple[str, ...] | None, list[str]] = {}
    alone: list[str] = []
    for stretch in stretches(curves):
        where = alone if stretch.alone else parts.setdefault(stretch.ahead, [])
        where.append(_range(stretch.low, stretch.high))
    at_or_below = " and ".join(parts.pop((), [])) or "nowhere"
    unknown = parts.pop(None, [])
    text = [
        f"Between {_percent(LOW)} and {_percent(HIGH)} of the dense {axis.name} bytes the predictor's perplexity is "
        f"at or below that of every other method measured there {at_or_below}"
    ]
    for ahead, at in parts.items():
        verb = "is" if len(ahead or ()) == 1 else "are"
        text.append(f"{' and '.join(ahead or ())} {verb} ahead of it {' and '.join(at)}")
    for method, share in _single_points(curves):
        place = "ahead of" if method in (_ahead(curves, share) or ()) else "behind"
        text.append(f"{method}, measured there only, is {place} it at {_percent(share)}")
    text += [f"no other method was measured {' and '.join(alone)}"] if alone else []
    text += [f"the predictor was not measured {' and '.join(unknown)}"] if unknown else []
    limits = [_limits(curves, method) for method in _methods(curves)]
    known = [limit for limit in limits if limit]
    closing = f" Not measured: {', '.join(known)}." if known else ""
    return "; ".join(text) + f".{closing} Interpolated on a logarithmic scale; oracle and random, bounds, are left out."


def _single_points(curves: Sequence[Curve]) -> list[tuple[str, float]]:
    """Methods of one point only, which no stretch shows, where the predictor was measured, too."""
    single = [(curve.method, curve.points[0][0]) for curve in curves if len(curve.points) == 1]
    return [
        (method, share)
        for method, share in sorted(single, key=lambda found: found[1])
        if method != "predictor" and LOW <= share <= HIGH and _ahead(curves, share) is not None
    ]


def _cuts(curves: Sequence[Curve]) -> list[float]:
    """Where a curve bends or ends, and where two of them cross."""
    bends = sorted({share for curve in curves for share, _ in curve.points})
    crossings = []
    for left, right in pairwise(bends):
        for one, other in combinations(curves, 2):
            ends = [(one.at(share), other.at(share)) for share in (left, right)]
            gaps = [a - b for a, b in ends if a is not None and b is not None]
            if len(gaps) == 2 and gaps[0] * gaps[1] < 0:
                crossings.append(left + (right - left) * gaps[0] / (gaps[0] - gaps[1]))
    return bends + crossings


def _ahead(curves: Sequence[Curve], share: float) -> tuple[str, ...] | None:
    ours = lowest(curves, "predictor", share)
    if ours is None:
        return None
    values = {method: lowest(curves, method, share) for method in _methods(curves)}
    return tuple(method for method, value in values.items() if value is not None and value < ours - TOLERANCE)


def _limits(curves: Sequence[Curve], method: str) -> str:
    """What of the range a method other than the predictor was not measured on."""
    if method == "predictor":
        return ""
    shares = [share for curve in curves if curve.method == method for share, _ in curve.points]
    ends = [f"below {_percent(min(shares))}"] if min(shares) > LOW + SAME_BYTES else []
    ends += [f"above {_percent(max(shares))}"] if max(shares) < HIGH - SAME_BYTES else []
    return f"{method} {' and '.join(ends)}" if ends else ""


def _percent(share: float) -> str:
    return f"{100 * share:.1f}".removesuffix(".0") + " %"


def _range(low: float, high: float) -> str:
    return f"from {_percent(low)} to {_percent(high)}"


def _exp(value: float | None) -> float | None:
    return None if value is None else math.exp(value)
