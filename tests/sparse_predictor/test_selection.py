"""`attach_selection`: every method against dense, against a mask simulation written here, and its refusals."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from data.activation_store import ActivationStore
from modules.decoder import Decoder
from modules.sparsity import num_kept
from sparse_predictor.cost import thinned_densities
from sparse_predictor.methods.registry import all_methods, is_thinning
from sparse_predictor.selection import Selection, attach_selection, remove_sparsity
from tests.modules.tiny_kinds import KINDS
from tests.modules.tiny_models import tiny_decoder
from tests.sparse_predictor.tiny_stages import Trained, prompt_then_decode, selection

METHODS = list(all_methods())


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize(
    ("kind", "method", "variant"),
    [("llama", method, "standin") for method in METHODS]
    + [("llama", "predictor", variant) for variant in ("plain", "topk", "lookahead")]
    + [("opt-post-norm-projected", method, "standin") for method in METHODS if not all_methods()[method].needs_gate],
)
def test_at_density_one_every_method_equals_dense_bit_for_bit(
    trained: Trained, kind: str, method: str, variant: str, batch: int
) -> None:
    model = tiny_decoder(KINDS[kind])
    dense = prompt_then_decode(model, batch)
    stats = attach_selection(model, selection(method, trained(variant, kind), 1.0))
    assert torch.equal(prompt_then_decode(model, batch), dense)
    assert stats.densities("mlp") == [1.0] * 3
    if is_thinning(method):
        assert thinned_densities(model) == thinned_densities(model, block="attention") == [1.0] * 3
    elif method == "griffin":  # the prompt stays dense
        assert stats.executions() == {"dense": 15, "gather": 9, "mask": 0}
    else:
        assert stats.executions() == {"dense": 12, "gather": 12 if batch == 1 else 9, "mask": 0 if batch == 1 else 3}
    remove_sparsity(model)
    assert torch.equal(prompt_then_decode(model, batch), dense)


Keep = Callable[[int, dict[int, Tensor], Tensor], Tensor]


def simulate(model: Decoder, keep: Keep, batch: int, add: Callable[[int, Tensor], Tensor] | None = None) -> Tensor:
    """The dense model with `keep(layer, MLP inputs by layer, activations)` as a mask on its activations, and
    `add(layer, MLP input)` added to each MLP's output."""
    inputs: dict[int, Tensor] = {}
    handles = []
    for layer in range(3):
        mlp = model.mlp(layer)

        def see(module: Any, args: Any, layer: int = layer) -> None:
            inputs[layer] = args[0]

        def mask(module: Any, args: Any, activations: Tensor, layer: int = layer) -> Tensor:
            return activations * keep(layer, inputs, activations)

        def extra(module: Any, args: Any, output: Tensor, layer: int = layer) -> Tensor:
            return output if add is None else output + add(layer, inputs[layer])

        handles.append(mlp.register_forward_pre_hook(see))
        handles.append(mlp.activations.register_forward_hook(mask))
        handles.append(mlp.register_forward_hook(extra))
    logits = prompt_then_decode(model, batch)
    for handle in handles:
        handle.remove()
    return logits


def quantile(directory: Path, name: str, density: float) -> float:
    values = load_file(directory / "calibration.safetensors")[name].double().numpy()
    return float(np.interp((1 - density) * (len(values) - 1), np.arange(len(values)), values))


def assert_same_sparse_run(model: Decoder, selection: Selection, batch: int, expected: Tensor) -> None:
    attach_selection(model, selection)
    found = prompt_then_decode(model, batch)
    remove_sparsity(model)
    assert float((found - expected).abs().max()) < 1e-9
    assert float((prompt_then_decode(model, batch) - expected).abs().max()) > 1e-3, "and not the dense one"


