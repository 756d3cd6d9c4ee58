"""The head groups that attention computes for each row: the learned scores, and the largest of them, in one launch.

    inner[r]  = first x[r],    x = norm(residual + partial + bias), see deferred_norm
    score[r]  = second inner[r] + score_bias
    active[r] = the `count` groups of the largest scores; of equals the lower index

states [rows, D]; first [R, D] and second [G, R] of x's type, score_bias [G] of any of the three types; R, G <= 64;
active bool [rows, G]. Rounding is that of plain PyTorch in x's type: inner and scores are summed in float32 and rounded
to it. NaN counts as the largest. One program per row, since a whole predictor is some tens of kilobytes. Heads are
predicted as in Deja Vu (Liu et al. 2023, section 4.2), for groups that share a key-value head.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from modules.kernels.arguments import DTYPES, Expected, check_tensors
from modules.kernels.deferred_norm import DeferredNorm, can_launch, dependent_launch, equal_copies
from modules.kernels.weight_tiles import check_linear

try:
    import triton
    import triton.language as tl
except ImportError:  # published for Linux on x86-64 only; elsewhere the reference serves
    triton = None

MAX_GROUPS = 64
MAX_RANK = 64
TILE_ELEMENTS = 65536  # 128 KB of half precision in flight, half of a multiprocessor's registers
NUM_WARPS = 16


def reference_choose_groups(
    states: DeferredNorm, first: Tensor, second: Tensor, score_bias: Tensor, *, count: int
) -> Tensor:
    """Plain PyTorch, with the kernel's arguments and rounding."""
    inner = F.linear(states.normed().float(), first.float()).to(states.dtype)
    scores = F.linear(inner.float(), second.float(), score_bias.float()).to(states.dtype)
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order[:, :count], True)


if triton is not None:
    from modules.kernels.add_norm import normed_row
    from modules.kernels.deferred_norm import wait_for_inputs
    from modules.kernels.weight_tiles import weight_rows

    @triton.jit
    def group_columns(  # type: ignore[no-untyped-def]
        second, first_rank, NUM_GROUPS: tl.constexpr, GROUPS_BLOCK: tl.constexpr, RANK: tl.constexpr, TILE: tl.constexpr
    ):
        """Columns first_rank .. first_rank + TILE of the second matrix [GROUPS_BLOCK, TILE], 0 beyond its edges."""
        groups = tl.arange(0, GROUPS_BLOCK)
        ranks = first_rank + tl.arange(0, TILE)
        inside = (groups < NUM_GROUPS)[:, None] & (ranks < RANK)[None, :]
        return tl.load(second + groups[:, None] * RANK + ranks[None, :], mask=inside, other=0.0)

    @triton.jit
    def choose_groups_kernel(  # type: ignore[no-untyped-def]
        partial,  # these seven as normed_row has them
        residual,
        bias,
        norm_weight,
        norm_bias,
        new_residual,
        eps,
        first,  # [RANK, HIDDEN_SIZE]
        second,  # [NUM_GROUPS, RANK]
        score_bias,  # [NUM_GROUPS]
        active,  # [rows, NUM_GROUPS] bool, written
        COUNT: tl.constexpr,
        NUM_GROUPS: tl.constexpr,
        GROUPS_BLOCK: tl.constexpr,  # NUM_GROUPS rounded up to a power of two
        RANK: tl.constexpr,
        TILE: tl.constexpr,
        KIND: tl.constexpr,
        HIDDEN_SIZE: tl.constexpr,
        BLOCK: tl.constexpr,
        PDL: tl.constexpr,
    ):
        """Grid: one program per row."""
        row = tl.program_id(0)
        groups = tl.arange(0, GROUPS_BLOCK)
        ahead = weight_rows(first, 0, RANK, HIDDEN_SIZE, BLOCK, TILE)
        outer_ahead = group_columns(second, 0, NUM_GROUPS, GROUPS_BLOCK, RANK, TILE)
        scores = tl.load(score_bias + groups, mask=groups < NUM_GROUPS, other=0.0).to(tl.float32)
        wait_for_inputs(PDL)
        states = normed_row(
            partial, residual, bias, norm_weight, norm_bias, new_residual, eps, row, False, first,
            KIND, HIDDEN_SIZE, BLOCK,
        )  # fmt: skip
        for start in tl.static_range(0, RANK, TILE):
            tile_weights, outer = ahead, outer_ahead
            if start + TILE < RANK:
                ahead = weight_rows(first, start + TILE, RANK, HIDDEN_SIZE, BLOCK, TILE)
                outer_ahead = group_columns(second, start + TILE, NUM_GROUPS, GROUPS_BLOCK, RANK, TILE)
            inner = tl.sum(tile_weights.to(tl.float32) * states[None, :], axis=1)
            inner = inner.to(first.dtype.element_ty).to(tl.float32)
            scores += tl.sum(outer.to(tl.float32) * inner[None, :], axis=1)
        scores = scores.to(first.dtype.element_ty).to(tl.float32)
        scores = tl.where(scores != scores, float("inf"), scores)
        scores = tl.where(groups < NUM_GROUPS, scores, float("-inf"))
        # A group's place among all: how many come before it. What is beyond NUM_GROUPS comes before none that is not.
        larger = scores[None, :] > scores[:, None]
        earlier = (scores[None, :] == scores[:, None]) & (groups[None, :] < groups[:, None])
        place = tl.sum((larger | earlier).to(tl.int32), axis=1)
        tl.store(active + row * NUM_GROUPS + groups, place < COUNT, mask=groups < NUM_GROUPS)


