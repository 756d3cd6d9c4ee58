"""What is fitted to the running model: stand-ins, refinement against its logits, thresholds in sparse runs."""

import contextlib
import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from data.activation_store import ActivationStore
from modules.decoder import Decoder
from sparse_predictor.labels import LabelDefinition
from sparse_predictor.methods.learned_predictor import PredictorSelector
from sparse_predictor.predictor import Predictor, PredictorStack
from sparse_predictor.refine import RefineOptions, refine
from sparse_predictor.selection import apply_sparsity, remove_sparsity
from sparse_predictor.standin import fit_standins
from sparse_predictor.thresholds import calibrate_thresholds
from sparse_predictor.train import FitOptions, fit_scores
from sparse_predictor.training_data import TrainingRows
from tests.modules.tiny_kinds import LLAMA
from tests.modules.tiny_models import tiny_decoder
from tests.sparse_predictor.tiny_stages import collect, model_folder, ragged_documents

DENSITIES = (0.5, 0.3)
FIT = FitOptions(
    loss="energy_bce",
    label=LabelDefinition(kind="top", share=0.5),
    initialisation="closed_form",
    steps=0,
    batch_rows=64,
    learning_rate=1e-3,
    seed=0,
)


@pytest.fixture(scope="module")
def model() -> Decoder:
    return tiny_decoder(LLAMA)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> ActivationStore:
    folder = tmp_path_factory.mktemp("llama")
    return collect(model_folder(folder / "model", LLAMA), folder / "store", ragged_documents([40] * 30))


def fitted(
    store: ActivationStore, model: Decoder, tmp_path: Path, *, standin_rank: int = 0, lookahead: int = 0
) -> tuple[PredictorStack, TrainingRows]:
    rows = TrainingRows(store, model, "mlp", lookahead=lookahead, device=torch.device("cpu"))
    stack = PredictorStack(3, 48, 80, 16, densities=DENSITIES, standin_rank=standin_rank)
    fit_scores(stack, rows, FIT, state_path=tmp_path / "state.pt")
    return stack, rows


def windows(store: ActivationStore, split: str) -> Tensor:
    """[documents, 40]"""
    text = [store.token_ids[start:stop].astype(np.int64) for start, stop in store.row_ranges(split)]
    return torch.from_numpy(np.stack(text))


@pytest.mark.parametrize("error_share", [0.0, 1.0])
@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_standin_is_the_best_low_rank_map_of_what_is_missing(
    store: ActivationStore, model: Decoder, tmp_path: Path, error_share: float, lookahead: int
) -> None:
    stack, _ = fitted(store, model, tmp_path, standin_rank=6, lookahead=lookahead)
    text = windows(store, "train")
    fit_standins(model, stack, range(3), text, lookahead=lookahead, error_share=error_share)
    assert all(not module._forward_hooks for module in model.modules())
    predictors = dict(enumerate(stack.to_predictors()))
    calibrate_thresholds(model, predictors, text, lookahead)
    for place, density in enumerate(DENSITIES):
        dense, sparse = [Watched(model, text), Watched(model, text, predictors, density, lookahead)]
        for layer in range(3):
            chosen = sparse.activations[layer] != 0
            assert float(chosen.double().mean()) == pytest.approx(density, abs=0.01)
            down = model.mlp(layer).down_proj.weight.detach().double()
            x = sparse.inputs[layer]
            activations = F.silu(x @ model.mlp(layer).gate_proj.weight.double().T) * (  # type: ignore[union-attr]
                x @ model.mlp(layer).up_proj.weight.double().T
            )
            target = activations.masked_fill(chosen, 0) @ down
            target += error_share * (dense.residuals[layer] - sparse.residuals[layer])
            weight = 1 / (dense.residuals[layer] + dense.outputs[layer]).square().mean(-1)
            standin = stack.layer_standin(layer, x.float(), density)
            assert standin is not None
            nothing = float((weight[:, None] * target.square()).sum())
            error = float((weight[:, None] * (target - standin.detach().double()).square()).sum())
            best = best_low_rank_error(x.detach().numpy(), target.detach().numpy(), weight.detach().numpy(), 6)
            assert best * (1 - 1e-6) <= error < 1.01 * best, (place, layer)
            assert error < 0.97 * nothing


def best_low_rank_error(x: np.ndarray, y: np.ndarray, weight: np.ndarray, rank: int) -> float:
    """Of the weighted regression y = a map of that rank of x, plus a bias."""
    root = np.sqrt(weight)[:, None]
    x = root * (x - np.average(x, axis=0, weights=weight))
    y = root * (y - np.average(y, axis=0, weights=weight))
    full = x @ np.linalg.lstsq(x, y, rcond=None)[0]
    directions = np.linalg.svd(full, full_matrices=False)[2][:rank]
    return float(((y - full @ directions.T @ directions) ** 2).sum())


