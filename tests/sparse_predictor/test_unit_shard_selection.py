"""`attach_selection` where ranks hold parts of the blocks or of the layers: as in one process, for every method."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modules.decoder import Decoder
from modules.sparsity import BLOCKS
from sparse_predictor.cost import layer_bytes_share, mlp_bytes_share, predictor_bytes_share, thinned_densities
from sparse_predictor.labels import LabelDefinition, true_active
from sparse_predictor.methods.learned_predictor import PredictorSelector
from sparse_predictor.methods.registry import all_methods, is_thinning, thins_attention
from sparse_predictor.metrics import measure_selection
from sparse_predictor.selection import Selection, attach_selection, remove_sparsity
from sparse_predictor.store import read_manifest, same_weights, weights_sample
from tests.modules.tiny_kinds import KINDS, random_tokens
from tests.modules.tiny_models import tiny_decoder
from tests.modules.unit_shard_ranks import Ranks, Watched, cut_decoders, head_plans, unit_shard
from tests.sparse_predictor.tiny_stages import Trained, prompt_then_decode, selection

PLANS = head_plans()
PREDICTORS = [("predictor", variant) for variant in ("plain", "standin", "topk", "lookahead")]
SHARED = [name for name, method in all_methods().items() if not method.needs_whole_matrices]
METHODS = [
    *PREDICTORS,
    *((name, "standin") for name in SHARED if name != "predictor"),
]
CHOOSE_HEADS = ("predictor", "oracle", "static", "random")


def sharded(plan: str, kind: str = "llama") -> tuple[Decoder, Ranks, list[Decoder]]:
    """A whole model, the ranks that share it, and their parts: 80 neurons over 3 ranks leave one of padding."""
    whole = tiny_decoder(KINDS[kind], dtype=torch.float64)
    ranks = Ranks(len(PLANS[plan]))
    return whole, ranks, cut_decoders(whole, ranks, PLANS[plan])


def run(model: Decoder, chosen: Selection, batch: int) -> dict[str, Any]:
    """What a run made, for comparison: logits, sets of every call, statistics."""
    stats = attach_selection(model, chosen)
    watched: dict[tuple[int, str], Watched] = {}
    for layer in model.layers:
        for block in BLOCKS:
            module = model.half_block(layer, block).block
            if module.selector is not None:
                watched[layer, block] = Watched(module.selector)
                module.selector = watched[layer, block]
    logits = prompt_then_decode(model, batch)
    return {"logits": logits, "stats": stats, "sets": {place: one.found for place, one in watched.items()}}


@pytest.mark.parametrize("plan", ["one-rank-has-padding-only", "both-groups-on-two-ranks"])
@pytest.mark.parametrize(("method", "variant"), METHODS)
@pytest.mark.parametrize("batch", [1, 9])
def test_every_method_chooses_as_in_one_process(
    trained: Trained, plan: str, method: str, variant: str, batch: int
) -> None:
    whole, ranks, models = sharded(plan)
    heads = 0.5 if method in CHOOSE_HEADS else 1.0
    chosen = selection(method, trained(variant), 0.3, head_density=heads)
    alone = run(whole, chosen, batch)
    found = ranks.run(lambda rank: run(models[rank], chosen, batch))
    for one in found:
        assert float((one["logits"] - alone["logits"]).abs().max()) < 1e-9
    for place, expected in alone["sets"].items():
        for call, active in enumerate(expected):
            if active is None:
                assert all(one["sets"][place][call] is None for one in found)
                continue
            held = torch.zeros_like(active.mask)
            for model, one in zip(models, found, strict=True):
                units, here = model.half_block(*place).block.unit_shard, one["sets"][place][call]
                assert not here.mask[:, ~units.real].any(), "padding is never active"
                held[:, units.local[units.real]] = here.mask[:, units.real]
                assert torch.equal(here.mask, units.columns(active.mask)), "replicas agree, too"
                added = active.compensation is not None and units.is_first
                assert (here.compensation is not None) == added, "the stand-in is added once"
            assert torch.equal(held, active.mask)
    together = ranks.run(lambda rank: found[rank]["stats"].summed(3, ranks.summed(rank)))
    bytes_read = ranks.run(lambda rank: mlp_bytes_share(models[rank], method, together[rank], ranks.summed(rank)))
    thinned = ranks.run(lambda rank: thinned_densities(models[rank], ranks.summed(rank)))
    shares = ranks.run(lambda rank: layer_bytes_share(models[rank], method, together[rank], ranks.summed(rank)))
    for rank, stats in enumerate(together):
        for block in BLOCKS:
            assert stats.densities(block) == alone["stats"].densities(block)
        assert stats.executions() == alone["stats"].executions()
        assert bytes_read[rank] == pytest.approx(mlp_bytes_share(whole, method, alone["stats"]), abs=1e-12)
        assert thinned[rank] == pytest.approx(thinned_densities(whole), abs=1e-12)
        assert shares[rank] == pytest.approx(layer_bytes_share(whole, method, alone["stats"]), abs=1e-12)
    assert is_thinning(method) == (min(thinned[0]) < 0.9)
    assert thins_attention(method) == (min(thinned_densities(whole, block="attention")) < 0.9)


@pytest.mark.parametrize(("method", "variant"), METHODS)
def test_at_density_one_everything_but_padding_is_active(trained: Trained, method: str, variant: str) -> None:
    whole, ranks, models = sharded("one-rank-has-padding-only")
    dense = prompt_then_decode(whole, 2)
    found = ranks.run(lambda rank: run(models[rank], selection(method, trained(variant), 1.0), 2))
    for rank, (model, one) in enumerate(zip(models, found, strict=True)):
        assert float((one["logits"] - dense).abs().max()) < 1e-9
        assert one["stats"].densities("mlp") == [1.0] * 3
        assert int(one["stats"].of(0, "mlp").total) == 2 * 9 * (26 if rank == 2 else 27)
        for (_, block), sets in one["sets"].items():
            real = model.half_block(0, block).block.unit_shard.real
            chosen = [active.mask for active in sets if active is not None]
            assert block == "mlp" and chosen and all(torch.equal(mask, real.expand_as(mask)) for mask in chosen)
        if is_thinning(method):
            assert [int(model.mlp(0).down_proj.seen), int(model.mlp(0).down_proj.kept)] == [  # type: ignore
                2 * 9 * (26 if rank == 2 else 27)
            ] * 2


def test_each_rank_keeps_its_rows_of_a_predictor_and_the_first_the_standins(trained: Trained) -> None:
    whole, ranks, models = sharded("one-rank-has-padding-only")
    chosen = selection("predictor", trained("standin"), 0.3)
    attach_selection(whole, chosen)
    for rank, model in enumerate(models):
        attach_selection(model, chosen)
        here, everywhere = model.mlp(1).selector, whole.mlp(1).selector
        assert isinstance(here, PredictorSelector) and isinstance(everywhere, PredictorSelector)
        local = list(range(rank, 80, 3))
        assert torch.equal(here.predictor.first, everywhere.predictor.first)
        for name in ("second", "bias"):
            rows, full = getattr(here.predictor, name), getattr(everywhere.predictor, name)
            assert torch.equal(rows[: len(local)], full[local]) and rows[len(local) :].abs().sum() == 0
            assert rows.shape[0] == 27 and rows.untyped_storage().nbytes() == rows.nbytes, "the others are given back"
        assert (here.predictor.standin_in.shape[0] > 0) == (here.standin_index is not None) == (rank == 0)
    shares = ranks.run(lambda rank: predictor_bytes_share(models[rank], ranks.summed(rank)))
    assert shares == [predictor_bytes_share(whole)] * 3


@pytest.mark.parametrize(("kind", "method", "heads"), [("llama", "static", 0.5), ("opt", "random", 1.0)])
def test_recall_and_precision_are_those_of_one_process(trained: Trained, kind: str, method: str, heads: float) -> None:
    whole = tiny_decoder(KINDS[kind], dtype=torch.float64)
    plan = PLANS["both-groups-on-two-ranks"]
    if kind == "opt":
        plan = [([0, 1], [0, 1], 2, 1), ([2, 3], [2, 3], 2, 1), ([4, 5], [4, 5], 2, 1)]
    ranks = Ranks(len(plan))
    models = cut_decoders(whole, ranks, plan)
    ids, lengths = random_tokens(2, 20), torch.tensor([20, 7])

    def measured(model: Decoder) -> Any:
        attach_selection(model, selection(method, trained(kind=kind), 0.3, head_density=heads))
        quality = measure_selection(model, {"mlp": [0.3] * 3, "attention": [heads] * 3})
        with torch.no_grad():
            model(ids, num_tokens=lengths)
        return quality

    alone = measured(whole)
    found = ranks.run(lambda rank: measured(models[rank]))
    for together in ranks.run(lambda rank: found[rank].summed(3, ranks.summed(rank))):
        for block in BLOCKS:
            assert [overlap.counts.tolist() for overlap in together.per_layer(block)] == [
                overlap.counts.tolist() for overlap in alone.per_layer(block)
            ]
        assert (together.pooled("attention") is None) == (heads == 1.0)


@pytest.mark.parametrize("kind", ["positive", "top", "energy"])
def test_labels_of_a_shard_are_chosen_among_all_neurons(kind: Any) -> None:
    activations, norms = torch.randn(5, 10), torch.rand(10)
    definition = LabelDefinition(kind=kind, share=0.4)
    expected = true_active(activations, norms, definition)
    held, ranks = [[9, 2, 4], [1, 0, 3], [5, 6, 8, 7]], Ranks(3)

    def labels(rank: int) -> Tensor:
        units = unit_shard(ranks, rank, held, 4, 10)
        own, own_norms = torch.zeros(5, 4), torch.ones(4)
        own[:, : len(held[rank])], own_norms[: len(held[rank])] = activations[:, held[rank]], norms[held[rank]]
        return true_active(own, own_norms, definition, units)

    for rank, found in enumerate(ranks.run(labels)):
        assert torch.equal(found[:, : len(held[rank])], expected[:, held[rank]])
        assert not found[:, len(held[rank]) :].any()


def stages(kind: str = "llama", cuts: tuple[int, ...] = (0, 1, 3)) -> list[Decoder]:
    """Pipeline stages of a tiny model: layers of other stages are empty modules."""
    found = []
    for start, stop in zip(cuts, cuts[1:], strict=False):
        model = tiny_decoder(KINDS[kind], dtype=torch.float64)
        model.span = range(2 * start, 2 * stop)
        for idx in range(len(model.half_blocks)):
            if idx not in model.span:
                model.half_blocks[idx] = nn.Module()
        found.append(model)
    return found


@pytest.mark.parametrize(("method", "variant"), METHODS)
def test_a_pipeline_stage_selects_for_the_layers_it_has(trained: Trained, method: str, variant: str) -> None:
    whole = tiny_decoder(KINDS["llama"], dtype=torch.float64)
    heads = 0.5 if method in CHOOSE_HEADS else 1.0
    chosen = selection(method, trained(variant), 0.3, head_density=heads)
    ids = random_tokens(2, 6)
    with torch.no_grad():
        alone = attach_selection(whole, chosen)
        expected = whole(ids)
        states: Any = None
        kept: dict[Any, dict[int, Tensor]] = {"attention": {}, "mlp": {}}
        found = []
        for model in stages():
            stats = attach_selection(model, chosen)
            assert model.max_lookahead == whole.max_lookahead == int(variant == "lookahead")
            forward_pass = model.begin(ids)
            forward_pass.inputs = kept
            for projection in [module for module in model.modules() if hasattr(module, "threshold")]:
                projection.enabled = True  # what the hook on the whole forward pass would do
            stream = model.stream(forward_pass)
            if states is None:
                model.embed(ids, stream)
            else:
                stream.hidden_states, stream.residual = states
            model.run_half_blocks(stream)
            states = stream.hidden_states, stream.residual
            found.append((model, stats))
    assert torch.equal(states[0], expected)
    assert len(found) == 2 and [len(stats.blocks) for _, stats in found] == [2, 4]
    ranks = Ranks(2)
    for together in ranks.run(lambda rank: found[rank][1].summed(3, ranks.summed(rank))):
        assert together.blocks.keys() == alone.blocks.keys() and together.executions() == alone.executions()
        assert all(together.densities(block) == alone.densities(block) for block in BLOCKS)
    shares = ranks.run(lambda rank: mlp_bytes_share(found[rank][0], method, alone, ranks.summed(rank)))
    assert shares == [pytest.approx(mlp_bytes_share(whole, method, alone))] * 2
    for model, _ in found:
        remove_sparsity(model)
        assert model.stats is None and all(model.mlp(layer).selector is None for layer in model.layers)


def test_weights_are_compared_as_far_as_they_are_here(trained: Trained, tmp_path: Path) -> None:
    whole, ranks, models = sharded("one-rank-has-padding-only")
    sample, directory = weights_sample(whole), trained()
    for model in (*models, *stages()):
        here = weights_sample(model)
        assert 0 < sum(value == value for value in here) < len(here) and same_weights(here, sample)
        read_manifest(directory, model)
    assert ranks.run(lambda rank: weights_sample(models[rank], ranks.summed(rank))) == [sample] * 3
    other = tiny_decoder(KINDS["llama"], seed=1, dtype=torch.float64)
    for model in cut_decoders(other, ranks, PLANS["one-rank-has-padding-only"]):
        with pytest.raises(ValueError, match="same configuration but other weights"):
            read_manifest(directory, model)
    assert not same_weights(sample[:-1], sample)
