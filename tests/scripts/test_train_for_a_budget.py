"""Predictors trained for a budget of densities: what each layer keeps, in training and in a run, and refusals."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from data.activation_store import ActivationStore
from modules.sparsity import SparsityStats
from scripts.train import Options, main
from sparse_predictor.budgets import DensityBudget
from sparse_predictor.labels import LabelDefinition
from sparse_predictor.predictor import PredictorStack
from sparse_predictor.selection import MethodName, Selection, attach_selection
from sparse_predictor.sensitivity import divergence_of
from sparse_predictor.standin import fit_standins
from sparse_predictor.train import validation_metrics
from sparse_predictor.training_data import TrainingRows
from tests.modules.tiny_kinds import LLAMA
from tests.modules.tiny_models import tiny_decoder
from tests.sparse_predictor.tiny_stages import collect, model_folder, one_error_line, ragged_documents, train

UNEVEN = [1.0, 0.3, 0.2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`model` and `store` of a tiny Llama."""
    folder = tmp_path_factory.mktemp("llama")
    collect(model_folder(folder / "model", LLAMA), folder / "store", ragged_documents([40] * 30))
    return folder


@pytest.fixture(scope="module")
def predictors(folder: Path) -> Path:
    """Trained and refined for `UNEVEN`."""
    return trained(folder, folder / "p", UNEVEN)


def trained(folder: Path, output_dir: Path, densities: list[float]) -> Path:
    budget = folder / "budget.json"
    # Thresholds of other predictors, as scripts.budget leaves them, are no matter.
    DensityBudget(densities={"mlp": densities}, method="predictor", predictors="0" * 12, thresholds=[0.0] * 3).write(
        budget
    )
    options: dict[str, Any] = {"densities": (0.5,), "density_budget": budget, "refine_steps": 3, "batch_size": 2}
    return train(folder / "model", ActivationStore(folder / "store"), output_dir, units="mlp", **options)


def held_out(folder: Path) -> Tensor:
    store = ActivationStore(folder / "store")
    rows = TrainingRows(store, tiny_decoder(LLAMA), "mlp", lookahead=0, device=torch.device("cpu"))
    return rows.text("validation", 16384, 32)


def run(predictors: Path, text: Tensor, *, method: MethodName = "predictor", **selection: Any) -> SparsityStats:
    model = tiny_decoder(LLAMA)
    stats = attach_selection(model, Selection(method=method, predictors=predictors, sparse_phases="all", **selection))
    with torch.no_grad():
        model(text)
    return stats


def test_a_run_keeps_what_the_predictors_were_trained_for(folder: Path, predictors: Path) -> None:
    text = held_out(folder)
    assert run(predictors, text, mlp_density=0.5).densities("mlp") == pytest.approx(UNEVEN, abs=0.01)
    # Wherever the same densities come from: these are what the predictors are calibrated at.
    file = folder / "budget.json"
    file.write_text(json.dumps({"mlp": UNEVEN}))
    assert run(predictors, text, mlp_density=0.5, density_budget=file).densities("mlp") == pytest.approx(
        UNEVEN, abs=0.01
    )


def test_other_methods_other_densities_and_a_budget_of_the_run_come_first(folder: Path, predictors: Path) -> None:
    text = held_out(folder)
    assert run(predictors, text, mlp_density=0.5, method="static").densities("mlp") == pytest.approx([0.5] * 3)
    assert run(predictors, text, mlp_density=0.3).densities("mlp") == pytest.approx([0.3] * 3, abs=0.1)
    even = DensityBudget(densities={"mlp": [0.5] * 3})
    assert run(predictors, text, mlp_density=0.5, density_budget=even).densities("mlp") == pytest.approx(
        [0.5] * 3, abs=0.1
    )


def test_what_is_refined_is_what_runs(folder: Path, predictors: Path) -> None:
    """A dense layer among sparse ones is dense in training, too, without a stand-in. What differs are thresholds: of
    some rows there, of all of them here."""
    refined = json.loads((predictors / "metrics.json").read_text())["refinement"]["best"]
    model, text = tiny_decoder(LLAMA), held_out(folder)
    selection = Selection(method="predictor", predictors=predictors, mlp_density=0.5, sparse_phases="all")
    found = divergence_of(model, lambda: attach_selection(model, selection), text, batch_size=len(text))
    assert found == pytest.approx(refined, rel=0.02)
    assert model.mlp(0).selector is None and model.mlp(1).selector is not None


def test_a_layer_that_keeps_everything_has_nothing_to_stand_in_for() -> None:
    stack = PredictorStack(2, 8, 16, 4, densities=(0.6,), layer_densities={0.6: [1.0, 0.2]}, standin_rank=2)
    torch.nn.init.ones_(stack.standin_bias)
    states = torch.ones(3, 8)
    assert stack.layer_standin(0, states, 0.6) is None
    assert torch.equal(stack.layer_standin(1, states, 0.6), states)
    assert [predictor.densities.tolist() for predictor in stack.to_predictors()] == [[1.0], [0.2]]


