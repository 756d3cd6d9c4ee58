"""Bytes read, recall and precision of a sparse run, against counts made here."""

from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from modules.thinned_input import ThinnedInput
from sparse_predictor.cost import achieved, mlp_bytes_share, predictor_bytes_share, weights_by_density
from sparse_predictor.metrics import measure_selection
from sparse_predictor.selection import attach_selection, remove_sparsity
from tests.modules.tiny_kinds import KINDS
from tests.modules.tiny_models import tiny_decoder
from tests.sparse_predictor.tiny_stages import Trained, prompt_then_decode, selection


def test_bytes_read_follow_the_stated_formulas(trained: Trained) -> None:
    model = tiny_decoder(KINDS["llama"])
    matrices = 3 * 48 * 80

    def share(method: str, variant: str = "standin", density: float = 0.5) -> tuple[float, float]:
        stats = attach_selection(model, selection(method, trained(variant), density, sparse_phases="all"))
        prompt_then_decode(model, 2)
        return mlp_bytes_share(model, method, stats), stats.mean_density("mlp")  # type: ignore[arg-type]

    for method in ("oracle", "random", "static"):
        assert share(method) == (pytest.approx(0.5), pytest.approx(0.5))
    found, density = share("cats")
    assert found == pytest.approx((1 + 2 * density) / 3) and 0.3 < density < 0.7
    file = load_file(trained("plain") / "layer_0_mlp.safetensors")
    scores = sum(file[name].numel() for name in ("first", "second", "bias")) / matrices
    found, density = share("predictor", "plain")
    assert found == pytest.approx(density + scores) and predictor_bytes_share(model) == pytest.approx(scores)
    found, density = share("predictor", "standin")
    assert found == pytest.approx(density + scores + (2 * 4 * 48 + 48) / matrices), "one stand-in, the one in use"
    found, density = share("predictor", "standin", 1.0)
    assert found == pytest.approx(1.0 + scores), "none where nothing is skipped"

    attach_selection(model, selection("teal", trained(), 0.5))
    kept: list[float] = []
    handles = [
        module.register_forward_pre_hook(
            lambda module, args: kept.append(float((args[0].abs() >= module.threshold).float().mean()))
        )
        for module in model.modules()
        if isinstance(module, ThinnedInput)
    ]
    with torch.no_grad():
        stats = model.stats
        model(torch.randint(0, 131, (1, 30)))
    for handle in handles:
        handle.remove()
    assert len(kept) == 9 and stats is not None
    assert mlp_bytes_share(model, "teal", stats) == pytest.approx(sum(kept) / 9, abs=1e-6)
    remove_sparsity(model)


def test_cats_reads_its_whole_gate_and_of_the_others_what_is_active(trained: Trained) -> None:
    model = tiny_decoder(KINDS["llama"])
    chosen = selection("cats", trained(), 0.3)
    stats = attach_selection(model, chosen)
    active: list[int] = []

    def look(mlp: Any, args: Any) -> None:
        gate = F.silu(args[0] @ mlp.gate_proj.weight.T)
        active.append(int((gate.abs() >= mlp.selector.threshold).sum()))

    handles = [model.mlp(layer).register_forward_pre_hook(look) for layer in range(3)]
    with torch.no_grad():
        model(torch.randint(0, 131, (1, 30)))
    for handle in handles:
        handle.remove()
    gates, of_active = 3 * 30 * 48 * 80, sum(active) * 2 * 48  # a neuron: a row of up, a row of down
    share = (gates + of_active) / (3 * gates)
    assert 0.2 < sum(active) / (3 * 30 * 80) < 0.4
    found = achieved(model, chosen, stats)
    assert found["bytes_read_share"] == mlp_bytes_share(model, "cats", stats) == pytest.approx(share)
    attention = 2 * 48 * 48 + 2 * 48 * 16
    expected = (share * 3 * 48 * 80 + attention) / (3 * 48 * 80 + attention)
    assert found["layer_bytes_share"] == pytest.approx(expected)
    assert weights_by_density(model.config, "cats", "mlp") == 2 * 48 * 80, "what a budget divides"
    assert weights_by_density(model.config, "teal", "mlp") == 3 * 48 * 80
    remove_sparsity(model)


def test_quality_counts_what_was_chosen_against_the_truth_without_padding(trained: Trained) -> None:
    model = tiny_decoder(KINDS["llama"])
    token_ids, lengths = torch.randint(0, 131, (2, 20)), torch.tensor([20, 7])
    true: dict[int, Tensor] = {}
    chosen: dict[int, Tensor] = {}
    attach_selection(model, selection("static", trained(), 0.3))
    for layer in range(3):
        chosen[layer] = model.mlp(layer).selector.mask  # type: ignore[union-attr]
    quality = measure_selection(model, {"mlp": [0.3] * 3, "attention": [1.0] * 3})

    def truth(module: Any, args: Any) -> None:
        x = args[0]
        activations = F.silu(x @ module.gate_proj.weight.T) * (x @ module.up_proj.weight.T)
        sizes = activations.abs() * module.down_proj.weight.norm(dim=1)
        mask = sizes >= sizes.sort(-1, descending=True).values[..., 23:24]
        true[module.layer_idx] = torch.cat([mask[0], mask[1, :7]])

    handles = [model.mlp(layer).register_forward_pre_hook(truth) for layer in range(3)]
    with torch.no_grad():
        model(token_ids, num_tokens=lengths)
    for handle in handles:
        handle.remove()
    both = [int((true[layer] & chosen[layer]).sum()) for layer in range(3)]
    for overlap, hits in zip(quality.per_layer("mlp"), both, strict=True):
        assert overlap.recall == overlap.precision == pytest.approx(hits / (27 * 24))
    pooled = quality.pooled("mlp")
    assert pooled is not None and pooled.recall == pytest.approx(sum(both) / (3 * 27 * 24))
    assert quality.pooled("attention") is None
    remove_sparsity(model)
