"""Seam 1: which units (MLP neurons, key-value groups of heads) a token computes.

A `Selector` in every MLP and attention block (None: dense) answers with an `ActiveSet`; the block then really skips
the other units (few rows: gathered weight rows) or masks them (many rows), same set either way.
Legend: B batch, T tokens, rows = B * T, U units, D hidden.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from modules.cache import Cache

Block = Literal["mlp", "attention"]
Phase = Literal["prefill", "decode"]
BLOCKS: tuple[Block, Block] = ("attention", "mlp")
Reduce = Callable[[Tensor], Tensor]  # sums a small tensor over all ranks, each of which must call it

# Above this many rows the union of the active sets is nearly everything, and a masked dense matmul is faster.
MAX_GATHER_ROWS = 8


def num_kept(density: float, num_units: int) -> int:
    """Units kept at `density` in (0, 1]: max(1, floor(density * num_units + 0.5))."""
    if not 0.0 < density <= 1.0:
        raise ValueError(f"density must lie in (0, 1], got {density}")
    return max(1, int(density * num_units + 0.5))


class Units(NamedTuple):
    """What a block can skip, and how many there are in the whole layer: neurons, key-value groups, experts."""

    kind: Literal["neurons", "groups", "experts"]
    number: int


@dataclass(frozen=True, eq=False, kw_only=True)
class UnitShard:
    """The part of a block's units that one tensor-parallel rank computes: U of `num_units`.

    `local` int64 [U]: global index of each unit computed here, -1 for padding. `counted` bool [U]: counted in
    statistics here (no padding, and no rank before this one holds the unit). `gather` [rows, U] -> [rows, num_units]:
    scores of all units, equal on all ranks (of replicas the first wins); `gather_norms`: the same for L2 norms of
    parts, where replicas (a group whose query heads several ranks share) combine as sqrt(sum of squares). `is_first`:
    this rank adds what must be added once.
    """

    num_units: int
    local: Tensor
    counted: Tensor
    gather: Callable[[Tensor], Tensor]
    gather_norms: Callable[[Tensor], Tensor]
    is_first: bool

    @cached_property
    def real(self) -> Tensor:
        """bool [U]: no padding."""
        return self.local >= 0

    @cached_property
    def num_counted(self) -> int:
        """Units counted here."""
        return int(self.counted.sum())

    def columns(self, mask: Tensor) -> Tensor:
        """This rank's part of a mask over all units, [..., num_units] -> [..., U]; padding is never active."""
        return mask[..., self.local.clamp(min=0)] & self.real


@dataclass(frozen=True, kw_only=True)
class StandIn:
    """What is added for the units that are skipped, as linear units that are always active:
    sum over i of (inputs[i] . x) * outputs[i] + bias; inputs and outputs [R, D], bias [D]."""

    inputs: Tensor
    outputs: Tensor
    bias: Tensor


@dataclass(frozen=True, kw_only=True)
class ActiveList:
    """The units that any row of a decode step computes, as a list on the device that a kernel walks.

    `indices` int32 [U]: the first `length[0]` entries are the active units, in no promised order, then
    anything. `length` int32 [1]. `num_active` int32 [rows]: units of each row. `mask` bool [rows, U], which row has
    which; None for a single row. `gate_values` float32 [rows, U]: act(gate) of active units, where known (CATS).
    `compensation` [rows, D] or `standin`: what the others add. `is_early`: made well before it is read (deferred_norm).
    """

    indices: Tensor
    length: Tensor
    num_active: Tensor
    mask: Tensor | None = None
    gate_values: Tensor | None = None
    compensation: Tensor | None = None
    standin: StandIn | None = None
    is_early: bool = False


