"""Checks and times all-reduce + add + norm at one size, every method on the same numbers.

Every method begins with the partial sums where a block writes them. For a few rows, which kernels add up, that is
ordinary memory, and the copy into memory that peers can read is timed, too; for more rows, a matrix product writes them
into any memory. Its result is compared with the equation in float32, and between ranks, before any is
timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from loguru import logger
from torch import Tensor

from modules.kernels.add_norm import fused_add_norm, reference_add_norm
from modules.kernels.arguments import MAX_ROWS
from pipeline_parallel import communication
from pipeline_parallel.kernels.all_reduce_norm import STRATEGIES as OURS
from pipeline_parallel.kernels.all_reduce_norm import all_reduce_norm, owned_rows
from pipeline_parallel.kernels.barrier import begin
from pipeline_parallel.kernels.workspace import create_workspace
from pipeline_parallel.mesh import ParallelMesh
from scripts.benchmark.timing import Timing, time_function

EPS = 1e-5
# ||row - equation|| / ||equation||, the largest of all rows. Ours rounds the result once; the others the sum as well.
MAX_ERROR = {"ours": 0.005, "others": 0.02}
# Of the residual, which ours keeps in float32; a sum made by the switch (multimem) was rounded.
MAX_RESIDUAL_ERROR = {"p2p": 1e-5, "multimem": 0.01, "others": 0.02}
LINK_BYTES = 512 * 2**20


@dataclass(frozen=True, kw_only=True)
class Point:
    """A size of the grid."""

    num_tokens: int
    hidden_size: int

    @property
    def numel(self) -> int:
        """Elements of one partial."""
        return self.num_tokens * self.hidden_size

    def __str__(self) -> str:
        return f"{self.num_tokens} x {self.hidden_size}"


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """One call's operands: partials by rank [T, H], the whole residual [T, H] float32, the norm's weight [H]."""

    partials: list[Tensor]
    residual: Tensor
    weight: Tensor

    def equation(self) -> tuple[Tensor, Tensor]:
        """(hidden, residual) in float32, summed in order of ranks."""
        total = torch.zeros_like(self.residual)
        for partial in self.partials:
            total += partial.float()
        return reference_add_norm(
            total, self.residual, self.weight, None, None, kind="rms", eps=EPS, out_dtype=torch.float32
        )


def make_inputs(point: Point, ranks: int, dtype: torch.dtype, device: torch.device, seed: int) -> Inputs:
    """The same on every rank, which so knows the partials of all."""
    generator = torch.Generator(device).manual_seed(seed)
    shape = (point.num_tokens, point.hidden_size)
    residual = torch.randn(shape, generator=generator, device=device)
    weight = 1 + 0.1 * torch.randn(point.hidden_size, generator=generator, device=device)
    partials = [torch.randn(shape, generator=generator, device=device).to(dtype) for _ in range(ranks)]
    return Inputs(partials=partials, residual=residual, weight=weight.to(dtype))


PEER = "peer"
COPIES = "copies"  # two-shot whose data the copy engines move: as split prefills have it, and not timed here
FUSED = (*OURS, COPIES)
# A peer: FUNCTION(group, max_tokens, hidden_size, dtype, device) returns what takes (partial, residual, weight, eps) to
# (hidden, new residual), all rows on every rank.
Peer = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
MakePeer = Callable[[Any, int, int, torch.dtype, torch.device], Peer]


class Methods(Protocol):
    """All ways to compute the junction, for one hidden size, on the ranks of a mesh."""

    transport: str
    signal_pad: Tensor
    """int32: of ours, zero between calls."""

    def begin(self) -> None:
        """Ours: a new series of calls, whatever was replayed before (a collective call)."""

    def place(self, method: str, partial: Tensor) -> None:
        """Put this rank's part of the sum, of which no call is under way, where the method reads it."""

    def run(
        self, method: str, partial: Tensor, residual: Tensor, weight: Tensor, *, is_placed: bool = False
    ) -> tuple[Tensor, Tensor]:
        """(hidden [T, D], new residual [T or the owned rows, D]) of this rank's part of the sum, which may be
        overwritten (a collective call). `is_placed`: it is where `place` has put it, too."""

    def owned(self, method: str, num_tokens: int) -> slice:
        """Rows of the residual that the method keeps on this rank."""


