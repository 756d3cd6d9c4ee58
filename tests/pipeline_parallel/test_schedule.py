"""The order of work on a pipeline: every piece of work once, in an order that is possible, and no stage idle."""

from collections import defaultdict
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline_parallel.schedule import pipeline_schedule, stage_order

stages = st.integers(1, 6)
microbatches = st.integers(1, 8)
turns = st.integers(0, 6)


@given(stages, microbatches, turns)
def test_each_micro_batch_passes_each_stage_once_a_turn_and_no_stage_does_two_things(
    num_stages: int, num_microbatches: int, num_turns: int
) -> None:
    work = list(pipeline_schedule(num_stages, num_microbatches, num_turns))
    assert len(work) == num_stages * num_microbatches * num_turns
    assert len({(tick, stage) for tick, _, stage in work}) == len(work)
    assert [tick for tick, _, _ in work] == sorted(tick for tick, _, _ in work)


@given(stages, microbatches, st.integers(1, 6))
def test_a_stage_works_on_what_the_stage_before_has_made_and_a_turn_on_the_tokens_of_the_last(
    num_stages: int, num_microbatches: int, num_turns: int
) -> None:
    ticks: dict[tuple[int, int], list[int]] = defaultdict(list)
    for tick, microbatch, stage in pipeline_schedule(num_stages, num_microbatches, num_turns):
        ticks[microbatch, stage].append(tick)
    for microbatch in range(num_microbatches):
        for stage in range(1, num_stages):
            pairs = zip(ticks[microbatch, stage - 1], ticks[microbatch, stage], strict=True)
            assert all(earlier < later for earlier, later in pairs)
        chosen, starts = ticks[microbatch, num_stages - 1], ticks[microbatch, 0]
        assert all(earlier < later for earlier, later in zip(chosen, starts[1:], strict=False))


@given(stages, microbatches, st.integers(1, 6))
def test_each_stages_own_order_is_its_part_of_the_schedule(
    num_stages: int, num_microbatches: int, num_turns: int
) -> None:
    whole = list(pipeline_schedule(num_stages, num_microbatches, num_turns))
    for stage in range(num_stages):
        own = [(tick, microbatch) for tick, microbatch, where in whole if where == stage]
        assert list(islice(stage_order(num_stages, num_microbatches, stage), len(own))) == own


@given(stages, microbatches)
def test_with_as_many_micro_batches_as_stages_no_stage_idles_once_the_pipeline_is_full(
    num_stages: int, num_microbatches: int
) -> None:
    work = list(pipeline_schedule(num_stages, num_microbatches, 8))
    busy: dict[int, set[int]] = defaultdict(set)
    for tick, _, stage in work:
        busy[stage].add(tick)
    period = max(num_stages, num_microbatches)
    full = range(num_stages, num_stages + 4 * period)
    share = sum(tick in busy[stage] for stage in busy for tick in full) / (len(full) * num_stages)
    assert share == pytest.approx(num_microbatches / period)
    assert (share == 1.0) == (num_microbatches >= num_stages)


def test_the_schedule_of_two_stages_written_out() -> None:
    assert list(pipeline_schedule(2, 2, 2)) == [
        (0, 0, 0),
        (1, 1, 0), (1, 0, 1),
        (2, 0, 0), (2, 1, 1),
        (3, 1, 0), (3, 0, 1),
        (4, 1, 1),
    ]  # fmt: skip


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(0, 1), (1, 0)])
def test_a_schedule_needs_stages_and_micro_batches(num_stages: int, num_microbatches: int) -> None:
    with pytest.raises(ValueError, match="at least 1 each"):
        next(pipeline_schedule(num_stages, num_microbatches, 1))
    with pytest.raises(ValueError, match="at least 1 each"):
        next(stage_order(num_stages, num_microbatches, 0))
