"""Sparse models in graphs: what a step's message says about active units is what the statistics say without graphs."""

from collections.abc import Callable

import pytest
import torch

from modules.decoder import Decoder
from modules.feed_forward import unit_norms
from modules.generation import generate
from modules.graphs import StepCounts, _side_by_side
from modules.requests import GenerationRequest
from modules.sparsity import BLOCKS, ActiveSet, Block, SelectionContext, Selector, SparsityStats
from sparse_predictor.methods.oracle import OracleSelector
from sparse_predictor.methods.random import RandomSelector
from sparse_predictor.methods.static import StaticSelector
from sparse_predictor.selection import apply_sparsity
from tests.modules.played_graphs import play_graphs
from tests.modules.tiny_kinds import LLAMA, random_tokens
from tests.modules.tiny_models import tiny_decoder

NUM_UNITS: dict[Block, int] = {"attention": 2, "mlp": 80}
Make = Callable[[Decoder, int, Block], Selector]


class ByToken:
    """As many units as a row's own input says; of decode steps only, so a prompt is dense."""

    lookahead = 0

    def select(self, hidden_states: torch.Tensor, context: SelectionContext) -> ActiveSet | None:
        if context.phase == "prefill":
            return None
        share = torch.sigmoid(hidden_states.flatten(0, 1)[:, :1])
        num_units = NUM_UNITS[context.block]
        return ActiveSet(torch.arange(num_units) < share * num_units)


def static(model: Decoder, layer: int, block: Block) -> Selector:
    return StaticSelector(torch.arange(NUM_UNITS[block]) < (1 if block == "attention" else 20 + layer))


def oracle(model: Decoder, layer: int, block: Block) -> Selector:
    norms = unit_norms(model.mlp(layer)).double() if block == "mlp" else None
    return OracleSelector(norms, 0.5 + 0.1 * layer, NUM_UNITS[block])


MAKERS: dict[str, Make] = {
    "static": static,
    "oracle": oracle,
    "random": lambda model, layer, block: RandomSelector(0.5, NUM_UNITS[block], seed=layer),
    "by token": lambda model, layer, block: ByToken(),
}


def requests() -> list[GenerationRequest]:
    tokens = random_tokens(6, 20).tolist()
    return [
        GenerationRequest(prompt_token_ids=ids[:length], max_new_tokens=count)
        for ids, length, count in zip(tokens, [9, 1, 17, 4, 12, 3], [7, 12, 3, 9, 1, 6], strict=True)
    ]


def facts(stats: SparsityStats) -> dict[tuple[int, Block], tuple[object, ...]]:
    return {
        place: (int(found.active), int(found.total), found.executions, found.is_first)
        for place, found in stats.blocks.items()
    }


@pytest.mark.parametrize("name", MAKERS)
def test_a_sparse_model_counts_in_graphs_what_it_counts_without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_decoder(LLAMA, dtype=torch.float64)
    # One block stays dense beside the others.
    places = [(layer, block) for layer in model.layers for block in BLOCKS if (layer, block) != (1, "attention")]
    selectors = {place: MAKERS[name](model, *place) for place in places}
    eos = range(0, 131, 7)
    for batch_size in (1, 3):
        stats = apply_sparsity(model, selectors)
        eager = generate(model, requests(), batch_size=batch_size, eos_token_ids=eos)
        expected = facts(stats)
        for warm_up in (False, True):
            stats = apply_sparsity(model, selectors)
            with monkeypatch.context() as patch:
                seen = play_graphs(patch)
                found = generate(model, requests(), batch_size=batch_size, eos_token_ids=eos, warm_up=warm_up)
            assert seen.steps_ahead("used") > 0 and (batch_size == 1 or seen.steps_ahead("discarded") > 0)
            assert [each.token_ids for each in found] == [each.token_ids for each in eager]
            for ours, theirs in zip(found, eager, strict=True):
                assert (ours.mlp_density, ours.head_density) == (theirs.mlp_density, theirs.head_density)
            assert facts(stats) == expected and not stats.row_counts
    if name == "by token":
        assert len({each.mlp_density for each in eager}) > 3, "each row has its own"