class GpuMethods:
    """Ours (pipeline_parallel/kernels), those of others followed by the fused add + norm, and a peer's fused one."""

    def __init__(
        self,
        mesh: ParallelMesh,
        hidden_size: int,
        max_tokens: int,
        dtype: torch.dtype,
        make_peer: MakePeer | None = None,
    ) -> None:
        assert mesh.tp_group is not None
        self.mesh, self.group, self.dtype = mesh, mesh.tp_group, dtype
        self.workspace = create_workspace(self.group, max_tokens, hidden_size, dtype, mesh.device)
        self.transport, self.signal_pad = self.workspace.transport, self.workspace.signal_pad
        shape = (max_tokens, hidden_size)
        self._symmetric = communication.symmetric_tensor(shape, dtype, mesh.device, self.group)[0]
        self._peer = None if make_peer is None else make_peer(self.group, max_tokens, hidden_size, dtype, mesh.device)

    def begin(self) -> None:
        begin(self.workspace)

    def place(self, method: str, partial: Tensor) -> None:
        if method in FUSED:  # whose calls take turns
            self.workspace.partials[:, : len(partial)] = partial
        elif method not in (PEER, communication.UNFUSED, "nccl"):
            self._symmetric[: len(partial)] = partial

    def run(
        self, method: str, partial: Tensor, residual: Tensor, weight: Tensor, *, is_placed: bool = False
    ) -> tuple[Tensor, Tensor]:
        num_tokens = len(partial)
        if method in FUSED:
            own = None if is_placed or method != "one-shot" else partial
            if not is_placed and own is None:
                self.workspace.partial(num_tokens).copy_(partial)
            options: dict[str, Any] = {"kind": "rms", "eps": EPS, "strategy": method, "own": own}
            if method == COPIES:
                options |= {"strategy": "two-shot", "max_programs": 0}
            return all_reduce_norm(self.workspace, num_tokens, residual, weight, None, None, **options)
        if method == PEER:
            assert self._peer is not None
            return self._peer(partial, residual, weight, EPS)
        if method not in (communication.UNFUSED, "nccl"):
            memory = self._symmetric[:num_tokens]
            partial = memory if is_placed else memory.copy_(partial)
        total = communication.reduce_by(method, partial, self.group)
        return fused_add_norm(total, residual, weight, None, None, kind="rms", eps=EPS, out_dtype=self.dtype)

    def owned(self, method: str, num_tokens: int) -> slice:
        if method not in ("two-shot", COPIES):
            return slice(num_tokens)
        rows = owned_rows(num_tokens, self.mesh.tp_rank, self.mesh.tp_size)
        return slice(rows.start, rows.stop)


