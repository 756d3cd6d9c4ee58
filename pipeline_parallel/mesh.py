"""Which part of the work is this process's: its place on the axes data, pipeline and tensor parallel.

Consecutive ranks are tensor-parallel neighbours (they communicate most, and share a host's fast links), then come
pipeline stages, then replicas: rank = (dp_rank * pp_size + pp_rank) * tp_size + tp_rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

AXES = ("dp", "pp", "tp")
Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True)
class ParallelMesh:
    """One process's place. Its groups exist only where it was made from a process group."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1
    device: torch.device
    tp_group: dist.ProcessGroup | None = field(default=None, repr=False, compare=False)
    pp_group: dist.ProcessGroup | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        for axis in AXES:
            rank, size = getattr(self, f"{axis}_rank"), getattr(self, f"{axis}_size")
            if not 0 <= rank < size:
                raise ValueError(f"mesh: {axis}_rank {rank} is not within {axis}_size {size}")

    @staticmethod
    def single(device: torch.device | str) -> ParallelMesh:
        """One process that does everything."""
        return ParallelMesh(device=torch.device(device))

    @staticmethod
    def from_process_group(tp_size: int, pp_size: int, device: torch.device | str) -> ParallelMesh:
        """This process's place among all ranks of the default process group (a collective call).

        What tp_size * pp_size leaves of the world is data parallel. ValueError with both numbers if it does not fit.
        """
        device = torch.device(device)
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        check_sizes(tp_size, pp_size, world_size)
        if world_size == 1:
            return ParallelMesh.single(device)
        dp_size = world_size // (tp_size * pp_size)
        axes = init_device_mesh(device.type, (dp_size, pp_size, tp_size), mesh_dim_names=AXES)
        return ParallelMesh(
            tp_rank=axes.get_local_rank("tp"),
            tp_size=tp_size,
            pp_rank=axes.get_local_rank("pp"),
            pp_size=pp_size,
            dp_rank=axes.get_local_rank("dp"),
            dp_size=dp_size,
            device=device,
            tp_group=axes.get_group("tp"),
            pp_group=axes.get_group("pp"),
        )

    @property
    def world_size(self) -> int:
        """All processes."""
        return self.dp_size * self.pp_size * self.tp_size

    @property
    def rank(self) -> int:
        """This process among all of them."""
        return self.rank_at()

    @property
    def is_leader(self) -> bool:
        """Whether this process is the first of its replica."""
        return self.pp_rank == 0 and self.tp_rank == 0

    def rank_at(self, *, pp_rank: int | None = None, tp_rank: int | None = None) -> int:
        """The global rank at another place of this replica; what is not given is this process's own."""
        pp_rank = self.pp_rank if pp_rank is None else pp_rank
        tp_rank = self.tp_rank if tp_rank is None else tp_rank
        return (self.dp_rank * self.pp_size + pp_rank) * self.tp_size + tp_rank

    def replica_ranks(self) -> list[int]:
        """Global ranks of this replica, its leader first."""
        first = self.rank_at(pp_rank=0, tp_rank=0)
        return list(range(first, first + self.pp_size * self.tp_size))

    def from_rank_0(self, make: Callable[[], Value]) -> Value:
        """What `make` returns on rank 0, on all ranks (a collective call)."""
        if self.world_size == 1:
            return make()
        values: list[Any] = [make() if self.rank == 0 else None]
        dist.broadcast_object_list(values, src=0, device=torch.device("cpu"))
        return values[0]

    def gather(self, value: Value) -> list[Value]:
        """Everybody's value, in order of ranks (a collective call)."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of all ranks' tensors of one shape (a collective call); for small ones, on the CPU."""
        return torch.stack(self.gather(tensor)).sum(0)

    def describe(self, rank: int | None = None) -> str:
        """A rank (None: this one) in messages: `rank 3 (tp 1, dp 1)`, axes of size 1 left out."""
        rank = self.rank if rank is None else rank
        rest, tp_rank = divmod(rank, self.tp_size)
        dp_rank, pp_rank = divmod(rest, self.pp_size)
        places = (("tp", tp_rank, self.tp_size), ("pp", pp_rank, self.pp_size), ("dp", dp_rank, self.dp_size))
        parts = [f"{axis} {place}" for axis, place, size in places if size > 1]
        return f"rank {rank}" + (f" ({', '.join(parts)})" if parts else "")


def check_sizes(tp_size: int, pp_size: int, world_size: int) -> None:
    """ValueError if so many processes cannot be arranged like this."""
    for name, size in (("tp-size", tp_size), ("pp-size", pp_size)):
        if size < 1:
            raise ValueError(f"--{name} must be at least 1, got {size}")
    if world_size % (tp_size * pp_size):
        processes = "1 process runs" if world_size == 1 else f"{world_size} processes run"
        raise ValueError(
            f"--tp-size {tp_size} times --pp-size {pp_size} is {tp_size * pp_size}, but {processes}: start a "
            f"multiple of {tp_size * pp_size} (torchrun --nproc-per-node {tp_size * pp_size}; what is left over is "
            "data parallel)"
        )
