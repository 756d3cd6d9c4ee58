"""Choosing units where several ranks hold a block: the same sets, and every real unit counted once."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from modules.feed_forward import unit_norms
from modules.sparsity import BLOCKS, ActiveSet, Selector, SparsityStats, num_kept
from sparse_predictor.labels import contribution
from sparse_predictor.methods.oracle import OracleSelector
from sparse_predictor.methods.random import RandomSelector
from sparse_predictor.methods.static import StaticSelector
from sparse_predictor.selection import Selection, apply_sparsity, attach_selection
from tests.modules.tiny_kinds import KINDS, random_tokens
from tests.modules.tiny_models import tiny_decoder
from tests.modules.unit_shard_ranks import Ranks, Watched, context_of, cut_decoders, head_plans, unit_shard

PLANS = head_plans()


@given(st.integers(1, 30), st.integers(1, 5), st.integers(0, 3), st.integers(0, 1000))
def test_columns_of_all_ranks_make_up_the_mask(num_units: int, size: int, padding: int, seed: int) -> None:
    mask = torch.rand(4, num_units, generator=torch.Generator().manual_seed(seed)) < 0.5
    held = [list(range(rank, num_units, size)) for rank in range(size)]
    ranks, width = Ranks(size), len(held[0]) + padding
    rebuilt = torch.zeros_like(mask)
    for rank in range(size):
        units = unit_shard(ranks, rank, held, width, num_units)
        columns = units.columns(mask)
        assert columns.shape == (4, width) and not columns[:, len(held[rank]) :].any(), "padding is never active"
        rebuilt[:, held[rank]] = columns[:, : len(held[rank])]
        assert units.num_counted == len(held[rank])
    assert torch.equal(rebuilt, mask)


def test_units_that_several_ranks_hold_are_chosen_alike_and_counted_once() -> None:
    held = [[0], [0], [1]]
    ranks = Ranks(3)
    scores = [torch.tensor([[5.0], [1.0]]), torch.tensor([[-7.0], [9.0]]), torch.tensor([[4.0], [3.0]])]

    def choose(rank: int) -> tuple[list[Any], int]:
        units = unit_shard(ranks, rank, held, 1, 2)
        return ActiveSet.from_scores(units.gather(scores[rank]), 1, units).mask.tolist(), units.num_counted

    first, copy, other = ranks.run(choose)
    assert first == ([[True], [False]], 1) and copy == (first[0], 0) and other == ([[False], [True]], 1)


def test_a_group_is_as_large_as_all_its_heads_whoever_computes_them() -> None:
    heads = torch.randn(2, 3, 2, 3, 4, dtype=torch.float64)  # two groups of three heads
    whole = contribution(heads, None)
    parts = [heads[:, :, :1, :1], heads[:, :, :1, 1:], heads[:, :, 1:]]
    ranks = Ranks(3)
    found = ranks.run(lambda rank: contribution(parts[rank], None, unit_shard(ranks, rank, [[0], [0], [1]], 1, 2)))
    for scores in found:
        torch.testing.assert_close(scores, whole, rtol=1e-12, atol=0)


def test_random_and_static_units_need_no_word_from_other_ranks() -> None:
    positions = torch.tensor([[0, 1, 2], [7, 8, 9]])
    states = torch.zeros(2, 3, 4)
    frequent = torch.rand(10) < 0.5
    selectors: list[Selector] = [RandomSelector(0.4, 10, 3), StaticSelector(frequent)]
    ranks = Ranks(3)  # nobody runs them, so an exchange would not come back
    for selector in selectors:
        whole = selector.select(states, context_of(positions))
        assert whole is not None
        for rank in range(3):
            units = unit_shard(ranks, rank, [[9, 2, 4], [1, 0, 3], [5, 6, 8, 7]], 5, 10)
            here = selector.select(states, context_of(positions, units=units))
            assert here is not None and torch.equal(here.mask, units.columns(whole.mask))


def logits_of(model: Any, batch: int) -> Tensor:
    """A ragged prefill and two decoding steps: [batch, 4, V]."""
    ids = random_tokens(batch, 8)
    cache = model.new_cache(batch, 8)
    lengths = torch.arange(batch) % 3 + 4
    states = model(ids[:, :6], cache=cache, num_tokens=lengths)
    found = [model.logits(states[:, :4])]
    found += [model.logits(model(ids[:, step : step + 1], cache=cache, phase="decode")) for step in (6, 7)]
    return torch.cat(found, 1)


@pytest.mark.parametrize("plan", list(PLANS))
@pytest.mark.parametrize("method", ["dense", "oracle", "random"])
@pytest.mark.parametrize("batch", [1, 3, 9])
def test_ranks_run_and_count_as_one_process(plan: str, method: str, batch: int) -> None:
    whole = tiny_decoder(KINDS["llama-biases"], dtype=torch.float64)
    ranks = Ranks(len(PLANS[plan]))
    models = cut_decoders(whole, ranks, PLANS[plan])
    selection = Selection(method=method, mlp_density=0.3, head_density=0.5, sparse_phases="all", seed=4)  # type: ignore

    def run(model: Any) -> tuple[Tensor, SparsityStats]:
        stats = attach_selection(model, selection)
        stats.row_counts = {block: torch.zeros(2, batch, dtype=torch.int64) for block in BLOCKS}
        return logits_of(model, batch), stats

    with torch.inference_mode():
        expected, alone = run(whole)
    found = ranks.run(lambda rank: run(models[rank]))
    for logits, _ in found:
        assert float((logits - expected).abs().max()) < 1e-9
    for block in BLOCKS:
        rows = torch.stack([stats.row_counts[block] for _, stats in found]).sum(0)
        assert rows.tolist() == alone.row_counts[block].tolist()
    together = ranks.run(lambda rank: found[rank][1].summed(3, ranks.summed(rank)))
    for stats in together:
        assert stats.executions() == alone.executions() and stats.blocks.keys() == alone.blocks.keys()
        for place, block_stats in alone.blocks.items():
            assert int(stats.blocks[place].active) == int(block_stats.active)
            assert int(stats.blocks[place].total) == int(block_stats.total)


@pytest.mark.parametrize("plan", list(PLANS))
def test_heads_of_padding_do_not_make_a_group_look_large(plan: str) -> None:
    """Their queries are zero, so they return the mean of the values, which is not."""
    whole = tiny_decoder(KINDS["llama"], dtype=torch.float64)
    ranks = Ranks(len(PLANS[plan]))
    models = cut_decoders(whole, ranks, PLANS[plan])

    def chosen(model: Any) -> list[ActiveSet | None]:
        watched = [Watched(OracleSelector(None, 0.5, 2)) for _ in range(3)]
        apply_sparsity(model, {(layer, "attention"): watched[layer] for layer in range(3)})
        logits_of(model, 3)
        return [active for selector in watched for active in selector.found]

    with torch.inference_mode():
        expected = chosen(whole)
    for model, found in zip(models, ranks.run(lambda rank: chosen(models[rank])), strict=True):
        units = model.attention(0).unit_shard
        for here, everywhere in zip(found, expected, strict=True):
            assert torch.equal(here.mask, units.columns(everywhere.mask))  # type: ignore[union-attr]


@pytest.mark.cuda
def test_random_units_are_the_same_on_a_gpu() -> None:
    positions = torch.arange(300).view(2, 150)
    selector = RandomSelector(0.3, 1000, 7)
    masks = []
    for device in ("cpu", "cuda"):
        active = selector.select(torch.zeros(2, 150, 1, device=device), context_of(positions.to(device)))
        assert active is not None
        masks.append(active.mask.cpu())
    assert torch.equal(*masks)


def test_oracle_norms_are_those_of_the_neurons_here() -> None:
    whole = tiny_decoder(KINDS["llama"], dtype=torch.float64)
    models = cut_decoders(whole, Ranks(3), PLANS["one-rank-has-padding-only"])
    for rank, model in enumerate(models):
        norms = unit_norms(model.mlp(1))
        assert model.mlp(1).num_units == 27 and norms.shape == (27,)
        held = list(range(rank, 80, 3))
        torch.testing.assert_close(norms[: len(held)], unit_norms(whole.mlp(1))[held])
        assert float(norms[len(held) :].sum()) == 0.0
    assert num_kept(0.3, 80) == 24
