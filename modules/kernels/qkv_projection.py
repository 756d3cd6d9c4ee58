"""Queries, keys and values of one new token a row, in one kernel that reads each weight once.

    [q, k, v] = W_[q, k, v] x + b_[q, k, v],    x = norm(residual + partial + bias)     (a `DeferredNorm`)
    q, k = rotate(q, p), rotate(k, p);   keys[b, :, p] = k;  values[b, :, p] = v;   p = cache_seqlens[b]
    rotate((first, second), p) = (first cos - second sin, second cos + first sin)       (Su et al. 2021)

x [B, D], B rows from 1 to 8; W_q [N * H, D], W_k and W_v [G * H, D], contiguous, with biases or without; keys, values
[B, G, S, H], one layer of a static cache, heads contiguous, the rest of any strides; rotary float32 [2, S, H / 2],
cosine and sine of each position, or None for models without; queries [B, N, H]. All of bfloat16, float16 or float32 but
the table. A position >= S writes nothing. Sums are float32; the projection is rounded to the model's type before it is
rotated, and so are cosines and sines, as where each of the steps is an operator of its own.

Programs walk tiles of the three matrices, the next on its way while they compute one. A tile is some pairs of rows
(i, i + H / 2) of one head, which is what a rotation needs, and is read whole, 16 bytes per thread. Those of keys and
values are needed whatever is selected and come first; queries follow, only those of groups which any row has active.
Numbered without the others: programs that take every such tile share evenly what is left, and what is skipped is not
read.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from modules.kernels.arguments import DTYPES, FLAGS, MAX_ROWS, Expected, check_cache, check_tensors
from modules.kernels.deferred_norm import DeferredNorm, can_launch, dependent_launch, num_multiprocessors
from modules.kernels.early_selection import ExtraRows
from modules.positions import apply_rotary

try:
    import triton
    import triton.language as tl
except ImportError:  # published for Linux on x86-64 only; elsewhere the reference serves
    triton = None

MAX_HELD_ROWS = 4  # of x, in the registers of a program; more are normed beforehand and read again for every tile


@dataclass(frozen=True)
class Tuning:
    """How the kernel is launched: pairs of weight rows per tile (a divisor of H / 2), warps per program, programs per
    multiprocessor."""

    pairs: int
    num_warps: int
    programs_per_sm: int


def default_tuning(hidden_size: int, head_dim: int, num_rows: int, *, skips: bool = False) -> Tuning:
    """By shapes alone: what keeps most weights on their way without running out of registers. `skips`: where inactive
    groups are left out, smaller programs share what is left more evenly."""
    shares = skips and num_rows == 1
    columns = 32 if shares else 8 if 2 < num_rows <= MAX_HELD_ROWS else 16  # of each row, a thread
    num_warps = min(16, max(1, triton.next_power_of_2(hidden_size) // (32 * columns)))
    half = head_dim // 2
    pairs = min(half & -half, 2 if num_rows == 1 else 1)
    warps_per_sm = 8 if shares or num_rows > MAX_HELD_ROWS else 16
    return Tuning(pairs, num_warps, max(1, min(8, warps_per_sm // num_warps)))


def reference_project_qkv(
    states: DeferredNorm,
    weights: Iterable[Tensor],
    biases: Iterable[Tensor | None],
    *,
    rotary: Tensor | None,
    cache_seqlens: Tensor,
    keys: Tensor,
    values: Tensor,
) -> Tensor:
    """Plain PyTorch, with the kernel's rounding; weights and biases of queries, keys, values. Queries of all groups."""
    hidden = states.normed()
    max_seqlen, head_dim = keys.shape[2:]
    fits = (cache_seqlens < max_seqlen)[:, None, None]
    positions = cache_seqlens.clamp(max=max_seqlen - 1)
    rows = torch.arange(len(positions), device=positions.device)

    new: list[Tensor] = []
    for weight, bias in zip(weights, biases, strict=True):
        heads = F.linear(hidden, weight, bias).unflatten(-1, (-1, head_dim))
        if rotary is not None and len(new) < 2:
            cos, sin = rotary[:, positions, None].to(heads.dtype)
            heads = apply_rotary(heads, torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1))
        new.append(heads)
    for cache, heads in zip((keys, values), new[1:], strict=True):
        cache[rows, :, positions] = torch.where(fits, heads, cache[rows, :, positions])
    return new[0]


