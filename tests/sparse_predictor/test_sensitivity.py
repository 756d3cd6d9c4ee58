"""What one block costs, against whole runs with that block sparse; thresholds set in a run."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from modules.decoder import Decoder
from modules.sparsity import BLOCKS, Block
from sparse_predictor.budgets import DensityBudget
from sparse_predictor.cost import thinned_densities
from sparse_predictor.selection import Selection, attach_selection, remove_sparsity
from sparse_predictor.sensitivity import block_divergences, divergence_of
from sparse_predictor.thresholds import set_thresholds_in_run
from tests.modules.tiny_kinds import KINDS, random_tokens
from tests.modules.tiny_models import tiny_decoder
from tests.sparse_predictor.tiny_stages import Trained, selection


def alone(chosen: Selection, layer: int, block: Block, density: float) -> Selection:
    densities = {kind: [density if (layer, block) == (idx, kind) else 1.0 for idx in range(3)] for kind in BLOCKS}
    return replace(chosen, density_budget=DensityBudget(densities=densities))


def divergence(model: Decoder, chosen: Selection, tokens: torch.Tensor) -> float:
    """KL(dense || sparse) from whole logits, with thresholds of this very run."""
    with torch.no_grad():
        dense = model.logits(model(tokens)).log_softmax(-1)
        attach_selection(model, chosen)
        assert isinstance(chosen.density_budget, DensityBudget)
        set_thresholds_in_run(model, chosen.density_budget.densities["mlp"], tokens)
        sparse = model.logits(model(tokens)).log_softmax(-1)
    remove_sparsity(model)
    return float(F.kl_div(sparse, dense, reduction="sum", log_target=True) / tokens.numel())


@pytest.mark.parametrize(
    ("method", "variant", "blocks"),
    [
        ("oracle", "standin", ("mlp", "attention")),
        ("predictor", "standin", ("mlp", "attention")),
        ("predictor", "lookahead", ("mlp",)),
        ("cats", "standin", ("mlp",)),
        ("teal", "standin", ("mlp",)),
        ("wina-unrotated", "standin", ("mlp", "attention")),
    ],
)
def test_a_block_alone_costs_what_a_run_with_it_costs(
    trained: Trained, method: str, variant: str, blocks: tuple[Block, ...]
) -> None:
    model, tokens = tiny_decoder(KINDS["llama"], dtype=torch.float64), random_tokens(4, 30)
    chosen = selection(method, trained(variant), 0.9)
    grids: dict[Block, list[float]] = {block: [0.3, 0.6] if block == "mlp" else [0.5] for block in blocks}
    calls: list[int] = []
    found = block_divergences(model, chosen, grids, tokens, lambda: calls.append(1), batch_size=4)
    assert len(calls) == 6 and set(found) == {(layer, block) for layer in range(3) for block in blocks}
    assert model.stats is None and model.max_lookahead == 0 and not any(b.block.selector for b in model.half_blocks)
    for (layer, block), losses in found.items():
        for density, loss in losses.items():
            expected = divergence(model, alone(chosen, layer, block, density), tokens)
            assert loss == pytest.approx(expected, rel=1e-4, abs=1e-9), (layer, block, density)
            assert loss > 0


def test_thresholds_set_in_a_run_keep_each_layers_density(trained: Trained) -> None:
    model, tokens = tiny_decoder(KINDS["llama"], dtype=torch.float64), random_tokens(8, 40)
    densities = [0.45, 1.0, 0.2]
    for method in ("predictor", "cats"):
        budget = DensityBudget(densities={"mlp": densities})
        stats = attach_selection(model, selection(method, trained(), 0.5, density_budget=budget))
        thresholds = set_thresholds_in_run(model, densities, tokens)
        assert thresholds is not None and thresholds[1] == -math.inf and all(map(math.isfinite, thresholds[::2]))
        before = [stats.of(layer, "mlp").density for layer in range(3)]
        assert before == pytest.approx(densities, abs=0.002)
    attach_selection(model, selection("oracle", None, 0.5))
    assert set_thresholds_in_run(model, [0.5] * 3, tokens) is None
    attach_selection(model, selection("predictor", trained("topk"), 0.5))
    assert set_thresholds_in_run(model, [0.5] * 3, tokens) is None
    remove_sparsity(model)


def test_divergence_of_a_run_leaves_its_statistics(trained: Trained) -> None:
    model, tokens = tiny_decoder(KINDS["llama"]), random_tokens(5, 40)
    dense = divergence_of(model, lambda: attach_selection(model, Selection()), tokens, batch_size=5)
    assert dense == pytest.approx(0.0, abs=1e-6)
    teal = selection("teal", trained(), 0.3)
    found = divergence_of(model, lambda: attach_selection(model, teal), tokens, batch_size=5)
    assert found > 1e-4 and model.stats is not None
    assert thinned_densities(model) == pytest.approx([0.3] * 3, abs=0.1)
    assert [part.seen.host + int(part.seen.device or 0) for part, _ in model.mlp(0).thinned_parts()][0] == 5 * 40 * 48
    rows: list[int] = []
    model.register_forward_pre_hook(lambda model, given: rows.append(len(given[0])))
    assert divergence_of(model, lambda: None, tokens, batch_size=2) < 1e-6, "dense: what is attached goes first"
    assert rows == [2, 2, 1, 2, 2, 1], "so many windows together, dense and sparse"
    remove_sparsity(model)