class Watched:
    """A run over text, dense or by predictors: each layer's residual, MLP input, activations and MLP output."""

    def __init__(
        self,
        model: Decoder,
        text: Tensor,
        predictors: dict[int, Predictor] | None = None,
        density: float = 1.0,
        lookahead: int = 0,
    ) -> None:
        self.inputs: dict[int, Tensor] = {}
        self.activations: dict[int, Tensor] = {}
        self.residuals: dict[int, Tensor] = {}
        self.outputs: dict[int, Tensor] = {}
        if predictors is not None:
            selectors = {
                (layer, "mlp"): PredictorSelector(predictor, density, "threshold", min(layer, lookahead))
                for layer, predictor in predictors.items()
            }
            apply_sparsity(model, selectors)  # type: ignore[arg-type]
        handles = []
        for layer in range(3):
            points: list[tuple[dict[int, Tensor], nn.Module]] = [
                (self.residuals, model.half_block(layer, "mlp").residual_in),
                (self.activations, model.mlp(layer).activations),
                (self.outputs, model.mlp(layer)),
            ]
            for kept, module in points:
                handles.append(module.register_forward_hook(self.keeper(kept, layer)))
            handles.append(model.mlp(layer).register_forward_pre_hook(self.input_keeper(layer)))
        with torch.no_grad():
            model(text)
        for handle in handles:
            handle.remove()
        remove_sparsity(model)

    @staticmethod
    def keeper(kept: dict[int, Tensor], layer: int) -> Any:
        def hook(module: Any, args: Any, output: Tensor) -> None:
            kept[layer] = output.flatten(0, 1).double()

        return hook

    def input_keeper(self, layer: int) -> Any:
        def hook(module: Any, args: Any) -> None:
            self.inputs[layer] = args[0].flatten(0, 1).double()

        return hook


def test_packed_labels_do_not_start_a_closed_form(tmp_path: Path) -> None:
    packed = collect(model_folder(tmp_path / "model", LLAMA), tmp_path / "store", label_format="packed")
    rows = TrainingRows(packed, tiny_decoder(LLAMA), "mlp", lookahead=0, device=torch.device("cpu"))
    with pytest.raises(ValueError, match="packed labels: --initialisation random"):
        fit_scores(PredictorStack(3, 48, 80, 16), rows, FIT, state_path=tmp_path / "state.pt")


def divergence(model: Decoder, stack: PredictorStack, token_ids: Tensor, density: float) -> float:
    """KL of the sparse model from the dense one, nats a token, through the selectors that serve."""
    predictors = stack.to_predictors()
    with torch.no_grad():
        dense = model.logits(model(token_ids)).double().log_softmax(-1)
        calibrate_thresholds(model, dict(enumerate(predictors)), token_ids, 0)
        selectors = {
            (layer, "mlp"): PredictorSelector(predictor, density, "threshold", 0)
            for layer, predictor in enumerate(predictors)
        }
        apply_sparsity(model, selectors)  # type: ignore[arg-type]
        sparse = model.logits(model(token_ids)).double().log_softmax(-1)
        remove_sparsity(model)
    return float((dense.exp() * (dense - sparse)).sum(-1).mean())


def refine_options(steps: int) -> RefineOptions:
    return RefineOptions(steps=steps, batch_sequences=4, window=32, learning_rate=1e-2, densities=(0.3,), seed=0)


def test_refinement_lowers_the_divergence_and_leaves_the_model_as_it_was(
    store: ActivationStore, model: Decoder, tmp_path: Path
) -> None:
    stack = PredictorStack(3, 48, 80, 16, densities=DENSITIES, standin_rank=6)  # scores at random
    fit_standins(model, stack, range(3), windows(store, "train"), lookahead=0, error_share=1.0)
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    names = list(weights)
    for index, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(index % 2 == 0)
    held_out = windows(store, "validation")
    text = np.concatenate([store.token_ids[first:last] for first, last in store.row_ranges("train")])
    before = divergence(model, stack, held_out, 0.3)
    steps: list[int] = []
    options = refine_options(80)
    curve = refine(model, stack, text, held_out, options, lookahead=0, on_step=lambda step, loss: steps.append(step))
    assert steps == list(range(80)) and curve[0][0] == 0 and curve[-1][0] == 80
    best = min(divergence for _, divergence in curve)
    assert best < 0.9 * curve[0][1], "on text it was not refined on"
    assert divergence(model, stack, held_out, 0.3) == pytest.approx(best, rel=0.1), "the best state is kept"
    assert divergence(model, stack, held_out, 0.3) < 0.95 * before
    for index, (name, parameter) in enumerate(model.named_parameters()):
        assert torch.equal(parameter, weights[name]) and parameter.requires_grad == (index % 2 == 0)
        assert parameter.grad is None
    assert names and all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())
    model.requires_grad_(False)