@pytest.mark.parametrize(
    ("budget", "changes", "message"),
    [
        ({"mlp": [0.5, 0.3, 0.2]}, {}, "its MLPs keep 0.333 in the mean, not 0.5"),
        ({"mlp": [0.5] * 4}, {}, "is for 4 layers; this model has 3"),
        ({"attention": [0.5] * 3}, {}, "expected one density in (0, 1] for each MLP"),
        ({"mlp": [1.5, 0.0, 0.0]}, {}, "budget.json: `mlp[0]`: expected `float` <= 1.0"),
        ({"mlp": [0.5] * 3}, {"densities": (0.5, 0.3)}, "is for neurons, at one density of --densities"),
        ({"mlp": [0.5] * 3}, {"units": "attention"}, "is for neurons, at one density of --densities"),
        (None, {}, "budget.json"),
    ],
)
def test_a_budget_that_does_not_fit_is_one_line(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    budget: dict[str, list[float]] | None,
    changes: dict[str, Any],
    message: str,
) -> None:
    path = tmp_path / "budget.json"
    if budget is not None:
        path.write_text(json.dumps(budget))
    given = {"densities": (0.5,), "units": "mlp", **changes}
    words = ["--model", folder / "model", "--activations", folder / "store", "--output-dir", tmp_path / "p", "--quiet"]
    words += ["--density-budget", path, "--units", given["units"], "--densities", *given["densities"]]
    assert message in one_error_line(main, Options, words, capsys)
    assert not (tmp_path / "p").exists()


def test_predictors_of_another_budget_are_not_replaced(folder: Path, predictors: Path) -> None:
    assert trained(folder, predictors, UNEVEN) == predictors, "the same: nothing to do"
    with pytest.raises(FileExistsError, match="already holds predictors: density_budget"):
        trained(folder, predictors, [0.5] * 3)


def test_training_again_without_a_budget_leaves_none(folder: Path, tmp_path: Path) -> None:
    trained(folder, tmp_path / "p", UNEVEN)
    (tmp_path / "p/manifest.json").unlink()
    options: dict[str, Any] = {"densities": (0.5,), "units": "mlp"}
    train(folder / "model", ActivationStore(folder / "store"), tmp_path / "p", **options)
    found = run(tmp_path / "p", held_out(folder), mlp_density=0.5).densities("mlp")
    assert found == pytest.approx([0.5] * 3, abs=0.01)


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("much", "training.density_budget: expected `array`, got `str`"),
        ([0.5, None, 0.5], "training.density_budget: `[1]`: expected `float`, got `null`"),
        ([], "expected one density in (0, 1] for each MLP"),
        ([0.5, 0.0, 0.5], "training.density_budget: `[1]`: expected `float` > 0.0"),
        ([0.5] * 2, "2 mlp densities for 3 layers"),
    ],
)
def test_a_manifest_that_says_nonsense_is_refused(
    folder: Path, predictors: Path, tmp_path: Path, written: object, message: str
) -> None:
    copy = shutil.copytree(predictors, tmp_path / "p")
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["training"]["density_budget"] = written
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=re.escape(message)):
        run(copy, held_out(folder), mlp_density=0.5)
    assert run(copy, held_out(folder), mlp_density=0.3), "another density is no matter"


def test_stand_ins_thresholds_and_metrics_are_of_what_each_layer_keeps(folder: Path, tmp_path: Path) -> None:
    """Without refinement, which would hide stand-ins that were fitted at another density."""
    densities, text = [0.8, 0.4, 0.3], held_out(folder)
    store = ActivationStore(folder / "store")
    rows = TrainingRows(store, tiny_decoder(LLAMA), "mlp", lookahead=0, device=torch.device("cpu"))
    fitted = {}
    for kept in (densities, [0.5] * 3):
        stack = PredictorStack(3, 48, 80, 16, densities=(0.5,), layer_densities={0.5: kept}, standin_rank=6)
        fit_standins(rows.model, stack, range(3), text, lookahead=0, error_share=0.0)
        fitted[kept[0]] = stack
    # The fit sees the scores alone, and those are the same: what differs is what the thresholds leave out.
    lost = [stack.standin_out[0, 0].norm() for stack in (fitted[0.8], fitted[0.5])]
    assert lost[0] < 0.9 * lost[1], "little is left out of the first layer"
    found = validation_metrics(fitted[0.8], rows, LabelDefinition(kind="top", share=0.5), [0.5], "topk")["at"]["0.5"]
    assert found["density"] == pytest.approx(densities, abs=0.01)
