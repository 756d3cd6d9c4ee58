"""The residual junction of a tensor-parallel model in one kernel: add up what the ranks hold, and normalise the stream.

    new_residual[t] = residual[t] + (sum over ranks r of float32(partial_r[t]) + bias)
    hidden[t] = norm(new_residual[t]) * weight + norm_bias               (norm: rms, layer or none, as in add_norm)

Legend: W ranks, T tokens, D hidden. partial_r [T, D] and hidden [T, D] bfloat16 or float16, in symmetric memory
(workspace.py); residual, new_residual [T or this rank's rows, D] float32; weight, norm_bias, bias [D] float32, bfloat16
or float16; D a multiple of 8 up to 16384; all contiguous.

- one-shot, for few tokens: every rank adds up all rows itself and keeps the whole residual. One barrier, at entry.
- two-shot: rank r owns rows [r * ceil(T / W), (r + 1) * ceil(T / W)): it adds up those, keeps their residual,
  normalises them and stores hidden to all ranks. A barrier at entry and one at exit. Without a multiprocessor of its
  own (`max_programs` 0) the copy engines move the data (copied_two_shot.py).

Transports: peer to peer, or multimem (two-shot only, sm_90 and later, where NVLink has multicast), in which the switch
adds up a load over all ranks and hands a store to all of them.

Rounding: each half-block's partial sum is rounded to the workspace's type by whoever writes it: a matrix product that
ends there (whose split sums torch lets cuBLAS round one by one, unless allow_bf16_reduced_precision_reduction is off),
or in one-shot this kernel, once, from `own`, which saves a kernel for the copy. Peer to peer they are added in float32
in order of ranks. multimem adds in float32 in an order that is not stated and rounds that sum once more to
the workspace's type (in float16 it may overflow). Statistics are float32; hidden is rounded once, at the end.
Every rank has the same hidden, bit for bit: in two-shot it was computed once; in one-shot the order of the sum is the
same everywhere, which is why that one is always peer to peer.

What keeps a fast rank from overwriting what a slow one still reads: a call's entry barrier is passed only when every
rank has come to that call, so each has finished the call before and whatever stood between them in its stream. The
next sum goes to the other of the two partials, and hidden is written behind the barrier. Two consecutive calls must
therefore not share one of the partials. Which one is next is kept on the host, where a replayed CUDA graph does not
reach it: whoever captures calls starts with `begin`, and starts with `begin` again what follows a replay (each forward,
say).

After T. Gond et al. 2025, TokenWeave (arXiv 2505.11329); kernels of our own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from loguru import logger
from torch import Tensor

from modules.kernels.add_norm import KINDS, reference_add_norm
from modules.kernels.arguments import DTYPES, check_tensors
from modules.kernels.deferred_norm import dependent_launch
from pipeline_parallel.kernels.barrier import begin, check_launch, is_interpreted
from pipeline_parallel.kernels.copied_two_shot import copied_two_shot
from pipeline_parallel.kernels.workspace import Workspace, check_num_tokens

try:
    import triton
    import triton.language as tl
except ImportError:  # published for Linux on x86-64 only; elsewhere the reference is all there is
    triton = None

STRATEGIES = ("one-shot", "two-shot")
ELEMENTS_PER_THREAD = 8  # 16 bytes of each peer under way at once
# All programs run at once, as they should where they wait for each other: with at most 64 registers a thread, every
# multiprocessor since Volta holds 32 warps.
MAX_REGISTERS = 64
WARPS_A_MULTIPROCESSOR = 32
MAX_PROGRAMS = 256
ROWS_A_RANK = 4  # in the test of multimem


def owned_rows(num_tokens: int, rank: int, world_size: int) -> range:
    """The rows whose residual a rank keeps in two-shot: equal blocks, of which the last may be short or empty."""
    rows = -(-num_tokens // world_size)
    return range(min(rank * rows, num_tokens), min((rank + 1) * rows, num_tokens))


def launch_shape(
    num_tokens: int,
    hidden_size: int,
    world_size: int,
    strategy: str,
    num_multiprocessors: int,
    max_programs: int | None = None,
) -> tuple[int, int]:
    """(programs, warps of each), the same on all ranks, as barriers need: of nothing but these values.

    `num_multiprocessors` (of every rank's device) limits the programs to those that run at once; `max_programs` leaves
    the rest of the device to what runs beside.
    """
    block = 1 << (hidden_size - 1).bit_length()
    num_warps = min(32, max(1, block // (32 * ELEMENTS_PER_THREAD)))
    rows = num_tokens if strategy == "one-shot" else -(-num_tokens // world_size)
    programs = min(rows, MAX_PROGRAMS, WARPS_A_MULTIPROCESSOR // num_warps * num_multiprocessors)
    return max(1, programs if max_programs is None else min(programs, max_programs)), num_warps


def reference_all_reduce_norm(
    partials: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    norm_bias: Tensor | None,
    bias: Tensor | None,
    *,
    kind: str,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """(hidden, new_residual) of all T rows from all ranks' partials [W, T, D]: plain PyTorch, peer-to-peer rounding."""
    total = partials[0].float()
    for partial in partials[1:]:
        total = total + partial.float()
    return reference_add_norm(total, residual, weight, norm_bias, bias, kind=kind, eps=eps, out_dtype=partials.dtype)


if triton is not None:
    from modules.kernels.deferred_norm import wait_for_inputs
    from pipeline_parallel.kernels.barrier import barrier, signal, wait
    from pipeline_parallel.kernels.multimem import load_sum, store_to_all

    @triton.jit
    def pointers_of(table, like, WORLD_SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
        """A tuple of the addresses in `table`, as pointers of the type of `like`."""
        pointers = ()
        for rank in tl.static_range(WORLD_SIZE):
            pointer = tl.load(table + rank).to(like.dtype)
            # The alignment of a number is not known, and without that a load takes 2 bytes at a time.
            pointers = pointers + (tl.multiple_of(pointer, 16),)  # type: ignore[assignment]
        return pointers

    @triton.jit(do_not_specialize=["first_partial_row", "first_hidden_row", "num_rows", "rank", "tag"])
    def all_reduce_norm_kernel(  # type: ignore[no-untyped-def]
        partial_pointers,  # int64 [WORLD_SIZE], as the next two
        hidden_pointers,
        signal_pointers,
        multicast_partials,  # addresses, or 0 peer to peer
        multicast_hidden,
        own,  # [T, D], this rank's part, to be put among the partials; None: it is there. One-shot only
        hidden,  # [T, D], this rank's
        residual,  # [rows of this rank, D] float32 or None
        weight,  # [D] or None, as the next two
        norm_bias,
        bias,
        new_residual,  # [rows of this rank, D] float32, written
        eps,
        first_partial_row,  # this rank's first row in `partials` and in `hidden`
        first_hidden_row,
        num_rows,  # of this rank
        rank,
        tag,
        HIDDEN_SIZE: tl.constexpr,
        BLOCK: tl.constexpr,  # HIDDEN_SIZE rounded up to a power of two
        KIND: tl.constexpr,
        WORLD_SIZE: tl.constexpr,
        TWO_SHOT: tl.constexpr,
        TRANSPORT: tl.constexpr,  # "p2p" or "multimem"
        SIGNALS: tl.constexpr,  # as in barrier
        PDL: tl.constexpr,
    ):
        """Grid: any number of programs, the same on all ranks; program i takes rows i, i + programs, ... of a rank."""
        wait_for_inputs(PDL)
        program = tl.program_id(0).to(tl.int64)
        stride = tl.num_programs(0)
        columns = tl.arange(0, BLOCK)
        if own is not None:
            partials = tl.multiple_of(tl.load(partial_pointers + rank).to(hidden.dtype), 16)
            for row in range(program, num_rows, stride):  # those that this program's peers read
                part = tl.load(own + row * HIDDEN_SIZE + columns, mask=columns < HIDDEN_SIZE)
                place = partials + (first_partial_row + row) * HIDDEN_SIZE + columns
                tl.store(place, part.to(hidden.dtype.element_ty), mask=columns < HIDDEN_SIZE)
            tl.debug_barrier()  # what the other threads have written comes before the signal
        # It says that the kernels before this one are done, too, among them who else has written the partials.
        signalled = signal(signal_pointers, tl.program_id(0), rank, tag, WORLD_SIZE, SIGNALS)
        # Registers do not suffice to hold them so long where rows or ranks are many.
        VECTORS_FIRST: tl.constexpr = BLOCK <= 8192 and WORLD_SIZE <= 4
        sources = pointers_of(partial_pointers, hidden, WORLD_SIZE)
        targets = pointers_of(hidden_pointers, hidden, WORLD_SIZE)
        # At least once, also where there is no row left: every program takes part in the barriers.
        for row in range(program, tl.maximum(num_rows, program + 1), stride):
            exists = row < num_rows
            inside = (columns < HIDDEN_SIZE) & exists
            # What comes from no peer is asked for before the wait, which hides its latency where tokens are few.
            kept = row * HIDDEN_SIZE
            if residual is not None:
                stream = tl.load(residual + kept + columns, mask=inside, other=0.0)
            if VECTORS_FIRST and bias is not None:
                offset = tl.load(bias + columns, mask=inside, other=0.0)
            if VECTORS_FIRST and weight is not None:
                scale = tl.load(weight + columns, mask=inside, other=0.0)
            if VECTORS_FIRST and norm_bias is not None:
                shift = tl.load(norm_bias + columns, mask=inside, other=0.0)
            if row == program:
                wait(signal_pointers, tl.program_id(0), rank, tag, signalled, WORLD_SIZE, SIGNALS)
            source = (first_partial_row + row) * HIDDEN_SIZE
            if TRANSPORT == "multimem":
                total = load_sum(multicast_partials + source * 2, exists, hidden, HIDDEN_SIZE, BLOCK)
            else:
                total = tl.load(sources[0] + source + columns, mask=inside, other=0.0).to(tl.float32)
                for peer in tl.static_range(1, WORLD_SIZE):
                    total += tl.load(sources[peer] + source + columns, mask=inside, other=0.0).to(tl.float32)
            if bias is not None:
                if not VECTORS_FIRST:
                    offset = tl.load(bias + columns, mask=inside, other=0.0)
                total += offset.to(tl.float32)
            if residual is not None:
                total = stream + total
            normed = total
            if KIND == "layer":
                normed = tl.where(inside, total - tl.sum(total, axis=0) / HIDDEN_SIZE, 0.0)
            if KIND != "none":
                normed = normed * tl.rsqrt(tl.sum(normed * normed, axis=0) / HIDDEN_SIZE + eps)
            if weight is not None:
                if not VECTORS_FIRST:
                    scale = tl.load(weight + columns, mask=inside, other=0.0)
                normed = normed * scale.to(tl.float32)
            if norm_bias is not None:
                if not VECTORS_FIRST:
                    shift = tl.load(norm_bias + columns, mask=inside, other=0.0)
                normed = normed + shift.to(tl.float32)
            rounded = normed.to(hidden.dtype.element_ty)
            place = (first_hidden_row + row) * HIDDEN_SIZE
            if not TWO_SHOT:
                tl.store(hidden + place + columns, rounded, mask=inside)
            elif TRANSPORT == "multimem":
                store_to_all(multicast_hidden + place * 2, rounded, exists, HIDDEN_SIZE, BLOCK)
            else:
                for peer in tl.static_range(WORLD_SIZE):
                    tl.store(targets[peer] + place + columns, rounded, mask=inside)
            tl.store(new_residual + kept + columns, total, mask=inside)  # last: nobody waits for it
        if TWO_SHOT:
            barrier(signal_pointers, tl.program_id(0), rank, tag, WORLD_SIZE, SIGNALS)


def all_reduce_norm(
    workspace: Workspace,
    num_tokens: int,
    residual: Tensor | None,
    weight: Tensor | None,
    norm_bias: Tensor | None,
    bias: Tensor | None,
    *,
    kind: str,
    eps: float,
    strategy: str,
    own: Tensor | None = None,
    max_programs: int | None = None,
) -> tuple[Tensor, Tensor]:
    """(hidden, new_residual) of the equation above (a collective call: T, strategy and options the same on all ranks).

    The partial sums are what `workspace.partial(num_tokens)` held on each rank, or in one-shot `own` [T, D], float32 or
    half precision, which this rank may give instead. hidden [T, D] lies in symmetric memory and is good until the next
    call; new_residual is fresh: all T rows in one-shot, `owned_rows` in two-shot, of which `residual` has as many.
    `max_programs` as in `launch_shape`; 0, in two-shot: the copy engines move the data. ValueError on an argument that
    does not fit. Nothing here waits for the device or tunes itself: a CUDA graph can hold it, if what is captured
    starts with `begin`. Ranks that differ in T or strategy are a CUDA error, not a hang; if any uses copies, only where
    `begin` was told what follows.
    """
    for name, value, allowed in (("kind", kind, KINDS), ("strategy", strategy, STRATEGIES)):
        if value not in allowed:
            raise ValueError(f"{name} {value!r} is not one of {', '.join(allowed)}")
    if own is not None and strategy != "one-shot":
        raise ValueError("own: only one-shot reads what is not in the workspace yet")
    if max_programs is not None and max_programs < (0 if strategy == "two-shot" else 1):
        raise ValueError(f"max_programs must be at least 1, in two-shot 0, got {max_programs}")
    check_num_tokens(num_tokens, workspace.max_tokens)
    two_shot = strategy == "two-shot"
    rows = owned_rows(num_tokens, workspace.rank, workspace.world_size) if two_shot else range(num_tokens)
    hidden_size = workspace.hidden_size
    vector = (hidden_size,)
    check_tensors(
        {
            "own": (own, (num_tokens, hidden_size), DTYPES),
            "residual": (residual, (len(rows), hidden_size), (torch.float32,)),
            "weight": (weight, vector, DTYPES),
            "norm_bias": (norm_bias, vector, DTYPES),
            "bias": (bias, vector, DTYPES),
        },
        workspace.device,
    )
    if kind == "none":
        weight = norm_bias = None
    if max_programs == 0:
        new_residual = copied_two_shot(
            workspace, num_tokens, rows, residual, weight, norm_bias, bias, kind=kind, eps=eps
        )
        workspace.partial_idx = 1 - workspace.partial_idx
        return workspace.hidden[:num_tokens], new_residual
    programs, num_warps = launch_shape(
        num_tokens, hidden_size, workspace.world_size, strategy, workspace.num_multiprocessors, max_programs
    )
    check_launch(programs, workspace)
    new_residual = torch.empty(len(rows), hidden_size, dtype=torch.float32, device=workspace.device)
    multicast = workspace.multicast_address if two_shot else 0
    hidden_start = workspace.partials.numel() * workspace.partials.itemsize
    with torch.cuda.device_of(workspace.hidden):
        all_reduce_norm_kernel[(programs,)](
            workspace.partial_pointers,
            workspace.hidden_pointers,
            workspace.signal_pointers,
            multicast,
            multicast + hidden_start if multicast else 0,
            own,
            workspace.hidden,
            residual,
            weight,
            norm_bias,
            bias,
            new_residual,
            eps,
            workspace.partial_idx * workspace.max_tokens + rows.start,
            rows.start,
            len(rows),
            workspace.rank,
            2 * num_tokens + (2 if two_shot else 1),
            HIDDEN_SIZE=hidden_size,
            BLOCK=triton.next_power_of_2(hidden_size),
            KIND=kind,
            WORLD_SIZE=workspace.world_size,
            TWO_SHOT=two_shot,
            TRANSPORT="multimem" if multicast else "p2p",
            SIGNALS=not is_interpreted(),
            **dependent_launch(workspace.hidden),
            num_warps=num_warps,
            maxnreg=MAX_REGISTERS,
        )
    workspace.partial_idx = 1 - workspace.partial_idx
    return workspace.hidden[:num_tokens], new_residual


def verify_transport(workspace: Workspace, gather: Callable[[Any], list[Any]]) -> None:
    """Give up multicast in `workspace` unless its sums are right on every rank, said once (a collective call).

    `gather` returns all ranks' values in order (`workspace.gatherer`). Not while a CUDA graph is captured.
    """
    if workspace.transport != "multimem":
        return
    address = workspace.multicast_address
    num_tokens = min(workspace.max_tokens, ROWS_A_RANK * workspace.world_size)
    generator = torch.Generator().manual_seed(workspace.rank)
    partial = torch.randn(num_tokens, workspace.hidden_size, generator=generator).to(workspace.dtype)
    begin(workspace)
    workspace.multicast_address = 0
    expected = sums(workspace, partial)
    workspace.multicast_address = address
    found = sums(workspace, partial)
    # Two orders of a float32 sum may round to neighbours in 16 bits; anything more is wrong.
    step = torch.finfo(workspace.dtype).eps
    wrong = [
        rank
        for rank, is_right in enumerate(gather(bool(torch.allclose(found, expected, rtol=step, atol=1e-5))))
        if not is_right
    ]
    if wrong:
        workspace.multicast_address = 0
        logger.warning(f"sums over NVLink multicast are wrong on ranks {wrong}: all ranks reduce peer to peer")


def sums(workspace: Workspace, partial: Tensor) -> Tensor:
    """float32 [T, D]: this rank's copy of the rounded sum of all ranks' `partial`."""
    workspace.partial(len(partial)).copy_(partial)
    hidden, _ = all_reduce_norm(
        workspace, len(partial), None, None, None, None, kind="none", eps=0.0, strategy="two-shot"
    )
    return hidden.float()
