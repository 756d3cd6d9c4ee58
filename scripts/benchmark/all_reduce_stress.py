"""Thousands of calls of the fused all-reduce in a row: sizes alternate, input changes, one rank is late, graphs or not.

Nothing waits for the device in between, so that a rank may be ahead of the others wherever the kernels let it. Every
result is compared with the equation in float32, on the device, and at the end with the other ranks' bit for bit; then
the signal pads must be zero.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from scripts.benchmark.all_reduce_bench import OURS, Bench, Inputs, Methods, Point, checksum, make_inputs, transport_of
from scripts.command_line import progress

NUM_SERIES = 24
CALLS = 3  # of one series; odd, so that the next begins with the buffer that this one ends with
NUM_INPUTS = 5
LATE_CYCLES = 300_000  # 0.15 ms, some ten calls
# |hidden - equation| <= relative * |equation| + absolute: rounded once, to eight bits or more; a sum made by the switch
# was rounded before.
RELATIVE, ABSOLUTE = 2**-7, {"p2p": 1e-3, "multimem": 0.05}


@dataclass(frozen=True, kw_only=True)
class Series:
    """Calls in a row, (token count, method) each; `late_rank` comes late to one of them."""

    calls: tuple[tuple[int, str], ...]
    late_rank: int
    late_call: int


@dataclass(frozen=True, kw_only=True)
class Step:
    """A series on certain numbers."""

    series_idx: int
    inputs: tuple[int, ...]
    """Which numbers each call sums."""
    replayed: bool
    """From the series' CUDA graph; else launched call by call."""


def awkward_counts(ranks: int) -> tuple[int, ...]:
    """The smallest token counts, and some that divide by nothing."""
    return tuple(sorted({0, 1, ranks - 1, ranks + 1, 77, 255, 257, 1023, 1025}))


def make_series(counts: Sequence[int], ranks: int, seed: int) -> list[Series]:
    """The same for the same arguments, so that all ranks do alike. Every (count, method) is in one at least, and where
    there are several none follows itself; ranks and calls take turns in being late."""
    order = random.Random(seed)
    sizes = [(num_tokens, method) for num_tokens in counts for method in OURS]
    waiting: list[tuple[int, str]] = []
    calls: list[tuple[int, str]] = []
    while len(calls) < max(NUM_SERIES, -(-len(sizes) // CALLS)) * CALLS:
        waiting = waiting or order.sample(sizes, len(sizes))
        if calls and waiting[-1] == calls[-1]:
            waiting.insert(0, waiting.pop())
        calls.append(waiting.pop())
    return [
        Series(
            calls=tuple(calls[start : start + CALLS]),
            late_rank=idx % ranks,
            late_call=idx // ranks % CALLS,
        )
        for idx, start in enumerate(range(0, len(calls), CALLS))
    ]


def make_steps(num_replays: int, num_series: int, seed: int) -> list[Step]:
    """In no order, the same for the same arguments: so many from graphs, and one more in ten launched call by call."""
    order = random.Random(seed)
    steps = []
    for replayed in [True] * num_replays + [False] * (num_replays // 10):
        inputs = tuple(order.randrange(NUM_INPUTS) for _ in range(CALLS))
        steps.append(Step(series_idx=order.randrange(num_series), inputs=inputs, replayed=replayed))
    order.shuffle(steps)
    return steps


class Stress:
    """The calls of one hidden size on one rank."""

    def __init__(self, bench: Bench, methods: Methods, hidden_size: int, series: Sequence[Series]) -> None:
        self.bench, self.methods, self.series, self.mesh = bench, methods, series, bench.mesh
        counts = sorted({num_tokens for each in series for num_tokens, _ in each.calls})
        self.inputs: dict[int, list[Inputs]] = {}
        self.expected: dict[int, list[Tensor]] = {}
        for num_tokens in counts:
            point = Point(num_tokens=num_tokens, hidden_size=hidden_size)
            ranks, device = self.mesh.tp_size, self.mesh.device
            whole = make_inputs(point, ranks * NUM_INPUTS, bench.dtype, device, bench.seed + num_tokens)
            self.inputs[num_tokens] = [
                replace(whole, partials=whole.partials[start : start + ranks])
                for start in range(0, ranks * NUM_INPUTS, ranks)
            ]
            self.expected[num_tokens] = [each.equation()[0] for each in self.inputs[num_tokens]]
        shape = (CALLS, counts[-1], hidden_size)
        # What graphs read and write; they are captured once, and the numbers change.
        self.given, self.found = (torch.zeros(shape, dtype=bench.dtype, device=self.mesh.device) for _ in range(2))
        for each in series:  # compiles, which a capture must not
            self.launch(each)
        bench.settle()
        self.replays = [self.capture(each) for each in series]
        bench.settle()

    def launch(self, series: Series) -> None:
        """The calls of a series on what is in `given`, their results into `found`."""
        self.methods.begin()
        for idx, (num_tokens, method) in enumerate(series.calls):
            if (series.late_rank, series.late_call) == (self.mesh.tp_rank, idx) and self.mesh.device.type == "cuda":
                torch.cuda._sleep(LATE_CYCLES)
            inputs = self.inputs[num_tokens][0]
            self.methods.partial(num_tokens).copy_(self.given[idx, :num_tokens])
            residual = inputs.residual[self.methods.owned(method, num_tokens)]
            hidden, _ = self.methods.run(method, num_tokens, residual, inputs.weight)
            self.found[idx, :num_tokens].copy_(hidden)

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
        wrong = torch.zeros(len(steps), CALLS, dtype=torch.int64, device=device)
        sums = torch.zeros(len(steps), CALLS, 2, dtype=torch.int64, device=device)
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
                hidden, expected = self.found[idx, :num_tokens], self.expected[num_tokens][step.inputs[idx]]
                limit = RELATIVE * expected.abs() + ABSOLUTE[transport_of(method, self.methods.transport)]
                # NaN is within no limit.
                wrong[step_idx, idx] = (~((hidden.float() - expected).abs() <= limit)).sum()
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
