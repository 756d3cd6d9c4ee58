"""The order in which pipeline stages work on micro-batches, as plain Python.

A micro-batch takes turns: in each, it passes through all stages, one tick per stage; its next turn needs what the last
stage made of the one before (the chosen tokens). With at least as many micro-batches as stages, every stage is busy in
every tick once the pipeline is full, in decode as in prefill.

    turn k of micro-batch m is on stage s in tick  k * max(num_microbatches, num_stages) + m + s
"""

from collections.abc import Iterator
from itertools import count


def pipeline_schedule(num_stages: int, num_microbatches: int, num_turns: int) -> Iterator[tuple[int, int, int]]:
    """Yields (tick, microbatch, stage) of `num_turns` turns of every micro-batch, in order of ticks, then stages."""
    _check(num_stages, num_microbatches)
    period = max(num_stages, num_microbatches)
    for tick in range((num_turns - 1) * period + num_microbatches + num_stages - 1 if num_turns else 0):
        for stage in range(num_stages):
            turn, microbatch = divmod(tick - stage, period)
            if 0 <= turn < num_turns and microbatch < num_microbatches:
                yield tick, microbatch, stage


def stage_order(num_stages: int, num_microbatches: int, stage: int) -> Iterator[tuple[int, int]]:
    """Yields (tick, microbatch) for one stage, without end: what a stage does, one after the other."""
    _check(num_stages, num_microbatches)
    period = max(num_stages, num_microbatches)
    for turn in count():
        for microbatch in range(num_microbatches):
            yield turn * period + microbatch + stage, microbatch


def _check(num_stages: int, num_microbatches: int) -> None:
    if num_stages < 1 or num_microbatches < 1:
        raise ValueError(f"schedule: {num_stages} stages and {num_microbatches} micro-batches; at least 1 each")
