"""All-reduces of others, to measure ours against: NCCL's, and torch's over symmetric memory; and plain copies over the
link.

Symmetric memory is imported where it is used: a torch without CUDA has none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

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
