"""Attention of one new token a row over a static cache, its sequence split over the device: flash-decoding.

    s_i = q . k_i / sqrt(H),  i < length;    out = sum_i exp(s_i - m) v_i / sum_i exp(s_i - m),  m = max_i s_i
    of split p:  maximum m_p = max s_i,  sum l_p = sum exp(s_i - m_p),  output o_p = sum exp(s_i - m_p) v_i
    out = sum_p exp(m_p - m) o_p / sum_p exp(m_p - m) l_p,  m = max_p m_p

Flash-decoding (Dao, Haziza, Massa & Sizov 2023); the split softmax is that of Milakov & Gimelshein 2018. queries
[B, N, H], keys and values [B, G, S, H] of bfloat16, float16 or float32, heads contiguous, the cache otherwise of any
strides; row b has length min(cache_seqlens[b] + 1, S), the new token's key and value being in place. The R = N / G
queries of a group see the same keys, so one program takes them all: as rows of a matrix product, padded to 16.

The number of splits P follows from shapes, so a CUDA graph holds for all lengths; each program computes its own range
from the length that it finds, and the ranges are even at any length. Scores, softmax and sums are float32; of 16-bit
inputs the weights of the values are rounded to their type, and the result is rounded once. No kernel combines the
splits: whoever reads them does (see project_heads), before it multiplies.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from modules.kernels.arguments import DTYPES, FLAGS, MAX_QUERIES_PER_GROUP, Expected, check_cache, check_tensors
from modules.kernels.deferred_norm import (
    can_launch,
    dependent_launch,
    equal_copies,
    is_interpreted,
    num_multiprocessors,
)
from modules.kernels.early_selection import EarlySelection

try:
    import triton
    import triton.language as tl
except ImportError:  # published for Linux on x86-64 only; elsewhere the reference serves
    triton = None

GRANULE = 16  # positions: ranges begin at multiples of it
MAX_SPLITS = 16  # the reader's work grows with them
MAX_SPLITS_SELECTING = 8  # beside programs of an early selection


@dataclass(frozen=True)
class Tuning:
    """How the kernel is launched: splits of a row and group, positions per step of a program, warps per program."""

    num_splits: int
    block: int
    num_warps: int


def default_tuning(
    num_rows: int, num_groups: int, max_seqlen: int, multiprocessors: int, *, selects: bool = False
) -> Tuning:
    """By shapes alone: at most two programs per multiprocessor, which leaves registers to the next kernel, and no more
    splits than there can be ranges. `selects`: whether other programs of the launch make an early selection."""
    most = MAX_SPLITS_SELECTING if selects else MAX_SPLITS
    splits = min(2 * multiprocessors // (num_rows * num_groups), most, -(-max_seqlen // GRANULE))
    splits = 1 << (max(1, splits).bit_length() - 1)
    return Tuning(splits, block=32, num_warps=4)


@dataclass(frozen=True)
class SplitHeads:
    """Heads before their splits are combined: outputs float32 [B, N, P, H], not yet divided by sums [B, N, P], both
    relative to exp(maxima) [B, N, P]. An empty split has a maximum of -inf, and zeros."""

    outputs: Tensor
    maxima: Tensor
    sums: Tensor

    def combined(self, dtype: torch.dtype) -> Tensor:
        """[B, N, H]."""
        weights = torch.exp(self.maxima - self.maxima.amax(-1, keepdim=True))
        total = (weights * self.sums).sum(-1, keepdim=True)
        return ((weights[..., None] * self.outputs).sum(-2) / total).to(dtype)


def reference_attend(queries: Tensor, keys: Tensor, values: Tensor, cache_seqlens: Tensor) -> SplitHeads:
    """Plain PyTorch, all positions at once in one split; float32."""
    num_rows, num_groups, max_seqlen, head_dim = keys.shape
    grouped = queries.float().view(num_rows, num_groups, -1, head_dim)
    scores = grouped @ keys.float().transpose(-1, -2) * head_dim**-0.5
    beyond = torch.arange(max_seqlen, device=keys.device) > cache_seqlens[:, None]
    scores = scores.masked_fill(beyond[:, None, None], float("-inf"))
    maxima = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - maxima)
    # What lies beyond the length may be anything, and 0 * NaN is NaN.
    outputs = weights @ values.float().masked_fill(beyond[:, None, :, None], 0.0)
    outputs, maxima = outputs.flatten(1, 2)[:, :, None], maxima.flatten(1, 2)
    return SplitHeads(outputs, maxima, weights.sum(-1, keepdim=True).flatten(1, 2))


if triton is not None:
    from modules.kernels.deferred_norm import wait_for_inputs
    from modules.kernels.early_selection import select_early_groups, select_early_units

    @triton.jit
    def load_positions(  # type: ignore[no-untyped-def]
        states,  # of one row and group
        start,
        end,
        position_stride,
        BLOCK: tl.constexpr,
        HEAD_DIM: tl.constexpr,
        HEAD_BLOCK: tl.constexpr,
    ):
        """[BLOCK, HEAD_BLOCK] from position `start` on; zeros from `end` on."""
        positions = start + tl.arange(0, BLOCK)
        channels = tl.arange(0, HEAD_BLOCK)
        inside = (positions < end)[:, None] & (channels < HEAD_DIM)[None, :]
        offsets = tl.arange(0, BLOCK)[:, None] * position_stride + channels[None, :]
        # Past the L1 cache: a line that was read early may hold the new position as it was.
        place = states + start.to(tl.int64) * position_stride
        return tl.load(place + offsets, mask=inside, other=0.0, cache_modifier=".cg")

    @triton.jit
    def attend_split(  # type: ignore[no-untyped-def]
        split,
        group,
        row,
        queries,  # this and the rest up to `scale`: as decode_attention_kernel has them
        keys,
        values,
        cache_seqlens,
        active_groups,
        outputs,
        maxima,
        sums,
        row_stride,
        group_stride,
        position_stride,
        max_seqlen,
        num_groups,
        scale,
        SPLITS: tl.constexpr,
        QUERIES: tl.constexpr,
        QUERY_BLOCK: tl.constexpr,
        HEAD_DIM: tl.constexpr,
        HEAD_BLOCK: tl.constexpr,
        BLOCK: tl.constexpr,
        GRANULE: tl.constexpr,
        PDL: tl.constexpr,
    ):
        """One split of one group's positions."""
        # What the step before has left, and flags that the queries were computed by, are early: so are all
        # positions but the new one.
        length = tl.minimum(tl.load(cache_seqlens + row, cache_modifier=".cg") + 1, max_seqlen).to(tl.int32)
        active = 1
        if active_groups is not None:
            active = tl.load(active_groups + row * num_groups + group, cache_modifier=".cg").to(tl.int32)
        granules = tl.cdiv(length, GRANULE)
        start = split * granules // SPLITS * GRANULE
        end = tl.minimum((split + 1) * granules // SPLITS * GRANULE, length)
        end = tl.where(active != 0, end, start)
        offset = row.to(tl.int64) * row_stride + group.to(tl.int64) * group_stride
        keys += offset
        values += offset
        is_complete = start + BLOCK < length
        known_end = tl.where(is_complete, end, start)
        k = load_positions(keys, start, known_end, position_stride, BLOCK, HEAD_DIM, HEAD_BLOCK)
        v = load_positions(values, start, known_end, position_stride, BLOCK, HEAD_DIM, HEAD_BLOCK)
        wait_for_inputs(PDL)
        if active == 0:
            return
        if not is_complete:
            k = load_positions(keys, start, end, position_stride, BLOCK, HEAD_DIM, HEAD_BLOCK)
            v = load_positions(values, start, end, position_stride, BLOCK, HEAD_DIM, HEAD_BLOCK)
        members = tl.arange(0, QUERY_BLOCK)
        channels = tl.arange(0, HEAD_BLOCK)
        heads = (row * num_groups + group) * QUERIES + members
        present = (members < QUERIES)[:, None] & (channels < HEAD_DIM)[None, :]
        states = tl.load(queries + heads[:, None] * HEAD_DIM + channels[None, :], mask=present, other=0.0)

        top = tl.full((QUERY_BLOCK,), float("-inf"), tl.float32)
        total = tl.zeros((QUERY_BLOCK,), tl.float32)
        output = tl.zeros((QUERY_BLOCK, HEAD_BLOCK), tl.float32)
        for begin in range(start, end, BLOCK):
            following = begin + BLOCK
            next_k = load_positions(keys, following, end, position_stride, BLOCK, HEAD_DIM, HEAD_BLOCK)
            next_v = load_positions(values, following, end, position_stride, BLOCK, HEAD_DIM, HEAD_BLOCK)
            scores = tl.dot(states, tl.trans(k), input_precision="ieee") * scale
            scores = tl.where((begin + tl.arange(0, BLOCK) < end)[None, :], scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, axis=1))  # finite: a step has a position
            weights = tl.exp(scores - new_top[:, None])
            shrunk = tl.exp(top - new_top)
            total = total * shrunk + tl.sum(weights, axis=1)
            output = tl.dot(weights.to(v.dtype), v, output * shrunk[:, None], input_precision="ieee")
            top, k, v = new_top, next_k, next_v
        places = heads * SPLITS + split
        tl.store(maxima + places, top, mask=members < QUERIES)
        tl.store(sums + places, total, mask=members < QUERIES)
        tl.store(outputs + places[:, None] * HEAD_DIM + channels[None, :], output, mask=present)

    @triton.jit
    def decode_attention_kernel(  # type: ignore[no-untyped-def]
        queries,  # [num_rows, num_groups * QUERIES, HEAD_DIM]
        keys,  # [num_rows, num_groups, max_seqlen, HEAD_DIM], as the next
        values,
        cache_seqlens,  # [num_rows] int64
        active_groups,  # [num_rows, num_groups] uint8, or None
        outputs,  # [num_rows, num_groups * QUERIES, SPLITS, HEAD_DIM] float32, written
        maxima,  # [num_rows, num_groups * QUERIES, SPLITS] float32, written, as the next
        sums,
        row_stride,  # of keys and values, as the next two
        group_stride,
        position_stride,
        max_seqlen,
        num_rows,
        num_groups,
        scale,
        unit_inner,  # this and the rest of the units and groups: see early_selection.EarlySelection
        unit_second,
        unit_bias,
        unit_threshold,
        unit_counters,
        unit_indices,
        group_inner,
        group_second,
        group_bias,
        group_flags,
        NUM_UNITS: tl.constexpr,
        UNIT_RANK: tl.constexpr,
        UNIT_BLOCK: tl.constexpr,
        UNIT_TILE: tl.constexpr,
        GROUPS_SCORED: tl.constexpr,
        GROUPS_SCORED_BLOCK: tl.constexpr,
        GROUPS_KEPT: tl.constexpr,
        GROUP_RANK: tl.constexpr,
        GROUP_RANK_BLOCK: tl.constexpr,
        SPLITS: tl.constexpr,
        QUERIES: tl.constexpr,  # of a group
        QUERY_BLOCK: tl.constexpr,  # what a matrix product takes
        HEAD_DIM: tl.constexpr,
        HEAD_BLOCK: tl.constexpr,  # HEAD_DIM rounded up to a power of two
        BLOCK: tl.constexpr,
        GRANULE: tl.constexpr,
        PDL: tl.constexpr,
    ):
        """Grid: splits x groups x rows, splits innermost; then the programs of an early selection."""
        program = tl.program_id(0)
        extra_program = program - num_rows * num_groups * SPLITS
        if extra_program < 0:
            attend_split(
                program % SPLITS, program // SPLITS % num_groups, program // SPLITS // num_groups,
                queries, keys, values, cache_seqlens, active_groups, outputs, maxima, sums,
                row_stride, group_stride, position_stride, max_seqlen, num_groups, scale,
                SPLITS, QUERIES, QUERY_BLOCK, HEAD_DIM, HEAD_BLOCK, BLOCK, GRANULE, PDL,
            )  # fmt: skip
        elif extra_program < tl.cdiv(NUM_UNITS, UNIT_TILE):
            if unit_inner is not None:
                select_early_units(
                    extra_program, unit_inner, unit_second, unit_bias, unit_threshold, unit_counters, unit_indices,
                    NUM_UNITS, UNIT_RANK, UNIT_BLOCK, UNIT_TILE, PDL,
                )  # fmt: skip
        else:
            if group_inner is not None:
                select_early_groups(
                    group_inner, group_second, group_bias, group_flags,
                    GROUPS_KEPT, GROUPS_SCORED, GROUPS_SCORED_BLOCK, GROUP_RANK, GROUP_RANK_BLOCK, PDL,
                )  # fmt: skip


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    cache_seqlens: Tensor,
    *,
    active_groups: Tensor | None = None,
    early: EarlySelection | None = None,
    tuning: Tuning | None = None,
) -> SplitHeads:
    """The heads of the equation above, in fresh memory.

    `early`: choices of later blocks, made by further programs of the launch.

    cache_seqlens int64 [B]; active_groups bool or uint8 [B, G], None for all: heads of an inactive group are undefined.
    The kernel on a GPU or under Triton's interpreter, else the reference. ValueError on what does not fit.
    """
    check(queries, keys, values, cache_seqlens, active_groups)
    early = early or EarlySelection()
    if triton is None or not can_launch(decode_attention_kernel, queries):
        early.in_plain_pytorch()
        return reference_attend(queries, keys, values, cache_seqlens)
    if is_interpreted(decode_attention_kernel) and queries.dtype == torch.bfloat16:
        # The interpreter would multiply the bit patterns.
        queries, keys, values = queries.float(), keys.float(), values.float()
    num_rows, num_groups, max_seqlen, head_dim = keys.shape
    num_heads = queries.shape[1]
    if tuning is None:
        multiprocessors, selects = num_multiprocessors(queries.device), early.num_programs > 0
        tuning = default_tuning(num_rows, num_groups, max_seqlen, multiprocessors, selects=selects)
    shape = (num_rows, num_heads, tuning.num_splits)
    outputs = torch.empty(*shape, head_dim, dtype=torch.float32, device=queries.device)
    maxima, sums = torch.empty((2, *shape), dtype=torch.float32, device=queries.device)
    num_programs = tuning.num_splits * num_groups * num_rows + early.num_programs
    with torch.cuda.device_of(queries):  # a kernel is launched on the current device, not on that of its arguments
        decode_attention_kernel[(num_programs,)](
            queries=queries,
            keys=keys,
            values=values,
            cache_seqlens=cache_seqlens,
            active_groups=None if active_groups is None else active_groups.view(torch.uint8),
            outputs=outputs,
            maxima=maxima,
            sums=sums,
            row_stride=keys.stride(0),
            group_stride=keys.stride(1),
            position_stride=keys.stride(2),
            max_seqlen=max_seqlen,
            num_rows=num_rows,
            num_groups=num_groups,
            scale=head_dim**-0.5,
            **early.kernel_arguments(),
            SPLITS=tuning.num_splits,
            QUERIES=num_heads // num_groups,
            QUERY_BLOCK=16,
            HEAD_DIM=head_dim,
            HEAD_BLOCK=max(16, triton.next_power_of_2(head_dim)),
            BLOCK=tuning.block,
            GRANULE=GRANULE,
            num_warps=tuning.num_warps,
            **dependent_launch(queries),
            **equal_copies(queries.dtype),
        )
    return SplitHeads(outputs, maxima, sums)


def check(queries: Tensor, keys: Tensor, values: Tensor, cache_seqlens: Tensor, active_groups: Tensor | None) -> None:
    """ValueError on the first argument that does not fit the others."""
    if queries.dim() != 3 or queries.numel() == 0 or queries.dtype not in DTYPES:
        raise ValueError(f"queries {tuple(queries.shape)} of {queries.dtype}: not [rows, heads, head_dim] of {DTYPES}")
    num_rows, num_heads, head_dim = queries.shape
    check_cache(keys, values, num_rows, queries.dtype)
    num_groups = keys.shape[1]
    if num_heads % num_groups or num_heads > MAX_QUERIES_PER_GROUP * num_groups:
        raise ValueError(f"{num_heads} heads do not share {num_groups} groups, at most {MAX_QUERIES_PER_GROUP} each")
    expected: dict[str, Expected] = {
        "queries": (queries, (num_rows, num_heads, keys.shape[-1]), DTYPES),
        "cache_seqlens": (cache_seqlens, (num_rows,), (torch.int64,)),
        "active_groups": (active_groups, (num_rows, num_groups), FLAGS),
    }
    check_tensors(expected, keys.device)
