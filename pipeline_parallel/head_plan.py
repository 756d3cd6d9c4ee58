"""Which key-value groups and query heads each tensor-parallel rank computes: plain Python.

A key-value group and its query heads stay together while there are at least as many groups as ranks; where there are
fewer, several ranks hold a copy of a group's key-value head and share its queries. What does not divide is padded with
heads of zero weight, so that all ranks have the same shapes.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class HeadPlan:
    """One rank's share: consecutive groups, and the query heads [start, stop) of each of them that it computes."""

    groups: tuple[int, ...]
    query_heads: tuple[int, int]
    num_groups: int  # with padding, the same on all ranks
    queries_per_group: int  # with padding, the same on all ranks
    is_first_holder: bool  # no earlier rank holds these groups


def plan_heads(num_attention_heads: int, num_key_value_heads: int, tp_size: int) -> list[HeadPlan]:
    """Each rank's share; every query head is on exactly one rank. ValueError for more ranks than query heads."""
    if tp_size > num_attention_heads:
        raise ValueError(
            f"--tp-size {tp_size}: this model has {num_attention_heads} attention heads, one per rank at least"
        )
    per_group = num_attention_heads // num_key_value_heads
    if tp_size <= num_key_value_heads:
        starts = [rank * num_key_value_heads // tp_size for rank in range(tp_size + 1)]
        return [
            HeadPlan(
                groups=tuple(range(start, stop)),
                query_heads=(start * per_group, stop * per_group),
                num_groups=-(-num_key_value_heads // tp_size),
                queries_per_group=per_group,
                is_first_holder=True,
            )
            for start, stop in zip(starts, starts[1:], strict=False)
        ]
    owner = [rank * num_key_value_heads // tp_size for rank in range(tp_size)]
    shares = []
    for rank, group in enumerate(owner):
        holders = owner.count(group)
        place = rank - owner.index(group)
        first, last = place * per_group // holders, (place + 1) * per_group // holders
        shares.append((group, first, last, place == 0))
    widest = max(last - first for _, first, last, _ in shares)
    return [
        HeadPlan(
            groups=(group,),
            query_heads=(group * per_group + first, group * per_group + last),
            num_groups=1,
            queries_per_group=widest,
            is_first_holder=is_first,
        )
        for group, first, last, is_first in shares
    ]
