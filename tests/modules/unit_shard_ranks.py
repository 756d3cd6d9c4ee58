"""Tensor-parallel ranks as threads of one process: decoders cut by hand, and what they tell each other.

What a rank's units say is built here from which units every rank holds, without torch.distributed, and in another way
than `pipeline_parallel` does it.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from modules.attention import Attention
from modules.decoder import Decoder
from modules.feed_forward import FeedForward
from modules.normalization import add_norm
from modules.sparsity import ActiveSet, SelectionContext, Selector, UnitShard

# Of each rank: the (groups, query heads within them) it computes, and the groups and queries a group with padding.
Plan = list[tuple[list[int], list[int], int, int]]


class Ranks:
    """`size` threads that run the same function and exchange values in lock step."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.values: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=60)

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """Every rank's value, on every rank."""
        self.values[rank] = value
        self.barrier.wait()
        found = list(self.values)
        self.barrier.wait()
        return found

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        """`function(rank)` on all ranks at once; results in their order."""

        def guarded(rank: int) -> Any:
            try:
                with torch.inference_mode():
                    return function(rank)
            except BaseException:
                self.barrier.abort()
                raise

        with ThreadPoolExecutor(self.size) as threads:
            futures = [threads.submit(guarded, rank) for rank in range(self.size)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in errors:
            if not isinstance(error, threading.BrokenBarrierError):
                raise error
        return [future.result() for future in futures]

    def summed(self, rank: int) -> Callable[[Tensor], Tensor]:
        """The reducer of one rank."""
        return lambda counts: torch.stack(self.exchange(rank, counts)).sum(0)


def neuron_shares(num_neurons: int, size: int) -> list[list[int]]:
    """Neurons of each rank: as many on each as fit, the last ranks short and then padded; interleaved, so that no
    selector may take neighbours for neighbours."""
    return [list(range(rank, num_neurons, size)) for rank in range(size)]


def unit_shard(ranks: Ranks, rank: int, held: list[list[int]], width: int, num_units: int) -> UnitShard:
    """This rank's units where `held[rank]` lists each rank's, padded to `width`."""
    earlier = {unit for units in held[:rank] for unit in units}
    local = held[rank] + [-1] * (width - len(held[rank]))

    def joined(scores: Tensor, combine: Callable[[list[Tensor]], Tensor]) -> Tensor:
        everyone = ranks.exchange(rank, scores)
        columns = [
            [everyone[place][:, units.index(unit)] for place, units in enumerate(held) if unit in units]
            for unit in range(num_units)
        ]
        return torch.stack([combine(parts) for parts in columns], -1)

    return UnitShard(
        num_units=num_units,
        local=torch.tensor(local),
        counted=torch.tensor([unit >= 0 and unit not in earlier for unit in local]),
        gather=lambda scores: joined(scores, lambda parts: parts[0]),
        gather_norms=lambda scores: joined(scores, lambda parts: torch.stack(parts).norm(dim=0)),
        is_first=rank == 0,
    )


def rows_of(weight: Tensor, indices: list[int], size: int) -> nn.Parameter:
    """Rows of a parameter, then rows of zeros."""
    cut = weight.new_zeros(size, *weight.shape[1:])
    cut[: len(indices)] = weight[indices]
    return nn.Parameter(cut, requires_grad=False)


def cut_decoders(whole: Decoder, ranks: Ranks, plan: Plan) -> list[Decoder]:
    """One decoder a rank: attention as `plan` says, neurons as `neuron_shares`; embeddings and head are whole."""
    found = []
    for rank in range(ranks.size):
        model = deepcopy(whole)
        for layer in range(whole.config.num_hidden_layers):
            _cut_attention(model.attention(layer), ranks, rank, plan)
            _cut_mlp(model.mlp(layer), ranks, rank)

        def reducing(partial: Tensor, residual: Tensor | None, *args: Any, rank: int = rank, **more: Any) -> Any:
            parts = [partial] if residual is None else ranks.exchange(rank, partial)  # embeddings are whole here
            return add_norm(torch.stack(parts).sum(0), residual, *args, **more)

        model.add_norm = reducing
        found.append(model.requires_grad_(False).eval())
    return found


def _cut_attention(block: Attention, ranks: Ranks, rank: int, plan: Plan) -> None:
    (groups, heads, num_groups, queries_per_group), num_units = plan[rank], block.num_units
    channels = {
        name: [index * block.head_dim + channel for index in indices for channel in range(block.head_dim)]
        for name, indices in (("q", heads), ("k", groups), ("v", groups), ("o", heads))
    }
    for name, indices in channels.items():
        projection = getattr(block, f"{name}_proj")
        size = num_groups * block.head_dim * (queries_per_group if name in "qo" else 1)
        for kind in ("weight", "bias"):
            if getattr(projection, kind, None) is not None:
                setattr(projection, kind, rows_of(getattr(projection, kind), indices, size))
    block.num_units, block.queries_per_group = num_groups, queries_per_group
    block.query_heads = (heads[0], heads[-1] + 1) if heads else (0, 0)
    block.unit_shard = unit_shard(ranks, rank, [share[0] for share in plan], num_groups, num_units)


def _cut_mlp(block: FeedForward, ranks: Ranks, rank: int) -> None:
    held, num_units = neuron_shares(block.num_units, ranks.size), block.num_units
    width = len(held[0])
    for projection in (block.gate_proj, block.up_proj, block.down_proj):
        for kind in ("weight", "bias"):
            if getattr(projection, kind, None) is not None:
                setattr(projection, kind, rows_of(getattr(projection, kind), held[rank], width))
    block.num_units = width
    block.unit_shard = unit_shard(ranks, rank, held, width, num_units)


class Watched:
    """Passes a selector's choice on, and keeps it."""

    def __init__(self, inner: Selector) -> None:
        self.inner, self.lookahead = inner, inner.lookahead
        self.found: list[ActiveSet | None] = []

    def select(self, hidden_states: Tensor, context: Any) -> ActiveSet | None:
        self.found.append(self.inner.select(hidden_states, context))
        return self.found[-1]


def context_of(positions: Tensor, layer_idx: int = 0, **more: Any) -> SelectionContext:
    more = {"valid": None, "dense_output": lambda: torch.zeros(0), "block": "mlp", **more}
    return SelectionContext(layer_idx=layer_idx, phase="decode", positions=positions, earlier_inputs={}, **more)


def head_plans() -> dict[str, Plan]:
    """Ways to share the 6 query heads and 2 key-value groups of the tiny Llama."""
    return {
        "a-group-each": [([0], [0, 1, 2], 1, 3), ([1], [3, 4, 5], 1, 3)],
        "one-rank-has-padding-only": [([0], [0, 1, 2], 1, 3), ([1], [3, 4, 5], 1, 3), ([], [], 1, 3)],
        "a-group-on-two-ranks": [([0], [0], 1, 3), ([0], [1, 2], 1, 3), ([1], [3, 4, 5], 1, 3)],
        "both-groups-on-two-ranks": [([0], [0, 1], 1, 2), ([0], [2], 1, 2), ([1], [3], 1, 2), ([1], [4, 5], 1, 2)],
    }
