"""Communication between ranks: sums and joins within a tensor-parallel group, and hidden states along the pipeline;
also the all-reduces of NCCL and torch, which ours are compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from modules.normalization import Norm, add_norm, residual_dtype
from modules.specs import NormPlacement
from pipeline_parallel.mesh import ParallelMesh

# Renamed after torch 2.11; the old name warns.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def all_gather_last(states: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[..., n] on each of W ranks -> [..., W * n] on all of them, in order of ranks."""
    size = group.size()
    flat = states.reshape(-1, states.shape[-1]).contiguous()
    joined = flat.new_empty(size * flat.shape[0], flat.shape[1])
    _all_gather(joined, flat, group=group)
    return joined.view(size, *flat.shape).permute(1, 0, 2).reshape(*states.shape[:-1], size * states.shape[-1])


class ReducingAddNorm:
    """The residual junction under tensor parallelism: the ranks' partial sums are added up first, in float32."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def __call__(
        self,
        partial: Tensor,
        residual: Tensor | None,
        norm: Norm | None,
        bias: Tensor | None,
        *,
        placement: NormPlacement,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        """As `modules.normalization.add_norm`; `partial` is this rank's part of the sum and may be overwritten."""
        partial = partial.to(residual_dtype(partial.dtype)).contiguous()
        dist.all_reduce(partial, group=self.group)
        return add_norm(partial, residual, norm, bias, placement=placement, dtype=dtype)


class HandOff:
    """Sends and receives along one pipeline, through buffers that are reused.

    Two buffers are used alternately for sending, so that a stage computes while its last result is being sent. A buffer
    is written again only when its send is done.
    """

    def __init__(self, mesh: ParallelMesh) -> None:
        self.mesh = mesh
        self._outgoing = [self._empty(0), self._empty(0)]
        self._sends: list[dist.Work | None] = [None, None]
        self._incoming = self._empty(0)
        self._slot = 0

    def send(self, parts: list[Tensor]) -> None:
        """Send tensors to the next stage, the widest type first (so that all are aligned)."""
        slot = self._slot
        self._slot = 1 - slot
        pending = self._sends[slot]
        if pending is not None:
            pending.wait()
        num_bytes = sum(part.numel() * part.itemsize for part in parts)
        if self._outgoing[slot].numel() < num_bytes:
            self._outgoing[slot] = self._empty(num_bytes)
        buffer = self._outgoing[slot][:num_bytes]
        torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts], out=buffer)
        target = self.mesh.rank_at(pp_rank=self.mesh.pp_rank + 1)
        self._sends[slot] = dist.isend(buffer, dst=target, group=self.mesh.pp_group)

    def receive(self, parts: list[tuple[torch.dtype, tuple[int, ...]]]) -> list[Tensor]:
        """Tensors of these types and shapes from the stage before; they stay valid until the next call."""
        sizes = [torch.Size(shape).numel() * dtype.itemsize for dtype, shape in parts]
        if self._incoming.numel() < sum(sizes):
            self._incoming = self._empty(sum(sizes))
        buffer = self._incoming[: sum(sizes)]
        source = self.mesh.rank_at(pp_rank=self.mesh.pp_rank - 1)
        work = dist.irecv(buffer, src=source, group=self.mesh.pp_group)
        assert work is not None
        work.wait()
        return [
            received.view(dtype).view(shape)
            for received, (dtype, shape) in zip(buffer.split(sizes), parts, strict=True)
        ]

    def finish(self) -> None:
        """Wait until all sends are done."""
        for pending in self._sends:
            if pending is not None:
                pending.wait()
        self._sends = [None, None]

    def _empty(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.mesh.device)


UNFUSED = "nccl float32"  # what the model does where nothing is fused: `ReducingAddNorm` adds up in float32
# By the type of what is summed; all but UNFUSED add up in that type, too. Torch's own take no float16.
NAMES = {
    torch.bfloat16: (UNFUSED, "nccl", "torch one-shot", "torch two-shot"),
    torch.float16: (UNFUSED, "nccl"),
}


def symmetric_tensor(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup
) -> tuple[Tensor, Any]:
    """(zeros, handle): memory on every rank of the group that all of them reach (a collective call)."""
    from torch.distributed import _symmetric_memory as symmetric_memory

    tensor = symmetric_memory.empty(shape, dtype=dtype, device=device).zero_()
    return tensor, symmetric_memory.rendezvous(tensor, group)


def reduce_by(name: str, partial: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over ranks of `partial`, which may be overwritten; torch's own take theirs in symmetric memory."""
    if name in (UNFUSED, "nccl"):
        partial = partial.float() if name == UNFUSED else partial
        dist.all_reduce(partial, group=group)
        return partial
    if name == "torch one-shot":
        return torch.ops.symm_mem.one_shot_all_reduce(partial, "sum", group.group_name)
    if name == "torch two-shot":
        return torch.ops.symm_mem.two_shot_all_reduce_(partial, "sum", group.group_name)
    raise ValueError(f"all-reduce {name!r} is not one of {', '.join(NAMES[torch.bfloat16])}")


def link_copies(num_bytes: int, device: torch.device, group: dist.ProcessGroup) -> dict[str, Callable[[], object]]:
    """Ways to move `num_bytes` from or to the next rank's memory, by name (a collective call).

    When all ranks run the same one at once, every GPU receives and sends that many bytes.
    """
    tensor, handle = symmetric_tensor((num_bytes // 4,), torch.float32, device, group)
    peer = handle.get_buffer((group.rank() + 1) % group.size(), tensor.shape, tensor.dtype)
    local = torch.zeros_like(tensor)

    def copy(kept: object = (tensor, handle)) -> None:  # the peers' memory is mapped as long as these two live
        local.copy_(peer)

    return {
        "copy engine": copy,
        "loads": lambda: torch.mul(peer, 1.0, out=local),
        "stores": lambda: torch.mul(local, 1.0, out=peer),
    }
