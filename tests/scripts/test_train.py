"""The train stage: artefacts, recipes by flags, resuming, achieved densities, refusals."""

import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loguru import logger

import scripts.train
from data.activation_store import ActivationStore
from scripts.command_line import run_stage
from scripts.train import Options, fit_to_device, main, parse_rank
from sparse_predictor.selection import Selection, attach_selection
from sparse_predictor.store import load_calibration, load_predictors
from sparse_predictor.training_data import TrainingRows
from tests.modules.tiny_kinds import KINDS, LLAMA, OPT
from tests.modules.tiny_models import tiny_decoder
from tests.sparse_predictor.tiny_stages import QUICK, collect, model_folder, one_error_line, ragged_documents, train


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`model` and `store` of a tiny Llama."""
    folder = tmp_path_factory.mktemp("llama")
    collect(model_folder(folder / "model", LLAMA), folder / "store", ragged_documents([40] * 30))
    return folder


def flags(folder: Path, output_dir: Path, /, **changes: Any) -> list[str]:
    values = {"model": folder / "model", "activations": folder / "store", "output-dir": output_dir}
    values |= {name.replace("_", "-"): value for name, value in {**QUICK, **changes}.items() if name != "quiet"}
    words = []
    for name, value in values.items():
        words += [f"--{name}", *(map(str, value) if isinstance(value, tuple) else [str(value)])]
    return [*words, "--quiet"]


def test_the_stage_leaves_predictors_calibration_metrics_and_a_manifest(folder: Path, tmp_path: Path) -> None:
    run_stage(main, Options, flags(folder, tmp_path / "p", refine_steps=2, batch_size=2))
    names = {path.name for path in (tmp_path / "p").iterdir()}
    assert names == {
        "manifest.json", "metrics.json", "metrics.md", "calibration.safetensors",
        *(f"layer_{layer}_{block}.safetensors" for layer in range(3) for block in ("mlp", "attention")),
    }  # fmt: skip
    manifest = json.loads((tmp_path / "p/manifest.json").read_text())
    assert manifest["layers"] == [0, 1, 2] and manifest["blocks"] == ["attention", "mlp"]
    assert manifest["definitions"]["label"] == {"kind": "top", "share": 0.5}
    assert manifest["training"]["seed"] == 0 and manifest["provenance"]["command_line"]
    metrics = json.loads((tmp_path / "p/metrics.json").read_text())
    for block in ("mlp", "attention"):
        for density in ("0.5", "0.3"):
            found = metrics[block]["at"][density]
            assert all(len(found[name]) == 3 for name in ("recall", "precision", "density"))
            assert all(0 <= value <= 1 for name in found for value in found[name])
    first = metrics["mlp"]["at"]["0.5"]
    row = f"| 0 | {first['recall'][0]:.3f} | {first['precision'][0]:.3f} |"
    assert row in (tmp_path / "p/metrics.md").read_text()
    curve = metrics["refinement"]["held_out_divergence"]
    assert [steps for steps, _ in curve] == [0, 2] and metrics["refinement"]["best"] <= curve[0][1]
    load_predictors(tmp_path / "p", tiny_decoder(LLAMA))


def test_finished_predictors_are_kept_and_never_replaced_by_those_of_other_options(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_stage(main, Options, flags(folder, tmp_path / "p"))
    before = {path.name: path.read_bytes() for path in (tmp_path / "p").iterdir()}
    monkeypatch.setattr(scripts.train, "fit_block", lambda *arguments: pytest.fail("training began"))
    run_stage(main, Options, [word for word in flags(folder, tmp_path / "p") if word != "--quiet"])
    assert "holds the predictors of these options: nothing to do" in capsys.readouterr().err
    collect(folder / "model", tmp_path / "store", ragged_documents([40] * 30, seed=7))
    collect(folder / "model", tmp_path / "some", ragged_documents([40] * 30), layers="1,2")
    monkeypatch.setattr(Options, "load", lambda options: pytest.fail("the model was loaded"))
    for changes, message in (
        ({"steps": 5}, "already holds predictors: steps is 4 there, 5 now; give another --output-dir, or remove"),
        ({"densities": (0.5,), "seed": 1}, "densities is [0.5, 0.3] there, [0.5] now; seed is 0 there, 1 now; give"),
        ({"activations": tmp_path / "store"}, "they were trained on other activations; give another --output-dir"),
        ({"activations": tmp_path / "some"}, "holds predictors: they were trained on other activations; give"),
    ):
        assert message in one_error_line(main, Options, flags(folder, tmp_path / "p", **changes), capsys)
    assert {path.name: path.read_bytes() for path in (tmp_path / "p").iterdir()} == before


def test_defaults_fit_the_device_and_what_they_leave_out_is_told(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    given = Options(model="m", activations=folder / "store", output_dir=tmp_path)
    on_gpu, on_cpu = fit_to_device(given, "cuda"), fit_to_device(given, "cpu")
    assert (on_gpu.refine_steps, on_gpu.steps, on_gpu.standin_tokens) == (800, 400, 65536)
    assert (on_cpu.refine_steps, on_cpu.steps, on_cpu.standin_tokens) == (0, 50, 4096)
    assert fit_to_device(replace(given, steps=7, refine_steps=3), "cpu").steps == 7
    assert fit_to_device(replace(given, refine_corpus="self", refine_tokens=9), "cpu").refine_steps == 800
    monkeypatch.setattr(scripts.train, "layer_densities", lambda options: pytest.fail(str(options.refine_steps)))
    left = [word for name, value in QUICK.items() if name in ("batch_rows", "steps") for word in (f"--{name}", value)]
    flags = ["--model", folder / "model", "--activations", folder / "store", "--output-dir", tmp_path, *left]
    with pytest.raises(pytest.fail.Exception, match="^0$"):
        run_stage(main, Options, [str(word).replace("_", "-") for word in flags] + ["--device", "cpu"])
    assert "on a CPU: no refinement, closed_form_rows 6144, standin_tokens 4096, calibration_tokens 2048" in (
        told := capsys.readouterr().err
    )
    assert "--refine-steps 800" in told and "steps 50" not in told


def test_deja_vus_recipe_is_reachable_by_flags(folder: Path, tmp_path: Path) -> None:
    recipe = {"loss": "bce", "initialisation": "random", "predictor_rank": 24, "rule": "topk", "standin_rank": 0}
    run_stage(main, Options, flags(folder, tmp_path / "p", **recipe, steps=150, learning_rate=0.01))
    predictors, manifest = load_predictors(tmp_path / "p", tiny_decoder(LLAMA))
    assert manifest.predictor_rank["mlp"] == 24 and manifest.mlp_rule == "topk" and manifest.standin_rank == 0
    assert predictors[1, "mlp"].first.shape == (24, 48) and predictors[1, "mlp"].standin_in.numel() == 0
    metrics = json.loads((tmp_path / "p/metrics.json").read_text())
    assert min(metrics["mlp"]["at"]["0.5"]["recall"]) > 0.6, "better than chance"
    model = tiny_decoder(LLAMA)
    stats = attach_selection(
        model, Selection(method="predictor", predictors=tmp_path / "p", mlp_density=0.3, sparse_phases="all")
    )
    with torch.no_grad():
        model(torch.randint(0, 131, (2, 20)))
    assert stats.densities("mlp") == pytest.approx([0.3] * 3), "top-k keeps the same number for every token"


class Killed(Exception):
    pass


def test_interrupted_training_resumes_to_the_same_files(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"steps": 210, "units": "mlp"}
    store = ActivationStore(folder / "store")
    train(folder / "model", store, tmp_path / "whole", **options)
    steps: list[int] = []

    def advance(bar: Any, step: int, loss: float) -> None:
        steps.append(step)
        if step == 205 and len(steps) < 210:
            raise Killed

    monkeypatch.setattr(scripts.train, "show_step", advance)
    with pytest.raises(Killed):
        train(folder / "model", store, tmp_path / "parts", **options)
    assert not (tmp_path / "parts/manifest.json").exists()
    del steps[:]
    steps.extend([-1] * 210)
    train(folder / "model", store, tmp_path / "parts", **options)
    assert steps[210:] == list(range(200, 210)), "from the last saved state"
    for layer in range(3):
        name = f"layer_{layer}_mlp.safetensors"
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert {path.name for path in (tmp_path / "parts").iterdir()} == {
        path.name for path in (tmp_path / "whole").iterdir()
    }


@pytest.mark.parametrize(
    ("kind", "changes"), [("llama", {}), ("llama", {"lookahead": 1}), ("opt-post-norm-projected", {})]
)
def test_a_sparse_run_on_the_calibration_text_has_the_density_asked_for_in_every_layer(
    tmp_path: Path, kind: str, changes: dict[str, Any]
) -> None:
    store = collect(model_folder(tmp_path / "model", KINDS[kind]), tmp_path / "store", ragged_documents([40] * 30))
    # A window beyond the context of 64 is cut down to it.
    train(tmp_path / "model", store, tmp_path / "p", refine_window=1024, **changes)
    rows = TrainingRows(store, tiny_decoder(KINDS[kind]), "mlp", lookahead=0, device=torch.device("cpu"))
    text = rows.text("validation", 16384, 1024)
    assert text.shape == (1, 64), "the validation documents hold 120 tokens"
    model = tiny_decoder(KINDS[kind])
    for density in (0.5, 0.3):
        selection = Selection(method="predictor", predictors=tmp_path / "p", mlp_density=density, sparse_phases="all")
        stats = attach_selection(model, selection)
        with torch.no_grad():
            model(text)
        assert stats.densities("mlp") == pytest.approx([density] * 3, abs=0.01)


def test_heads_of_a_relu_model_are_labelled_by_rank_not_by_sign(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "model", OPT)
    predictors = train(
        model, collect(model, tmp_path / "store", ragged_documents([40] * 20)), tmp_path / "p", steps=100
    )
    for layer, statistics in load_calibration(predictors).items():
        frequency = statistics.require("group_frequency", "static")
        assert float(frequency.mean()) == pytest.approx(0.5), layer  # 3 of 6 heads a token
        assert float(frequency.max()) > float(frequency.min())
    found = json.loads((predictors / "metrics.json").read_text())["attention"]["at"]["0.5"]
    assert np.mean(found["recall"]) > 0.6 and found["recall"] == pytest.approx(found["precision"])


@pytest.mark.parametrize("kind", ["llama", "opt"])
def test_a_bfloat16_model_can_be_trained_on(tmp_path: Path, kind: str) -> None:
    model = model_folder(tmp_path / "model", KINDS[kind])
    store = collect(model, tmp_path / "store", ragged_documents([40] * 12), dtype="bfloat16")
    train(model, store, tmp_path / "half", dtype="bfloat16", refine_steps=2, batch_size=2)
    exact = train(model, store, tmp_path / "exact", refine_steps=2, batch_size=2)
    for directory in (tmp_path / "half", exact):
        predictors, _ = load_predictors(directory, tiny_decoder(KINDS[kind]))
        assert all(bool(tensor.isfinite().all()) for p in predictors.values() for tensor in p.state_dict().values())
    half = json.loads((tmp_path / "half/metrics.json").read_text())["mlp"]["at"]["0.5"]["recall"]
    assert half == pytest.approx(
        json.loads((exact / "metrics.json").read_text())["mlp"]["at"]["0.5"]["recall"], abs=0.1
    )


def test_packed_labels_train_with_bce_and_serve_what_they_can(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "model", OPT)
    store = collect(model, tmp_path / "store", label_format="packed")
    recipe = {"loss": "bce", "initialisation": "random", "standin_rank": "0"}
    said: list[str] = []
    sink = logger.add(said.append, level="INFO", format="{message}")
    predictors = train(model, store, tmp_path / "p", **recipe)
    logger.remove(sink)
    assert said and not any("stand-ins" in str(message) for message in said)
    decoder = tiny_decoder(OPT)
    # TEAL too: its statistics come from the model's own pass, not from the store.
    for method in ("predictor", "static", "teal"):
        attach_selection(decoder, Selection(method=method, predictors=predictors, mlp_density=0.5))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lookahead": 2}, "--lookahead must be 0 or 1, got 2"),
        ({"predictor_rank": "wide"}, "--predictor-rank must be auto or a whole number of at least 1, got 'wide'"),
        ({"predictor_rank": "0"}, "--predictor-rank must be auto or a whole number of at least 1, got '0'"),
        ({"standin_rank": "-1"}, "--standin-rank must be auto or a whole number of at least 0"),
        ({"steps": -1}, "--steps must be at least 0"),
        ({"batch_rows": 0}, "--batch-rows at least 1"),
        ({"densities": (0.5, 1.5)}, "--densities and --label-density must lie in (0, 1], got 1.5"),
        ({"label_density": 0.0}, "--label-density must lie in (0, 1], got 0.0"),
        ({"activations": "nowhere"}, "nowhere/manifest.json does not exist"),
        (
            {"activations": "nowhere"},
            "collect first: python -m scripts.collect --model DIR --corpus SPEC --output-dir ",
        ),
        ({"model": "nowhere/at/all"}, "nowhere/at/all: no such folder"),
        ({"refine_steps": 2, "refine_window": 5000}, None),
    ],
)
def test_bad_flags_are_one_line_and_leave_no_manifest(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture, changes: dict[str, Any], message: str | None
) -> None:
    if message is None:  # the window is cut to the context instead
        run_stage(main, Options, flags(folder, tmp_path / "p", **changes))
        return
    assert message in one_error_line(main, Options, flags(folder, tmp_path / "p", **changes), capsys)
    assert not (tmp_path / "p/manifest.json").exists()


def test_a_store_that_does_not_fit_is_refused(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    model_folder(tmp_path / "model", OPT)
    other = flags(folder, tmp_path / "p", model=tmp_path / "model")
    line = one_error_line(main, Options, other, capsys)
    assert "was collected from model (config" in line and "not from model (config" in line
    collect(folder / "model", tmp_path / "heads", units="attention")
    neurons = flags(folder, tmp_path / "p", activations=tmp_path / "heads", units="mlp")
    assert "holds units attention, not mlp" in one_error_line(main, Options, neurons, capsys)
    collect(folder / "model", tmp_path / "some", layers="0,2")
    line = one_error_line(
        main, Options, flags(folder, tmp_path / "p", activations=tmp_path / "some", refine_steps=2), capsys
    )
    assert "lacks layers [1]" in line
    assert not list(tmp_path.glob("p/manifest.json"))


def test_a_store_without_validation_rows_is_refused_before_training(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    collect(folder / "model", tmp_path / "one", ragged_documents([60]))
    monkeypatch.setattr(scripts.train, "fit_block", lambda *arguments: pytest.fail("training began"))
    line = one_error_line(main, Options, flags(folder, tmp_path / "p", activations=tmp_path / "one"), capsys)
    assert "no validation rows; collect more documents" in line


def test_activations_that_are_not_finite_are_one_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    store = collect(folder / "model", tmp_path / "store", ragged_documents([40] * 10))
    spoiled = np.memmap(store.directory / "mlp_x_2.mmap", np.float16, "r+")
    spoiled[::7] = np.nan
    spoiled.flush()
    manifest = json.loads((store.directory / "manifest.json").read_text())
    for name in ("sums", "samples"):  # an older store, which opens
        del manifest[name]
    (store.directory / "manifest.json").write_text(json.dumps(manifest))
    for initialisation in ("closed_form", "random"):
        words = flags(folder, tmp_path / "p", activations=store.directory, initialisation=initialisation)
        line = one_error_line(main, Options, words, capsys)
        assert "not finite" in line and "2" in line
    assert not (tmp_path / "p/manifest.json").exists()


def test_ranks_are_auto_or_whole_numbers() -> None:
    assert (parse_rank("auto", 7, "--x", 1), parse_rank("12", 7, "--x", 1), parse_rank("0", 7, "--x", 0)) == (7, 12, 0)


def test_activations_of_other_weights_are_refused(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    model_folder(tmp_path / "other", LLAMA, seed=5)
    line = one_error_line(main, Options, flags(folder, tmp_path / "p", model=tmp_path / "other"), capsys)
    assert "collected from other weights" in line


def test_a_damaged_training_state_is_left_behind(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    (tmp_path / "p/training_mlp.pt").write_bytes(b"PK damaged")
    run_stage(main, Options, flags(folder, tmp_path / "p"))
    assert (tmp_path / "p/manifest.json").is_file()


@pytest.mark.parametrize("name", ["training_mlp.pt", "layer_1_mlp.safetensors", "metrics.json", "manifest.json"])
def test_a_full_disk_is_one_line_and_the_same_command_completes(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    replace = os.replace

    def full(source: Path, target: Path) -> None:
        if Path(target).name == name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr("data.files.os.replace", full)
        line = one_error_line(main, Options, flags(folder, tmp_path / "p"), capsys)
    assert f"p/{name}: no space left to write it" in line and "free space there, then give the same command" in line
    assert not (tmp_path / "p/manifest.json").exists() and not list(tmp_path.glob("**/*.tmp"))
    run_stage(main, Options, flags(folder, tmp_path / "p"))
    load_predictors(tmp_path / "p", tiny_decoder(LLAMA))
    assert not list((tmp_path / "p").glob("training_*"))


def test_damaged_predictors_are_trained_again_by_the_same_command(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    run_stage(main, Options, flags(folder, tmp_path / "p"))
    file = tmp_path / "p/layer_1_mlp.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-4] + b"\0\0\0\1")
    capsys.readouterr()
    run_stage(main, Options, flags(folder, tmp_path / "p"))
    said = capsys.readouterr().err
    assert "layer_1_mlp.safetensors: " in said and "training again" in said and file.read_bytes() == whole
    run_stage(main, Options, [word for word in flags(folder, tmp_path / "p") if word != "--quiet"])
    assert "nothing to do" in capsys.readouterr().err
