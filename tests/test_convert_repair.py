"""A conversion that is there: whole, damaged, half done, of an older version, or being written by another process."""

import json
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from torch import Tensor

from convert_llama_checkpoint import run
from data.files import only_writer
from modules.checkpoint.load import load_model
from modules.checkpoint.manifest import verify_checkpoint
from modules.checkpoint.sources import ShardFiles
from tests.modules.checkpoint.test_damage import drop_sums, edit_config, edit_manifest, swap
from tests.modules.tiny_kinds import LLAMA
from tests.modules.tiny_models import same_weights, save_hf_folder, tiny_decoder
from tests.test_convert import Convert, add_tokenizer, converter
from tests.test_convert_gguf import GGUF, write_gguf


@pytest.fixture
def convert(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Convert:
    return converter(tmp_path, capsys)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    save_hf_folder(tmp_path / "source", LLAMA)
    add_tokenizer(tmp_path / "source")
    return tmp_path / "source"


def zero_a_page(folder: Path) -> None:
    with (folder / "pytorch_1.pt").open("r+b") as file:
        file.seek(8192)
        file.write(bytes(4096))


DAMAGES: dict[str, tuple[Callable[[Path], object], set[str]]] = {
    "truncated": (lambda out: os.truncate(out / "pytorch_2.pt", 5000), {"2"}),
    "zeroed": (zero_a_page, {"1"}),
    "missing": (lambda out: (out / "pytorch_embs.pt").unlink(), {"embs"}),
    "swapped": (swap, {"0", "1"}),
    "a part too many": (lambda out: shutil.copy(out / "pytorch_0.pt", out / "pytorch_10.pt"), set()),
    "config": (edit_config, set()),
    "tokenizer": (lambda out: (out / "tokenizer.json").write_text("{}"), set()),
    "no tokenizer": (lambda out: (out / "tokenizer_config.json").unlink(), set()),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_what_is_damaged_of_a_conversion_is_written_anew_and_nothing_else(
    kind: str,
    source: Path,
    tmp_path: Path,
    convert: Convert,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    convert(source, "--dtype", "float32")
    out = tmp_path / "out"
    contents = {
        path.name: path.read_bytes() for path in out.iterdir() if path.suffix != ".json" or "token" in path.name
    }
    damage, expected = DAMAGES[kind]
    damage(out)
    read: set[str] = set()
    original = ShardFiles.read_part

    def read_part(self: ShardFiles, part: str) -> dict[str, Tensor]:
        read.add(part)
        return original(self, part)

    monkeypatch.setattr(ShardFiles, "read_part", read_part)
    assert "3 layers" in convert(source, "--dtype", "float32")
    assert read - {"embs"} == expected - {"embs"}  # the embeddings' type is looked at
    verify_checkpoint(out)
    assert same_weights(load_model(out), tiny_decoder(LLAMA))
    assert {name: (out / name).read_bytes() for name in contents} == contents
    assert not (out / "pytorch_10.pt").exists()
    assert "already converted" in convert(source, "--dtype", "float32")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def test_the_command_in_a_message_repairs_the_checkpoint(source: Path, tmp_path: Path, convert: Convert) -> None:
    convert(source, "--dtype", "bfloat16")
    os.truncate(tmp_path / "out" / "pytorch_2.pt", 5000)
    with pytest.raises(
        ValueError, match="truncated or replaced; convert the model again.*: python convert_llama"
    ) as told:
        load_model(tmp_path / "out")
    arguments = str(told.value).partition("python convert_llama_checkpoint.py ")[2].split()
    run([*arguments, "--quiet"])
    verify_checkpoint(tmp_path / "out")


def test_a_checkpoint_without_sums_is_converted_again(source: Path, tmp_path: Path, convert: Convert) -> None:
    convert(source)
    edit_manifest(tmp_path / "out", drop_sums)
    assert "3 layers" in convert(source)
    verify_checkpoint(tmp_path / "out")
    assert "already converted" in convert(source)


def test_overwrite_replaces_whatever_checkpoint_is_there(source: Path, tmp_path: Path, convert: Convert) -> None:
    out = tmp_path / "out"
    for content in ("{", json.dumps({"format_version": 99}), None):
        convert(source, "--overwrite")
        (out / "manifest.json").unlink()
        if content is not None:
            (out / "manifest.json").write_text(content)
        assert "--overwrite" in convert(source)
        assert "3 layers" in convert(source, "--overwrite")
    assert "3 layers" in convert(source, "--overwrite")  # also a whole one
    verify_checkpoint(out)


def test_a_checkpoint_of_another_request_is_refused_before_its_files_are_read(
    source: Path, convert: Convert, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(source)
    monkeypatch.setattr("convert_llama_checkpoint.changed_files", lambda *arguments: pytest.fail("all files are read"))
    assert "pass --overwrite to replace it" in convert(source, "--dtype", "bfloat16")


def test_only_one_process_converts_into_a_folder(source: Path, tmp_path: Path, convert: Convert) -> None:
    with only_writer(tmp_path / "out"):
        error = convert(source)
    assert f"out is being written by process {os.getpid()}" in error
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("moment", ["parts", "between the renames", "before the old one is gone"])
def test_a_killed_conversion_leaves_the_old_checkpoint_or_the_new_one(
    moment: str,
    source: Path,
    tmp_path: Path,
    convert: Convert,
) -> None:
    out, partial, replaced = (tmp_path / name for name in ("out", "out.partial", "out.replaced"))
    convert(source)
    if moment == "parts":
        shutil.copytree(out, partial, ignore=shutil.ignore_patterns("manifest.json", "pytorch_2.pt"))
        out.rename(replaced)
    else:
        shutil.copytree(out, replaced)
        edit_config(replaced)
        if moment == "between the renames":
            out.rename(partial)
    if not out.exists():
        with pytest.raises(
            FileNotFoundError, match=r"out\.replaced was left by an interrupted conversion: give its comm"
        ):
            load_model(out)
    assert "already converted" in convert(source)
    verify_checkpoint(out)
    assert same_weights(load_model(out), tiny_decoder(LLAMA))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """A disk that is full, as far as a file can tell."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(("num_bytes", "name"), [(100, "out.partial/"), (20_000, "pytorch_embs.pt")])
def test_a_full_disk_is_one_line_that_names_the_file_and_leaves_nothing(
    num_bytes: int,
    name: str,
    source: Path,
    tmp_path: Path,
    convert: Convert,
) -> None:
    with largest_file(num_bytes):
        error = convert(source)
    assert name in error and "no space left to write it" in error and "give the same command again" in error
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    assert "3 layers" in convert(source)
    verify_checkpoint(tmp_path / "out")


def test_a_full_disk_while_a_ggufs_tokenizer_is_written_is_not_told_as_a_bad_file(
    tmp_path: Path, convert: Convert
) -> None:
    write_gguf(tmp_path / "tiny.gguf", GGUF)
    with largest_file(2000):
        error = convert(tmp_path / "tiny.gguf")
    assert "out.partial: the tokenizer cannot be written: " in error
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]
