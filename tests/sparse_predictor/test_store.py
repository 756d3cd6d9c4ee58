"""Predictor directories: strict in both directions, and never complete before they are."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import sparse_predictor.store
from modules.decoder import Decoder
from sparse_predictor.calibration import load_calibration
from sparse_predictor.selection import Selection, attach_selection
from sparse_predictor.store import load_predictors, weights_sample
from tests.modules.tiny_kinds import LLAMA
from tests.modules.tiny_models import tiny_decoder
from tests.sparse_predictor.tiny_stages import collect, model_folder, train

DEEP = LLAMA | {"num_hidden_layers": 12}


@pytest.fixture(scope="module")
def model() -> Decoder:
    return tiny_decoder(DEEP)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deep")
    model_folder(folder / "model", DEEP)
    train(folder / "model", collect(folder / "model", folder / "store"), folder / "predictors", steps=1)
    return folder


@pytest.fixture
def predictors(folder: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(folder / "predictors", tmp_path / "predictors"))


def test_every_layer_is_served_by_its_own_file(predictors: Path, model: Decoder) -> None:
    names = {path.name for path in predictors.iterdir()}
    assert names == {
        "manifest.json", "metrics.json", "metrics.md", "calibration.safetensors",
        *(f"layer_{layer}_{block}.safetensors" for layer in range(12) for block in ("mlp", "attention")),
    }  # fmt: skip
    loaded, manifest = load_predictors(predictors, model)
    assert manifest.layers == list(range(12)) and len(loaded) == 24
    for (layer, block), predictor in loaded.items():
        file = load_file(predictors / f"layer_{layer}_{block}.safetensors")
        assert torch.equal(predictor.first, file["first"]) and torch.equal(predictor.thresholds, file["thresholds"])
    assert len({tuple(loaded[layer, "mlp"].second.flatten().tolist()) for layer in range(12)}) == 12


@pytest.mark.parametrize("layer", [0, 1, 10, 11])
def test_a_missing_layer_is_never_served_by_another(predictors: Path, model: Decoder, layer: int) -> None:
    (predictors / f"layer_{layer}_mlp.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=rf"layer_{layer}_mlp.safetensors is missing.*layer {layer}$"):
        attach_selection(model, Selection(method="predictor", predictors=predictors, mlp_density=0.5))


def rewrite(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        path = directory / "layer_1_mlp.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)

    return apply


def edit_manifest(**changes: Any) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        path = directory / "manifest.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return apply


def truncate(name: str) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        path = directory / name
        path.write_bytes(path.read_bytes()[:-100])

    return apply


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (rewrite(lambda tensors: tensors.pop("second")), ValueError, r"layer_1_mlp.*[Mm]issing.*second"),
        (
            rewrite(lambda tensors: tensors.update(first=torch.zeros(3, 48))),
            ValueError,
            r"layer_1_mlp.*size mismatch for first",
        ),
        (
            rewrite(lambda tensors: tensors.update(third=torch.zeros(3))),
            ValueError,
            r"layer_1_mlp.*[Uu]nexpected.*third",
        ),
        (
            rewrite(lambda tensors: tensors["bias"].fill_(float("nan"))),
            ValueError,
            r"layer_1_mlp.*bias holds NaN",
        ),
        (truncate("layer_1_mlp.safetensors"), ValueError, "layer_1_mlp"),
        (lambda directory: (directory / "manifest.json").unlink(), FileNotFoundError, "its training did not finish"),
        (edit_manifest(format_version=99), ValueError, "format version 99"),
        (edit_manifest(config_hash="0" * 12), ValueError, "do not belong to this model"),
        (edit_manifest(weights_sample=[0.5] * 48), ValueError, "same configuration but other weights"),
        (edit_manifest(blocks=["mlp", "experts"]), ValueError, "unknown block 'experts'"),
        (edit_manifest(training=None), ValueError, "definitions or training is no valid value"),
        (edit_manifest(surprise=1), ValueError, "not a predictor manifest .it has an unknown surprise.; give a"),
        (lambda directory: (directory / "manifest.json").write_text("{"), ValueError, "manifest .not JSON: "),
        (lambda directory: (directory / "manifest.json").write_text("[1]"), ValueError, "manifest .no JSON object.$"),
        (
            lambda directory: (directory / "manifest.json").write_text('{"format": "x", "layers": [0]}'),
            ValueError,
            "manifest.json: not a predictor manifest .it has no model_id.; give a directory that scripts.train wrote$",
        ),
    ],
    ids=lambda value: None,
)
def test_what_does_not_fit_is_refused_and_named(
    predictors: Path, model: Decoder, spoil: Callable[[Path], object], error: type[Exception], message: str
) -> None:
    spoil(predictors)
    with pytest.raises(error, match=f"(?s){message}"):
        load_predictors(predictors, model)


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (lambda directory: (directory / "calibration.safetensors").unlink(), FileNotFoundError, "is missing"),
        (truncate("calibration.safetensors"), ValueError, "calibration.safetensors"),
        (
            lambda directory: save_file({"0.neuron_mood": torch.zeros(80)}, directory / "calibration.safetensors"),
            ValueError,
            "unexpected tensor 0.neuron_mood",
        ),
        (
            lambda directory: save_file({"0.neuron_frequency": torch.ones(80)}, directory / "calibration.safetensors"),
            ValueError,
            r"no calibration for layers \[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11\]",
        ),
        (
            lambda directory: save_file(
                {f"{layer}.neuron_frequency": torch.ones(7) for layer in range(12)},
                directory / "calibration.safetensors",
            ),
            ValueError,
            r"neuron_frequency.*7.*80",
        ),
    ],
    ids=lambda value: None,
)
def test_a_spoiled_calibration_is_refused(
    predictors: Path, model: Decoder, spoil: Callable[[Path], object], error: type[Exception], message: str
) -> None:
    spoil(predictors)
    with pytest.raises(error, match=message):
        attach_selection(model, Selection(method="static", predictors=predictors, mlp_density=0.5))


def test_predictors_of_another_model_are_refused_for_every_method(predictors: Path) -> None:
    other_config, other_weights = tiny_decoder(LLAMA), tiny_decoder(DEEP, seed=1)
    for method in ("predictor", "static", "cats", "teal"):
        selection = Selection(method=method, predictors=predictors, mlp_density=0.5)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="do not belong to this model"):
            attach_selection(other_config, selection)
        with pytest.raises(ValueError, match="same configuration but other weights"):
            attach_selection(other_weights, selection)
    rounded = tiny_decoder(DEEP, dtype=torch.bfloat16)
    attach_selection(rounded, Selection(method="predictor", predictors=predictors, mlp_density=0.5))


@pytest.mark.parametrize("step", ["save_file", "save_calibration", "write_json"])
def test_a_crash_while_saving_leaves_no_manifest(
    folder: Path, predictors: Path, model: Decoder, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    loaded, manifest = load_predictors(predictors, model)

    def crash(*arguments: Any, **options: Any) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(sparse_predictor.store, step, crash)
        with pytest.raises(OSError, match="disk full"):
            sparse_predictor.store.save_predictors(predictors, loaded, load_calibration(predictors), {}, manifest)
    assert not (predictors / "manifest.json").exists()
    with pytest.raises(FileNotFoundError, match="did not finish"):
        load_predictors(predictors, model)


def test_training_again_leaves_nothing_of_the_predictors_before(folder: Path, predictors: Path, model: Decoder) -> None:
    loaded, manifest = load_predictors(predictors, model)
    few = {place: predictor for place, predictor in loaded.items() if place[1] == "mlp"}
    (predictors / "training_mlp.pt").write_bytes(b"state")
    sparse_predictor.store.save_predictors(predictors, few, load_calibration(predictors), {}, manifest)
    assert not list(predictors.glob("*_attention.safetensors")) and not list(predictors.glob("training_*"))
    with pytest.raises(FileNotFoundError, match="layer_0_attention.safetensors is missing"):
        load_predictors(predictors, model)


def test_a_copy_of_another_layers_file_is_refused(predictors: Path, model: Decoder) -> None:
    shutil.copy(predictors / "layer_0_mlp.safetensors", predictors / "layer_1_mlp.safetensors")
    with pytest.raises(ValueError, match="written for layer 0 mlp, not for layer 1 mlp"):
        load_predictors(predictors, model)


def test_the_sample_of_weights_stays_within_a_matrix_that_float32_cannot_number() -> None:
    hidden_size, neurons = 4096, 16384  # its last entry is number 2**26 - 1
    weight = torch.ones(1, 1).expand(neurons, hidden_size)
    mlp = SimpleNamespace(units=None, down_proj=SimpleNamespace(weight=weight))
    config = SimpleNamespace(hidden_size=hidden_size, intermediate_size=neurons, num_hidden_layers=1)
    model: Any = SimpleNamespace(config=config, has_block=lambda *place: True, mlp=lambda layer_idx: mlp)
    assert weights_sample(model) == [1.0] * 4