if triton is not None:
    from modules.kernels.add_norm import normed_row
    from modules.kernels.deferred_norm import wait_for_inputs

    @triton.jit
    def group_ranks(  # type: ignore[no-untyped-def]
        active_groups,  # [NUM_ROWS, NUM_GROUPS] uint8
        NUM_ROWS: tl.constexpr,
        NUM_GROUPS: tl.constexpr,
        GROUP_BLOCK: tl.constexpr,  # NUM_GROUPS rounded up to a power of two
    ):
        """[GROUP_BLOCK]: the place among the active groups of each that any row has active, else -1; their number."""
        groups = tl.arange(0, GROUP_BLOCK)
        flags = tl.zeros((GROUP_BLOCK,), tl.int32)
        for row in tl.static_range(NUM_ROWS):
            flags |= tl.load(active_groups + row * NUM_GROUPS + groups, mask=groups < NUM_GROUPS, other=0).to(tl.int32)
        flags = (flags != 0).to(tl.int32)
        return tl.where(flags != 0, tl.cumsum(flags, axis=0) - 1, -1), tl.sum(flags, axis=0)

    @triton.jit
    def tile_place(  # type: ignore[no-untyped-def]
        tile,
        ranks,  # of `group_ranks`, or None: all are active
        NUM_GROUPS: tl.constexpr,
        QUERIES_PER_GROUP: tl.constexpr,
        TILES_PER_HEAD: tl.constexpr,
        PAIRS: tl.constexpr,
    ):
        """Of a tile: 0 for keys, 1 for values, 2 for queries; which head of those; the first of its pairs."""
        slot = tile // TILES_PER_HEAD
        query = slot - 2 * NUM_GROUPS
        if ranks is not None:
            found = ranks == query // QUERIES_PER_GROUP
            group = tl.sum(tl.where(found, tl.arange(0, ranks.shape[0]), 0), axis=0)
            query = group * QUERIES_PER_GROUP + query % QUERIES_PER_GROUP
        head = tl.where(slot < 2 * NUM_GROUPS, slot % NUM_GROUPS, query)
        return tl.minimum(slot // NUM_GROUPS, 2), head, tile % TILES_PER_HEAD * PAIRS

    @triton.jit
    def of_kind(kind, for_keys, for_values, for_queries):  # type: ignore[no-untyped-def]
        """The one that `tile_place` means."""
        return tl.where(kind == 0, for_keys, tl.where(kind == 1, for_values, for_queries))

    @triton.jit
    def load_pairs(  # type: ignore[no-untyped-def]
        weight,
        head,
        pair,
        wanted,
        HIDDEN_SIZE: tl.constexpr,
        BLOCK: tl.constexpr,  # HIDDEN_SIZE rounded up to a power of two
        HALF: tl.constexpr,
        PAIRS: tl.constexpr,
    ):
        """[2 * PAIRS, BLOCK]: both rows of the first pair, of the second, and so on; zeros if not `wanted`."""
        columns = tl.arange(0, BLOCK)[None, :]
        rows = tl.arange(0, 2 * PAIRS)[:, None]
        start = weight + (head * (2 * HALF) + pair).to(tl.int64) * HIDDEN_SIZE
        offsets = (rows // 2 + rows % 2 * HALF) * HIDDEN_SIZE + columns
        inside = (columns < HIDDEN_SIZE) & wanted
        return tl.load(start + offsets, mask=inside, other=0.0, eviction_policy="evict_first")

    @triton.jit
    def qkv_projection_kernel(  # type: ignore[no-untyped-def]
        q_weight,  # [NUM_HEADS * 2 * HALF, HIDDEN_SIZE]
        k_weight,  # [NUM_GROUPS * 2 * HALF, HIDDEN_SIZE], as the next
        v_weight,
        q_bias,  # [NUM_HEADS * 2 * HALF], or None as the next two
        k_bias,
        v_bias,
        rotary,  # [2, max_seqlen, HALF] float32, or None
        cache_seqlens,  # [NUM_ROWS] int64
        active_groups,  # [NUM_ROWS, NUM_GROUPS] uint8, or None
        extra_rows,  # [NUM_EXTRA, HIDDEN_SIZE] or None: see early_selection.ExtraRows
        extra_output,  # [NUM_EXTRA], written
        queries,  # [NUM_ROWS, NUM_HEADS, 2 * HALF], written
        keys,  # [NUM_ROWS, NUM_GROUPS, max_seqlen, 2 * HALF], one position per row written, as the next
        values,
        row_stride,  # of keys and values, as the next two
        group_stride,
        position_stride,
        max_seqlen,
        partial,  # this and the rest up to `eps`: see normed_row
        residual,
        bias,
        norm_weight,
        norm_bias,
        new_residual,
        eps,
        KIND: tl.constexpr,
        HIDDEN_SIZE: tl.constexpr,
        BLOCK: tl.constexpr,  # HIDDEN_SIZE rounded up to a power of two
        NUM_ROWS: tl.constexpr,
        NUM_HEADS: tl.constexpr,
        NUM_GROUPS: tl.constexpr,
        GROUP_BLOCK: tl.constexpr,  # NUM_GROUPS rounded up to a power of two
        HALF: tl.constexpr,
        PAIRS: tl.constexpr,
        NUM_EXTRA: tl.constexpr,
        HOLDS: tl.constexpr,  # whether x stays in registers; if not, `partial` must be x
        PDL: tl.constexpr,
    ):
        """Grid: any number of programs; each takes every such tile."""
        QUERIES_PER_GROUP: tl.constexpr = NUM_HEADS // NUM_GROUPS
        TILES_PER_HEAD: tl.constexpr = HALF // PAIRS
        NUM_CACHE_TILES: tl.constexpr = 2 * NUM_GROUPS * TILES_PER_HEAD
        program = tl.program_id(0)
        num_programs = tl.num_programs(0)
        num_tiles = NUM_CACHE_TILES + NUM_HEADS * TILES_PER_HEAD
        # The first tile is on its way before the kernel ahead has ended, unless it takes that to know which one it is.
        kind, head, pair = tile_place(program, None, NUM_GROUPS, QUERIES_PER_GROUP, TILES_PER_HEAD, PAIRS)
        weight = of_kind(kind, k_weight, v_weight, q_weight)
        known = active_groups is None or program < NUM_CACHE_TILES
        weights = load_pairs(weight, head, pair, known, HIDDEN_SIZE, BLOCK, HALF, PAIRS)
        columns = tl.arange(0, BLOCK)
        if extra_rows is not None:
            mask = (columns < HIDDEN_SIZE) & (program < NUM_EXTRA)
            scoring = tl.load(extra_rows + program * HIDDEN_SIZE + columns, mask=mask, other=0.0)
        wait_for_inputs(PDL)

        ranks = None
        if active_groups is not None:
            ranks, num_active = group_ranks(active_groups, NUM_ROWS, NUM_GROUPS, GROUP_BLOCK)
            num_tiles = NUM_CACHE_TILES + num_active * (QUERIES_PER_GROUP * TILES_PER_HEAD)
            if program >= NUM_CACHE_TILES:
                kind, head, pair = tile_place(program, ranks, NUM_GROUPS, QUERIES_PER_GROUP, TILES_PER_HEAD, PAIRS)
                wanted = program < num_tiles
                weights = load_pairs(q_weight, head, pair, wanted, HIDDEN_SIZE, BLOCK, HALF, PAIRS)
        positions = ()
        held = ()
        for row in tl.static_range(NUM_ROWS):
            positions += (tl.load(cache_seqlens + row),)  # type: ignore[assignment]
        for row in tl.static_range(NUM_ROWS if HOLDS else 0):
            x = normed_row(
                partial, residual, bias, norm_weight, norm_bias, new_residual, eps, row, program == 0, queries,
                KIND, HIDDEN_SIZE, BLOCK,
            )  # fmt: skip
            held += (x,)  # type: ignore[assignment]
        if extra_rows is not None:
            inner = tl.sum(scoring.to(tl.float32) * held[0], axis=0)  # type: ignore[misc]
            tl.store(extra_output + program, inner.to(extra_output.dtype.element_ty), mask=program < NUM_EXTRA)
            for scored in range(program + num_programs, NUM_EXTRA, num_programs):
                scoring = tl.load(extra_rows + scored * HIDDEN_SIZE + columns, mask=columns < HIDDEN_SIZE, other=0.0)
                inner = tl.sum(scoring.to(tl.float32) * held[0], axis=0)  # type: ignore[misc]
                tl.store(extra_output + scored, inner.to(extra_output.dtype.element_ty))

        pairs = tl.arange(0, PAIRS)
        both = tl.arange(0, 2 * PAIRS)
        both = both // 2 + both % 2 * HALF
        for tile in range(program, num_tiles, num_programs):
            # Small loads first: they must not queue behind the next tile.
            turns = ()
            if rotary is not None:
                for row in tl.static_range(NUM_ROWS):
                    place = tl.minimum(positions[row], max_seqlen - 1)
                    cos = tl.load(rotary + place * HALF + pair + pairs)
                    sin = tl.load(rotary + (max_seqlen + place) * HALF + pair + pairs)
                    turns += ((cos, sin),)  # type: ignore[assignment]
            if q_bias is not None:
                biases = tl.load(of_kind(kind, k_bias, v_bias, q_bias) + head * (2 * HALF) + pair + both)
            following = tile + num_programs
            next_kind, next_head, next_pair = tile_place(
                following, ranks, NUM_GROUPS, QUERIES_PER_GROUP, TILES_PER_HEAD, PAIRS
            )
            weight = of_kind(next_kind, k_weight, v_weight, q_weight)
            wanted = following < num_tiles
            next_weights = load_pairs(weight, next_head, next_pair, wanted, HIDDEN_SIZE, BLOCK, HALF, PAIRS)

            for row in tl.static_range(NUM_ROWS):
                if HOLDS:
                    x = held[row]
                else:
                    x = tl.load(partial + row * HIDDEN_SIZE + columns, mask=columns < HIDDEN_SIZE, other=0.0)
                sums = tl.sum(weights.to(tl.float32) * x.to(tl.float32)[None, :], axis=1)
                if q_bias is not None:
                    sums += biases.to(tl.float32)
                sums = sums.to(queries.dtype.element_ty)
                first, second = tl.split(tl.reshape(sums, (PAIRS, 2)))
                if rotary is not None:
                    cos = turns[row][0].to(first.dtype).to(tl.float32)
                    sin = turns[row][1].to(first.dtype).to(tl.float32)
                    wide_first = first.to(tl.float32)
                    wide_second = second.to(tl.float32)
                    turned_first = (wide_first * cos).to(first.dtype).to(tl.float32) - wide_second * sin
                    turned_second = (wide_second * cos).to(first.dtype).to(tl.float32) + wide_first * sin
                    first = tl.where(kind == 1, first, turned_first.to(first.dtype))
                    second = tl.where(kind == 1, second, turned_second.to(first.dtype))
                in_cache = tl.full((), row, tl.int64) * row_stride + head.to(tl.int64) * group_stride
                in_cache += positions[row] * position_stride
                in_queries = (row * NUM_HEADS + head) * (2 * HALF)
                place = of_kind(kind, keys, values, queries) + tl.where(kind == 2, in_queries, in_cache) + pair + pairs
                inside = (kind == 2) | (positions[row] < max_seqlen)
                tl.store(place, first, mask=inside)
                tl.store(place + HALF, second, mask=inside)
            kind, head, pair, weights = next_kind, next_head, next_pair, next_weights


def project_qkv(
    states: DeferredNorm,
    q_weight: Tensor,
    k_weight: Tensor,
    v_weight: Tensor,
    q_bias: Tensor | None,
    k_bias: Tensor | None,
    v_bias: Tensor | None,
    *,
    rotary: Tensor | None,
    cache_seqlens: Tensor,
    keys: Tensor,
    values: Tensor,
    active_groups: Tensor | None = None,
    extra: ExtraRows | None = None,
    tuning: Tuning | None = None,
) -> Tensor:
    """Queries [B, N, H] of the equation above, in fresh memory; writes keys, values and `states.new_residual`.

    cache_seqlens int64 [B]; active_groups bool or uint8 [B, G], None for all: queries of a group that no row has active
    are undefined. `extra` (one row only): further rows that x is multiplied with. The kernel on a GPU or under
    Triton's interpreter, else the reference. ValueError on a misfit.
    """
    weights = {"q_weight": q_weight, "k_weight": k_weight, "v_weight": v_weight}
    biases = {"q_bias": q_bias, "k_bias": k_bias, "v_bias": v_bias}
    check(states, weights, biases, rotary, cache_seqlens, keys, values, active_groups)
    memory: dict[str, Any] = {"rotary": rotary, "cache_seqlens": cache_seqlens, "keys": keys, "values": values}
    if triton is None or not can_launch(qkv_projection_kernel, q_weight):
        if extra is not None:
            extra.in_plain_pytorch(states.normed())
        return reference_project_qkv(states, weights.values(), biases.values(), **memory)
    num_rows, hidden_size = states.partial.shape
    if extra is not None:
        extra.check(num_rows, hidden_size, states.dtype)
    num_groups, max_seqlen, head_dim = keys.shape[1:]
    num_heads = len(q_weight) // head_dim
    tuning = (
        default_tuning(hidden_size, head_dim, num_rows, skips=active_groups is not None) if tuning is None else tuning
    )
    holds = num_rows <= MAX_HELD_ROWS
    states = states if holds else DeferredNorm.plain(states.normed())
    num_tiles = (num_heads + 2 * num_groups) * (head_dim // 2 // tuning.pairs)
    queries = torch.empty(num_rows, num_heads, head_dim, dtype=states.dtype, device=q_weight.device)
    with torch.cuda.device_of(q_weight):  # a kernel is launched on the current device, not on that of its arguments
        qkv_projection_kernel[(min(num_tiles, num_multiprocessors(q_weight.device) * tuning.programs_per_sm),)](
            **weights,
            **biases,
            **memory,
            active_groups=None if active_groups is None else active_groups.view(torch.uint8),
            extra_rows=None if extra is None else extra.weight,
            extra_output=None if extra is None else extra.output,
            NUM_EXTRA=0 if extra is None else len(extra.weight),
            queries=queries,
            row_stride=keys.stride(0),
            group_stride=keys.stride(1),
            position_stride=keys.stride(2),
            max_seqlen=max_seqlen,
            **states.kernel_arguments(),
            BLOCK=triton.next_power_of_2(hidden_size),
            NUM_ROWS=num_rows,
            NUM_HEADS=num_heads,
            NUM_GROUPS=num_groups,
            GROUP_BLOCK=triton.next_power_of_2(num_groups),
            HALF=head_dim // 2,
            PAIRS=tuning.pairs,
            HOLDS=holds,
            num_warps=tuning.num_warps,
            **dependent_launch(q_weight),
        )
    return queries


def check(
    states: DeferredNorm,
    weights: dict[str, Tensor],
    biases: dict[str, Tensor | None],
    rotary: Tensor | None,
    cache_seqlens: Tensor,
    keys: Tensor,
    values: Tensor,
    active_groups: Tensor | None,
) -> None:
    """ValueError on the first argument that does not fit the others."""
    if states.partial.dim() != 2 or not 0 < len(states.partial) <= MAX_ROWS or states.dtype not in DTYPES:
        shape = tuple(states.partial.shape)
        raise ValueError(f"states {shape} of {states.dtype}: not [1 to {MAX_ROWS} rows, hidden_size] of {DTYPES}")
    num_rows, hidden_size = states.partial.shape
    check_cache(keys, values, num_rows, states.dtype)
    num_groups, max_seqlen, head_dim = keys.shape[1:]
    num_heads = len(weights["q_weight"]) // head_dim
    if head_dim % 2 or num_heads == 0 or num_heads % num_groups:
        raise ValueError(f"{num_heads} query heads, {num_groups} groups, head_dim {head_dim}: uneven")
    given = [name for name, bias in biases.items() if bias is not None]
    if given and len(given) < len(biases):
        raise ValueError(f"biases must be given for all or none, not for {given}")
    rows = {name: (num_heads if name[0] == "q" else num_groups) * head_dim for name in (*weights, *biases)}
    expected: dict[str, Expected] = {
        "states": (states.partial, (num_rows, hidden_size), DTYPES),
        **{name: (weight, (rows[name], hidden_size), (states.dtype,)) for name, weight in weights.items()},
        **{name: (bias, (rows[name],), (states.dtype,)) for name, bias in biases.items()},
        "rotary": (rotary, (2, max_seqlen, head_dim // 2), (torch.float32,)),
        "cache_seqlens": (cache_seqlens, (num_rows,), (torch.int64,)),
        "active_groups": (active_groups, (num_rows, num_groups), FLAGS),
    }
    check_tensors(expected, keys.device)
