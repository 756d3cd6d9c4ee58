"""Predictor directories: strict in both directions, and never complete before they are."""

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import sparse_predictor.store
from data.files import only_writer
from modules.decoder import Decoder
from modules.specs import Dense
from sparse_predictor.selection import Selection, attach_selection
from sparse_predictor.store import load_calibration, load_predictors, parse_manifest, weights_sample
from tests.data.spoiled_json import spoiled
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
    with pytest.raises(
        FileNotFoundError, match=rf"layer_{layer}_mlp.safetensors is missing.*layer {layer}; train again"
    ):
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


def swap(one: str, other: str) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        paths = [directory / f"{name}.safetensors" for name in (one, other)]
        contents = [path.read_bytes() for path in paths]
        for path, content in zip(paths, reversed(contents), strict=True):
            path.write_bytes(content)

    return apply


def zero(name: str) -> Callable[[Path], None]:
    return lambda directory: (directory / name).write_bytes(bytes((directory / name).stat().st_size)) and None


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
        (
            rewrite(lambda tensors: tensors["second"].view(-1)[3].fill_(float("inf"))),
            ValueError,
            r"layer_1_mlp.*second holds infinite values; train again",
        ),
        (
            rewrite(lambda tensors: tensors.update(first=tensors["first"].half())),
            ValueError,
            r"layer_1_mlp.*first is of type torch.float16, expected torch.float32",
        ),
        (
            rewrite(lambda tensors: tensors["second"].view(-1)[3].add_(1.0)),
            ValueError,
            r"layer_1_mlp.*not as it was written .its sha256 differs from the manifest's.; train again",
        ),
        (swap("layer_0_mlp", "layer_1_mlp"), ValueError, "layer_0_mlp.*written for layer 1 mlp, not for layer 0 mlp"),
        (
            swap("layer_1_mlp", "layer_1_attention"),
            ValueError,
            "layer_1_(mlp|attention).safetensors: written for layer 1 (attention|mlp), not for",
        ),
        (truncate("layer_1_mlp.safetensors"), ValueError, "layer_1_mlp"),
        (zero("layer_1_mlp.safetensors"), ValueError, "layer_1_mlp.*damaged"),
        (lambda directory: (directory / "manifest.json").unlink(), FileNotFoundError, "its training did not finish"),
        (edit_manifest(format_version=99), ValueError, "format version 99"),
        (edit_manifest(config_hash="0" * 12), ValueError, "do not belong to this model"),
        (edit_manifest(weights_sample=[0.5] * 48), ValueError, "same configuration but other weights"),
        (edit_manifest(blocks=["mlp", "experts"]), ValueError, r"`blocks\[1\]`: invalid enum value 'experts'"),
        (edit_manifest(training=None), ValueError, "`training`: expected `object`, got `null`"),
        (edit_manifest(lookahead=True), ValueError, "`lookahead`: expected `int`, got `bool`"),
        (edit_manifest(layers=[*range(11), 12]), ValueError, r"`layers` has \[12\], this model has layers 0 to 11"),
        (edit_manifest(predictor_rank={"mlp": 8}), ValueError, "`predictor_rank` lacks attention"),
        (edit_manifest(predictor_rank={"mlp": 2**20, "attention": 2}), ValueError, "size mismatch for first"),
        (edit_manifest(surprise=1), ValueError, "not a predictor manifest .*unknown field `surprise`.; give a"),
        (lambda directory: (directory / "manifest.json").write_text("{"), ValueError, "manifest .*not JSON "),
        (lambda directory: (directory / "manifest.json").write_text("[1]"), ValueError, "manifest .*expected `obj"),
        (
            lambda directory: (directory / "manifest.json").write_text('{"format": "x", "layers": [0]}'),
            ValueError,
            "not a predictor manifest .*manifest.json: object contains unknown field `format`.; give a directory that",
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


def test_predictors_whose_manifest_has_the_first_versions_hash_load(predictors: Path, model: Decoder) -> None:
    edit_manifest(config_hash=model.config.version_1_hash())(predictors)
    assert load_predictors(predictors, model)[1].layers


def change_calibration(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        tensors = load_file(directory / "calibration.safetensors")
        tensors["2.neuron_frequency"] = change(tensors["2.neuron_frequency"])
        save_file(tensors, directory / "calibration.safetensors")

    return apply


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (lambda directory: (directory / "calibration.safetensors").unlink(), FileNotFoundError, "is missing"),
        (truncate("calibration.safetensors"), ValueError, "calibration.safetensors"),
        (
            lambda directory: shutil.copy(directory / "layer_3_mlp.safetensors", directory / "calibration.safetensors"),
            ValueError,
            "calibration.safetensors: unexpected tensor",
        ),
        (
            change_calibration(lambda value: value + 1),
            ValueError,
            "calibration.safetensors: not as it was written",
        ),
        (change_calibration(lambda value: value / 0), ValueError, "neuron_frequency holds (NaN|infinite values)"),
        (change_calibration(lambda value: value.long()), ValueError, "neuron_frequency is of type torch.int64"),
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
    if "as it was written" not in message:
        edit_manifest(sums={})(predictors)
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


@pytest.mark.parametrize("step", ["write_tensors", "save_calibration", "write_json"])
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
    mlp = SimpleNamespace(unit_shard=None, down_proj=SimpleNamespace(rows=weight.__getitem__))
    layer = SimpleNamespace(feed_forward=Dense(intermediate_size=neurons, gated=True, activation="silu"))
    config = SimpleNamespace(hidden_size=hidden_size, layers=(layer,), num_hidden_layers=1)
    model: Any = SimpleNamespace(config=config, has_block=lambda *place: True, mlp=lambda layer_idx: mlp)
    assert weights_sample(model) == [1.0] * 4


def test_predictors_without_sums_are_those_of_an_older_version_and_are_read(predictors: Path, model: Decoder) -> None:
    path = predictors / "manifest.json"
    record = json.loads(path.read_text())
    assert len(record.pop("sums")) == 27
    path.write_text(json.dumps(record))
    assert len(load_predictors(predictors, model)[0]) == 24
    attach_selection(model, Selection(method="static", predictors=predictors, mlp_density=0.5))


def test_reading_predictors_while_they_are_trained_names_the_process(
    predictors: Path, model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    (predictors / "manifest.json").unlink()
    with only_writer(predictors):
        monkeypatch.setattr("data.files.os.getpid", lambda: -1)  # another process asks
        with pytest.raises(BlockingIOError, match="predictors is being written by process [0-9]+ on .*; wait until"):
            load_predictors(predictors, model)
        monkeypatch.undo()


def test_files_have_the_mode_that_umask_gives(folder: Path, predictors: Path, model: Decoder) -> None:
    loaded, manifest = load_predictors(predictors, model)
    before = os.umask(0o027)
    try:
        sparse_predictor.store.save_predictors(predictors, loaded, load_calibration(predictors), {}, manifest)
    finally:
        os.umask(before)
    written = [path for path in predictors.iterdir() if path.name != "metrics.md"]
    assert {oct(path.stat().st_mode & 0o777) for path in written} == {"0o640"}


def test_any_wrong_value_in_a_manifest_is_told(predictors: Path, model: Decoder) -> None:
    path = predictors / "manifest.json"
    valid = json.loads(path.read_text())
    valid["sums"] = dict(list(valid["sums"].items())[:1])
    valid["layers"] = valid["layers"][:1]
    for name in ("definitions", "training"):
        valid[name] = {"density_budget": None}
    for _, text in spoiled(valid):
        path.write_bytes(text)
        with contextlib.suppress(ValueError, FileNotFoundError):
            parse_manifest(predictors)
            load_predictors(predictors, model)
            attach_selection(model, Selection(method="predictor", predictors=predictors, mlp_density=0.5))
