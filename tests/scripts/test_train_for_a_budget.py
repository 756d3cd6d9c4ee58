"""Predictors trained for a budget of densities: what each layer keeps, in training and in a run, and refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from data.activation_store import ActivationStore
from modules.sparsity import SparsityStats
from scripts.train import Options, main
from sparse_predictor.budgets import BUDGET_FILE, DensityBudget
from sparse_predictor.selection import Selection, attach_selection
from sparse_predictor.sensitivity import divergence_of
from sparse_predictor.stack import PredictorStack
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


def run(predictors: Path, text: Tensor, **selection: Any) -> SparsityStats:
    model = tiny_decoder(LLAMA)
    stats = attach_selection(
        model, Selection(method="predictor", predictors=predictors, sparse_phases="all", **selection)
    )
    with torch.no_grad():
        model(text)
    return stats


def test_a_run_keeps_what_the_predictors_were_trained_for(folder: Path, predictors: Path) -> None:
    text = held_out(folder)
    assert run(predictors, text, mlp_density=0.5).densities("mlp") == pytest.approx(UNEVEN, abs=0.01)
    own = predictors / BUDGET_FILE
    assert json.loads(own.read_text()) == {"mlp": UNEVEN}
    assert run(predictors, text, mlp_density=0.5, density_budget=own).densities("mlp") == pytest.approx(
        UNEVEN, abs=0.01
    )


def test_another_density_and_a_budget_of_the_run_come_first(folder: Path, predictors: Path) -> None:
    text = held_out(folder)
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
        ({"attention": [0.5] * 3}, {}, "expected a density in (0, 1] of each MLP"),
        ({"mlp": [1.5, 0.0, 0.0]}, {}, "expected a density in (0, 1] of each MLP"),
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
