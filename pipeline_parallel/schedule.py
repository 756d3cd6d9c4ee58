"""The order in which pipeline stages work on micro-batches, as plain Python.

In each step a micro-batch passes through all stages, one tick per stage; its next step needs what the last stage made
of the one before (the chosen tokens). With at least as many micro-batches as stages, every stage is busy in every tick
once the pipeline is full, in decode as in prefill.

    step k of micro-batch m is on stage s in tick  k * max(num_microbatches, num_stages) + m + s
"""

from collections.abc import Iterator
from itertools import count


def stage_order(num_stages: int, num_microbatches: int, stage_idx: int) -> Iterator[tuple[int, int]]:
    """Yields (tick, microbatch) for one stage, without end: what a stage does, one after the other."""
    if num_stages < 1 or num_microbatches < 1:
        raise ValueError(f"schedule: {num_stages} stages and {num_microbatches} micro-batches; at least 1 each")
    period = max(num_stages, num_microbatches)
    for step in count():
        for microbatch in range(num_microbatches):
            yield step * period + microbatch + stage_idx, microbatch
