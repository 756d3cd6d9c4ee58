"""The collect stage: what it stores, against Hugging Face's own modules; padding, resuming, refusals."""

import json
import os
import re
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from data.activation_store import ActivationStore
from modules.checkpoint.load import load_config
from scripts.collect import Options, main, parse_layers
from scripts.command_line import run_stage
from sparse_predictor.collect import ActivationRecorder
from tests.modules.tiny_kinds import KINDS, LLAMA, OPT
from tests.modules.tiny_models import save_hf_folder
from tests.sparse_predictor.tiny_stages import (
    collect,
    model_folder,
    one_error_line,
    ragged_documents,
    write_corpus,
)

KIND_NAMES = ["llama", "opt", "opt-post-norm-projected"]
ARRAYS = ("mlp_x", "mlp_label", "att_x", "att_label")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("llama"), LLAMA)


def rows_of_hugging_face(model: PreTrainedModel, documents: list[list[int]]) -> dict[str, np.ndarray]:
    """{array_layer: [rows, width]} through hooks on Hugging Face's modules, one document at a time."""
    config, rows = model.config, {}
    is_llama, post_norm = config.model_type == "llama", not getattr(config, "do_layer_norm_before", True)
    layers = model.model.layers if is_llama else model.model.decoder.layers

    def keep(module: torch.nn.Module, name: str) -> None:
        def hook(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
            states = (args[0] if args else kwargs["hidden_states"]).detach().flatten(0, -2)
            if name.startswith("att_label"):
                states = states.unflatten(-1, (config.num_attention_heads, -1)).norm(dim=-1)
            rows.setdefault(name, []).append(states.numpy())

        module.register_forward_pre_hook(hook, with_kwargs=True)

    for i, layer in enumerate(layers):
        attention = layer.self_attn
        if is_llama:
            points = (layer.post_attention_layernorm, layer.mlp.down_proj, layer.input_layernorm, attention.o_proj)
        elif post_norm:
            points = (layer.fc1, layer.fc2, attention.q_proj, attention.out_proj)
        else:
            points = (layer.final_layer_norm, layer.fc2, layer.self_attn_layer_norm, attention.out_proj)
        for name, point in zip(ARRAYS, points, strict=True):
            keep(point, f"{name}_{i}")
    with torch.no_grad():
        for document in documents:
            model(torch.tensor([document]))
    return {name: np.concatenate(parts) for name, parts in rows.items()}


def stored(store: ActivationStore) -> dict[str, np.ndarray]:
    kinds = [(name, layer) for name in ARRAYS for layer in store.layers]
    return {f"{name}_{layer}": np.array(getattr(store, name)(layer), np.float32) for name, layer in kinds}


def assert_equal_as_float16(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, rows in expected.items():
        np.testing.assert_allclose(found[name], rows, rtol=2e-3, atol=2e-3 * rows.std(), err_msg=name)


@pytest.mark.parametrize("kind", KIND_NAMES)
def test_rows_are_those_of_hugging_faces_modules_for_ragged_batches(kind: str, tmp_path: Path) -> None:
    theirs = save_hf_folder(tmp_path / "model", KINDS[kind])
    documents = ragged_documents()
    store = collect(tmp_path / "model", tmp_path / "batched", batch_size=8)
    assert store.num_rows == sum(map(len, documents)) and store.manifest.complete
    assert store.att_label(0).shape == (store.num_rows, 6), "a column a query head, whatever the groups"
    assert_equal_as_float16(stored(store), rows_of_hugging_face(theirs, documents))
    alone = collect(tmp_path / "model", tmp_path / "alone", batch_size=1)
    assert_equal_as_float16(stored(store), stored(alone))


def test_padding_is_never_stored_and_genuine_special_tokens_are(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "model", OPT)  # pad 1, eos 2; batches are padded with 0
    documents = [[2, 5, 1, 1], [0, 0], [7, 2, 2, 9, 1, 0, 2], [1]]
    store = collect(model, tmp_path / "store", documents, batch_size=4)
    assert store.token_ids.tolist() == [token for document in documents for token in document]
    assert [(entry.start, entry.stop) for entry in store.documents] == [(0, 4), (4, 6), (6, 13), (13, 14)]
    assert all(np.abs(store.mlp_x(layer)).sum(1).min() > 0 for layer in store.layers)


@pytest.mark.parametrize("kind", ["llama", "opt"])
def test_packed_labels_are_the_definition_applied_to_the_activations(kind: str, tmp_path: Path) -> None:
    theirs = save_hf_folder(tmp_path / "model", KINDS[kind])
    raw = rows_of_hugging_face(theirs, ragged_documents())
    store = collect(tmp_path / "model", tmp_path / "packed", label_format="packed", label_density=0.3, units="mlp")
    assert store.layout.definitions["packed_label"]["kind"] == ("top" if kind == "llama" else "positive")
    layers = theirs.model.layers if kind == "llama" else theirs.model.decoder.layers
    for i, layer in enumerate(layers):
        found = store.read_mlp_label(i, 0, store.num_rows)
        if kind == "opt":
            expected = raw[f"mlp_label_{i}"] > 0
        else:
            sizes = np.abs(raw[f"mlp_label_{i}"]) * np.linalg.norm(layer.mlp.down_proj.weight.numpy(), axis=0)
            expected = sizes >= np.sort(sizes, axis=1)[:, -24:-23]  # the 24 = 0.3 * 80 largest
            assert (found.sum(1) == 24).all()
        assert found.dtype == bool and (found == expected).mean() > 0.9999


def test_layers_and_units_choose_what_is_stored(llama: Path, tmp_path: Path) -> None:
    everything = collect(llama, tmp_path / "all")
    some = collect(llama, tmp_path / "some", layers="0,2", units="attention")
    names = {path.name for path in some.directory.glob("*.mmap")}
    assert names == {"token_ids.mmap", "att_x_0.mmap", "att_x_2.mmap", "att_label_0.mmap", "att_label_2.mmap"}
    assert np.array_equal(some.att_x(2), everything.att_x(2))
    assert np.array_equal(some.att_label(0), everything.att_label(0))


def test_the_number_of_tokens_is_exact_and_long_documents_are_cut_at_the_context(llama: Path, tmp_path: Path) -> None:
    documents = ragged_documents([150, 20])
    store = collect(llama, tmp_path / "store", documents, max_tokens=160)
    assert store.num_rows == 160
    ranges = [(entry.document_id, entry.stop - entry.start) for entry in store.documents]
    assert ranges == [("0", 64), ("0", 64), ("0", 22), ("1", 10)]


def test_layer_lists() -> None:
    assert parse_layers("all", 3) == [0, 1, 2]
    assert parse_layers("7,0,2-4", 9) == [0, 2, 3, 4, 7]
    for text in ("", "x", "1-", "-1", "3-1", "0,9", "1,,2"):
        with pytest.raises(ValueError, match="layers"):
            parse_layers(text, 9)


class Killed(Exception):
    pass


def interrupt_at_batch(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Collecting stops as if killed when the recorder is about to run that batch."""
    run: Callable[..., None] = ActivationRecorder.run
    batches: list[int] = []

    def counting(self: ActivationRecorder, *args: Any) -> None:
        batches.append(1)
        if len(batches) == number:
            raise Killed
        run(self, *args)

    monkeypatch.setattr(ActivationRecorder, "run", counting)


@pytest.mark.parametrize("label_format", ["raw", "packed"])
def test_an_interrupted_collection_resumes_to_the_same_bytes(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, label_format: str
) -> None:
    options: dict[str, Any] = {"batch_size": 3, "label_format": label_format}
    corpus = write_corpus(tmp_path / "corpus.jsonl", ragged_documents())

    def run(directory: Path, **more: Any) -> ActivationStore:
        return main(Options(model=str(llama), corpus=corpus, output_dir=directory, quiet=True, **options, **more))

    def files(directory: Path) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in directory.iterdir()}

    run(tmp_path / "whole")
    with monkeypatch.context() as patch:
        interrupt_at_batch(3, patch)
        with pytest.raises(Killed):
            run(tmp_path / "parts")
    interrupted = ActivationStore(tmp_path / "parts")
    assert not interrupted.manifest.complete and 0 < interrupted.num_rows < 302
    assert run(tmp_path / "parts", resume=True).manifest.complete
    assert files(tmp_path / "parts") == files(tmp_path / "whole")
    older = (tmp_path / "parts/manifest.json").read_text()
    (hash_now,) = re.findall(r'"config_hash": "(\w+)"', older)
    hash_then = load_config(llama).version_1_hash()
    (tmp_path / "parts/manifest.json").write_text(older.replace(hash_now, str(hash_then)))
    with monkeypatch.context() as patch:
        interrupt_at_batch(1, patch)
        assert run(tmp_path / "parts", resume=True).num_rows == 302, "nothing left to do, nothing run"


def arguments(folder: Path, tmp_path: Path, /, **changes: Any) -> list[object]:
    corpus = write_corpus(tmp_path / "corpus.jsonl", ragged_documents())
    flags: dict[str, Any] = {"model": folder, "corpus": corpus, "output-dir": tmp_path / "store", **changes}
    return [word for name, value in flags.items() for word in (f"--{name}", value)] + ["--quiet"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"corpus": "no-such-corpus"}, "unknown corpus 'no-such-corpus'"),
        ({"corpus": "nowhere/text.jsonl"}, "nowhere/text.jsonl"),
        ({"max-tokens": 0}, "--max-tokens must be at least 1, got 0"),
        ({"layers": "0,7"}, "this model has layers 0 to 2"),
        ({"layers": "first"}, "expected all, or a list such as 0,5-9"),
        ({"label-format": "packed", "label-density": 1.5}, r"--label-density must lie in (0, 1], got 1.5"),
        ({"max-document-tokens": 0}, "must be"),
        ({"model": "nowhere/at/all"}, "nowhere/at/all: no such folder"),
    ],
)
def test_bad_flags_are_one_line_and_leave_no_store(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture, changes: dict[str, Any], message: str
) -> None:
    assert message in one_error_line(main, Options, arguments(llama, tmp_path, **changes), capsys)
    assert not (tmp_path / "store").exists()


def test_an_existing_store_is_refused_without_resume_and_kept(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    store = collect(llama, tmp_path / "store")
    before = (store.directory / "mlp_x_0.mmap").read_bytes()
    line = one_error_line(main, Options, arguments(llama, tmp_path), capsys)
    assert "already holds an activation store: give --resume" in line
    assert (store.directory / "mlp_x_0.mmap").read_bytes() == before and ActivationStore(store.directory).num_rows
    changed = [*arguments(llama, tmp_path, **{"layers": "0"}), "--resume"]
    assert "cannot resume" in one_error_line(main, Options, changed, capsys)


def test_a_damaged_store_is_repaired_by_collecting_with_resume(llama: Path, tmp_path: Path) -> None:
    def run(directory: Path, **more: Any) -> ActivationStore:
        corpus = write_corpus(tmp_path / "corpus.jsonl", ragged_documents())
        return main(Options(model=str(llama), corpus=corpus, output_dir=directory, batch_size=1, quiet=True, **more))

    def files(directory: Path) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in directory.iterdir()}

    run(tmp_path / "whole")
    run(tmp_path / "store")
    for damage in (
        lambda path: os.truncate(path, path.stat().st_size - 100),
        lambda path: path.unlink(),
        lambda path: path.write_bytes((tmp_path / "store/mlp_x_1.mmap").read_bytes()),
        lambda path: path.write_bytes(path.read_bytes() + b"more"),
    ):
        damage(tmp_path / "store/att_x_1.mmap")
        with pytest.raises((ValueError, FileNotFoundError), match=r"att_x_1.mmap.*collect again with --resume"):
            ActivationStore(tmp_path / "store")
        run(tmp_path / "store", resume=True)
        assert files(tmp_path / "store") == files(tmp_path / "whole")


def test_a_file_that_reaches_the_limit_is_one_line_and_a_resume_completes(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, limits[1]))  # as a full disk: the kernel refuses the write
    try:
        line = one_error_line(main, Options, arguments(llama, tmp_path), capsys)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "store/mlp_label_" in line and "no space left to write it" in line and "continue with --resume" in line
    assert not ActivationStore(tmp_path / "store").manifest.complete
    run_stage(main, Options, [str(word) for word in arguments(llama, tmp_path)] + ["--resume"])
    assert ActivationStore(tmp_path / "store", verify=True).num_rows == 302


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no text"),
        ('{"token_ids": [1, 2]}\n{oops\n', "line 2"),
        ('{"token_ids": [1, 131]}\n', "token id 131, but the vocabulary has 131"),
        ('{"text": "words"}\n', "the model has no tokenizer"),
    ],
)
def test_a_bad_corpus_is_one_line_and_its_store_is_not_complete(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture, text: str, message: str
) -> None:
    flags = arguments(llama, tmp_path)
    (tmp_path / "corpus.jsonl").write_text(text)
    assert message in one_error_line(main, Options, flags, capsys)
    manifest = tmp_path / "store/manifest.json"
    assert not manifest.exists() or not json.loads(manifest.read_text())["complete"]


@pytest.mark.parametrize(("scale", "message"), [(1e6, "float16"), (float("nan"), "embed_tokens")])
def test_values_that_float16_cannot_hold_are_refused_loudly(
    tmp_path: Path, capsys: pytest.CaptureFixture, scale: float, message: str
) -> None:
    model = save_hf_folder(tmp_path / "model", LLAMA)
    model.model.embed_tokens.weight.mul_(scale)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "model")
    line = one_error_line(main, Options, arguments(tmp_path / "model", tmp_path), capsys)
    assert message in line
    if scale == 1e6:
        assert "mlp_x of layer 0" in line
        assert not ActivationStore(tmp_path / "store").manifest.complete
    else:
        assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["llama", "opt"])
def test_half_precision_models_with_padded_rows_are_collected_finite(tmp_path: Path, kind: str, dtype: str) -> None:
    model = model_folder(tmp_path / "model", KINDS[kind])
    store = collect(model, tmp_path / "half", dtype=dtype, batch_size=8)
    exact = collect(model, tmp_path / "exact", batch_size=1)
    assert store.layout.dtype == dtype
    for name, rows in stored(exact).items():
        found = stored(store)[name]
        assert np.isfinite(found).all()
        assert np.abs(found - rows).mean() < 0.05 * np.abs(rows).mean(), name
