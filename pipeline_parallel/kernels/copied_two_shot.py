"""Two-shot of all_reduce_norm with copies between the ranks instead of loads and stores by multiprocessors.

    staged[peer] <- partial_peer[my rows]            each peer's part of my rows, by the copy engines
    hidden[my rows], new_residual <- add_norm(partial[my rows] + staged, ...)     one ordinary kernel, on this GPU alone
    hidden_peer[my rows] <- hidden[my rows]          to each peer, by the copy engines

with a barrier before the first copy and one after the last. Copies and barriers (`stream_barrier`) take no
multiprocessor and wait for none, so what runs beside them keeps its own (as decomposed all-gathers do in torch's
asynchronous tensor parallelism); alone, a call is slower than the one kernel, which moves and computes at once. The sum
starts with this rank's own part, the others follow in order of ranks; hidden is computed once and has the same bits
everywhere.

The barrier needs no multiprocessor: the streams themselves write to signal pads and wait for them.

A kernel, however small, starts when something leaves a multiprocessor, and a large product of matrices (persistent, one
program per multiprocessor) leaves none before it ends: beside one of 1.2 ms on an H200 a kernel of one thread waited
for 1.2 ms, and these operations took 8 µs. They are cuStreamWriteValue32 and cuStreamWaitValue32 of the CUDA driver.

Each rank tells every peer by putting `tag` into its own slot of the peer's pad, waits for each peer's `tag` in its own
pad, and makes that slot zero again. There is no compare-and-swap, so nothing may be put where something still is: the
two barriers of a call, ENTRY and EXIT, have slots of their own and alternate. Whoever signals at ENTRY again has
passed EXIT, so all ranks have come to EXIT, and have emptied their ENTRY slots before that. A write waits for what its
stream did before, copies to peers included, and is ordered behind it for whoever waits (CUDA driver API, "Stream Memory
Operations"). Ranks that differ in `tag` wait for ever: what tells them apart is `begin`, with which a pass starts.

On memory that processes have mapped instead (Triton's interpreter) the same writes and waits are made at once.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from modules.kernels.add_norm import fused_add_norm
from pipeline_parallel.kernels.barrier import check_launch, is_interpreted
from pipeline_parallel.kernels.workspace import STREAM_BARRIERS, Workspace

ENTRY: Literal[0] = 0
EXIT: Literal[1] = 1
EQUAL = 1  # CU_STREAM_WAIT_VALUE_EQ


def copied_two_shot(
    workspace: Workspace,
    num_tokens: int,
    rows: range,
    residual: Tensor | None,
    weight: Tensor | None,
    norm_bias: Tensor | None,
    bias: Tensor | None,
    *,
    kind: str,
    eps: float,
) -> Tensor:
    """This rank's rows of the new residual; the result is in `workspace.hidden` (see `all_reduce_norm`, which checks
    the arguments and switches to the other partial). A CUDA graph can hold it."""
    peers = [peer for peer in range(workspace.world_size) if peer != workspace.rank]
    mine = slice(rows.start, rows.stop)
    tag = 2 * num_tokens + 2
    stream_barrier(workspace, ENTRY, tag)
    staged = torch.empty(len(peers), len(rows), workspace.hidden_size, dtype=workspace.dtype, device=workspace.device)
    for place, peer in enumerate(peers):
        staged[place].copy_(workspace.partial_of(peer, num_tokens)[mine])
    hidden, new_residual = fused_add_norm(
        workspace.partial(num_tokens)[mine],
        residual,
        weight,
        norm_bias,
        bias,
        kind=kind,
        eps=eps,
        out_dtype=workspace.dtype,
        more=staged,
        out=workspace.hidden[mine],
    )
    for peer in peers:
        workspace.hidden_of(peer)[mine].copy_(hidden)
    stream_barrier(workspace, EXIT, tag)
    return new_residual


def stream_barrier(workspace: Workspace, place: Literal[0, 1], tag: int) -> None:
    """Wait, on the device, until every rank has come to ENTRY or EXIT of the call `tag`, not 0 (a collective call).

    RuntimeError where the driver refuses, or is not there.
    """
    check_launch(0, workspace)
    world_size, mine = workspace.world_size, workspace.rank
    slots = workspace.signal_pad.numel() // world_size - STREAM_BARRIERS + place

    def slot(owner: int, sender: int) -> int:
        return workspace.signal_addresses[owner] + workspace.signal_pad.itemsize * (slots * world_size + sender)

    peers = [peer for peer in range(world_size) if peer != mine]
    write, wait = (_store, _spin) if is_interpreted() else _operations(workspace.device)
    with torch.cuda.device_of(workspace.hidden):  # the default stream's handle is that of the current device
        for peer in peers:
            write(slot(peer, mine), tag)
        for peer in peers:
            wait(slot(mine, peer), tag)
            write(slot(mine, peer), 0)


def _operations(device: torch.device) -> tuple[Callable[[int, int], None], Callable[[int, int], None]]:
    """(write, wait) at an address, in the current stream."""
    driver, stream = _driver(), ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)

    def write(address: int, value: int) -> None:
        _check("cuStreamWriteValue32", driver.cuStreamWriteValue32_v2(stream, address, value & 0xFFFFFFFF, 0))

    def wait(address: int, value: int) -> None:
        _check("cuStreamWaitValue32", driver.cuStreamWaitValue32_v2(stream, address, value & 0xFFFFFFFF, EQUAL))

    return write, wait


@cache
def _driver() -> ctypes.CDLL:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        for name in ("cuStreamWriteValue32_v2", "cuStreamWaitValue32_v2"):
            getattr(driver, name).argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)
    except (OSError, AttributeError) as problem:
        raise RuntimeError(f"no CUDA driver with stream memory operations ({problem})") from problem
    return driver


def _check(name: str, error: int) -> None:
    if error:
        raise RuntimeError(f"{name} failed (CUDA driver error {error})")


def _store(address: int, value: int) -> None:
    ctypes.c_int32.from_address(address).value = value


def _spin(address: int, value: int) -> None:
    slot = ctypes.c_int32.from_address(address)
    while slot.value != value:
        time.sleep(0)  # let the ranks run that it waits for
