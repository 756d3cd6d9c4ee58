"""What a set of records says, in a few plain sentences: the predictor beside its rivals, and faster or slower."""

from __future__ import annotations

from collections.abc import Sequence

from analysis.comparison import Comparison, compare, group_by_task
from analysis.formatting import format_number
from analysis.results import Record

# Methods that a user could take instead; oracle, static and random are bounds.
RIVALS = ("cats", "teal", "griffin")
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
