"""Budgets: the file, how bytes are divided, and thresholds that come with it."""

import json
import math
import shutil
from itertools import product
from pathlib import Path

import pytest
import torch

from modules.sparsity import Block
from sparse_predictor.budgets import STEP, Curve, DensityBudget, Place, allocate, as_lists, predictors_id, read_budget
from sparse_predictor.selection import attach_selection, remove_sparsity
from tests.data.spoiled_json import spoiled
from tests.modules.tiny_kinds import KINDS
from tests.modules.tiny_models import tiny_decoder
from tests.sparse_predictor.tiny_stages import Trained, selection

STEPS: dict[Block, float] = {"mlp": STEP, "attention": 1 / 3}


def test_a_budget_reads_as_it_was_written(tmp_path: Path) -> None:
    plain = DensityBudget(densities={"mlp": [0.5, 0.25, 1.0]})
    full = DensityBudget(
        densities={"attention": [1.0, 0.5, 0.5], "mlp": [0.5, 0.25, 1.0]},
        method="cats",
        predictors="0123456789ab",
        thresholds=[0.125, -3.5, -math.inf],
        measured={"note": [1, 2]},
    )
    of_matrices = DensityBudget(
        densities={"mlp": [0.5, 0.75]},
        matrices={"up_proj": [0.25, 1.0], "down_proj": [0.75, 0.5]},
        method="teal",
        predictors="0123456789ab",
        thresholds={"up_proj": [0.5, -math.inf], "down_proj": [0.125, 1.5]},
    )
    for budget in (plain, of_matrices, full):
        budget.write(tmp_path / "budget.json")
        assert read_budget(tmp_path / "budget.json") == budget
    assert json.loads((tmp_path / "budget.json").read_text())["thresholds"] == [0.125, -3.5, None]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mlp": None}, "expected"),
        ({"speed": 1}, "expected"),
        ({"measured": [1]}, "`measured`: expected `object`, got `array`"),
        ({"format_version": 2}, "format version 2, this code reads 1"),
        ({"method": "cats"}, "method, predictors, thresholds together, found only method"),
        ({"method": "cats", "predictors": "ab", "thresholds": [0.5, "a", 0.5]}, r"`thresholds\[1\]`: expected `float"),
        ({"method": 1, "predictors": "ab", "thresholds": [0.5, 0.5, 0.5]}, "`method`: expected `str"),
        ({"method": "cats", "predictors": "ab", "thresholds": [0.5, 0.5]}, "2 thresholds for 3 mlp densities"),
        ({"method": "teal", "predictors": "ab", "thresholds": {"up_proj": [0.5]}}, "1 thresholds for 3 mlp densities"),
        ({"method": "teal", "predictors": "ab", "thresholds": {"up_proj": 0.5}}, r"`thresholds.*: expected `array`"),
        ({"matrices": [0.5, 0.5, 0.5]}, "`matrices`: expected `object"),
        ({"matrices": {"up_proj": [0.5, 0.5]}}, "`matrices` must have as many densities each as `mlp`, 3"),
    ],
)
def test_what_is_no_budget_is_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    path = tmp_path / "budget.json"
    path.write_text(json.dumps({"mlp": [0.5, 0.5, 0.5], **changes}))
    with pytest.raises(ValueError, match=message):
        read_budget(path)


def test_any_wrong_value_in_a_budget_is_told(tmp_path: Path) -> None:
    path = tmp_path / "budget.json"
    valid: dict[str, object] = {"mlp": [0.5, 0.5], "attention": [1.0, 0.5], "method": "cats", "predictors": "ab"}
    for more in ({"thresholds": [0.1, None]}, {"thresholds": {"up_proj": [0.1, 0.2]}, "matrices": {"up_proj": [1, 1]}}):
        for what, text in spoiled({**valid, **more, "measured": {"text": {"tokens": 3}}}):
            path.write_bytes(text)
            try:
                found = read_budget(path)
                assert all(0.0 < one <= 1.0 for values in found.densities.values() for one in values), what
            except ValueError as error:
                assert str(path) in str(error) and len(str(error)) < 1000, what


def test_bytes_go_where_they_buy_most_and_all_of_them() -> None:
    # Losses a * (1 - density)^2: the optimum has equal slopes, a * (1 - density) the same everywhere.
    sensitivity = {(0, "mlp"): 1.0, (1, "mlp"): 2.0, (2, "mlp"): 4.0}
    grid = [density / 20 for density in range(2, 20)]
    curves: dict[Place, Curve] = {
        place: Curve(tuple((density, a * (1 - density) ** 2) for density in grid), 300.0)  # type: ignore[misc]
        for place, a in sensitivity.items()
    }
    found = allocate(curves, 900.0 * 0.5, STEPS)
    assert sum(found.values()) / 3 == pytest.approx(0.5, abs=1e-9)
    slopes = [a * (1 - found[place]) for place, a in sensitivity.items()]  # type: ignore[index]
    assert max(slopes) - min(slopes) < 2 * 4.0 * 0.05, "but for the width of the grid"
    assert as_lists(found, 4)["mlp"][3] == 1.0 and set(as_lists(found, 4)) == {"mlp"}


