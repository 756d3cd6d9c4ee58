"""R-Sparse against a product written here with a singular value decomposition, what it reads, and what it refuses."""

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from modules.decoder import Decoder
from modules.generation import generate
from modules.linear import Linear
from modules.requests import GenerationRequest
from sparse_predictor.cost import achieved
from sparse_predictor.methods.r_sparse import NAME, RankAwareInput, r_sparse
from sparse_predictor.methods.registry import Setting
from sparse_predictor.selection import apply_sparsity, attach_selection, remove_sparsity
from sparse_predictor.store import load_calibration
from sparse_predictor.thinning import matrices_of, projection_of, thin_inputs, thinned_by_name
from tests.modules.tiny_kinds import KINDS, random_tokens
from tests.modules.tiny_models import tiny_decoder
from tests.modules.unit_shard_ranks import Ranks, cut_decoders, head_plans
from tests.sparse_predictor.tiny_stages import Trained, prompt_then_decode, selection


def attach(model: Decoder, trained: Trained, density: float, ratio: float, kind: str = "llama") -> None:
    """On a tiny model, whose matrices are so small that 5 % of them is no rank at all, with another ratio."""
    setting = Setting(model=model, densities={}, calibration=load_calibration(trained(kind=kind)))
    names = matrices_of(model.config)
    apply_sparsity(model, {})
    thin_inputs(model, r_sparse(setting, ratio), dict.fromkeys(names, [density] * 3), decode_only=False)
    model.is_sparse = True


def as_stated(weight: Tensor, states: Tensor, threshold: float, rank: int) -> Tensor:
    """The method on weight [in, out], term by term in float64."""
    weight, states = weight.double(), states.double()
    mask = (states.abs() * weight.norm(dim=1)) >= threshold
    left, values, right = torch.linalg.svd(weight, full_matrices=False)
    copy = (left[:, :rank] * values[:rank]) @ right[:rank]
    return (states * mask) @ weight + (states * ~mask) @ copy


@pytest.mark.parametrize("kind", ["llama", "opt"])
def test_large_entries_meet_the_weights_and_the_others_a_low_rank_copy(trained: Trained, kind: str) -> None:
    model = tiny_decoder(KINDS[kind], dtype=torch.float64)
    attach(model, trained, density=0.6, ratio=0.5, kind=kind)
    quantiles = load_file(trained(kind=kind) / "calibration.safetensors")["1.weighted_quantiles"].double()
    for place, name in enumerate(matrices_of(model.config)):
        part = projection_of(model, 1, name)
        assert isinstance(part, RankAwareInput)
        weight = part.dequantised() if part.projection.rows_are == "inputs" else part.dequantised().t()
        num_inputs, num_outputs = weight.shape
        rank = int(0.3 * num_inputs * num_outputs / (num_inputs + num_outputs))
        threshold = float(torch.quantile(quantiles[place], 0.7))
        assert part.first.shape[1] == rank > 0 and part.threshold == pytest.approx(threshold, rel=1e-5)
        states = torch.randn(2, 3, num_inputs, dtype=torch.float64) * threshold / weight.norm(dim=1).mean()
        bias = 0.0 if part.bias is None else part.bias
        expected = as_stated(weight, states, part.threshold, rank) + bias
        assert float((part(states) - expected).abs().max()) < 1e-9, name
    remove_sparsity(model)


