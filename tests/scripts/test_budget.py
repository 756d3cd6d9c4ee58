"""The budget stage: a file that runs load, as many bytes as uniform densities have, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest

import scripts.budget
from scripts.budget import Options, main
from sparse_predictor.budgets import read_budget
from sparse_predictor.cost import achieved
from sparse_predictor.selection import attach_selection
from tests.modules.tiny_kinds import LLAMA, random_tokens
from tests.modules.tiny_models import tiny_decoder
from tests.sparse_predictor.tiny_stages import (
    collect,
    model_folder,
    one_error_line,
    ragged_documents,
    selection,
    train,
    write_corpus,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`model`, its `predictors` and a `text.jsonl` of token ids."""
    folder = tmp_path_factory.mktemp("budget")
    model_folder(folder / "model", LLAMA)
    store = collect(folder / "model", folder / "store", ragged_documents([40] * 20))
    train(folder / "model", store, folder / "predictors", standin_rank="4")
    write_corpus(folder / "text.jsonl", ragged_documents([45] * 20, seed=5))
    return folder


def options(folder: Path, output: Path, **changes: Any) -> Options:
    values: dict[str, Any] = {
        "model": str(folder / "model"),
        "predictors": folder / "predictors",
        "corpus": str(folder / "text.jsonl"),
        "output": output,
        "method": "predictor",
        "densities": (0.7, 0.4, 0.2),
        "tokens": 320,
        "check_tokens": 320,
        "window": 32,
        "batch_size": 8,
        "quiet": True,
    }
    return Options(**{**values, **changes})


@pytest.mark.parametrize(
    ("method", "heads"),
    [
        ("predictor", 1.0),
        ("predictor", 0.5),
        ("cats", 1.0),
        ("oracle", 0.5),
        ("wina-unrotated", 1.0),
        ("teal", 1.0),
        ("griffin", 1.0),
    ],
)
def test_a_run_loads_the_budget_and_reads_as_many_bytes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: Any, heads: float
) -> None:
    monkeypatch.setattr("sparse_predictor.sensitivity.GREEDY_STEP", 0.2)  # of seven matrices smaller steps take seconds
    path = tmp_path / "budget.json"
    budget = main(options(folder, path, method=method, mlp_density=0.5, head_density=heads))
    assert read_budget(path) == budget
    mlps, groups = budget.densities["mlp"], budget.densities.get("attention")
    weights, of_heads = 3 * 48 * 80, 2 * 48 * 48 + (2 * 48 * 16 if method == "wina-unrotated" else 0)
    if groups is None:
        assert sum(mlps) / 3 == pytest.approx(0.5) and method != "wina-unrotated" and heads == 1.0
    else:
        uniform = 0.5 * weights + (0.5 if method == "wina-unrotated" else heads) * of_heads
        assert sum(mlps) * weights + sum(groups) * of_heads == pytest.approx(3 * uniform)
    measured = budget.measured
    shares = measured["divergence_by_share_of_allocation"]
    assert min(shares.values()) == shares[str(measured["share_of_allocation"])] and len(shares) == 5
    assert len(measured["divergence_of_one_block"]) == (3 if groups is None else 6)
    thins = method in ("teal", "wina-unrotated")
    assert (budget.thresholds is not None) == (method in ("predictor", "cats") or thins)
    assert isinstance(budget.thresholds, dict) == thins and (budget.matrices is not None) == thins
    assert ("uniform_layers" in measured["other_documents"]) == thins

    model = tiny_decoder(LLAMA)
    chosen = selection(method, folder / "predictors", 0.9, density_budget=path)
    stats = attach_selection(model, chosen)
    model(random_tokens(8, 40))
    found = achieved(model, chosen, stats)["per_layer"]["mlp"]
    expected = [(1 + density) / 2 for density in mlps] if method == "griffin" else mlps
    assert found == pytest.approx(expected, abs=0.12), "thresholds are of other text"


def test_uniform_densities_stay_where_nothing_is_better(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr("scripts.budget.MIXTURES", (0.0,))
    said: list[str] = []
    monkeypatch.setattr("scripts.budget.logger.warning", said.append)
    sizes: set[int] = set()
    for name in ("block_divergences", "divergence_of"):
        measure = getattr(scripts.budget, name)
        monkeypatch.setattr(
            f"scripts.budget.{name}",
            lambda *given, batch_size, measure=measure: sizes.add(batch_size) or measure(*given, batch_size=batch_size),
        )
    budget = main(options(folder, tmp_path / "budget.json", method="random", predictors=None, batch_size=5))
    assert sizes == {5}
    assert budget.densities == {"mlp": [0.5] * 3} and budget.thresholds is None
    assert said == [f"no allocation tried is better than uniform densities: {tmp_path / 'budget.json'} holds these"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "dense"}, "--method dense has no densities to divide"),
        ({"tokens": "31"}, "--tokens must be at least 32, got 31"),
        ({"check-tokens": "3"}, "--check-tokens must be at least 32, got 3"),
        ({"window": "1"}, "--window must be at least 2, got 1"),
        ({"window": "65", "tokens": "65", "check-tokens": "65"}, "window 65 does not fit the model's context of 64"),
        ({"densities": "1.0"}, "--densities: give some in (0, 1), got (1.0,)"),
        ({"mlp-density": "0.1"}, "--mlp-density 0.1 lies below all --densities"),
        (
            {"tokens": "640", "check-tokens": "640"},
            "is too short for 640 tokens to measure on and 640 of other documents",
        ),
        ({"method": "cats", "head-density": "0.5"}, "method cats does not choose heads"),
        ({"method": "wina-unrotated", "head-density": "0.5"}, "method wina-unrotated does not choose heads"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(
    folder: Path, tmp_path: Path, changes: dict[str, str], message: str, capsys: pytest.CaptureFixture
) -> None:
    flags = {
        "model": folder / "model",
        "predictors": folder / "predictors",
        "corpus": folder / "text.jsonl",
        "output": tmp_path / "budget.json",
        "method": "predictor",
        "densities": "0.4",
        "tokens": "320",
        "check-tokens": "320",
        "window": "32",
        **changes,
    }
    arguments = [word for name, value in flags.items() for word in (f"--{name}", value)]
    assert message in one_error_line(main, Options, [*arguments, "--quiet"], capsys)
    assert not (tmp_path / "budget.json").exists()


def test_the_file_says_how_it_came_to_be(folder: Path, tmp_path: Path) -> None:
    main(options(folder, tmp_path / "deep/budget.json", method="cats"))
    measured = json.loads((tmp_path / "deep/budget.json").read_text())["measured"]
    assert measured["text"] == {"corpus": "text.jsonl", "tokens": 320, "check_tokens": 320, "window": 32}
    assert set(measured["other_documents"]) == {"uniform", "budget"}
    for found in measured["other_documents"].values():
        assert set(found) == {"divergence", "mlp_density", "bytes_read_share", "layer_bytes_share"}
    assert measured["method"] == "cats" and measured["divergence_of_one_block"]["0.mlp"]["0.4"] > 0
