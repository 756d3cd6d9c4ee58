"""Every query head is computed once, beside its own keys, and all ranks have the same shapes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline_parallel.tensor_parallel import plan_heads


@st.composite
def heads_and_ranks(draw: st.DrawFn) -> tuple[int, int, int]:
    """(query heads, key-value groups, ranks) that a model and a launch may have."""
    num_groups, per_group = draw(st.integers(1, 12)), draw(st.integers(1, 9))
    return num_groups * per_group, num_groups, draw(st.integers(1, num_groups * per_group))


@given(heads_and_ranks())
def test_every_query_head_is_on_one_rank_together_with_its_group(case: tuple[int, int, int]) -> None:
    num_heads, num_groups, tp_size = case
    plan = plan_heads(num_heads, num_groups, tp_size)
    assert len(plan) == tp_size
    assert [head for share in plan for head in range(*share.query_heads)] == list(range(num_heads))
    for share in plan:
        own_groups = {head // (num_heads // num_groups) for head in range(*share.query_heads)}
        assert set(share.groups) == own_groups and list(share.groups) == sorted(own_groups)


@given(heads_and_ranks())
def test_padding_makes_all_ranks_alike_and_no_rank_holds_more_than_it_must(case: tuple[int, int, int]) -> None:
    num_heads, num_groups, tp_size = case
    plan = plan_heads(num_heads, num_groups, tp_size)
    assert len({(share.num_groups, share.queries_per_group) for share in plan}) == 1
    for share in plan:
        start, stop = share.query_heads
        assert 0 < stop - start <= share.num_groups * share.queries_per_group and len(share.groups) <= share.num_groups
    assert plan[0].num_groups == max(len(share.groups) for share in plan)
    assert plan[0].num_groups == max(1, -(-num_groups // tp_size))
    if plan[0].num_groups > 1:  # only whole groups lie beside each other: their queries must not be torn apart
        assert plan[0].queries_per_group == num_heads // num_groups


@given(heads_and_ranks())
def test_each_group_has_one_first_holder(case: tuple[int, int, int]) -> None:
    seen: set[int] = set()
    for share in plan_heads(*case):
        assert share.is_first_holder == seen.isdisjoint(share.groups)
        seen.update(share.groups)
    assert seen == set(range(case[1]))


def test_a_rank_without_a_head_is_refused() -> None:
    with pytest.raises(ValueError, match="--tp-size 7: this model has 6 attention heads"):
        plan_heads(6, 2, 7)