def test_a_dense_model_with_statistics_counts_its_steps_in_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_decoder(LLAMA, dtype=torch.float64)
    stats = apply_sparsity(model, {})
    generate(model, requests(), batch_size=3, eos_token_ids=())
    expected = facts(stats)
    stats = apply_sparsity(model, {})
    play_graphs(monkeypatch)
    generate(model, requests(), batch_size=3, eos_token_ids=(), warm_up=True)
    assert facts(stats) == expected


def context(block: Block) -> SelectionContext:
    positions = torch.zeros(4, 1, dtype=torch.int64)
    return SelectionContext(
        layer_idx=0,
        block=block,
        phase="decode",
        positions=positions,
        valid=None,
        earlier_inputs={},
        dense_output=lambda: positions,
    )


def test_padding_rows_are_not_counted_and_rows_have_their_own_counts() -> None:
    counts = StepCounts()
    counts.count(context("mlp"), 10, "gather", ActiveSet(torch.arange(10) < torch.tensor([[1], [4], [7], [9]])))
    counts.count(context("mlp"), 10, "dense", None)
    counts.count(context("attention"), 2, "mask", ActiveSet(torch.tensor([[True, False]])))
    (table,) = counts.table(4)
    assert table.tolist() == [[1, 4, 7, 9], [1, 1, 1, 1]]
    stats = SparsityStats()
    counts.add_to(stats, table[:, :3], 3)
    stats.row_counts = {block: torch.zeros(2, 3, dtype=torch.int64) for block in BLOCKS}
    counts.add_to(stats, table[:, :3], 3)
    assert stats.row_counts["mlp"].tolist() == [[11, 14, 17], [20, 20, 20]]
    assert stats.row_counts["attention"].tolist() == [[1, 1, 1], [2, 2, 2]]
    assert facts(stats) == {
        (0, "mlp"): (2 * (12 + 30), 2 * 60, {"dense": 2, "gather": 2, "mask": 0}, True),
        (0, "attention"): (2 * 3, 2 * 6, {"dense": 0, "gather": 0, "mask": 2}, True),
    }


def test_what_the_host_knows_is_counted_without_the_device() -> None:
    counts = StepCounts()
    counts.count(context("attention"), 8, "gather", ActiveSet(torch.zeros(4, 8, dtype=torch.bool), count=3))
    assert counts.table(4) == []
    stats = SparsityStats()
    stats.row_counts = {"attention": torch.zeros(2, 2, dtype=torch.int64)}
    counts.add_to(stats, torch.empty(0, 2), 2)
    assert facts(stats) == {(0, "attention"): (6, 16, {"dense": 0, "gather": 1, "mask": 0}, True)}
    assert stats.row_counts["attention"].tolist() == [[3, 3], [8, 8]]


@pytest.mark.parametrize("num_rows", [1, 2])
def test_counts_that_lie_evenly_in_memory_are_a_view_and_others_a_copy(num_rows: int) -> None:
    memory = torch.arange(60, dtype=torch.int32).view(12, 5)
    evenly = [memory[place, 1 : 1 + num_rows] for place in (1, 3, 5, 7)]
    found = _side_by_side(evenly)
    assert torch.equal(found, torch.stack(evenly)) and found.data_ptr() == evenly[0].data_ptr()
    other = torch.full((num_rows,), 7, dtype=torch.int32)
    for counts in (
        [*evenly, memory[8, 1 : 1 + num_rows]],
        [*evenly, other],
        [other],
        evenly[::-1],
        [other[:1].expand(num_rows)] * 2,
    ):
        assert torch.equal(_side_by_side(counts), torch.stack(counts))
