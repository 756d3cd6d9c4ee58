"""TEAL's greedy allocation: its path against errors measured here, what a target cuts off it, budgets of matrices."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from data.activation_store import ActivationStore
from modules.decoder import Decoder
from modules.thinned_input import ThinnedInput
from sparse_predictor.budgets import DensityBudget, predictors_id
from sparse_predictor.calibration import quantiles_of, threshold_at
from sparse_predictor.cost import achieved
from sparse_predictor.methods.registry import Setting, find_method
from sparse_predictor.methods.teal import teal
from sparse_predictor.selection import attach_selection, remove_sparsity
from sparse_predictor.sensitivity import GREEDY_LEAST, GREEDY_STEP, GreedyPath, greedy_paths
from sparse_predictor.store import load_calibration
from sparse_predictor.thinning import matrices_of, thinned_by_name
from sparse_predictor.thresholds import set_thresholds_in_run
from sparse_predictor.training_data import TrainingRows
from tests.modules.tiny_kinds import KINDS, random_tokens
from tests.modules.tiny_models import tiny_decoder
from tests.sparse_predictor.tiny_stages import Trained, selection


def streams(model: Decoder, tokens: Tensor, thresholds: dict[tuple[int, str], float]) -> list[Tensor]:
    """The residual stream behind each layer, with small inputs of some matrices dropped by hooks."""
    handles, found = [], []
    for (layer, name), threshold in thresholds.items():
        holder = model.attention(layer) if name in ("q_proj", "k_proj", "v_proj", "o_proj") else model.mlp(layer)
        projection = getattr(holder, name)
        handles.append(
            projection.register_forward_pre_hook(lambda m, args, t=threshold: args[0] * (args[0].abs() >= t))
        )
    for layer in model.layers:
        block = model.half_block(layer, "mlp").block
        handles.append(block.register_forward_hook(lambda m, args, output: found.append(output.clone())))
    with torch.no_grad():
        model(tokens)
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize(("kind", "method"), [("llama", "teal"), ("llama", "teal-all"), ("opt", "teal")])
def test_each_step_is_the_one_that_costs_least_per_weight(trained: Trained, kind: str, method: str) -> None:
    model, tokens = tiny_decoder(KINDS[kind], dtype=torch.float64), random_tokens(3, 20)
    names = matrices_of(model.config, find_method(method).blocks)
    calibration = load_calibration(trained(kind=kind))
    thin = teal(Setting(model=model, densities={}, calibration=calibration), method)
    calls: list[int] = []
    paths = greedy_paths(model, thin, names, [0.6, 0.9, 0.4], tokens, lambda: calls.append(1))
    assert len(paths) == len(calls) == 3
    assert not any(isinstance(module, ThinnedInput) for module in model.modules()), "the model is dense again"
    for path, least in zip(paths, [0.6, 0.9, 0.4], strict=True):
        assert set(path.sizes) == set(names)
        saved = sum(GREEDY_STEP * path.sizes[name] for name in path.steps) / sum(path.sizes.values())
        last = GREEDY_STEP * path.sizes[path.steps[-1]] / sum(path.sizes.values())
        assert 1 - least <= saved + 1e-9 and saved - last < 1 - least + 1e-9
        assert len(path.errors) == len(path.steps) + 1 and path.errors[0] == 0.0
        assert path.errors[-1] > 0.0 or kind == "opt", "exact zeros cost nothing"

    # The first steps of the first MLP, by its output alone: what the residual adds is the same.
    if method != "teal":
        return
    inputs: dict[str, Tensor] = {}
    handles = [
        getattr(model.mlp(0), name).register_forward_pre_hook(
            lambda m, args, name=name: inputs.update({name: args[0].abs()})
        )
        for name in names
    ]
    dense = streams(model, tokens, {})[0]
    for handle in handles:
        handle.remove()
    kept, error = dict.fromkeys(names, 1.0), 0.0
    for step in paths[0].steps[:4]:
        errors = {}
        for name in names:
            tried = {**kept, name: kept[name] - GREEDY_STEP}
            thresholds = {
                (0, other): threshold_at(quantiles_of(inputs[other]), density) for other, density in tried.items()
            }
            errors[name] = float((streams(model, tokens, thresholds)[0] - dense).norm())
        assert step == min(names, key=lambda name: (errors[name] - error) / paths[0].sizes[name])
        kept[step], error = kept[step] - GREEDY_STEP, errors[step]


def test_a_target_takes_its_share_of_the_weights_off_the_path() -> None:
    path = GreedyPath(sizes={"a": 100, "b": 300}, steps=["a", "b", "a", "b"], errors=[0.0] * 5)
    assert path.densities(1.0) == {"a": 1.0, "b": 1.0}
    for target in (0.99, 0.97, 0.95, 0.91):
        found = path.densities(target)
        assert (100 * found["a"] + 300 * found["b"]) / 400 == pytest.approx(target)
    assert path.densities(0.97) == {"a": 0.95, "b": pytest.approx(1 - 7 / 300)}
    with pytest.raises(ValueError, match="a layer cannot keep 0.8 of its weights, 0.05 of each matrix at least"):
        path.densities(0.8)
    assert GREEDY_LEAST == 0.05


def test_matrices_of_a_budget_have_their_own_densities_and_thresholds_of_the_run(trained: Trained) -> None:
    model, tokens = tiny_decoder(KINDS["llama"], dtype=torch.float64), random_tokens(8, 40)
    matrices = {"gate_proj": [0.3, 1.0, 0.5], "up_proj": [0.6, 1.0, 0.4], "down_proj": [0.45, 0.2, 0.7]}
    means = [sum(values[layer] for values in matrices.values()) / 3 for layer in range(3)]
    budget = DensityBudget(densities={"mlp": means}, matrices=matrices)
    chosen = selection("teal", trained(), 0.5, density_budget=budget)
    stats = attach_selection(model, chosen)
    thresholds = set_thresholds_in_run(model, means, tokens)
    assert isinstance(thresholds, dict) and set(thresholds) == set(matrices)
    assert thresholds["gate_proj"][1] == thresholds["up_proj"][1] == float("-inf")
    with torch.no_grad():
        model(tokens)
    for name, parts in thinned_by_name(model).items():
        kept = [int(part.kept) / int(part.seen) for part in parts]
        assert kept == pytest.approx(matrices[name], abs=0.003), "and nothing of the run that set them is counted"
        assert all(int(part.seen) == 8 * 40 * part.num_counted for part in parts)
    assert achieved(model, chosen, stats)["per_layer"]["mlp"] == pytest.approx(means, abs=0.003)
    set_so = DensityBudget(
        densities={"mlp": means},
        matrices=matrices,
        method="teal",
        predictors=predictors_id(trained()),
        thresholds=thresholds,
    )
    attach_selection(model, replace(chosen, density_budget=set_so))
    assert {name: [part.threshold for part in parts] for name, parts in thinned_by_name(model).items()} == thresholds
    remove_sparsity(model)


def test_budgets_of_other_matrices_are_refused(trained: Trained) -> None:
    model = tiny_decoder(KINDS["llama"])
    matrices = {name: [0.5] * 3 for name in ("gate_proj", "up_proj", "down_proj")}
    given = DensityBudget(densities={"mlp": [0.5] * 3}, matrices=matrices)
    for method, message in (
        ("teal-all", "it has matrices gate_proj, up_proj, down_proj; method teal-all thins out q_proj, k_proj"),
        ("cats", "densities of matrices, whose inputs method cats does not thin out"),
    ):
        with pytest.raises(ValueError, match=message):
            attach_selection(model, selection(method, trained(), 0.5, density_budget=given))
    for values in ([0.5, 0.5], [0.5, 0.5, 0.0]):
        wrong = replace(given, matrices={**matrices, "up_proj": values})
        with pytest.raises(ValueError, match=r"up_proj needs 3 densities in \(0, 1\]"):
            attach_selection(model, selection("teal", trained(), 0.5, density_budget=wrong))
    owner = {"predictors": predictors_id(trained()), "densities": {"mlp": [0.5] * 3}}
    of_mlps = DensityBudget(method="teal", thresholds=[0.1] * 3, **owner)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="it has thresholds of MLPs, where teal needs them of matrices"):
        attach_selection(model, selection("teal", trained(), 0.5, density_budget=of_mlps))
    of_others = DensityBudget(method="teal", thresholds={"up_proj": [0.1] * 3}, **owner)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="it has thresholds of up_proj; thinned out are gate_proj, up_proj, down_proj"):
        attach_selection(model, selection("teal", trained(), 0.5, density_budget=of_others))
    of_matrices = DensityBudget(method="cats", thresholds={"up_proj": [0.1] * 3}, **owner)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="it has thresholds of matrices, where neurons are chosen"):
        attach_selection(model, selection("cats", trained(), 0.5, density_budget=of_matrices))


@pytest.mark.parametrize("method", ["cats", "teal", "teal-all", "wina-unrotated"])
def test_training_sets_the_thresholds_of_each_method_in_its_own_sparse_run(trained: Trained, method: str) -> None:
    model, directory = tiny_decoder(KINDS["llama"]), trained()
    calibration = load_calibration(directory)
    assert calibration[0].statistics["densities"].tolist() == [0.5, 0.3]
    attach_selection(model, selection(method, directory, 0.3))
    used = thinned_by_name(model)
    found = (
        {name: [part.threshold for part in parts] for name, parts in used.items()}
        if used
        else [model.mlp(layer).selector.threshold for layer in range(3)]  # type: ignore[union-attr]
    )
    text = held_out(trained)
    again = set_thresholds_in_run(model, [0.3] * 3, text)
    for name in used or [None]:  # type: ignore[list-item]
        ours, theirs = (found, again) if name is None else (found[name], again[name])  # type: ignore
        assert ours == pytest.approx(theirs, rel=1e-5), name
    remove_sparsity(model)


def held_out(trained: Trained) -> Tensor:
    """The text that training sets thresholds on."""
    store = ActivationStore(trained().parent / "store")
    rows = TrainingRows(store, tiny_decoder(KINDS["llama"]), "mlp", lookahead=0, device=torch.device("cpu"))
    return rows.text("validation", 16384, 32)
