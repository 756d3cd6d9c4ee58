"""Thousands of calls of the fused all-reduce in a row: sizes alternate, input changes, one rank is late, graphs or not.

It is late in three ways: to a call (its peers wait for what it adds); in reading its peers' partial sums, once they are
all there (its peers, which have what they need, go on as far as they may); and in reading its result, which its peers'
next call overwrites. Reading peers late is for calls made of copies: within one kernel nothing can be put in between.

Nothing waits for the device in between, so that a rank may be ahead of the others wherever the kernels let it. Every
result is compared with the equation in float32, on the device, hidden states and residual, and at the end the hidden
states with the other ranks' bit for bit; then the signal pads must be zero.

Two kinds of series, as in the model: those of the first pipeline stage begin with `begin`; those of later stages do
not, and have an even number of calls (two per layer), after which both buffers have had equal turns.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from pipeline_parallel.kernels import copied_two_shot
from pipeline_parallel.kernels.copied_two_shot import ENTRY
from pipeline_parallel.kernels.workspace import Workspace
from scripts.benchmark.all_reduce import (
    COPIES,
    Bench,
    Inputs,
    Methods,
    Point,
    checksum,
    make_inputs,
    transport_of,
)
from scripts.command_line import progress

NUM_SERIES = 24
CALLS = 3  # of a series with `begin`; odd, so that the next begins with the buffer that this one ends with
CALLS_WITHOUT_BEGIN = 4
NUM_INPUTS = 5
LATE_CYCLES = 600_000  # 0.3 ms, twenty calls of the kernel; several of the largest that are made of copies
ARRIVAL, PEERS, RESULT = "arrival", "peers", "result"
# |hidden - equation| <= relative * |equation| + absolute: rounded once, to eight bits or more; a sum made by the switch
# was rounded before.
RELATIVE, ABSOLUTE = 2**-7, {"p2p": 1e-3, "multimem": 0.05}
# Of the residual, which stays float32.
RESIDUAL_RELATIVE, RESIDUAL_ABSOLUTE = {"p2p": 1e-5, "multimem": 2**-7}, {"p2p": 1e-5, "multimem": 0.05}


@dataclass(frozen=True, kw_only=True)
class Series:
    """Calls in a row, (token count, method) each, and the rank that is late."""

    calls: tuple[tuple[int, str], ...]
    late_rank: int
    late_call: int
    late_in: str = ARRIVAL
    """ARRIVAL: it comes late to `late_call`. RESULT: it reads the result of that one late. PEERS: it reads its peers'
    partial sums late, in every call that is made of copies."""
    begins: bool = True


@dataclass(frozen=True, kw_only=True)
class Step:
    """A series on certain numbers."""

    series_idx: int
    inputs: tuple[int, ...]
    """Which numbers each call sums (of a short series: the first of these)."""
    replayed: bool
    """From the series' CUDA graph; else launched call by call."""


def awkward_counts(ranks: int) -> tuple[int, ...]:
    """The smallest token counts, and some that divide by nothing."""
    return tuple(sorted({0, 1, ranks - 1, ranks + 1, 77, 255, 257, 1023, 1025}))