def test_interrupted_refinement_continues_to_the_same_result(
    store: ActivationStore, model: Decoder, tmp_path: Path
) -> None:
    held_out = windows(store, "validation")
    text = np.concatenate([store.token_ids[first:last] for first, last in store.row_ranges("train")])
    options = RefineOptions(
        steps=9, batch_sequences=2, window=32, learning_rate=1e-2, densities=(0.5, 0.3), validate_every=3
    )

    def run(state_path: Path, stop_at: int, origin: dict[str, Any]) -> tuple[PredictorStack, Any, list[int]]:
        stack = PredictorStack(3, 48, 80, 16, densities=(0.5, 0.3), standin_rank=6)
        fit_standins(model, stack, range(3), windows(store, "train"), lookahead=0, error_share=1.0)
        steps: list[int] = []

        def on_step(step: int, loss: float) -> None:
            steps.append(step)
            if step == stop_at:
                raise KeyboardInterrupt

        curve, more = None, {"lookahead": 0, "state_path": state_path, "origin": origin, "on_step": on_step}
        with contextlib.suppress(KeyboardInterrupt):
            curve = refine(model, stack, text, held_out, options, **more)
        return stack, curve, steps

    whole, whole_curve, _ = run(tmp_path / "a.pt", -1, {"seed": "0"})
    _, stopped, _ = run(tmp_path / "b.pt", 7, {"seed": "0"})
    assert stopped is None and (tmp_path / "b.pt").is_file()
    resumed, resumed_curve, steps = run(tmp_path / "b.pt", -1, {"seed": "0"})
    assert steps == [6, 7, 8] and resumed_curve == whole_curve
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
    assert run(tmp_path / "b.pt", -1, {"seed": "1"})[2] == list(range(9)), "another start begins anew"


def test_refinement_that_fails_leaves_no_hooks(store: ActivationStore, model: Decoder, tmp_path: Path) -> None:
    stack, _ = fitted(store, model, tmp_path)
    sound, held_out = copy.deepcopy(stack), windows(store, "validation")
    with torch.no_grad():
        stack.second[1] = float("nan")
    with pytest.raises(ValueError, match="not finite at step 0"):
        refine(model, stack, np.arange(100) % 131, held_out, refine_options(2), lookahead=0)
    assert all(not module._forward_hooks for module in model.modules())
    with pytest.raises(ValueError, match="20 training tokens do not fill one window of 32"):
        refine(model, sound, np.arange(20), held_out, refine_options(2), lookahead=0)
    few = PredictorStack(2, 48, 80, 16, densities=DENSITIES)
    with pytest.raises(ValueError, match="needs all 3 layers in the store, which has 2"):
        refine(model, few, np.arange(100), held_out, refine_options(2), lookahead=0)


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("standin_rank", [0, 6])
def test_calibrated_thresholds_keep_the_density_of_every_layer_in_a_sparse_run(
    store: ActivationStore, model: Decoder, tmp_path: Path, lookahead: int, standin_rank: int
) -> None:
    stack, _ = fitted(store, model, tmp_path, standin_rank=standin_rank, lookahead=lookahead)
    if standin_rank:
        fit_standins(model, stack, range(3), windows(store, "train"), lookahead=lookahead, error_share=1.0)
    predictors = dict(enumerate(stack.to_predictors()))
    text = torch.from_numpy(store.token_ids[:1200].reshape(30, 40).astype(np.int64))
    calibrate_thresholds(model, predictors, text, lookahead)
    assert model.stats is None and all(model.mlp(layer).selector is None for layer in range(3))
    for density in DENSITIES:
        selectors = {
            (layer, "mlp"): PredictorSelector(predictor, density, "threshold", min(layer, lookahead))
            for layer, predictor in predictors.items()
        }
        stats = apply_sparsity(model, selectors)  # type: ignore[arg-type]
        with torch.no_grad():
            model(text)
        # Set in the sparse run itself, layer after layer: thresholds of a dense run miss by more than this.
        assert stats.densities("mlp") == pytest.approx([density] * 3, abs=0.001)
        remove_sparsity(model)
    # At a density it was not calibrated at, layer 0 (which nothing sparse precedes) is still right.
    stats = apply_sparsity(model, {(0, "mlp"): PredictorSelector(predictors[0], 0.7, "threshold", 0)})
    with torch.no_grad():
        model(text)
    assert stats.densities("mlp")[0] == pytest.approx(0.7, abs=0.01)
    remove_sparsity(model)