def test_a_run_is_that_of_its_products(trained: Trained) -> None:
    model = tiny_decoder(KINDS["llama"], dtype=torch.float64)
    attach(model, trained, density=0.6, ratio=0.5)
    found = prompt_then_decode(model, 2)
    parts = {name: list(layers) for name, layers in thinned_by_name(model).items()}
    remove_sparsity(model)
    handles = []
    for name, layers in parts.items():
        for layer, part in enumerate(layers):

            def replace(module: Linear, args: tuple[Tensor], output: Tensor, part: RankAwareInput = part) -> Tensor:  # type: ignore[assignment]
                weight = module.dequantised() if module.rows_are == "inputs" else module.dequantised().t()
                return as_stated(weight, args[0], part.threshold, part.first.shape[1])

            handles.append(projection_of(model, layer, name).register_forward_hook(replace))
    expected = prompt_then_decode(model, 2)
    for handle in handles:
        handle.remove()
    assert float((found - expected).abs().max()) < 1e-9
    assert float((found - prompt_then_decode(model, 2)).abs().max()) > 1e-3, "and not the dense one"


def test_bytes_are_the_entries_kept_and_both_factors(trained: Trained) -> None:
    model = tiny_decoder(KINDS["llama"])
    attach(model, trained, density=0.6, ratio=0.5)
    kept, factors, total = 0, 0, 0
    for layer in model.layers:
        for name in ("gate_proj", "up_proj", "down_proj"):
            part = projection_of(model, layer, name)
            assert isinstance(part, RankAwareInput)

            def count(module: RankAwareInput, args: tuple[Tensor]) -> None:
                nonlocal kept
                kept += int((module.compared(args[0]) >= module.threshold).sum()) * module.projection.out_features

            part.register_forward_pre_hook(count)
            factors += 2 * 30 * (part.first.numel() + part.second.numel())
            total += 2 * 30 * 48 * 80
    with torch.no_grad():
        model(random_tokens(2, 30))
    stats = model.stats
    assert stats is not None
    share = achieved(model, selection(NAME, trained(), 0.6), stats)["bytes_read_share"]
    assert share == pytest.approx((kept + factors) / total) and 0.5 < share < 0.7
    remove_sparsity(model)


def test_a_request_counts_the_factors_and_a_dense_prompt_does_not(trained: Trained) -> None:
    model = tiny_decoder(KINDS["llama"], dtype=torch.float64)
    attach(model, trained, density=0.6, ratio=0.5)
    requests = [GenerationRequest(prompt_token_ids=ids, max_new_tokens=5) for ids in random_tokens(2, 9).tolist()]
    for warm_up in (False, True):
        found = generate(model, requests, batch_size=2, eos_token_ids=(), warm_up=warm_up)
        assert all(0.5 < one.mlp_density < 0.7 and 0.5 < one.head_density < 0.7 for one in found)
    stats = attach_selection(model, selection(NAME, trained(), 0.6, sparse_phases="decode"))
    prompt_then_decode(model, 2, steps=0)
    assert achieved(model, selection(NAME, trained(), 0.6), stats)["bytes_read_share"] == 1.0
    remove_sparsity(model)


def test_factors_are_found_anew_for_other_weights(trained: Trained) -> None:
    model, states = tiny_decoder(KINDS["llama"]), torch.randn(4, 48)
    for _ in range(2):
        attach(model, trained, density=0.6, ratio=0.5)
        part = projection_of(model, 0, "up_proj")
        assert isinstance(part, RankAwareInput)
        expected = as_stated(part.dequantised().t(), states, float("inf"), part.first.shape[1])
        nothing_is_large = torch.zeros_like(states, dtype=torch.bool)
        torch.testing.assert_close(part.product(states, nothing_is_large).double(), expected, rtol=1e-3, atol=1e-5)
        remove_sparsity(model)
        with torch.no_grad():
            model.mlp(0).up_proj.weight.mul_(2.0)


def test_ranks_that_hold_parts_of_matrices_are_refused(trained: Trained) -> None:
    plan = head_plans()["one-rank-has-padding-only"]
    whole = tiny_decoder(KINDS["llama"], dtype=torch.float64)
    for model in cut_decoders(whole, Ranks(len(plan)), plan):
        with pytest.raises(ValueError, match=f"method {NAME} needs whole matrices, and does not run with --tp-size"):
            attach_selection(model, selection(NAME, trained(), 0.5))
