"""Early selection: what a later block computes, chosen by kernels of an earlier one that have what it takes at hand.

A predictor's choice is two small products, inner = first . x and scores = second . inner + bias, and a comparison. As
kernels of their own they would cost more in launches and waiting than in bytes. With look-ahead the first product has
its x early: a kernel that already holds x computes it as extra rows (`ExtraRows`: sparse_mlp, qkv_projection). The
second product and the comparison are made by extra programs of attention, whose own wait for memory most of the time:
for `EarlyUnits` each scores a tile of neurons and appends the active ones to the list, for `EarlyGroups` one scores all
key-value groups and takes the best. Equations, rounding and order of the list as in select_units and choose_groups.
One row only: the choices of several rows are kernels of their own.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from modules.kernels.arguments import check_tensors
from modules.kernels.deferred_norm import num_multiprocessors
from modules.sparsity import ActiveList

try:
    import triton
    import triton.language as tl
except ImportError:  # published for Linux on x86-64 only; elsewhere the references serve
    triton = None

RANK_BLOCK = 128  # padding a rank to a power of two would waste registers, and so keep the next kernel out


@dataclass(frozen=True)
class ExtraRows:
    """Further rows for a kernel to multiply with its own states, [rank, D] @ [D]; `output` [rank] is written."""

    weight: Tensor
    output: Tensor

    def check(self, num_rows: int, hidden_size: int, dtype: torch.dtype) -> None:
        """ValueError unless it fits states of this shape and type."""
        if num_rows > 1:
            raise ValueError(f"extra rows are multiplied with one row of states, not {num_rows}")
        rank = self.output.numel()
        check_tensors(
            {
                "extra rows weight": (self.weight, (rank, hidden_size), (dtype,)),
                "extra rows output": (self.output, (rank,), (dtype,)),
            },
            self.weight.device,
        )

    def in_plain_pytorch(self, x: Tensor) -> None:
        """x [1, D]: what the kernel would do."""
        self.output.copy_(F.linear(x.float(), self.weight.float())[0])


@dataclass(frozen=True)
class EarlyUnits:
    """Neurons whose score, second . inner + bias, reaches the threshold: `found` is what will hold them.

    inner [R], second [U, R], bias [U] of the model's type; `counters` int32 [2], zeros.
    """

    inner: Tensor
    second: Tensor
    bias: Tensor
    threshold: float
    counters: Tensor
    found: ActiveList

    @property
    def tile(self) -> int:
        """Neurons per program: two programs per multiprocessor leave registers to the kernel that starts meanwhile."""
        num_units = len(self.second)
        return 32 if num_units <= 32 * 2 * num_multiprocessors(self.second.device) else 64

    @staticmethod
    def of(inner: Tensor, second: Tensor, bias: Tensor, threshold: float, counters: Tensor) -> "EarlyUnits":
        """With memory for the list."""
        indices = torch.empty(len(second), dtype=torch.int32, device=second.device)
        found = ActiveList(indices=indices, length=counters[:1], num_active=counters[1:], is_early=True)
        return EarlyUnits(inner, second, bias, threshold, counters, found)

    def in_plain_pytorch(self) -> None:
        """What the kernel would do, the list in ascending order."""
        scores = F.linear(self.inner.float(), self.second.float(), self.bias.float()).to(self.inner.dtype)
        found = (scores >= self.threshold).nonzero().squeeze(-1)
        self.found.indices[: len(found)] = found
        self.counters.add_(len(found))


@dataclass(frozen=True)
class EarlyGroups:
    """The `count` key-value groups with the largest scores: flags bool [1, G] will say which. Else as EarlyUnits."""

    inner: Tensor
    second: Tensor
    bias: Tensor
    count: int
    flags: Tensor

    @staticmethod
    def of(inner: Tensor, second: Tensor, bias: Tensor, count: int) -> "EarlyGroups":
        """With memory for the flags."""
        flags = torch.empty(1, len(second), dtype=torch.bool, device=second.device)
        return EarlyGroups(inner, second, bias, count, flags)

    def in_plain_pytorch(self) -> None:
        """What the kernel would do."""
        scores = F.linear(self.inner.float(), self.second.float(), self.bias.float()).to(self.inner.dtype)
        order = scores.sort(descending=True, stable=True).indices
        self.flags.zero_()[0, order[: self.count]] = True


@dataclass
class EarlySelection:
    """What one launch chooses besides: neurons of one block and groups of one at most."""

    units: EarlyUnits | None = None
    groups: EarlyGroups | None = None

    def add(self, choice: EarlyUnits | EarlyGroups) -> bool:
        """Take a choice in; False if there is one of its kind already."""
        if isinstance(choice, EarlyUnits):
            taken, self.units = self.units is None, self.units or choice
        else:
            taken, self.groups = self.groups is None, self.groups or choice
        return taken

    @property
    def num_programs(self) -> int:
        """Extra programs: those for neurons first, one for groups last."""
        tiles = 0 if self.units is None else -(-len(self.units.second) // self.units.tile)
        return tiles + (self.groups is not None)

    def in_plain_pytorch(self) -> None:
        """What the kernel would do."""
        for choice in (self.units, self.groups):
            if choice is not None:
                choice.in_plain_pytorch()

    def kernel_arguments(self) -> dict[str, Any]:
        """What a kernel passes on to `select_early_units` and `select_early_groups`; absent ones are None."""
        units, groups = self.units, self.groups
        threshold = 0.0
        if units is not None:  # as PyTorch compares: in the tensor's type. On the CPU, so nothing waits for the device.
            threshold = float(torch.tensor(units.threshold, dtype=units.second.dtype))
        return {
            "unit_inner": None if units is None else units.inner,
            "unit_second": None if units is None else units.second,
            "unit_bias": None if units is None else units.bias,
            "unit_threshold": threshold,
            "unit_counters": None if units is None else units.counters,
            "unit_indices": None if units is None else units.found.indices,
            "group_inner": None if groups is None else groups.inner,
            "group_second": None if groups is None else groups.second,
            "group_bias": None if groups is None else groups.bias,
            "group_flags": None if groups is None else groups.flags.view(torch.uint8),
            "NUM_UNITS": 0 if units is None else len(units.second),
            "UNIT_RANK": 1 if units is None else units.second.shape[1],
            "UNIT_BLOCK": 1 if units is None else min(RANK_BLOCK, triton.next_power_of_2(units.second.shape[1])),
            "UNIT_TILE": 1 if units is None else units.tile,
            "GROUPS_SCORED": 1 if groups is None else len(groups.second),
            "GROUPS_SCORED_BLOCK": 1 if groups is None else triton.next_power_of_2(len(groups.second)),
            "GROUPS_KEPT": 0 if groups is None else groups.count,
            "GROUP_RANK": 1 if groups is None else groups.second.shape[1],
            "GROUP_RANK_BLOCK": 1 if groups is None else triton.next_power_of_2(groups.second.shape[1]),
        }


if triton is not None:
    from modules.kernels.deferred_norm import wait_for_inputs

    @triton.jit
    def select_early_units(  # type: ignore[no-untyped-def]
        tile,
        inner,  # [RANK]
        second,  # [NUM_UNITS, RANK]
        bias,  # [NUM_UNITS]
        threshold,
        counters,  # [2] int32: added to
        indices,  # [NUM_UNITS] int32: its beginning written
        NUM_UNITS: tl.constexpr,
        RANK: tl.constexpr,
        BLOCK: tl.constexpr,  # of RANK: what is loaded at once
        TILE: tl.constexpr,
        PDL: tl.constexpr,
    ):
        """Units tile * TILE and on: the active ones into the list, at places reserved with one addition."""
        units = tile * TILE + tl.arange(0, TILE)
        inside = units < NUM_UNITS
        columns = tl.arange(0, BLOCK)
        weights = ()
        for first in tl.static_range(0, RANK, BLOCK):
            ranks = first + columns
            place = second + units[:, None] * RANK + ranks[None, :]
            mask = inside[:, None] & (ranks < RANK)[None, :]
            piece = tl.load(place, mask=mask, other=0.0, eviction_policy="evict_first")
            weights += (piece,)  # type: ignore[assignment]
        shift = tl.load(bias + units, mask=inside, other=0.0).to(tl.float32)
        wait_for_inputs(PDL)
        products = tl.zeros((TILE, BLOCK), dtype=tl.float32)
        for first in tl.static_range(0, RANK, BLOCK):
            ranks = first + columns
            states = tl.load(inner + ranks, mask=ranks < RANK, other=0.0).to(tl.float32)
            products += weights[first // BLOCK].to(tl.float32) * states[None, :]
        scores = tl.sum(products, axis=1) + shift
        scores = scores.to(second.dtype.element_ty).to(tl.float32)
        active = (inside & (scores >= threshold)).to(tl.int32)
        count = tl.sum(active, axis=0)
        start = tl.atomic_add(counters, count, sem="relaxed")
        tl.atomic_add(counters + 1, count, sem="relaxed")
        tl.store(indices + start + tl.cumsum(active, axis=0) - 1, units, mask=active == 1)

    @triton.jit
    def select_early_groups(  # type: ignore[no-untyped-def]
        inner,  # [RANK]
        second,  # [NUM_GROUPS, RANK]
        bias,  # [NUM_GROUPS]
        flags,  # [NUM_GROUPS] uint8, written
        COUNT: tl.constexpr,
        NUM_GROUPS: tl.constexpr,
        GROUPS_BLOCK: tl.constexpr,  # NUM_GROUPS rounded up to a power of two
        RANK: tl.constexpr,
        RANK_BLOCK: tl.constexpr,
        PDL: tl.constexpr,
    ):
        """All groups in one program; NaN counts as the largest, of equals the lower index comes first."""
        groups = tl.arange(0, GROUPS_BLOCK)
        ranks = tl.arange(0, RANK_BLOCK)
        inside = groups < NUM_GROUPS
        mask = inside[:, None] & (ranks < RANK)[None, :]
        weights = tl.load(second + groups[:, None] * RANK + ranks[None, :], mask=mask, other=0.0)
        shift = tl.load(bias + groups, mask=inside, other=0.0).to(tl.float32)
        wait_for_inputs(PDL)
        states = tl.load(inner + ranks, mask=ranks < RANK, other=0.0).to(tl.float32)
        scores = tl.sum(weights.to(tl.float32) * states[None, :], axis=1) + shift
        scores = scores.to(second.dtype.element_ty).to(tl.float32)
        scores = tl.where(scores != scores, float("inf"), scores)
        scores = tl.where(inside, scores, float("-inf"))
        larger = scores[None, :] > scores[:, None]
        earlier = (scores[None, :] == scores[:, None]) & (groups[None, :] < groups[:, None])
        place = tl.sum((larger | earlier).to(tl.int32), axis=1)
        tl.store(flags + groups, (place < COUNT).to(tl.uint8), mask=inside)
