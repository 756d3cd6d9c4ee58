"""Tensor parallelism, applied to a decoder from outside (Shoeybi et al. 2019, Megatron-LM, section 3).

Queries, keys, values, gate and up are cut by output (column parallel), the output projections by input (row parallel),
so each half-block ends in a partial sum which the residual junction adds up over the ranks: one all-reduce per
half-block and one for the embeddings. The vocabulary is cut too; logits are joined, so every rank chooses the same
token.

A key-value group and its query heads stay together while there are at least as many groups as ranks; where there are
fewer, several ranks hold a copy of a group's key-value head and share its queries. What does not divide is padded with
heads of zero weight, so that all ranks have the same shapes.

Legend: V vocabulary, W ranks, U units of a block on one rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from modules.attention import Attention
from modules.decoder import Decoder
from modules.feed_forward import FeedForward
from modules.shards import Shard
from modules.sparsity import UnitShard
from pipeline_parallel.communication import ReducingAddNorm, all_gather_last
from pipeline_parallel.mesh import ParallelMesh


@dataclass(frozen=True, kw_only=True)
class HeadPlan:
    """One rank's share: consecutive groups, and the query heads [start, stop) of each of them that it computes."""

    groups: tuple[int, ...]
    query_heads: tuple[int, int]
    num_groups: int  # with padding, the same on all ranks
    queries_per_group: int  # with padding, the same on all ranks
    is_first_holder: bool  # no earlier rank holds these groups


