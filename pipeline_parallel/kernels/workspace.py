"""Symmetric memory of one tensor-parallel group: what all_reduce_norm reads its partial sums from and writes to.

Each of the W ranks holds one buffer of the same layout, mapped into all of them over NVLink:

    partials [2, max_tokens, D]   what this rank adds to the sum; used alternately
    hidden   [max_tokens, D]      the normalised result

both bfloat16 or float16, with a signal pad of int32 zeros (barrier.py). Addresses are device tables int64 [W]; where
every rank has NVLink multicast there is one more address, at which a load adds up all the buffers and a store reaches
all of them ("multimem"); elsewhere ranks load and store at each other ("p2p").

A workspace, its pad included, belongs to one group and to one stream at a time: two streams that may run at once take
a workspace each. Nothing but the order of a stream and the barriers protects it (all_reduce_norm.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from loguru import logger
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16)
MAX_HIDDEN_SIZE = 16384
HIDDEN_SIZE_STEP = 8  # elements in 16 bytes, which are moved as one
MAX_RANKS = 8  # of one host's NVLink; a barrier takes a thread per rank
NUM_PARTIALS = 2
STREAM_BARRIERS = 2  # whose slots are the last of a pad, as if of so many more programs (copied_two_shot.py)
NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
NCCL_MULTICAST = "NCCL_NVLS_ENABLE"


@dataclass(kw_only=True)
class Workspace:
    """One rank's view of the group's symmetric memory."""

    rank: int
    world_size: int
    buffers: list[Tensor]
    """[3 * max_tokens, D] of every rank: partials, then hidden."""
    partials: Tensor
    """[2, max_tokens, D], this rank's."""
    hidden: Tensor
    """[max_tokens, D], this rank's."""
    partial_pointers: Tensor
    """int64 [W]: the address of every rank's `partials`."""
    hidden_pointers: Tensor
    """int64 [W]: the address of every rank's `hidden`."""
    signal_pointers: Tensor
    """int64 [W]: the address of every rank's signal pad."""
    signal_addresses: list[int]
    """The same, known to the host."""
    signal_pad: Tensor
    """int32, this rank's: zeros whenever no call is under way."""
    num_multiprocessors: int
    """Of every rank's device: what limits the programs that run at once."""
    multicast_address: int = 0
    """Where all buffers answer at once, or 0."""
    handle: Any = field(default=None, repr=False)
    """What keeps the peers' memory mapped."""
    partial_idx: int = 0
    """Which of the two partials the next call reads."""

    @property
    def max_tokens(self) -> int:
        return self.hidden.shape[0]

    @property
    def hidden_size(self) -> int:
        return self.hidden.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.hidden.dtype

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    @property
    def signal_pad_bytes(self) -> int:
        return self.signal_pad.numel() * self.signal_pad.itemsize

    @property
    def transport(self) -> str:
        return "multimem" if self.multicast_address else "p2p"

    def partial(self, num_tokens: int) -> Tensor:
        """[num_tokens, D]: where this rank's part of the next sum is to be written. ValueError if it is too much."""
        check_num_tokens(num_tokens, self.max_tokens)
        return self.partials[self.partial_idx, :num_tokens]

    def partial_of(self, rank: int, num_tokens: int) -> Tensor:
        """[num_tokens, D]: what another rank's `partial` is, in its memory."""
        start = self.partial_idx * self.max_tokens
        return self.buffers[rank][start : start + num_tokens]

    def hidden_of(self, rank: int) -> Tensor:
        """[max_tokens, D]: another rank's `hidden`, in its memory."""
        return self.buffers[rank][NUM_PARTIALS * self.max_tokens :]

    def check_programs(self, programs: int) -> None:
        """ValueError if the signal pads have no room for so many programs."""
        needed = (programs + STREAM_BARRIERS) * self.world_size * self.signal_pad.itemsize
        if needed > self.signal_pad_bytes:
            raise ValueError(
                f"{programs} programs on {self.world_size} ranks need a signal pad of {needed} bytes, this one has "
                f"{self.signal_pad_bytes} (torch.distributed._symmetric_memory.set_signal_pad_size, before the "
                "workspace is created)"
            )