def make_series(
    counts: Sequence[int], methods: Sequence[str], ranks: int, seed: int, *, begins: bool = True
) -> list[Series]:
    """The same for the same arguments, so that all ranks do alike. Every (count, method) is in one at least, and where
    there are several none follows itself; ranks, calls and ways take turns in being late."""
    order, length = random.Random(seed), CALLS if begins else CALLS_WITHOUT_BEGIN
    sizes = [(num_tokens, method) for num_tokens in counts for method in methods]
    ways = (PEERS, RESULT, ARRIVAL) if COPIES in methods else (RESULT, ARRIVAL)
    waiting: list[tuple[int, str]] = []
    calls: list[tuple[int, str]] = []
    while len(calls) < max(NUM_SERIES, -(-len(sizes) // length)) * length:
        waiting = waiting or order.sample(sizes, len(sizes))
        if calls and waiting[-1] == calls[-1]:
            waiting.insert(0, waiting.pop())
        calls.append(waiting.pop())
    return [
        Series(
            calls=tuple(calls[start : start + length]),
            late_rank=idx % ranks,
            late_call=idx // ranks % length,
            late_in=ways[(idx % ranks + idx // ranks % length + idx // (ranks * length)) % len(ways)],
            begins=begins,
        )
        for idx, start in enumerate(range(0, len(calls), length))
    ]


def make_steps(num_replays: int, num_series: int, seed: int) -> list[Step]:
    """In no order, the same for the same arguments: so many from graphs, and one more in ten launched call by call."""
    order = random.Random(seed)
    steps = []
    for replayed in [True] * num_replays + [False] * (num_replays // 10):
        inputs = tuple(order.randrange(NUM_INPUTS) for _ in range(CALLS_WITHOUT_BEGIN))
        steps.append(Step(series_idx=order.randrange(num_series), inputs=inputs, replayed=replayed))
    order.shuffle(steps)
    return steps


class Stress:
    """The calls of one hidden size on one rank."""

    def __init__(self, bench: Bench, methods: Methods, hidden_size: int, series: Sequence[Series]) -> None:
        self.bench, self.methods, self.series, self.mesh = bench, methods, series, bench.mesh
        counts = sorted({num_tokens for each in series for num_tokens, _ in each.calls})
        self.inputs: dict[int, list[Inputs]] = {}
        self.expected: dict[int, list[tuple[Tensor, Tensor]]] = {}
        for num_tokens in counts:
            point = Point(num_tokens=num_tokens, hidden_size=hidden_size)
            ranks, device = self.mesh.tp_size, self.mesh.device
            whole = make_inputs(point, ranks * NUM_INPUTS, bench.dtype, device, bench.seed + num_tokens)
            self.inputs[num_tokens] = [
                replace(whole, partials=whole.partials[start : start + ranks])
                for start in range(0, ranks * NUM_INPUTS, ranks)
            ]
            self.expected[num_tokens] = [each.equation() for each in self.inputs[num_tokens]]
        self.num_calls = max(len(each.calls) for each in series)
        shape, device = (self.num_calls, counts[-1], hidden_size), self.mesh.device
        # What graphs read and write; they are captured once, and the numbers change.
        self.given, self.found = (torch.zeros(shape, dtype=bench.dtype, device=device) for _ in range(2))
        self.residuals = torch.zeros(shape, device=device)
        self.methods.begin()
        for each in series:  # compiles, which a capture must not
            self.launch(each)
        bench.settle()
        self.replays = [self.capture(each) for each in series]
        bench.settle()

    def launch(self, series: Series) -> None:
        """The calls of a series on what is in `given`, their results into `found` and `residuals`."""
        if series.begins:
            self.methods.begin()
        late_in = series.late_in if series.late_rank == self.mesh.tp_rank else None
        for idx, (num_tokens, method) in enumerate(series.calls):
            if late_in == ARRIVAL and idx == series.late_call:
                self.pause()
            inputs = self.inputs[num_tokens][0]
            residual = inputs.residual[self.methods.owned(method, num_tokens)]
            with reading_late(self.pause) if late_in == PEERS else nullcontext():
                hidden, total = self.methods.run(method, self.given[idx, :num_tokens], residual, inputs.weight)
            if late_in == RESULT and idx == series.late_call:
                self.pause()
            self.found[idx, :num_tokens].copy_(hidden)
            self.residuals[idx, : len(total)].copy_(total)

    def pause(self) -> None:
        """Let this rank's stream be busy for a while, where there is one."""
        if self.mesh.device.type == "cuda":
            torch.cuda._sleep(LATE_CYCLES)

    def capture(self, series: Series) -> Callable[[], None]:
        """A series as a CUDA graph, where there are any."""
        if self.mesh.device.type != "cuda":
            return lambda: self.launch(series)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.launch(series)
        return graph.replay

    def run(self, steps: Sequence[Step], *, quiet: bool) -> None:
        """All steps. ValueError on all ranks that names the first wrong call."""
        device = self.mesh.device
        wrong = torch.zeros(len(steps), self.num_calls, dtype=torch.int64, device=device)
        sums = torch.zeros(len(steps), self.num_calls, 2, dtype=torch.int64, device=device)
        for step_idx, step in enumerate(progress(steps, "stress", quiet=quiet)):
            series = self.series[step.series_idx]
            for idx, (num_tokens, _) in enumerate(series.calls):
                partial = self.inputs[num_tokens][step.inputs[idx]].partials[self.mesh.tp_rank]
                self.given[idx, :num_tokens].copy_(partial)
            if step.replayed:
                self.replays[step.series_idx]()
            else:
                self.launch(series)
            for idx, (num_tokens, method) in enumerate(series.calls):
                hidden, transport = self.found[idx, :num_tokens], transport_of(method, self.methods.transport)
                expected, total = self.expected[num_tokens][step.inputs[idx]]
                total = total[self.methods.owned(method, num_tokens)]
                wrong[step_idx, idx] = num_beyond(hidden, expected, RELATIVE, ABSOLUTE[transport])
                wrong[step_idx, idx] += num_beyond(
                    self.residuals[idx, : len(total)],
                    total,
                    RESIDUAL_RELATIVE[transport],
                    RESIDUAL_ABSOLUTE[transport],
                )
                sums[step_idx, idx] = checksum(hidden)
        self.bench.settle()
        pad = int(self.methods.signal_pad.count_nonzero())
        found = self.mesh.gather((wrong.cpu(), sums.cpu(), pad))
        for rank, (of_rank, _, left) in enumerate(found):
            if of_rank.any():
                step_idx, idx = of_rank.nonzero()[0].tolist()
                raise ValueError(
                    f"{int((of_rank > 0).sum())} calls went wrong on rank {rank}, the first of them "
                    f"{self.describe(steps[step_idx], step_idx, idx)}: {int(of_rank[step_idx, idx])} elements"
                )
            if left:
                raise ValueError(f"{left} slots of rank {rank}'s signal pad are not zero after all calls")
        for rank, (_, of_rank, _) in enumerate(found):
            different = (of_rank != found[0][1]).any(2).nonzero()
            if len(different):
                step_idx, idx = different[0].tolist()
                raise ValueError(
                    f"{len(different)} results of rank {rank} are not those of rank 0, the first of them "
                    f"{self.describe(steps[step_idx], step_idx, idx)}"
                )

    def describe(self, step: Step, step_idx: int, idx: int) -> str:
        """A call, for messages."""
        num_tokens, method = self.series[step.series_idx].calls[idx]
        how = "a graph" if step.replayed else "single calls"
        return f"{method} of {num_tokens} tokens (call {idx} of step {step_idx}, from {how})"


@contextmanager
def reading_late(pause: Callable[[], None]) -> Iterator[None]:
    """In here this process calls `pause` in every call made of copies, behind the barrier at its entry: all partial
    sums are there, and its peers' are not copied yet."""
    unpatched = copied_two_shot.stream_barrier

    def barrier_and_pause(workspace: Workspace, place: Literal[0, 1], tag: int) -> None:
        unpatched(workspace, place, tag)
        if place == ENTRY:
            pause()

    copied_two_shot.stream_barrier = barrier_and_pause
    try:
        yield
    finally:
        copied_two_shot.stream_barrier = unpatched


def num_beyond(found: Tensor, expected: Tensor, relative: float, absolute: float) -> Tensor:
    """How many elements are further off than that; NaN is within no limit."""
    return (~((found.float() - expected).abs() <= relative * expected.abs() + absolute)).sum()
