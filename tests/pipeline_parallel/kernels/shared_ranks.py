"""Ranks as processes of this host that have each other's memory mapped, as GPUs have over NVLink: for kernels that run
under Triton's interpreter.

Every rank maps every buffer at addresses of its own, in an order of its own: an address that belongs to another rank
is wrong, not right by chance. Bytes around the signal pads hold a pattern that nobody may touch.
"""

import mmap
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline_parallel.kernels.workspace import Workspace, workspace_of

GUARD_BYTES = 4096
GUARD = 0xA5
PATIENCE_S = 60.0


class SharedMemory:
    """One workspace's memory on all ranks, made before they fork."""

    def __init__(self, world_size: int, max_tokens: int, hidden_size: int, dtype: torch.dtype, pad_bytes: int) -> None:
        self.world_size, self.max_tokens, self.hidden_size, self.dtype = world_size, max_tokens, hidden_size, dtype
        self.pad_bytes = pad_bytes
        self.buffer_bytes = 3 * max_tokens * hidden_size * dtype.itemsize
        self.files = [os.memfd_create(f"rank {rank}") for rank in range(world_size)]
        for file in self.files:
            os.ftruncate(file, self.buffer_bytes + 2 * GUARD_BYTES + pad_bytes)
            buffer, before, _, after = self._parts(file)
            buffer.fill_(0xFF)  # NaN in either type
            before.fill_(GUARD)
            after.fill_(GUARD)

    def workspace(self, rank: int) -> Workspace:
        """The workspace of `rank`, to be asked for in its process."""
        order = [(rank + step) % self.world_size for step in range(self.world_size)]
        mapped = {peer: self._parts(self.files[peer]) for peer in order}
        _, _, pad, _ = mapped[rank]
        buffers = [mapped[peer][0] for peer in range(self.world_size)]
        return workspace_of(
            [buffer.view(self.dtype).view(3 * self.max_tokens, self.hidden_size) for buffer in buffers],
            pad.view(torch.int32),
            rank=rank,
            signal_addresses=[mapped[peer][2].data_ptr() for peer in range(self.world_size)],
            num_multiprocessors=132,
            handle=mapped,
        )

    def assert_guards_intact(self) -> None:
        for file in self.files:
            _, before, _, after = self._parts(file)
            assert (before == GUARD).all() and (after == GUARD).all(), "bytes around a signal pad have changed"

    def _parts(self, file: int) -> tuple[Tensor, ...]:
        """Buffer, guard, signal pad, guard: bytes of a fresh mapping."""
        mapping = torch.frombuffer(mmap.mmap(file, 0), dtype=torch.uint8)
        return mapping.split((self.buffer_bytes, GUARD_BYTES, self.pad_bytes, GUARD_BYTES))


def run_ranks(world_size: int, function: Callable[[int], Any], directory: Path) -> list[Any]:
    """`function(rank)` in a process a rank, all at once; what they return (tensors and plain values), by rank.

    An AssertionError with what was raised if one fails or is not done in time.
    """
    children = {}
    for rank in range(world_size):
        pid = os.fork()  # not spawned: importing torch in each would take longer than the tests
        if pid == 0:
            os._exit(_run(rank, function, directory))
        children[rank] = pid
    deadline = time.monotonic() + PATIENCE_S
    ended: dict[int, int] = {}
    while len(ended) < world_size and time.monotonic() < deadline and not any(ended.values()):
        for rank in children.keys() - ended.keys():
            pid, status = os.waitpid(children[rank], os.WNOHANG)
            if pid:
                ended[rank] = status
        time.sleep(0.002)
    for rank in children.keys() - ended.keys():
        os.kill(children[rank], 9)
        os.waitpid(children[rank], 0)
    said = [file.read_text() for file in sorted(directory.glob("*.error"))]
    assert len(ended) == world_size and not any(ended.values()), f"ended: {ended}\n" + "\n".join(said)
    return [torch.load(directory / f"{rank}.pt") for rank in range(world_size)]


def _run(rank: int, function: Callable[[int], Any], directory: Path) -> int:
    try:
        torch.set_num_threads(1)  # the parent's pool of threads was not forked with it
        torch.save(function(rank), directory / f"{rank}.pt")
    except BaseException:
        (directory / f"{rank}.error").write_text(traceback.format_exc())
        return 1
    return 0