@pytest.mark.parametrize("batch", [1, 8])
def test_cats_keeps_the_neurons_whose_gate_is_large(trained: Trained, batch: int) -> None:
    model, directory = tiny_decoder(KINDS["llama"], dtype=torch.float64), trained()

    def keep(layer: int, inputs: dict[int, Tensor], activations: Tensor) -> Tensor:
        gate = F.silu(inputs[layer] @ model.mlp(layer).gate_proj.weight.T)  # type: ignore[union-attr]
        return gate.abs() >= quantile(directory, f"{layer}.gate_quantiles", 0.4)

    expected = simulate(model, keep, batch)
    assert_same_sparse_run(model, selection("cats", directory, 0.4), batch, expected)


@pytest.mark.parametrize("kind", ["llama", "opt"])
@pytest.mark.parametrize("batch", [1, 8])
def test_teal_drops_the_small_inputs_of_each_matmul(trained: Trained, kind: str, batch: int) -> None:
    model, directory = tiny_decoder(KINDS[kind], dtype=torch.float64), trained(kind=kind)
    handles = []
    for layer in range(3):
        for name, statistic in (("gate", "input"), ("up", "input"), ("down", "activation")):
            projection = getattr(model.mlp(layer), f"{name}_proj")
            threshold = quantile(directory, f"{layer}.{statistic}_quantiles", 0.4)
            if projection is not None:
                handles.append(
                    projection.register_forward_pre_hook(
                        lambda module, args, threshold=threshold: args[0] * (args[0].abs() >= threshold)
                    )
                )
    expected = prompt_then_decode(model, batch)
    for handle in handles:
        handle.remove()
    assert_same_sparse_run(model, selection("teal", directory, 0.4), batch, expected)