def create_workspace(
    group: dist.ProcessGroup,
    max_tokens: int,
    hidden_size: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> Workspace:
    """Allocate and map the memory (a collective call, the same on all ranks of `group`).

    Where TORCH_SYMM_MEM_DISABLE_MULTICAST=1 nothing here creates a multicast object, and where it is not set nothing is
    done. ValueError for that, for a shape, type or device that the kernels do not take, for ranks that differ in what
    they ask for, and inside a graph capture, where ranks cannot wait for each other.
    """
    device = torch.device(device)
    check_request(group.size(), max_tokens, hidden_size, dtype, device)
    require_stated_multicast()
    if torch.cuda.is_current_stream_capturing():
        raise ValueError("a workspace cannot be created while a CUDA graph is captured: create it before")
    asked: dict[str, Any] = {"max_tokens": max_tokens, "hidden_size": hidden_size, "dtype": str(dtype)}
    asked[NO_MULTICAST] = os.environ.get(NO_MULTICAST) == "1"
    asked["multiprocessors"] = torch.cuda.get_device_properties(device).multi_processor_count
    gather = gatherer(group)
    check_same(gather(asked))
    import torch.distributed._symmetric_memory as symmetric_memory  # not in every build of torch

    with torch.cuda.device(device):
        buffer = symmetric_memory.empty((NUM_PARTIALS + 1) * max_tokens, hidden_size, dtype=dtype, device=device)
        handle = symmetric_memory.rendezvous(buffer, group)
    buffers = [handle.get_buffer(rank, buffer.shape, dtype) for rank in range(group.size())]
    buffers[handle.rank] = buffer
    assert [one.data_ptr() for one in buffers] == list(handle.buffer_ptrs), "a buffer does not begin its allocation"
    multicast_address = agreed_multicast_address(handle.multicast_ptr, gather, allowed=not asked[NO_MULTICAST])
    signal_pad = handle.get_signal_pad(handle.rank, dtype=torch.int32)
    return workspace_of(
        buffers,
        signal_pad,
        rank=handle.rank,
        signal_addresses=handle.signal_pad_ptrs,
        num_multiprocessors=asked["multiprocessors"],
        multicast_address=multicast_address,
        handle=handle,
    )


def workspace_of(
    buffers: list[Tensor],
    signal_pad: Tensor,
    *,
    rank: int,
    signal_addresses: list[int],
    num_multiprocessors: int,
    multicast_address: int = 0,
    handle: Any = None,
) -> Workspace:
    """The workspace of `rank` in buffers [3 * max_tokens, D], one per rank, that are mapped already."""
    buffer, addresses = buffers[rank], [one.data_ptr() for one in buffers]
    max_tokens = buffer.shape[0] // (NUM_PARTIALS + 1)
    partials, hidden = buffer.split((NUM_PARTIALS * max_tokens, max_tokens))

    def table(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=buffer.device)

    return Workspace(
        rank=rank,
        world_size=len(buffers),
        buffers=buffers,
        partials=partials.view(NUM_PARTIALS, max_tokens, -1),
        hidden=hidden,
        partial_pointers=table(addresses),
        hidden_pointers=table([address + partials.numel() * partials.itemsize for address in addresses]),
        signal_pointers=table(signal_addresses),
        signal_addresses=list(signal_addresses),
        signal_pad=signal_pad,
        num_multiprocessors=num_multiprocessors,
        multicast_address=multicast_address,
        handle=handle,
    )


def why_multicast_is_unclear() -> str | None:
    """What the environment leaves open about multicast objects; None: it says whether they may be created.

    Not merely a default: on a shared host a program that creates one may put the GPUs out of service for others.
    """
    said = os.environ.get(NO_MULTICAST)
    if said not in ("0", "1"):
        return (
            f"{NO_MULTICAST} is {said!r}: set it to 1 (peer-to-peer only, no multicast object is created) or, "
            "where the host allows multicast, to 0"
        )
    if said == "1" and os.environ.get(NCCL_MULTICAST) != "0":
        return f"{NO_MULTICAST}=1 forbids multicast, which NCCL uses too: set {NCCL_MULTICAST}=0"
    return None


def require_stated_multicast() -> None:
    """ValueError unless the environment says whether multicast objects may be created; call it before ranks connect."""
    problem = why_multicast_is_unclear()
    if problem is not None:
        raise ValueError(problem)


def gatherer(group: dist.ProcessGroup) -> Callable[[Any], list[Any]]:
    """A function that returns all ranks' values in order (a collective call)."""

    def gather(value: Any) -> list[Any]:
        values: list[Any] = [None] * group.size()
        dist.all_gather_object(values, value, group=group)
        return values

    return gather


def agreed_multicast_address(address: int | None, gather: Callable[[Any], list[Any]], *, allowed: bool) -> int:
    """`address` if every rank has one, else 0 on all of them, said once (a collective call)."""
    if not allowed:
        assert not address, f"{NO_MULTICAST}=1, but torch created a multicast object"
        return 0
    without = [rank for rank, has_one in enumerate(gather(bool(address))) if not has_one]
    if not without:
        assert address
        return address
    logger.info(f"no NVLink multicast on ranks {without}: all ranks reduce peer to peer")
    return 0


def check_request(world_size: int, max_tokens: int, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
    """ValueError on the first value that the kernels do not take."""
    if not 2 <= world_size <= MAX_RANKS:
        raise ValueError(f"a group of {world_size} ranks: 2 to {MAX_RANKS} can share symmetric memory")
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
    if not 0 < hidden_size <= MAX_HIDDEN_SIZE or hidden_size % HIDDEN_SIZE_STEP:
        raise ValueError(f"hidden_size {hidden_size} is not a multiple of {HIDDEN_SIZE_STEP} up to {MAX_HIDDEN_SIZE}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype} is not one of {DTYPES}")
    if device.type != "cuda":
        raise ValueError(f"symmetric memory is on GPUs, not on {device}")


def check_same(asked: list[dict[str, Any]]) -> None:
    """ValueError unless all ranks ask for the same."""
    for name, value in asked[0].items():
        found = [one[name] for one in asked]
        if any(other != value for other in found):
            raise ValueError(f"the ranks differ in {name}: {', '.join(map(str, found))} (ranks 0 to {len(found) - 1})")


def check_num_tokens(num_tokens: int, max_tokens: int) -> None:
    if not 0 <= num_tokens <= max_tokens:
        raise ValueError(f"num_tokens {num_tokens} is not within the workspace's 0 to {max_tokens}")