@dataclass(frozen=True)
class ActiveSet:
    """The active units of each row.

    `mask` bool [rows, U]. `compensation` [rows, D] is added to the block's output (the stand-in for what is skipped).
    `gate_values` [rows, U]: act(gate) where the selector has computed it anyway (CATS). `count`: active units of every
    row, where the host has the number. `is_early`: see ActiveList.
    """

    mask: Tensor
    compensation: Tensor | None = None
    gate_values: Tensor | None = None
    is_early: bool = False
    count: int | None = None

    @property
    def num_active(self) -> Tensor:
        """Active units of each row, int32 [rows], on the device."""
        return self.mask.sum(-1, dtype=torch.int32)

    def listed(self) -> ActiveList:
        """The union of the rows' sets, in ascending order, of fixed shape and without a host read: a CUDA graph can
        hold it."""
        union = self.mask.any(0)  # a stable sort of "inactive" puts active units first, and keeps them in order
        return ActiveList(
            indices=torch.sort(~union, stable=True).indices.to(torch.int32),
            length=union.sum(dtype=torch.int32)[None],
            num_active=self.num_active,
            mask=self.mask.contiguous() if len(self.mask) > 1 else None,
            gate_values=None if self.gate_values is None else self.gate_values.float(),
            compensation=self.compensation,
            is_early=self.is_early,
        )

    @staticmethod
    def from_scores(scores: Tensor, count: int, units: UnitShard | None = None) -> "ActiveSet":
        """Top `count` units of each row by the scores [rows, num_units] of all units; of a shard, those here."""
        indices = scores.topk(count, dim=-1, sorted=False).indices
        mask = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, indices, True)
        return ActiveSet(mask if units is None else units.columns(mask))


@dataclass(frozen=True, kw_only=True)
class SelectionContext:
    """What a selector may look at besides its block's own input.

    `earlier_inputs[i]`: the normed input [B, T, D] of the same kind of block in layer i, for look-ahead.
    `dense_output()`: what the dense block computes before its output projection: activations [B, T, F] (MLP) or head
    outputs by group [B, T, G, R, H] (attention). `positions` int64 [B, T] of the tokens, `valid` bool [B, T] (False:
    padding) or None. `num_prompt` int64 [B]: how many of a row's first tokens are its prompt, where a text is scored in
    one pass; None: unknown. `units`: the units of this rank, where it computes a part of them; a selector chooses among
    these. A selector may keep a state per row in `cache`.
    """

    layer_idx: int
    block: Block
    phase: Phase
    positions: Tensor
    valid: Tensor | None
    num_prompt: Tensor | None = None
    units: UnitShard | None = None
    cache: Cache | None = None
    earlier_inputs: Mapping[int, Tensor]
    dense_output: Callable[[], Tensor]


class Selector(Protocol):
    """Chooses the active units of one block; `lookahead` is how many layers back it reads (0: its own input)."""

    @property
    def lookahead(self) -> int: ...

    def select(self, hidden_states: Tensor, context: SelectionContext) -> ActiveSet | None:
        """hidden_states [B, T, D], the block's normed input -> active set over B * T rows, or None for dense."""


class Count:
    """A sum whose terms are known partly to the host and partly to the device, which only reading it makes wait."""

    def __init__(self, host: int = 0) -> None:
        self.host = host
        self.device: Tensor | None = None

    def add(self, number: int | Tensor) -> None:
        """A Python int, or a tensor that holds one."""
        if isinstance(number, int):
            self.host += number
        else:
            self.device = number if self.device is None else self.device + number

    def __int__(self) -> int:
        return self.host if self.device is None else self.host + int(self.device)


@dataclass
class BlockStats:
    """What one block did: units computed, and units there were, over all real tokens. `executions` counts calls: dense,
    gather (units skipped), mask. `is_first`: they count in the sum over ranks."""

    active: Count = field(default_factory=Count)
    total: Count = field(default_factory=Count)
    executions: dict[str, int] = field(default_factory=lambda: {"dense": 0, "gather": 0, "mask": 0})
    is_first: bool = True

    @property
    def density(self) -> float:
        """Mean share of units computed, 1.0 if nothing ran."""
        return int(self.active) / total if (total := int(self.total)) else 1.0