class Bench:
    """Measures on the ranks of a mesh; every call is collective."""

    def __init__(self, mesh: ParallelMesh, dtype: torch.dtype, seed: int) -> None:
        self.mesh, self.dtype, self.seed = mesh, dtype, seed

    def time(self, function: Callable[[], object], num_calls: int, *, use_cuda_graph: bool = True) -> Timing:
        """One call among `num_calls` in a CUDA graph; the maximum over ranks of each sample."""
        self.settle()
        return time_function(
            function,
            [()] * num_calls,
            device=self.mesh.device,
            use_cuda_graph=use_cuda_graph and self.mesh.device.type == "cuda",
            reduce_max=self.largest,
        )

    def largest(self, samples: list[float]) -> list[float]:
        """Of each sample, the maximum over ranks."""
        return [max(each) for each in zip(*self.mesh.gather(samples), strict=True)]

    def settle(self) -> None:
        """Return when every rank has come here and its device is idle."""
        if self.mesh.device.type == "cuda":
            torch.cuda.synchronize(self.mesh.device)
        self.mesh.gather(None)

    def times(self, point: Point, methods: Methods, names: Sequence[str]) -> dict[str, Timing]:
        """Every method checked, then every method timed."""
        inputs = make_inputs(point, self.mesh.tp_size, self.dtype, self.mesh.device, self.seed)
        expected = inputs.equation()
        partial = torch.empty_like(inputs.partials[0])  # some methods leave their sum there
        for name in names:
            partial.copy_(inputs.partials[self.mesh.tp_rank])
            self.check(point, methods, name, partial, inputs, expected)
        del expected
        timings = {}
        for name in names:
            residual = inputs.residual[methods.owned(name, point.num_tokens)]
            timings[name] = self.time(
                lambda name=name, residual=residual: methods.run(  # type: ignore[misc]
                    name, partial, residual, inputs.weight, is_placed=is_placed(point)
                ),
                num_calls(point),
            )
        return timings

    def check(
        self,
        point: Point,
        methods: Methods,
        name: str,
        partial: Tensor,
        inputs: Inputs,
        expected: tuple[Tensor, Tensor],
    ) -> None:
        """ValueError on all ranks if a method does not follow the equation, or ours not alike on all ranks."""
        self.settle()  # torch's own do not say what a rank that is ahead may overwrite
        owned = methods.owned(name, point.num_tokens)
        if is_placed(point):
            methods.place(name, partial)
        hidden, residual = methods.run(name, partial, inputs.residual[owned], inputs.weight, is_placed=is_placed(point))
        errors = (largest_row_error(hidden, expected[0]), largest_row_error(residual, expected[1][owned]))
        kind = "ours" if name in FUSED else "others"
        limits = (MAX_ERROR[kind], MAX_RESIDUAL_ERROR[transport_of(name, methods.transport)])
        found = self.mesh.gather((errors, checksum(hidden).tolist()))
        for rank, (of_rank, _) in enumerate(found):
            for what, error, limit in zip(("hidden states", "residual"), of_rank, limits, strict=True):
                if not error <= limit:
                    raise ValueError(
                        f"{name} at {point}: a row of rank {rank}'s {what} is off by {error} of what the equation "
                        f"gives (at most {limit}); it is not timed"
                    )
        if name in FUSED and any(checksum_of_rank != found[0][1] for _, checksum_of_rank in found):
            raise ValueError(f"{name} at {point}: the ranks' hidden states differ; it is not timed")

    def link_gb_per_s(self, num_bytes: int = LINK_BYTES) -> float:
        """Rate at which every GPU receives from another while it sends as much: the best of several plain copies."""
        assert self.mesh.tp_group is not None
        copies = communication.link_copies(num_bytes, self.mesh.device, self.mesh.tp_group)
        timings = {name: self.time(copy, 1, use_cuda_graph=False) for name, copy in copies.items()}
        self.settle()  # before the memory is given back
        rates = {name: timing.achieved_gb_per_s(num_bytes) for name, timing in timings.items()}
        logger.info("link, each way at once: " + ", ".join(f"{name} {rate:.0f} GB/s" for name, rate in rates.items()))
        return max(rates.values())


def transport_of(method: str, transport: str) -> str:
    """How a method's data travel; all but the two-shot kernel's go one by one even where the switch could add."""
    if method not in FUSED:
        return "others"
    return transport if method == "two-shot" else "p2p"


def is_placed(point: Point) -> bool:
    """Whether a matrix product writes the partial sums where they are needed."""
    return point.num_tokens > MAX_ROWS


def num_calls(point: Point) -> int:
    """Calls in one graph: enough that starting it does not count. Even, for buffers that take turns."""
    return 20 if point.numel < 2**22 else 4


def largest_row_error(found: Tensor, expected: Tensor) -> float:
    """||found - expected|| / ||expected|| of the worst row, NaN if there is one; 0 of no rows."""
    if len(expected) == 0:
        return 0.0
    difference = found.float() - expected
    return float((difference.norm(dim=1) / expected.norm(dim=1)).max())


def checksum(hidden: Tensor) -> Tensor:
    """Two int64 numbers, others for half-precision [T, D] that differ in a bit or in the order of rows or columns."""
    bits = hidden.view(torch.int16)
    rows, columns = bits.sum(1, dtype=torch.int64), bits.sum(0, dtype=torch.int64)
    places = torch.arange(1, max(bits.shape) + 1, device=bits.device)
    return torch.stack([(rows * places[: len(rows)]).sum(), (columns * places[: len(columns)]).sum()])