@pytest.mark.parametrize("batch", [1, 8])
def test_static_keeps_the_most_frequent_neurons_for_every_token(
    trained: Trained, stores: Callable[[str], ActivationStore], batch: int
) -> None:
    model, directory, store = tiny_decoder(KINDS["llama"], dtype=torch.float64), trained(), stores("llama")
    training_rows = np.concatenate([np.arange(start, stop) for start, stop in store.row_ranges("train")])
    masks = []
    for layer in range(3):
        frequency = load_file(directory / "calibration.safetensors")[f"{layer}.neuron_frequency"].numpy()
        norms = np.linalg.norm(model.mlp(layer).down_proj.weight.detach().numpy(), axis=1)
        sizes = np.abs(np.array(store.mlp_label(layer)[training_rows], np.float64)) * norms
        counted = (sizes >= np.sort(sizes, axis=1)[:, 40:41]).mean(0)  # the top half: 40 of 80
        np.testing.assert_allclose(frequency, counted, atol=2 / len(training_rows))
        attach_selection(model, selection("static", directory, 0.3))
        mask = model.mlp(layer).selector.mask  # type: ignore[union-attr]
        assert int(mask.sum()) == 24 and frequency[mask.numpy()].min() >= frequency[~mask.numpy()].max()
        masks.append(mask)
        remove_sparsity(model)
    expected = simulate(model, lambda layer, inputs, activations: masks[layer], batch)
    assert_same_sparse_run(model, selection("static", directory, 0.3), batch, expected)


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("variant", ["plain", "standin", "topk", "lookahead"])
def test_a_predictor_chooses_by_its_files_and_reads_the_layer_it_was_trained_on(
    trained: Trained, variant: str, batch: int
) -> None:
    model, directory, density = tiny_decoder(KINDS["llama"], dtype=torch.float64), trained(variant), 0.3
    files = [
        {name: tensor.double() for name, tensor in load_file(directory / f"layer_{layer}_mlp.safetensors").items()}
        for layer in range(3)
    ]

    def keep(layer: int, inputs: dict[int, Tensor], activations: Tensor) -> Tensor:
        source = layer - 1 if variant == "lookahead" and layer else layer
        file = files[layer]
        scores = inputs[source] @ file["first"].T @ file["second"].T + file["bias"]
        if variant == "topk":
            return scores >= scores.sort(-1, descending=True).values[..., num_kept(density, 80) - 1, None]
        return scores >= file["thresholds"][1]  # calibrated at 0.5 and 0.3

    def standin(layer: int, x: Tensor) -> Tensor:
        file = files[layer]
        return x @ file["standin_in"][1].T @ file["standin_out"][1].T + file["standin_bias"][1]

    expected = simulate(model, keep, batch, None if variant == "plain" else standin)
    assert_same_sparse_run(model, selection("predictor", directory, density), batch, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_half_precision_models_use_the_calibrated_thresholds_too(trained: Trained, dtype: torch.dtype) -> None:
    model, directory = tiny_decoder(KINDS["llama"], dtype=dtype), trained()
    attach_selection(model, selection("predictor", directory, 0.3))
    for layer in range(3):
        expected = float(load_file(directory / f"layer_{layer}_mlp.safetensors")["thresholds"][1])
        assert model.mlp(layer).selector.threshold == expected  # type: ignore[union-attr]
    assert prompt_then_decode(model, 2).dtype == dtype


@pytest.mark.parametrize("method", METHODS)
def test_sparse_phases_decode_leaves_the_prompt_dense(trained: Trained, method: str) -> None:
    model = tiny_decoder(KINDS["llama"])
    dense = prompt_then_decode(model, 2)
    variant = "lookahead" if method == "predictor" else "standin"
    stats = attach_selection(model, selection(method, trained(variant), 0.3, sparse_phases="decode"))
    for _ in range(2):  # a second prompt after decoding is dense again
        found = prompt_then_decode(model, 2)
        assert torch.equal(found[:, :6], dense[:, :6])
        assert float((found[:, 6:] - dense[:, 6:]).abs().max()) > 1e-3
    if not is_thinning(method):
        assert stats.executions()["gather"] == 3 * 3 * 2


@pytest.mark.parametrize("method", ["predictor", "oracle", "static", "random"])
def test_heads_are_chosen_as_groups(trained: Trained, method: str) -> None:
    model = tiny_decoder(KINDS["llama"])
    stats = attach_selection(model, selection(method, trained(), 1.0, head_density=0.5))
    prompt_then_decode(model, 2)
    assert stats.densities("attention") == [0.5] * 3 and stats.densities("mlp") == [1.0] * 3


def test_density_budgets_set_each_layer(trained: Trained, tmp_path: Path) -> None:
    budget = tmp_path / "budget.json"
    budget.write_text(json.dumps({"mlp": [1.0, 0.5, 0.1], "attention": [1, 0.5, 1.0]}))
    model = tiny_decoder(KINDS["llama"])
    stats = attach_selection(model, selection("random", None, 0.9, head_density=0.9, density_budget=budget))
    prompt_then_decode(model, 2)
    assert stats.densities("mlp") == pytest.approx([1.0, 0.5, 0.1]) and stats.densities("attention") == [1.0, 0.5, 1.0]
    budget.write_text(json.dumps({"mlp": [0.3, 0.3, 0.3]}))
    stats = attach_selection(model, selection("oracle", None, 0.9, density_budget=budget))
    prompt_then_decode(model, 2)
    assert stats.densities("mlp") == pytest.approx([0.3] * 3) and stats.densities("attention") == [1.0] * 3


def test_methods_can_follow_one_another_on_one_model(trained: Trained) -> None:
    def run(model: Decoder, method: str) -> Tensor:
        attach_selection(model, selection(method, trained("standin", "llama"), 0.5))
        return prompt_then_decode(model, 1)

    model = tiny_decoder(KINDS["llama"])
    for method in ("teal", "cats", "static", "wina-unrotated", "griffin", "predictor", "teal-all", "oracle", "dense"):
        assert torch.equal(run(model, method), run(tiny_decoder(KINDS["llama"]), method)), method