def plan_heads(num_attention_heads: int, num_key_value_heads: int, tp_size: int) -> list[HeadPlan]:
    """Each rank's share; every query head is on exactly one rank. ValueError for more ranks than query heads."""
    if tp_size > num_attention_heads:
        raise ValueError(
            f"--tp-size {tp_size}: this model has {num_attention_heads} attention heads, one per rank at least"
        )
    per_group = num_attention_heads // num_key_value_heads
    if tp_size <= num_key_value_heads:
        starts = [rank * num_key_value_heads // tp_size for rank in range(tp_size + 1)]
        return [
            HeadPlan(
                groups=tuple(range(start, stop)),
                query_heads=(start * per_group, stop * per_group),
                num_groups=-(-num_key_value_heads // tp_size),
                queries_per_group=per_group,
                is_first_holder=True,
            )
            for start, stop in zip(starts, starts[1:], strict=False)
        ]
    owner = [rank * num_key_value_heads // tp_size for rank in range(tp_size)]
    shares = []
    for rank, group in enumerate(owner):
        holders = owner.count(group)
        place = rank - owner.index(group)
        first, last = place * per_group // holders, (place + 1) * per_group // holders
        shares.append((group, first, last, place == 0))
    widest = max(last - first for _, first, last, _ in shares)
    return [
        HeadPlan(
            groups=(group,),
            query_heads=(group * per_group + first, group * per_group + last),
            num_groups=1,
            queries_per_group=widest,
            is_first_holder=is_first,
        )
        for group, first, last, is_first in shares
    ]


class ShardedEmbedding(nn.Module):
    """Rows [first, first + num_real) of a token embedding: zeros for tokens of other ranks, to be added up."""

    def __init__(self, first: int, num_real: int, weight: Tensor) -> None:
        super().__init__()
        self.first, self.num_real = first, num_real
        self.weight = weight  # a parameter, kept under its old name

    def forward(self, token_ids: Tensor) -> Tensor:
        """[B, T] -> [B, T, width]."""
        local = token_ids - self.first
        here = (local >= 0) & (local < self.num_real)
        return F.embedding(local.where(here, 0), self.weight).masked_fill(~here[..., None], 0)


def even_range(total: int, rank: int, size: int) -> tuple[int, int, int]:
    """(start, stop, width): equal blocks of `width` of which the last ones may be short, or empty."""
    width = -(-total // size)
    return min(rank * width, total), min((rank + 1) * width, total), width


def apply_tensor_parallel(model: Decoder, mesh: ParallelMesh) -> None:
    """Cut a decoder on `meta` to this rank's part. `model.shards` then says which part each parameter is.

    ValueError for more ranks than heads.
    """
    if mesh.tp_size == 1:
        return
    for (kind, layer_idx), block in model.blocks.items():
        cut = _cut_attention(block, mesh) if isinstance(block, Attention) else _cut_feed_forward(block, mesh)
        place = f"half_blocks.{2 * layer_idx + (kind == 'mlp')}.block"
        model.shards |= {f"{place}.{name}": shard for name, shard in cut.items()}
    _cut_vocabulary(model, mesh)
    if mesh.tp_group is not None:  # a mesh without groups only tells shapes and slices
        model.add_norm = ReducingAddNorm(mesh.tp_group)


def _cut_attention(block: Attention, mesh: ParallelMesh) -> dict[str, Shard]:
    plan = plan_heads(block.spec.num_attention_heads, block.units.number, mesh.tp_size)
    mine = plan[mesh.tp_rank]
    shards = block.cut(
        groups=(mine.groups[0], mine.groups[-1] + 1) if mine.groups else (0, 0),
        query_heads=mine.query_heads,
        num_groups=mine.num_groups,
        queries_per_group=mine.queries_per_group,
    )
    held = [share.groups + (-1,) * (share.num_groups - len(share.groups)) for share in plan]
    block.unit_shard = _units(block.units.number, held, [share.is_first_holder for share in plan], mesh)
    return shards


def _cut_feed_forward(block: FeedForward, mesh: ParallelMesh) -> dict[str, Shard]:
    total = block.units.number
    ranges = [even_range(total, rank, mesh.tp_size) for rank in range(mesh.tp_size)]
    shards = block.cut(*ranges[mesh.tp_rank])
    held = [tuple(range(first, last)) + (-1,) * (width - (last - first)) for first, last, width in ranges]
    block.unit_shard = _units(total, held, [True] * mesh.tp_size, mesh)
    return shards


def _cut_vocabulary(model: Decoder, mesh: ParallelMesh) -> None:
    config = model.config
    start, stop, width = even_range(config.vocab_size, mesh.tp_rank, mesh.tp_size)
    shard = Shard.of_rows(start, stop, width, config.vocab_size)
    if model.is_first:
        whole = model.embeddings.tokens.weight
        assert whole.is_meta, "tensor parallelism is applied to a decoder on meta"
        table = nn.Parameter(whole.new_empty(shard.local_shape(tuple(whole.shape))))
        tokens: Any = ShardedEmbedding(start, stop - start, table)
        model.embeddings.tokens = tokens
        model.shards["embeddings.tokens.weight"] = shard
        if mesh.tp_rank > 0:
            model.embeddings.positions = None  # added once
    if model.is_last:
        parts = model.lm_head.cut(shard)
        if model.is_first and config.tie_word_embeddings:
            model.tie_head()
        model.shards |= {f"lm_head.{kind}": part for kind, part in parts.items()}
        model.join_logits = partial(_join_logits, vocab_size=config.vocab_size, group=mesh.tp_group)


def _join_logits(logits: Tensor, *, vocab_size: int, group: dist.ProcessGroup | None) -> Tensor:
    """The logits of one rank's words -> those of all words, [..., vocab_size]; those of padding are cut off."""
    assert group is not None
    return all_gather_last(logits, group)[..., :vocab_size]


def _units(num_units: int, held: list[tuple[int, ...]], counted: list[bool], mesh: ParallelMesh) -> UnitShard:
    """What `held[rank]` says each rank has (-1: padding), as this rank's UnitShard."""
    width, mine = len(held[0]), held[mesh.tp_rank]
    places: dict[int, int] = {}  # unit -> its first place among the joined columns of all ranks
    for rank, units in enumerate(held):
        for column, unit in enumerate(units):
            if unit >= 0:
                places.setdefault(unit, rank * width + column)
    firsts = torch.tensor([places[unit] for unit in range(num_units)], device=mesh.device)
    owners = torch.tensor([unit for units in held for unit in units], device=mesh.device)

    def joined(scores: Tensor) -> Tensor:
        assert mesh.tp_group is not None
        return all_gather_last(scores, mesh.tp_group)

    def gather(scores: Tensor) -> Tensor:
        return joined(scores)[..., firsts]

    def gather_norms(scores: Tensor) -> Tensor:
        squares = joined(scores).square().masked_fill(owners < 0, 0)
        total = squares.new_zeros(*squares.shape[:-1], num_units)
        return total.index_add_(-1, owners.clamp(min=0), squares).sqrt_()

    local = torch.tensor(mine, device=mesh.device)
    return UnitShard(
        num_units=num_units,
        local=local,
        counted=(local >= 0) & counted[mesh.tp_rank],
        gather=gather,
        gather_norms=gather_norms,
        is_first=mesh.tp_rank == 0,
    )
