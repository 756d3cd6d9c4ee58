"""A checkpoint whose files are not those that were written is told when it is loaded, or with --verify."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from modules.checkpoint.load import load_config, load_model
from modules.checkpoint.manifest import read_manifest, verify_checkpoint
from modules.checkpoint.write import write_model
from tests.modules.tiny_kinds import LLAMA
from tests.modules.tiny_models import same_weights, tiny_decoder, tiny_hf_model, write_checkpoint


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A checkpoint with a file of a tokenizer."""
    (tmp_path / "merges.txt").write_text("a b")
    write_model(tiny_decoder(LLAMA), tmp_path / "model", model_id="tiny", other_files=[tmp_path / "merges.txt"])
    return tmp_path / "model"


def edit_manifest(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def drop_sums(manifest: dict[str, Any]) -> None:
    """As an older version wrote it."""
    del manifest["other_files"]
    for record in manifest["files"].values():
        del record["sha256"], record["directory_sha256"]


def swap(folder: Path) -> None:
    (folder / "pytorch_0.pt").rename(folder / "one")
    (folder / "pytorch_1.pt").rename(folder / "pytorch_0.pt")
    (folder / "one").rename(folder / "pytorch_1.pt")


def take_from_another(folder: Path) -> None:
    write_checkpoint(folder.with_name("other"), LLAMA, tiny_hf_model(LLAMA, seed=1).state_dict(), model_id="other")
    shutil.copy(folder.with_name("other") / "pytorch_1.pt", folder / "pytorch_1.pt")


def edit_config(folder: Path) -> None:
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace('"rope_theta": 10000.0', '"rope_theta": 20000.0'))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (swap, r"pytorch_0\.pt: not the file that the manifest records: it is pytorch_1\.pt; make the model again"),
        (take_from_another, r"pytorch_1\.pt: not the file that the manifest records: it is of another checkpoint"),
        (
            lambda folder: (folder / "config.json").write_bytes(b"\0"),
            r"config\.json: not JSON .*; convert the model again",
        ),
        (edit_config, r"config\.json: changed since the checkpoint was written \(configuration .*put it back, or make"),
        (
            lambda folder: (folder / "merges.txt").write_text("b a"),
            r"merges\.txt: missing, or changed since the checkp",
        ),
        (lambda folder: (folder / "merges.txt").unlink(), r"merges\.txt: missing, or changed since the checkpoint"),
        (lambda folder: edit_manifest(folder, lambda one: one.update(config_hash="0" * 12)), r"config\.json: changed"),
    ],
)
def test_loading_tells_files_that_were_exchanged_or_edited(
    damage: Callable[[Path], object], message: str, written: Path
) -> None:
    damage(written)
    with pytest.raises(ValueError, match=message):
        load_model(written)


def test_an_older_checkpoint_loads_and_its_swapped_layers_are_told(written: Path) -> None:
    edit_manifest(written, drop_sums)
    assert same_weights(load_model(written), tiny_decoder(LLAMA))
    verify_checkpoint(written)  # a warning: there is nothing to compare with
    swap(written)
    with pytest.raises(ValueError, match=r"pytorch_0\.pt: not the file that the manifest records: it is pytorch_1\.pt"):
        load_model(written)


def test_only_the_tail_of_a_part_is_read_before_the_part_is_needed(written: Path) -> None:
    """So a stage that holds one layer does not read the others."""
    path = written / "pytorch_1.pt"
    content = bytearray(path.read_bytes())
    at = len(content) // 2 // 4096 * 4096
    content[at : at + 4096] = bytes(4096)
    path.write_bytes(content)
    load_model(written)  # a sum of everything would find it, at the price of reading everything
    with pytest.raises(
        ValueError, match=r"pytorch_1\.pt: missing, or not as written \(sha256 .*; make the model again"
    ):
        verify_checkpoint(written)


def test_verifying_covers_every_file(written: Path) -> None:
    manifest = read_manifest(written)
    assert manifest is not None
    assert manifest.sums.keys() == {path.name for path in written.iterdir()} - {"manifest.json"}
    verify_checkpoint(written)


def test_a_manifest_of_wrong_types_sizes_or_depth_is_one_line(written: Path) -> None:
    whole = json.loads((written / "manifest.json").read_text())
    deep: Any = []
    for _ in range(500):
        deep = [deep]
    for key in whole:
        for value in (None, "x", True, -7, 0.5, 1e30, [None], {}, {"pytorch_0.pt": None}, deep):
            (written / "manifest.json").write_text(json.dumps({**whole, key: value}))
            try:
                load_config(written)
            except ValueError as error:  # some values are right for some keys
                assert "manifest" in str(error) and "\n" not in str(error)
    for text in ("", "[" * 100_000, "null", "NaN", '{"format_version": 1}'):
        (written / "manifest.json").write_text(text)
        with pytest.raises(ValueError, match=r"manifest\.json: .*; convert the model again with --overwrite"):
            load_config(written)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"files": None}, "`files`: expected `object`, got `null`"),
        ({"files": {"pytorch_0.pt": {"bytes": -1}}}, "expected `int` >= 0"),
        ({"dtype": "int8"}, "`dtype`: invalid enum value 'int8'"),
        ({"config_hash": 5}, "`config_hash`: expected `str`, got `int`"),
    ],
)
def test_what_is_wrong_in_a_manifest_is_said(change: dict[str, Any], message: str, written: Path) -> None:
    edit_manifest(written, lambda manifest: manifest.update(change))
    with pytest.raises(ValueError, match=r"manifest\.json: .*" + re.escape(message)):
        load_config(written)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "..", ""])
def test_an_index_names_files_of_its_own_folder_only(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
    with pytest.raises(ValueError, match=r"index\.json: weight_map names .*; only names of files in this folder"):
        load_model(tmp_path)


@pytest.mark.parametrize("value", ["null", "[]", '{"a": 1}', '{"a": null}', '"x"', "1e30", "[" * 100_000])
def test_an_index_of_other_types_is_one_line(value: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "model.safetensors.index.json").write_text(f'{{"weight_map": {value}}}')
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json: "):
        load_model(tmp_path)
