"""A killed collection loses at most what was not flushed; resumed, it ends with the bytes of a whole run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.activation_store import ActivationStore, ActivationStoreWriter
from data.store_manifest import StoreLayout

ReadFolder = Callable[[Path], dict[str, bytes]]


def collect(
    directory: Path,
    layout: StoreLayout,
    make_document: Callable[..., Any],
    lengths: list[int],
    *,
    resume: bool = False,
    complete: bool = True,
) -> int:
    """Write the documents that are not there yet; returns how many were."""
    num_skipped = 0
    writer = ActivationStoreWriter(directory, layout, command_line=f"collect {resume}", resume=resume)
    for idx, num_tokens in enumerate(lengths):
        token_ids, activations = make_document(layout, str(idx), num_tokens)
        if writer.skip_document(str(idx), token_ids):
            num_skipped += 1
        else:
            writer.append_document(str(idx), token_ids, activations)
    writer.close(complete=complete)
    return num_skipped


@pytest.mark.usefixtures("without_fsync")
@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 6), min_size=2, max_size=6),
    data=st.data(),
    label_format=st.sampled_from(["raw", "packed"]),
)
def test_resuming_after_a_crash_at_any_byte_gives_the_uninterrupted_store(
    make_layout: Callable[..., StoreLayout],
    make_document: Callable[..., Any],
    read_folder: ReadFolder,
    lengths: list[int],
    data: st.DataObject,
    label_format: str,
) -> None:
    layout = make_layout(label_format=label_format)
    with tempfile.TemporaryDirectory() as folder:
        whole, crashed = Path(folder) / "whole", Path(folder) / "crashed"
        collect(whole, layout, make_document, lengths)
        num_flushed = data.draw(st.integers(0, len(lengths)), label="documents flushed before the crash")
        collect(crashed, layout, make_document, lengths[:num_flushed], complete=False)
        # the crash: each file got any number of bytes beyond its valid rows, the next manifest half its text
        uninterrupted = read_folder(whole)
        for name in layout.files:
            path = crashed / name
            num_valid = path.stat().st_size
            num_more = data.draw(st.integers(0, len(uninterrupted[name]) - num_valid + 3), label=name)
            with open(path, "ab") as file:
                file.write((uninterrupted[name][num_valid:] + b"???")[:num_more])
        (crashed / "manifest.json.1234.tmp").write_bytes(b'{"format": "deja')
        assert ActivationStore(crashed).num_rows == sum(lengths[:num_flushed])
        assert not ActivationStore(crashed).manifest.complete

        assert collect(crashed, layout, make_document, lengths, resume=True) == num_flushed
        resumed = read_folder(crashed)
        assert resumed.pop("manifest.json").replace(b"collect True", b"collect False") == uninterrupted.pop(
            "manifest.json"
        )
        assert resumed == uninterrupted


CHILD = """
import sys
import numpy as np
from data.activation_store import ActivationStoreWriter
from data.store_manifest import StoreLayout

layout = StoreLayout(model="tiny", config_hash="0", dtype="float32", layers=(0, 1), hidden_size=64,
                     intermediate_size=256, num_attention_heads=4)
with ActivationStoreWriter(sys.argv[1], layout, resume=True, flush_bytes=50_000) as writer:
    for idx in range(int(sys.argv[2])):
        generator = np.random.default_rng(idx)
        token_ids = generator.integers(0, 100, 7 + idx % 5)
        if writer.skip_document(str(idx), token_ids):
            continue
        writer.append_document(str(idx), token_ids, {
            i: {kind: generator.standard_normal((len(token_ids), file.width)).astype(np.float16)
                for kind, file in layout.kinds.items()}
            for i in layout.layers})
