"""Seam 1: which units (MLP neurons, key-value groups of heads) a token computes.

A `Selector` sits in every MLP and attention block. `None` means dense. It answers with an `ActiveSet`; the block
then really skips the other units (few rows: gathered weight rows) or masks them (many rows), same set either way.

Legend: B batch, T tokens, rows = B * T, U units, D hidden.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

Block = Literal["mlp", "attention"]
Phase = Literal["prefill", "decode"]
BLOCKS: tuple[Block, Block] = ("attention", "mlp")

# Above this many rows the union of the active sets is nearly everything, and a masked dense matmul is faster.
MAX_GATHER_ROWS = 8


def num_kept(density: float, num_units: int) -> int:
    """Units kept at `density` in (0, 1]: max(1, floor(density * num_units + 0.5))."""
    if not 0.0 < density <= 1.0:
        raise ValueError(f"density must lie in (0, 1], got {density}")
    return max(1, int(density * num_units + 0.5))


@dataclass(frozen=True)
class ActiveSet:
    """The active units of each row.

    `mask` bool [rows, U]. `compensation` [rows, D] is added to the block's output (the stand-in for what is
    skipped). `gate_values` [rows, U]: act(gate) where the selector has already paid for it (CATS).
    """

    mask: Tensor
    compensation: Tensor | None = None
    gate_values: Tensor | None = None

    @property
    def num_active(self) -> Tensor:
        """Active units of each row, int32 [rows], on the device."""
        return self.mask.sum(-1, dtype=torch.int32)

    @property
    def active_indices(self) -> Tensor:
        """int32 [rows, U]: row r's first num_active[r] entries are its active units, ascending; then the inactive.

        Fixed shape and no host read, so a CUDA graph can hold it.
        """
        # A stable sort of "inactive" puts active units first and keeps both groups in order.
        return torch.sort(~self.mask, dim=-1, stable=True).indices.to(torch.int32)

    @staticmethod
    def from_scores(scores: Tensor, count: int) -> "ActiveSet":
        """Top `count` units of each row by score [rows, U]."""
        indices = scores.topk(count, dim=-1, sorted=False).indices
        return ActiveSet(torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, indices, True))


@dataclass(frozen=True, kw_only=True)
class SelectionContext:
    """What a selector may look at besides its block's own input.

    `earlier_inputs[i]`: the normed input [B, T, D] of the same kind of block in layer i, for look-ahead.
    `dense_output()`: what the dense block computes before its output projection: activations [B, T, F] (MLP) or
    head outputs by group [B, T, G, R, H] (attention). Only oracles and baselines that need it pay for it.
    """

    layer_idx: int
    block: Block
    phase: Phase
    valid: Tensor | None
    earlier_inputs: Mapping[int, Tensor]
    dense_output: Callable[[], Tensor]


class Selector(Protocol):
    """Chooses the active units of one block; `lookahead` is how many layers back it reads (0: its own input)."""

    @property
    def lookahead(self) -> int: ...

    def select(self, hidden_states: Tensor, context: SelectionContext) -> ActiveSet | None:
        """hidden_states [B, T, D], the block's normed input -> active set over B * T rows, or None for dense."""
        ...


