"""A damaged store: what is wrong is named, and collecting with --resume repairs it."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from loguru import logger

from data.activation_store import ActivationStore, ActivationStoreWriter
from data.files import only_writer
from data.store_files import BLOCK_BYTES, SAMPLED_BLOCKS
from data.store_manifest import StoreLayout

Layout = Callable[..., StoreLayout]
MakeDocument = Callable[..., Any]
Damage = Callable[[Path], object]
LENGTHS = (3, 4, 2)


def collect(
    directory: Path,
    layout: StoreLayout,
    make_document: MakeDocument,
    *,
    num_documents: int = len(LENGTHS),
    lengths: tuple[int, ...] = LENGTHS,
    **options: Any,
) -> list[str]:
    """Write the documents that are not there; returns their ids."""
    written = []
    with ActivationStoreWriter(directory, layout, command_line="collect", **options) as writer:
        for document_id, length in enumerate(lengths[:num_documents]):
            token_ids, activations = make_document(layout, str(document_id), length)
            if not writer.skip_document(str(document_id), token_ids):
                writer.append_document(str(document_id), token_ids, activations)
                written.append(str(document_id))
        if num_documents < len(lengths):
            writer.close(complete=False)
    return written


def swap(one: str, other: str) -> Damage:
    def apply(directory: Path) -> None:
        content = (directory / one).read_bytes()
        (directory / one).write_bytes((directory / other).read_bytes())
        (directory / other).write_bytes(content)

    return apply


def change_a_row(name: str) -> Damage:
    def apply(directory: Path) -> None:
        content = bytearray((directory / name).read_bytes())
        content[-1] ^= 1
        (directory / name).write_bytes(content)

    return apply


def cut(name: str, num_bytes: int) -> Damage:
    return lambda directory: os.truncate(directory / name, (directory / name).stat().st_size - num_bytes)


def unlink(name: str) -> Damage:
    return lambda directory: (directory / name).unlink()


@pytest.mark.parametrize("num_documents", [2, 3], ids=["incomplete", "complete"])
@pytest.mark.parametrize(
    ("damage", "named", "kept"),
    [
        (cut("token_ids.mmap", 1), "token_ids.mmap is truncated", 1),
        (cut("mlp_label_10.mmap", 1), "mlp_label_10.mmap is truncated", 1),
        (lambda directory: os.truncate(directory / "att_x_1.mmap", 9), "att_x_1.mmap is truncated", 0),
        (unlink("token_ids.mmap"), "token_ids.mmap is missing", 0),
        (unlink("att_label_1.mmap"), "att_label_1.mmap is missing", 0),
        (swap("att_x_1.mmap", "mlp_x_1.mmap"), r"mlp_x_1.mmap, att_x_1.mmap: not as collected", 0),
        (swap("att_x_1.mmap", "att_label_1.mmap"), "att_label_1.mmap is truncated|att_x_1.mmap is truncated", 0),
        (swap("att_x_1.mmap", "att_x_10.mmap"), r"att_x_1.mmap, att_x_10.mmap: not as collected", 0),
        (change_a_row("mlp_label_1.mmap"), "mlp_label_1.mmap: not as collected", 0),
    ],
)
def test_damage_is_named_and_repaired_by_a_resume(
    tmp_path: Path,
    make_layout: Layout,
    make_document: MakeDocument,
    read_folder: Callable[[Path], dict[str, bytes]],
    num_documents: int,
    damage: Damage,
    named: str,
    kept: int,
) -> None:
    layout = make_layout()
    collect(tmp_path / "whole", layout, make_document)
    collect(tmp_path / "damaged", layout, make_document, num_documents=num_documents)
    damage(tmp_path / "damaged")
    with pytest.raises((ValueError, FileNotFoundError), match=f"{named}.*; collect again with --resume"):
        ActivationStore(tmp_path / "damaged")
    kept = kept if num_documents == 2 or not kept else 2
    assert collect(tmp_path / "damaged", layout, make_document, resume=True) == [str(i) for i in range(kept, 3)]
    assert read_folder(tmp_path / "damaged") == read_folder(tmp_path / "whole")
    ActivationStore(tmp_path / "damaged", verify=True)


def test_a_change_between_the_sampled_blocks_is_found_in_a_small_store_and_by_verify_in_a_large_one(
    tmp_path: Path, make_layout: Layout, make_document: MakeDocument, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, lengths = make_layout(layers=(0,)), (2 * SAMPLED_BLOCKS * BLOCK_BYTES // 10, 3)
    collect(tmp_path, layout, make_document, lengths=lengths)

    def change() -> None:
        rows = np.memmap(tmp_path / "att_x_0.mmap", np.uint8, "r+")
        rows[BLOCK_BYTES + 100] ^= 1
        rows.flush()

    change()
    with pytest.raises(ValueError, match=r"att_x_0.mmap: not as collected .* collect again with --resume$"):
        ActivationStore(tmp_path)
    assert collect(tmp_path, layout, make_document, lengths=lengths, resume=True) == ["0", "1"]
    ActivationStore(tmp_path)
    monkeypatch.setattr("data.store_files.SMALL_BYTES", 0)
    change()
    ActivationStore(tmp_path)
    with pytest.raises(ValueError, match=r"att_x_0.mmap: not as collected .* collect again with --resume --verify"):
        ActivationStore(tmp_path, verify=True)
    assert collect(tmp_path, layout, make_document, lengths=lengths, resume=True, verify=True) == ["0", "1"]
    ActivationStore(tmp_path, verify=True)


def test_a_store_of_an_older_version_has_no_sums_and_is_read(
    tmp_path: Path, make_layout: Layout, make_document: MakeDocument
) -> None:
    collect(tmp_path, make_layout(), make_document)
    path = tmp_path / "manifest.json"
    record = json.loads(path.read_text())
    assert len(record.pop("sums")) == len(record.pop("samples")) == len(record["files"])
    path.write_text(json.dumps(record))
    said: list[str] = []
    sink = logger.add(said.append, format="{message}")
    assert ActivationStore(tmp_path, verify=True).num_rows == sum(LENGTHS)
    logger.remove(sink)
    assert len(said) == 1 and "--verify found no sums to compare its files with" in said[0]


def test_a_finished_store_that_is_resumed_keeps_its_manifest(
    tmp_path: Path, make_layout: Layout, make_document: MakeDocument
) -> None:
    collect(tmp_path, make_layout(), make_document)
    before = (tmp_path / "manifest.json").stat()
    assert collect(tmp_path, make_layout(), make_document, resume=True) == []
    after = (tmp_path / "manifest.json").stat()
    assert (after.st_mtime_ns, after.st_ino) == (before.st_mtime_ns, before.st_ino)


@pytest.mark.parametrize("spoil", [unlink("att_x_1.mmap"), cut("mlp_x_1.mmap", 1), lambda directory: None])
def test_reading_a_store_while_it_is_written_names_the_process(
    tmp_path: Path, make_layout: Layout, make_document: MakeDocument, monkeypatch: pytest.MonkeyPatch, spoil: Damage
) -> None:
    store = tmp_path / "store"
    collect(store, make_layout(), make_document, num_documents=2)
    spoil(store)
    with only_writer(store), monkeypatch.context() as patch:
        patch.setattr("data.files.os.getpid", lambda: -1)  # another process asks
        with pytest.raises(BlockingIOError, match="store is being written by process [0-9]+ on .*; wait until that"):
            ActivationStore(store)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EFBIG])
def test_a_full_disk_while_rows_are_appended_names_the_file_and_a_resume_completes(
    tmp_path: Path,
    make_layout: Layout,
    make_document: MakeDocument,
    read_folder: Callable[[Path], dict[str, bytes]],
    monkeypatch: pytest.MonkeyPatch,
    code: int,
) -> None:
    layout = make_layout()
    collect(tmp_path / "whole", layout, make_document)
    writer = ActivationStoreWriter(tmp_path / "store", layout, command_line="collect")
    writer.append_document("0", *make_document(layout, "0", LENGTHS[0]))
    writer.flush()

    def full(*arguments: Any) -> None:
        raise OSError(code, os.strerror(code))

    file = writer._files._files["mlp_x_10.mmap"]
    no_space = SimpleNamespace(write=full, flush=full, close=file.close)
    monkeypatch.setitem(writer._files._files, "mlp_x_10.mmap", no_space)  # type: ignore[arg-type]
    with pytest.raises(OSError, match="mlp_x_10.mmap: no space left .*; free space there, then continue with --resume"):
        writer.append_document("1", *make_document(layout, "1", LENGTHS[1]))
    with pytest.raises(OSError, match="mlp_x_10.mmap: no space left"):
        writer.close()
    assert ActivationStore(tmp_path / "store").num_rows == LENGTHS[0]
    assert collect(tmp_path / "store", layout, make_document, resume=True) == ["1", "2"]
    assert read_folder(tmp_path / "store") == read_folder(tmp_path / "whole")