def test_no_division_of_the_bytes_is_better() -> None:
    generator = torch.Generator().manual_seed(0)
    grid = [0.2, 0.4, 0.6, 0.8]
    for _ in range(5):
        drops = torch.rand(3, 4, generator=generator).sort(dim=1).values  # convex: later steps gain less
        losses = drops.cumsum(1).flip(1).tolist()
        losses = [[row[0], row[1], row[2], row[3]] for row in losses]
        curves: dict[Place, Curve] = {
            (layer, "mlp"): Curve(tuple(zip(grid, row, strict=True)), 10.0) for layer, row in enumerate(losses)
        }
        hulls = [dict(curves[layer, "mlp"].hull()) for layer in range(3)]
        found = allocate(curves, 30 * 0.6, STEPS)

        def loss_at(layer: int, density: float, hulls: list[dict[float, float]] = hulls) -> float:
            points = sorted(hulls[layer].items())
            for (low, before), (high, after) in zip(points, points[1:], strict=False):
                if density <= high + 1e-12:
                    return before + (after - before) * (density - low) / (high - low)
            return points[-1][1]

        ours = sum(loss_at(layer, density) for (layer, _), density in found.items())
        steps = [0.2 + 0.05 * step for step in range(17)]
        best = min(
            sum(loss_at(layer, density) for layer, density in enumerate(choice))
            for choice in product(steps, repeat=3)
            if sum(choice) <= 1.8 + 1e-9
        )
        assert ours <= best + 1e-9 and sum(found.values()) <= 1.8 + 1e-9


def test_noise_does_not_end_the_search_and_heads_move_in_whole_groups() -> None:
    # Of layer 0 the step from 0.5 to 0.7 buys nothing by itself, the one after it much.
    curves: dict[Place, Curve] = {
        (0, "mlp"): Curve(((0.3, 1.0), (0.5, 0.9), (0.7, 0.95)), 100.0),
        (1, "mlp"): Curve(((0.3, 0.01), (0.5, 0.0), (0.7, -0.01)), 100.0),
        (0, "attention"): Curve(((1 / 3, 0.5), (2 / 3, 0.1)), 30.0),
        (1, "attention"): Curve(((1 / 3, 0.02), (2 / 3, 0.01)), 30.0),
    }
    assert curves[0, "mlp"].hull() == [(0.3, 1.0), (1.0, 0.0)]
    found = allocate(curves, 0.6 * 260, STEPS)
    assert found[0, "mlp"] > 0.75 > 0.4 > found[1, "mlp"]
    for layer in range(2):
        assert found[layer, "attention"] * 3 == pytest.approx(round(found[layer, "attention"] * 3))
    spent = sum(density * curves[place].num_bytes for place, density in found.items())
    assert spent == pytest.approx(0.6 * 260, abs=1e-6)
    with pytest.raises(ValueError, match="budget of 52 bytes: the smallest densities measured cost 80"):
        allocate(curves, 0.2 * 260, STEPS)


def test_predictors_that_changed_since_their_budget_are_named_not_the_budget(trained: Trained, tmp_path: Path) -> None:
    shutil.copytree(trained(), tmp_path / "predictors")
    budget = DensityBudget(
        densities={"mlp": [0.4] * 3},
        method="predictor",
        predictors=predictors_id(tmp_path / "predictors"),
        thresholds=[0.0] * 3,
    )
    path = tmp_path / "predictors/layer_1_mlp.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    chosen = selection("predictor", tmp_path / "predictors", 0.5, density_budget=budget)
    with pytest.raises(ValueError, match="predictors: layer_1_mlp.safetensors: missing, or not as written"):
        attach_selection(tiny_decoder(KINDS["llama"]), chosen)


def test_a_missing_budget_names_what_writes_one(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.json: no such file; scripts\.budget writes one"):
        read_budget(tmp_path / "none.json")


def test_thresholds_of_a_budget_are_used_by_its_method_with_its_predictors_only(
    trained: Trained, tmp_path: Path
) -> None:
    model, path = tiny_decoder(KINDS["llama"]), tmp_path / "budget.json"
    for method in ("predictor", "cats"):
        DensityBudget(
            densities={"mlp": [0.4, 1.0, 0.7]},
            method=method,
            predictors=predictors_id(trained()),
            thresholds=[0.25, -math.inf, 0.75],
        ).write(path)
        attach_selection(model, selection(method, trained(), 0.5, density_budget=path))
        selectors = [model.mlp(layer).selector for layer in range(3)]
        assert selectors[1] is None, "what is left dense reads no predictor"
        assert [selectors[layer].threshold for layer in (0, 2)] == [0.25, 0.75]  # type: ignore[union-attr]
    for method in ("predictor", "teal"):
        with pytest.raises(ValueError, match=f"thresholds are those of method cats, not of {method}"):
            attach_selection(model, selection(method, trained(), 0.5, density_budget=path))
    with pytest.raises(ValueError, match="thresholds belong to other predictors than .*plain; make one for these"):
        attach_selection(model, selection("cats", trained("plain"), 0.5, density_budget=path))
    budget = read_budget(path)
    topk = DensityBudget(
        densities=budget.densities,
        method="predictor",
        predictors=predictors_id(trained("topk")),
        thresholds=budget.thresholds,
    )
    with pytest.raises(ValueError, match="it has thresholds, but these neurons are not chosen by one"):
        attach_selection(model, selection("predictor", trained("topk"), 0.5, density_budget=topk))
    remove_sparsity(model)


def test_predictors_are_named_by_what_they_hold(trained: Trained, tmp_path: Path) -> None:
    shutil.copytree(trained(), tmp_path / "same")
    assert predictors_id(tmp_path / "same") == predictors_id(trained())
    file = next((tmp_path / "same").glob("layer_*_mlp.safetensors"))
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert predictors_id(tmp_path / "same") != predictors_id(trained())