"""


def test_kill_minus_nine_then_resume_equals_a_run_that_was_never_killed(
    tmp_path: Path, read_folder: ReadFolder
) -> None:
    root = str(Path(__file__).parents[2])

    def start(name: str, num_documents: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path / name), str(num_documents)], cwd=root)

    child = start("killed", 100_000)
    manifest, deadline = tmp_path / "killed" / "manifest.json", time.monotonic() + 30
    while not (manifest.exists() and json.loads(manifest.read_text())["num_rows"] > 50):
        assert time.monotonic() < deadline and child.poll() is None
        time.sleep(0.01)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    num_documents = len(ActivationStore(manifest.parent).documents)
    assert start("killed", num_documents + 5).wait() == 0
    assert start("whole", num_documents + 5).wait() == 0
    assert read_folder(tmp_path / "killed") == read_folder(tmp_path / "whole")
    assert ActivationStore(tmp_path / "killed").manifest.complete


def test_an_exception_keeps_the_documents_before_it_and_leaves_the_store_incomplete(
    tmp_path: Path, make_layout: Callable[..., StoreLayout], make_document: Callable[..., Any]
) -> None:
    layout = make_layout()
    with pytest.raises(KeyError), ActivationStoreWriter(tmp_path, layout) as writer:
        writer.append_document("0", *make_document(layout, "0", 3))
        writer.append_document("1", *make_document(layout, "1", 3), may_flush=False)  # its batch is not whole
        raise KeyError
    store = ActivationStore(tmp_path)
    assert store.num_rows == 3
    assert not store.manifest.complete


def test_the_manifest_moves_only_when_every_data_file_is_on_the_disk(
    tmp_path: Path,
    make_layout: Callable[..., StoreLayout],
    make_document: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layout = make_layout()
    events: list[str] = []
    fsync, replace = os.fsync, os.replace

    def record_fsync(descriptor: int) -> None:
        events.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def record_replace(source: Path, target: Path) -> None:
        events.append("replace")
        replace(source, target)

    with ActivationStoreWriter(tmp_path, layout) as writer:
        writer.append_document("0", *make_document(layout, "0", 3))
        monkeypatch.setattr("data.store_files.os.fsync", record_fsync)
        monkeypatch.setattr("data.store_files.os.replace", record_replace)
        writer.flush()
        monkeypatch.undo()
    assert set(events[: len(layout.files)]) == set(layout.files)
    assert events[len(layout.files) :] == [f"manifest.json.{os.getpid()}.tmp", "replace", tmp_path.name]


def test_resuming_a_complete_store_collects_nothing_and_changes_no_byte(
    tmp_path: Path,
    make_layout: Callable[..., StoreLayout],
    make_document: Callable[..., Any],
    read_folder: ReadFolder,
) -> None:
    layout = make_layout()
    collect(tmp_path, layout, make_document, [3, 4])
    before = read_folder(tmp_path)
    assert collect(tmp_path, layout, make_document, [3, 4], resume=True) == 2
    assert read_folder(tmp_path) == before


def test_a_batch_becomes_valid_as_a_whole(
    tmp_path: Path, make_layout: Callable[..., StoreLayout], make_document: Callable[..., Any]
) -> None:
    layout = make_layout()
    writer = ActivationStoreWriter(tmp_path, layout, flush_bytes=1)
    for idx in range(4):
        writer.append_document(str(idx), *make_document(layout, str(idx), 2), may_flush=idx % 2 == 1)
        if idx == 2:
            writer._files.wait()
            assert ActivationStore(tmp_path).num_rows == 4
    writer.close()
    assert ActivationStore(tmp_path).num_rows == 8


def test_resuming_with_another_corpus_is_refused(
    tmp_path: Path, make_layout: Callable[..., StoreLayout], make_document: Callable[..., Any]
) -> None:
    layout = make_layout()
    collect(tmp_path, layout, make_document, [3, 4], complete=False)
    writer = ActivationStoreWriter(tmp_path, layout, resume=True)
    with pytest.raises(ValueError, match="the corpus or its tokenisation changed"):
        writer.skip_document("0", np.array([1, 2, 3]))
    with pytest.raises(ValueError, match="holds 2 documents, of which 0 were passed to skip_document"):
        writer.append_document("0", *make_document(layout, "0", 3))
    writer.close()
