"""Where the predictor stands beside the other methods: in a sentence, and at the same bytes read.

The tables say who has the lowest perplexity at the same bytes read.

Between two measured points the logarithm of perplexity is taken as linear in bytes, a share of dense (predictor, gate
and stand-in included); beyond a method's measured points nothing is said about it. Methods that leave attention dense
are compared at the bytes of the MLPs; where some method is sparse in both, all are at the bytes of whole layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from analysis.comparison import Comparison, compare, group_by_task, method_rank
from analysis.formatting import EMPTY_CELL, Column, Table, format_number, format_ratio, make_table
from analysis.results import Record, grouped
from sparse_predictor.methods.registry import all_methods

EQUAL_BYTES = "equal_bytes"
# Methods that a user could take instead of a predictor, and that are about MLPs alone, as it is.
RIVALS = tuple(
    name for name, method in all_methods().items() if method.role == "published" and method.blocks == ("mlp",)
)
# Oracle knows the outputs that it saves, and random knows nothing: bounds, not methods. Dense reads everything.
NOT_RIVALS = ("dense", *(name for name, method in all_methods().items() if method.role == "bound"))
SHOWN_BYTES = (0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7)
SAME_TEXT = ("dtype", "num_tokens", "window", "stride")
LEAST_ROWS = 3  # of fewer, the plot and `findings` say all that there is
SAME_BYTES = 5e-4  # how many neurons are kept is rounded, so a density of 0.3 may read 0.3001
# Of several densities the one nearest to it is told.
USUAL_DENSITY = 0.5
# Ratios to dense that differ by less than this share are called equal.
EQUAL = 0.005


def findings(records: Sequence[Record]) -> list[str]:
    """One or two sentences per model and text: how good the predictor is beside the others, and how fast."""
    told = []
    scored = [row for row in compare(records) if row.name == "perplexity" and row.head_density == 1.0]
    for (model, task, metric), rows in group_by_task(scored).items():
        own = [row for row in rows if row.method == "predictor" and row.ratio is not None]
        if not own:
            continue
        rivals = [row for row in rows if row.method in RIVALS and row.ratio is not None]
        shared = {row.mlp_density for row in own} & {row.mlp_density for row in rivals}
        density = min(shared or {row.mlp_density for row in own}, key=lambda each: abs(each - USUAL_DENSITY))
        best = min((row for row in own if row.mlp_density == density), key=lambda row: row.ratio or 0.0)
        there = [row for row in rivals if row.mlp_density == density]
        told.append(f"{model}, {task}: {_quality(best, there, metric)}{_speed(best)}")
    return told


def _quality(row: Comparison, rivals: Sequence[Comparison], metric: str) -> str:
    """How much worse than dense, and who is ahead."""
    assert row.ratio is not None
    text = f"with {row.mlp_density:.0%} of the neurons the predictor's {metric} is {_cost(row)}."
    if not rivals:
        return text
    groups: dict[str, list[str]] = {"behind": [], "as good as": [], "ahead of": []}
    for rival in rivals:
        assert rival.ratio is not None
        if abs(rival.ratio / row.ratio - 1) < EQUAL:
            place = "as good as"
        else:
            place = "behind" if rival.ratio < row.ratio else "ahead of"
        groups[place].append(f"{rival.method.upper()}{rival.variant.removeprefix(rival.method)} ({_cost(rival)})")
    said = [f"{place} {' and '.join(names)}" for place, names in groups.items() if names]
    return f"{text} It is {', '.join(said)}."


def _cost(row: Comparison) -> str:
    share = "" if row.bytes_read_share is None else f", reading {row.bytes_read_share:.0%} of the MLPs"
    return f"{row.ratio:.2f} times dense{share}"


def _speed(row: Comparison) -> str:
    if not row.tokens_per_s or not row.dense_tokens_per_s:
        return ""
    ratio = row.tokens_per_s / row.dense_tokens_per_s
    word = "as fast as" if abs(ratio - 1) < EQUAL else "faster than" if ratio > 1 else "slower than"
    numbers = f"{format_number(row.tokens_per_s)} tokens/s against {format_number(row.dense_tokens_per_s)}"
    return f" Decoding with it is {word} dense: {numbers}, {ratio:.2f} times the speed."


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


def equal_bytes_tables(records: Sequence[Record]) -> list[Table]:
    """Tables by model and text: interpolated ratios to dense at the same bytes, and who has the lowest."""
    tables = []
    for (model, task, metric), alike in group_by_task(compare(records)).items():
        if metric != "perplexity":
            continue
        # Another text, or precision, has another dense model.
        texts = grouped(alike, lambda row: tuple(row.labels.get(label) for label in SAME_TEXT))
        for text, rows in texts.items():
            told = [f"{label.replace('_', ' ')} {value}" for label, value in zip(SAME_TEXT, text, strict=True)]
            subject = ", ".join([model, task, *(told if len(texts) > 1 else [])])
            axes = [MLP_BYTES, *([LAYER_BYTES] if any(row.head_density < 1 for row in rows) else [])]
            tables += [table for axis in axes for table in _equal_bytes_table(subject, axis, curves_of(rows, axis))]
    return tables


def _equal_bytes_table(subject: str, axis: Axis, curves: Sequence[Curve]) -> list[Table]:
    """Only the bytes at which the predictor and a rival were both measured, or lie between their measured points; no
    table where these are few."""
    methods = sorted({curve.method for curve in curves}, key=lambda method: (method_rank(method), method))
    values = {
        share: {name: value for name in methods if (value := lowest(curves, name, share)) is not None}
        for share in SHOWN_BYTES
    }
    shares = [share for share, found in values.items() if "predictor" in found and len(found) > 1]
    if len(shares) < LEAST_ROWS:
        return []

    def ratio_of(name: str) -> Callable[[float], str]:
        return lambda share: format_ratio(math.exp(values[share][name])) if name in values[share] else EMPTY_CELL

    columns: list[Column[float]] = [
        (f"{axis.name} bytes read", lambda share: f"{100 * share:.1f}".removesuffix(".0") + " %"),
        *((name, ratio_of(name)) for name in methods),
        # Of equals the first; the predictor comes before its rivals.
        ("lowest", lambda share: min(values[share], key=lambda name: round(values[share][name], 9))),
    ]
    caption = "Between measured points the logarithm of the ratio is interpolated; oracle and random are bounds, "
    title = f"{subject}: ratio to dense at equal {axis.name} bytes"
    return [make_table(title, shares, columns, [f"{caption}and left out."])]


def curves_of(rows: Iterable[Comparison], axis: Axis = MLP_BYTES) -> list[Curve]:
    """One curve per series of the methods that can be run; of points with the same bytes the lowest.

    A recipe of the predictor that another one beats wherever both were measured does not stand for it, not even where
    it alone was measured; rivals keep all of theirs.
    """
    found: dict[tuple[str, str], dict[float, float]] = {}
    for row in rows:
        share = axis.share(row)
        if row.name != "perplexity" or row.method in NOT_RIVALS or row.phase == "decode" or share is None:
            continue
        if (row.head_density < 1 and not axis.attention_may_be_sparse) or not row.ratio or not 0 < row.ratio < math.inf:
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


def lowest(curves: Iterable[Curve], method: str, share: float) -> float | None:
    """A method's lowest value over its series at so many bytes."""
    return min((at for curve in curves if curve.method == method and (at := curve.at(share)) is not None), default=None)
