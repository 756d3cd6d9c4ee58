"""Output projection of one token's attention heads, straight from the parts that `decode_attention` leaves.

    out = sum over heads n of active groups, channels c of heads[n, c] * weight[n * H + c]
    heads[n] = sum_p exp(m_p - m) o_p[n] / sum_p exp(m_p - m) s_p,  m = max_p m_p    (Dao et al. 2023, Flash-Decoding)

parts o [1, N, P, H], maxima m and sums s [1, N, P] float32 (see `SplitHeads`); weight [N * H, D] unit-major: row j is
what channel j writes; out [1, D] float32. Rows of inactive key-value groups are not read. A program combines the parts
of its own channels, multiplies them with its own columns of their rows, the next rows on their way, and adds the sum to
`out` with float32 atomics, in no fixed order; under `torch.use_deterministic_algorithms(True)` the programs' sums are
added up in order. Programs are small, so that some start while attention still runs: one program of all columns would
need every register of a multiprocessor.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from modules.kernels.arguments import DTYPES, check_tensors
from modules.kernels.decode_attention import SplitHeads
from modules.kernels.deferred_norm import can_launch, dependent_launch, num_multiprocessors

try:
    import triton
    import triton.language as tl
except ImportError:  # published for Linux on x86-64 only; elsewhere the reference serves
    triton = None


@dataclass(frozen=True)
class Tuning:
    """How the kernel is launched: channels per step of a program, programs per multiprocessor at most."""

    units: int
    programs_per_sm: int


def columns_of(hidden_size: int) -> int:
    """Columns per program: 8 of each row per thread, so that sums over rows stay inside it."""
    power = min(1024, hidden_size & -hidden_size)
    return power if power >= 256 else min(1024, triton.next_power_of_2(hidden_size))


def reference_project_heads(heads: SplitHeads, weight: Tensor, active_groups: Tensor | None) -> Tensor:
    """Plain PyTorch: float32 [1, D]."""
    combined = heads.combined(weight.dtype)
    if active_groups is not None:
        mask = active_groups.bool().repeat_interleave(combined.shape[1] // active_groups.shape[1], dim=1)
        combined = combined.masked_fill(~mask[..., None], 0)
    return combined.flatten(1).float() @ weight.float()


if triton is not None:
    from modules.kernels.deferred_norm import wait_for_inputs

    @triton.jit
    def channels_of(places, order, GROUP_WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
        """The channels at `places` among those of the active groups; `order` [groups]: a group's place among the active
        ones, -1 for others; None: all are active."""
        channels = places
        if order is not None:
            found = order[None, :] == (places // GROUP_WIDTH)[:, None]
            groups = tl.sum(tl.where(found, tl.arange(0, order.shape[0])[None, :], 0), axis=1)
            channels = groups * GROUP_WIDTH + places % GROUP_WIDTH
        return channels

    @triton.jit
    def rows_at(  # type: ignore[no-untyped-def]
        weight,  # [any, HIDDEN_SIZE]
        place,
        count,
        order,
        columns,
        UNITS: tl.constexpr,
        GROUP_WIDTH: tl.constexpr,
        HIDDEN_SIZE: tl.constexpr,
    ):
        """[UNITS, len(columns)]: rows of the active channels at `place` and on, all of one group; unread from `count`
        on. Else as channels_of, for a single place."""
        start = place
        if order is not None:
            group = tl.sum(tl.where(order == place // GROUP_WIDTH, tl.arange(0, order.shape[0]), 0), axis=0)
            start = group * GROUP_WIDTH + place % GROUP_WIDTH
        offsets = (start + tl.arange(0, UNITS)).to(tl.int64)[:, None] * HIDDEN_SIZE + columns[None, :]
        mask = (columns < HIDDEN_SIZE)[None, :] & (place < count)
        return tl.load(weight + offsets, mask=mask, other=0.0, eviction_policy="evict_first")

    @triton.jit
    def combined_channels(  # type: ignore[no-untyped-def]
        parts,  # this and the next two: as project_heads_kernel has them
        maxima,
        sums,
        order,
        like,  # a pointer of the type that heads are rounded to
        places,
        count,
        GROUP_WIDTH: tl.constexpr,
        HEAD_DIM: tl.constexpr,
        SPLITS: tl.constexpr,
        SPLITS_BLOCK: tl.constexpr,
    ):
        """Heads at `places`, float32, 0 from `count` on; all of them in one wait for memory."""
        real = places < count
        channels = channels_of(places, order, GROUP_WIDTH)
        splits = tl.arange(0, SPLITS_BLOCK)
        stats = (channels // HEAD_DIM)[None, :] * SPLITS + splits[:, None]
        mask = real[None, :] & (splits < SPLITS)[:, None]
        part_maxima = tl.load(maxima + stats, mask=mask, other=float("-inf"))
        part_sums = tl.load(sums + stats, mask=mask, other=0.0)
        part_values = tl.load(parts + stats * HEAD_DIM + (channels % HEAD_DIM)[None, :], mask=mask, other=0.0)
        shares = tl.where(mask, tl.exp(part_maxima - tl.max(part_maxima, axis=0)[None, :]), 0.0)
        values = tl.sum(shares * part_values, axis=0) / tl.sum(shares * part_sums, axis=0)
        return tl.where(real, values, 0.0).to(like.dtype.element_ty).to(tl.float32)

    @triton.jit
    def project_heads_kernel(  # type: ignore[no-untyped-def]
        parts,  # [NUM_HEADS, SPLITS, HEAD_DIM] float32
        maxima,  # [NUM_HEADS, SPLITS] float32
        sums,
        active_groups,  # [NUM_GROUPS] bool or None
        weight,  # [NUM_HEADS * HEAD_DIM, HIDDEN_SIZE]
        output,  # [HIDDEN_SIZE] float32, added to; [programs / CHUNKS, HIDDEN_SIZE], written, if PARTS
        NUM_GROUPS: tl.constexpr,
        GROUPS_BLOCK: tl.constexpr,  # rounded up to a power of two, as the other blocks
        GROUP_WIDTH: tl.constexpr,  # channels of a group: queries a group * HEAD_DIM
        HEAD_DIM: tl.constexpr,
        SPLITS: tl.constexpr,
        SPLITS_BLOCK: tl.constexpr,
        HIDDEN_SIZE: tl.constexpr,
        COLUMNS: tl.constexpr,
        CHUNKS: tl.constexpr,  # CHUNKS * COLUMNS cover HIDDEN_SIZE
        UNITS: tl.constexpr,  # channels per step, all of one group
        STEPS: tl.constexpr,  # steps * programs / CHUNKS * UNITS cover all channels
        STEPS_BLOCK: tl.constexpr,
        PARTS: tl.constexpr,
        PDL: tl.constexpr,
    ):
        """Grid: CHUNKS times any number of lanes. Step i of a lane is channels (lane + i * lanes) * UNITS and on."""
        lane = tl.program_id(0) // CHUNKS
        columns = tl.program_id(0) % CHUNKS * COLUMNS + tl.arange(0, COLUMNS)
        inside = columns < HIDDEN_SIZE
        stride = tl.num_programs(0) // CHUNKS * UNITS
        count = NUM_GROUPS * GROUP_WIDTH
        order = None
        if active_groups is not None:  # queries were computed by these before heads were: they are early
            groups = tl.arange(0, GROUPS_BLOCK)
            flags = tl.load(active_groups + groups, mask=groups < NUM_GROUPS, other=0, cache_modifier=".cg")
            chosen = (flags != 0).to(tl.int32)
            order = tl.where(chosen != 0, tl.cumsum(chosen, axis=0) - 1, -1)
            count = tl.sum(chosen, axis=0) * GROUP_WIDTH
        place = lane * UNITS
        rows = rows_at(weight, place, count, order, columns, UNITS, GROUP_WIDTH, HIDDEN_SIZE)
        next_rows = rows
        if STEPS > 1:
            next_rows = rows_at(weight, place + stride, count, order, columns, UNITS, GROUP_WIDTH, HIDDEN_SIZE)
        wait_for_inputs(PDL)
        mine = tl.arange(0, STEPS_BLOCK * UNITS)
        own_values = combined_channels(
            parts, maxima, sums, order, weight, place + mine // UNITS * stride + mine % UNITS, count,
            GROUP_WIDTH, HEAD_DIM, SPLITS, SPLITS_BLOCK,
        )  # fmt: skip
        by_step = tl.reshape(own_values, (STEPS_BLOCK, UNITS))
        step_indices = tl.arange(0, STEPS_BLOCK)[:, None]
        total = tl.zeros((COLUMNS,), dtype=tl.float32)
        for step in tl.static_range(STEPS):
            values = tl.sum(tl.where(step_indices == step, by_step, 0.0), axis=0)
            total += tl.sum(values[:, None] * rows.to(tl.float32), axis=0)
            rows = next_rows
            if step + 2 < STEPS:
                later = place + (step + 2) * stride
                next_rows = rows_at(weight, later, count, order, columns, UNITS, GROUP_WIDTH, HIDDEN_SIZE)
        if PARTS:
            tl.store(output + lane * HIDDEN_SIZE + columns, total, mask=inside)
        else:
            tl.atomic_add(output + columns, total, mask=inside, sem="relaxed")


def project_heads(
    heads: SplitHeads,
    weight: Tensor,
    *,
    active_groups: Tensor | None = None,
    output: Tensor | None = None,
    tuning: Tuning | None = None,
) -> Tensor:
    """Float32 [1, D]: heads of one row, weight [N * H, D], active_groups bool [1, G] (None: all).

    `output`: float32 zeros [1, D] to add to, else fresh memory. ValueError on what does not fit.
    """
    rows, num_heads, splits, head_dim = heads.outputs.shape
    width, hidden_size = weight.shape
    if rows != 1 or num_heads * head_dim != width:
        raise ValueError(f"{rows} x {num_heads} heads of {head_dim} are not one row of weight's {width} channels")
    num_groups = num_heads if active_groups is None else active_groups.shape[-1]
    check_tensors(
        {
            "weight": (weight, (width, hidden_size), DTYPES),
            "active groups": (active_groups, (1, num_groups), (torch.bool,)),
            "output": (output, (1, hidden_size), (torch.float32,)),
        },
        weight.device,
    )
    if num_heads % num_groups:
        raise ValueError(f"{num_groups} groups do not divide {num_heads} heads")
    if triton is None or not can_launch(project_heads_kernel, weight):
        result = reference_project_heads(heads, weight, active_groups)
        return result if output is None else output.add_(result)
    tuning = tuning or Tuning(units=32 // weight.itemsize, programs_per_sm=4)
    columns = columns_of(hidden_size)
    chunks = triton.cdiv(hidden_size, columns)
    units = math.gcd(tuning.units, width // num_groups)
    lanes = max(1, num_multiprocessors(weight.device) * tuning.programs_per_sm // chunks)
    steps = triton.cdiv(width, lanes * units)
    lanes = triton.cdiv(width, steps * units)  # as even as the steps allow
    deterministic = torch.are_deterministic_algorithms_enabled()
    if deterministic:
        target = weight.new_empty((lanes, hidden_size), dtype=torch.float32)
    else:
        target = weight.new_zeros((1, hidden_size), dtype=torch.float32) if output is None else output
    with torch.cuda.device_of(weight):
        project_heads_kernel[(lanes * chunks,)](
            heads.outputs,
            heads.maxima,
            heads.sums,
            active_groups,
            weight,
            target,
            NUM_GROUPS=num_groups,
            GROUPS_BLOCK=triton.next_power_of_2(num_groups),
            GROUP_WIDTH=width // num_groups,
            HEAD_DIM=head_dim,
            SPLITS=splits,
            SPLITS_BLOCK=triton.next_power_of_2(splits),
            HIDDEN_SIZE=hidden_size,
            COLUMNS=columns,
            CHUNKS=chunks,
            UNITS=units,
            STEPS=steps,
            STEPS_BLOCK=triton.next_power_of_2(steps),
            PARTS=deterministic,
            **dependent_launch(weight),
            num_warps=4,
        )
    if not deterministic:
        return target
    return target.sum(0, keepdim=True) if output is None else output.add_(target.sum(0))
