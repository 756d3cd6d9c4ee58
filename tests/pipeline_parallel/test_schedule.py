"""The order of work on a pipeline: possible, every piece of work once, and no stage idle."""

from collections import defaultdict
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline_parallel.schedule import stage_order

NUM_STEPS = 8


@given(st.integers(1, 6), st.integers(1, 8))
def test_stages_do_each_step_of_each_micro_batch_once_after_what_it_needs_and_are_never_idle(
    num_stages: int, num_microbatches: int
) -> None:
    period = max(num_stages, num_microbatches)
    full = range(num_stages, num_stages + 4 * period)  # ticks in which all stages have been reached
    ticks: dict[tuple[int, int], list[int]] = defaultdict(list)
    num_busy = 0
    for stage in range(num_stages):
        work = list(islice(stage_order(num_stages, num_microbatches, stage), NUM_STEPS * num_microbatches))
        own = [tick for tick, _ in work]
        assert own == sorted(set(own)), "one thing at a time"
        num_busy += sum(tick in full for tick in own)
        for tick, microbatch in work:
            ticks[microbatch, stage].append(tick)
    assert num_busy == len(full) * num_stages * num_microbatches / period
    for microbatch in range(num_microbatches):
        for stage in range(num_stages):
            assert len(ticks[microbatch, stage]) == NUM_STEPS
            before = ticks[microbatch, stage - 1]
            pairs = zip(before, ticks[microbatch, stage][stage == 0 :], strict=False)  # the first needs chosen tokens
            assert all(earlier < later for earlier, later in pairs)


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(0, 1), (1, 0)])
def test_a_schedule_needs_stages_and_micro_batches(num_stages: int, num_microbatches: int) -> None:
    with pytest.raises(ValueError, match="at least 1 each"):
        next(stage_order(num_stages, num_microbatches, 0))