@dataclass
class BlockStats:
    """What one block did, counted on the device and read once at the end.

    Tokens of padding are not counted. `executions` counts calls: dense, gather (units skipped), mask.
    """

    num_units: int
    rows: Tensor | None = None
    active: Tensor | None = None
    executions: dict[str, int] = field(default_factory=lambda: {"dense": 0, "gather": 0, "mask": 0})
    row_counts: Tensor | None = None  # int64 [2, B]: active units, all units of each batch row (see SparsityStats)

    def count(self, execution: str, num_active: Tensor | None, valid: Tensor | None, num_rows: int) -> None:
        """Add one call: `num_active` [rows] (None: dense), `valid` [B, T] bool or None (all rows are real)."""
        self.executions[execution] += 1
        if num_active is None:
            real = valid.sum() if valid is not None else torch.tensor(num_rows)
            total = real * self.num_units
        elif valid is None:
            real, total = torch.tensor(num_rows, device=num_active.device), num_active.sum(dtype=torch.int64)
        else:
            keep = valid.reshape(-1)
            real, total = keep.sum(), (num_active * keep).sum(dtype=torch.int64)
        self.rows = real if self.rows is None else self.rows + real.to(self.rows.device)
        self.active = total if self.active is None else self.active + total.to(self.active.device)
        if self.row_counts is not None:
            shape = (self.row_counts.shape[1], num_rows // self.row_counts.shape[1])
            tokens = torch.ones_like(self.row_counts[0, :, None].expand(shape)) if valid is None else valid
            kept = tokens * (self.num_units if num_active is None else num_active.view(shape))
            self.row_counts += torch.stack((kept.sum(-1), tokens.sum(-1) * self.num_units))

    @property
    def density(self) -> float:
        """Mean share of units computed, 1.0 if nothing ran."""
        if self.rows is None or self.active is None or int(self.rows) == 0:
            return 1.0
        return float(self.active) / (float(self.rows) * self.num_units)


class SparsityStats:
    """Achieved density and the path taken, for every block of a model."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[int, Block], BlockStats] = {}
        self.row_counts: dict[Block, Tensor] = {}  # per kind of block, summed over layers, for those who ask: generate

    def of(self, layer_idx: int, block: Block, num_units: int) -> BlockStats:
        """The counters of one block, made on first use."""
        stats = self.blocks.setdefault((layer_idx, block), BlockStats(num_units))
        stats.row_counts = self.row_counts.get(block)
        return stats

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


class OracleSelector:
    """Top units by what they really contribute: |a_j| * ||down_j|| for neurons, output norm for head groups.

    It computes the dense block first, so it bounds accuracy and saves nothing. ReLU neurons that are exactly
    zero may be kept to fill the count; keeping them changes no output.
    """

    lookahead = 0

    def __init__(self, unit_norms: Tensor | None, density: float, num_units: int) -> None:
        self.unit_norms = unit_norms
        self.count = num_kept(density, num_units)

    def select(self, hidden_states: Tensor, context: SelectionContext) -> ActiveSet | None:
        return ActiveSet.from_scores(contribution(context.dense_output(), self.unit_norms), self.count)


def contribution(dense_output: Tensor, unit_norms: Tensor | None) -> Tensor:
    """Size of each unit's part of the block output, [rows, U].

    MLP: `dense_output` [B, T, F] and `unit_norms` [F] = ||down_j||. Attention: `dense_output` [B, T, G, R, H]
    (key-value groups of R query heads): L2 over a group's heads.
    """
    if dense_output.dim() == 5:
        return dense_output.flatten(-2).norm(dim=-1).flatten(0, 1)
    scores = dense_output.abs()
    return (scores if unit_norms is None else scores * unit_norms).flatten(0, 1)


class StaticSelector:
    """The same units for every token (those most often active on calibration text)."""

    lookahead = 0

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask

    def select(self, hidden_states: Tensor, context: SelectionContext) -> ActiveSet | None:
        rows = hidden_states.shape[0] * hidden_states.shape[1]
        return ActiveSet(self.mask.to(hidden_states.device).expand(rows, -1))


class RandomSelector:
    """`count` random units for each row, drawn anew each call from a seeded generator: a baseline, whose draws depend
    on the order and batching of calls."""

    lookahead = 0

    def __init__(self, density: float, num_units: int, seed: int) -> None:
        self.count = num_kept(density, num_units)
        self.num_units = num_units
        self.generator = torch.Generator().manual_seed(seed)

    def select(self, hidden_states: Tensor, context: SelectionContext) -> ActiveSet | None:
        rows = hidden_states.shape[0] * hidden_states.shape[1]
        scores = torch.rand(rows, self.num_units, generator=self.generator)
        return ActiveSet.from_scores(scores.to(hidden_states.device), self.count)