def choose_groups(states: DeferredNorm, first: Tensor, second: Tensor, score_bias: Tensor, *, count: int) -> Tensor:
    """states [rows, D], first [R, D], second [G, R], score_bias [G] -> bool [rows, G], `count` of each row True.

    Never fills `states.new_residual`. The kernel on a GPU or under Triton's interpreter; else the reference. ValueError
    on a type, shape, device or layout that does not fit. A CUDA graph can hold it.
    """
    check_linear(states, first, None)
    check(first, second, score_bias, count)
    if triton is None or not can_launch(choose_groups_kernel, first):
        return reference_choose_groups(replace(states, new_residual=None), first, second, score_bias, count=count)
    rows, (num_groups, rank) = states.partial.shape[0], second.shape
    block = triton.next_power_of_2(first.shape[1])
    active = torch.empty(rows, num_groups, dtype=torch.bool, device=first.device)
    with torch.cuda.device_of(first):  # a kernel is launched on the current device, not on that of its arguments
        choose_groups_kernel[(rows,)](
            **{**states.kernel_arguments(), "new_residual": None},
            first=first,
            second=second,
            score_bias=score_bias,
            active=active,
            COUNT=count,
            NUM_GROUPS=num_groups,
            GROUPS_BLOCK=triton.next_power_of_2(num_groups),
            RANK=rank,
            TILE=tile_of(rank, block),
            BLOCK=block,
            num_warps=NUM_WARPS,
            **dependent_launch(first),
            **equal_copies(first.dtype),
        )
    return active


def tile_of(rank: int, block: int) -> int:
    """Rows of `first` a tile: all, or as many as registers hold."""
    return min(triton.next_power_of_2(rank), max(1, TILE_ELEMENTS // block))


def check(first: Tensor, second: Tensor, score_bias: Tensor, count: int) -> None:
    """ValueError on the first argument that does not fit `first` [R, D]."""
    rank, num_groups = first.shape[0], score_bias.numel()
    if rank > MAX_RANK or not 1 <= num_groups <= MAX_GROUPS:
        raise ValueError(f"{rank} ranks and {num_groups} groups; at most {MAX_RANK} and {MAX_GROUPS}")
    expected: dict[str, Expected] = {
        "second": (second, (num_groups, rank), (first.dtype,)),
        "score_bias": (score_bias, (num_groups,), DTYPES),
    }
    check_tensors(expected, first.device)
    if not 1 <= count <= num_groups:
        raise ValueError(f"count {count} is not 1 to {num_groups}")
