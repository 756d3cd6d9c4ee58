"""What stands for the GPUs of the communication benchmark: one rank, whose sum is its own part."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from modules.kernels.add_norm import reference_add_norm
from pipeline_parallel.mesh import ParallelMesh
from scripts.benchmark.all_reduce import EPS, Bench, Methods, Point
from scripts.benchmark.timing import Timing

ALL_METHODS = ("one-shot", "two-shot", "nccl float32", "nccl", "torch one-shot", "torch two-shot")


class OneRank:
    """Every method by the equation, in the places where the kernels have theirs: two partials that take turns, and one
    result, which the next call overwrites."""

    transport = "p2p"

    def __init__(self, mesh: ParallelMesh, hidden_size: int, max_tokens: int, dtype: torch.dtype) -> None:
        self.partials = torch.zeros(2, max_tokens, hidden_size, dtype=dtype)
        self.hidden = torch.full((max_tokens, hidden_size), float("nan"), dtype=dtype)
        self.signal_pad = torch.zeros(16, dtype=torch.int32)
        self.turn = 0
        self.calls: list[str] = []

    def begin(self) -> None:
        self.turn = 0

    def place(self, method: str, partial: Tensor) -> None:
        self.partials[:, : len(partial)] = partial

    def run(
        self, method: str, partial: Tensor, residual: Tensor, weight: Tensor, *, is_placed: bool = False
    ) -> tuple[Tensor, Tensor]:
        self.calls.append(method)
        num_tokens = len(partial)
        if not is_placed:
            self.partials[self.turn, :num_tokens] = partial
        hidden, new_residual = reference_add_norm(
            self.partials[self.read_turn(), :num_tokens],
            residual,
            weight,
            None,
            None,
            kind="rms",
            eps=EPS,
            out_dtype=self.hidden.dtype,
        )
        self.hidden[:num_tokens] = hidden
        self.turn = 1 - self.turn
        return self.hidden[:num_tokens], new_residual

    def read_turn(self) -> int:
        return self.turn

    def owned(self, method: str, num_tokens: int) -> slice:
        return slice(0, num_tokens)


def milliseconds(value: float) -> Timing:
    """A timing of this median."""
    return Timing(
        median_ms=value, p10_ms=value, p90_ms=value, num_samples=1, num_argument_sets=1, uses_cuda_graph=False
    )


def one_rank_bench() -> Bench:
    """On the CPU."""
    return Bench(ParallelMesh.single("cpu"), torch.bfloat16, seed=0)


class FirstOfTwoRanks(Bench):
    """Rank 0, for what it makes of times that are given: by point and names of methods."""

    def __init__(self, times: Callable[[Point, Sequence[str]], dict[str, Timing]]) -> None:
        super().__init__(ParallelMesh(tp_size=2, device=torch.device("cpu")), torch.bfloat16, seed=0)
        self._times = times

    def times(self, point: Point, methods: Methods, names: Sequence[str]) -> dict[str, Timing]:
        return self._times(point, names)

    def link_gb_per_s(self, num_bytes: int = 0) -> float:
        return 400.0

    def settle(self) -> None: ...