class SparsityStats:
    """Achieved density and the path taken, for every block of a model (of a shard: of the units counted there)."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[int, Block], BlockStats] = {}
        self._row_counts: dict[Block, Tensor] = {}
        self._dense_rows: dict[Block, list[int]] = {}  # what the host still has to add to every row

    def of(self, layer_idx: int, block: Block) -> BlockStats:
        """The counters of one block, made on first use."""
        return self.blocks.setdefault((layer_idx, block), BlockStats())

    @property
    def row_counts(self) -> dict[Block, Tensor]:
        """Per kind of block, summed over layers: int64 [2, B], active units and all units of each batch row. Counted
        only from when a caller has set it (as `generate` does)."""
        for block, dense in self._dense_rows.items():
            if any(dense):
                counts = zip(self._row_counts[block], dense, strict=True)
                self._row_counts[block] = torch.stack([row + number for row, number in counts])
                self._dense_rows[block] = [0, 0]
        return self._row_counts

    @row_counts.setter
    def row_counts(self, counts: dict[Block, Tensor]) -> None:
        self._row_counts = counts
        self._dense_rows = {block: [0, 0] for block in counts}

    def count(
        self, context: SelectionContext, num_units: int, execution: str, active: ActiveSet | ActiveList | None
    ) -> None:
        """Add one call of a block with `num_units` units here; `active` None: dense."""
        units, valid, (batch, tokens) = context.units, context.valid, context.positions.shape
        mask = active.mask if isinstance(active, ActiveSet) else None
        stats = self.of(context.layer_idx, context.block)
        stats.executions[execution] += 1
        if units is not None:
            stats.is_first, num_units = units.is_first, units.num_counted
            mask = None if mask is None else mask & units.counted
        # Of each batch row: one int for all of them, or [B].
        total: int | Tensor = tokens * num_units if valid is None else valid.sum(-1) * num_units
        kept = total
        if mask is not None:
            counted = mask if valid is None else mask & valid.reshape(-1, 1)
            kept = counted.unflatten(0, (batch, tokens)).sum((1, 2))
        elif active is not None:
            kept = active.num_active
        for counter, number in ((stats.active, kept), (stats.total, total)):
            counter.add(number * batch if isinstance(number, int) else number.sum())
        if (counts := self._row_counts.get(context.block)) is not None:
            for row, number in enumerate((kept, total)):
                if isinstance(number, int):
                    self._dense_rows[context.block][row] += number
                else:
                    counts[row] += number

    def summed(self, num_layers: int, reduce: Reduce) -> "SparsityStats":
        """The statistics of all ranks together."""
        places: list[tuple[int, Block]] = [(layer, block) for layer in range(num_layers) for block in BLOCKS]
        found = [self.blocks.get(place, BlockStats()) for place in places]
        mine = [
            [int(stats.active), int(stats.total), *(calls * stats.is_first for calls in stats.executions.values())]
            for stats in found
        ]
        together = SparsityStats()
        for place, (active, total, *calls) in zip(places, reduce(torch.tensor(mine)).tolist(), strict=True):
            if any(calls):
                executions = dict(zip(("dense", "gather", "mask"), calls, strict=True))
                together.blocks[place] = BlockStats(Count(active), Count(total), executions)
        return together

    def densities(self, block: Block) -> list[float]:
        """Achieved density of each layer, in layer order."""
        return [stats.density for (_, kind), stats in sorted(self.blocks.items()) if kind == block]

    def mean_density(self, block: Block) -> float:
        """Mean over layers of the achieved density; 1.0 if the block never ran."""
        densities = self.densities(block)
        return sum(densities) / len(densities) if densities else 1.0

    def executions(self) -> dict[str, int]:
        """Calls by path, over all blocks: {"dense": n, "gather": n, "mask": n}."""
        total = {"dense": 0, "gather": 0, "mask": 0}
        for stats in self.blocks.values():
            for name, calls in stats.executions.items():
                total[name] += calls
        return total
