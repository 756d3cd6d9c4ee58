"""Each message that shards which do not fit can give, and each refusal to begin or resume."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from data.activation_store import ActivationStore, ActivationStoreWriter, open_shard_writer
from data.store_files import write_manifest
from data.store_manifest import StoreLayout
from tests.data.sharded_runs import Cut, MakeDocument, Pieces, collect_sharded, collect_whole, on_ranks

Layout = Callable[..., StoreLayout]
CUT = Cut(dp_size=2, neurons=(0, 5, 11), heads=(0, 2, 3), stages=((1,), (10,)))
ALONE = Cut(dp_size=1, neurons=(0, 11), heads=(0, 3), stages=((1,), (10,)))
PIECES: Pieces = [("0", 3), ("1", 4), ("2", 2), ("3", 1), ("4", 5)]


@pytest.fixture
def folder(tmp_path: Path, make_layout: Layout, make_document: MakeDocument) -> Path:
    """A complete store in 2 * 2 * 2 shards."""
    collect_sharded(tmp_path / "store", make_layout(), CUT, make_document, PIECES)
    return tmp_path / "store"


def edit(path: Path, **changes: Any) -> None:
    record = json.loads(path.read_text())
    for name, value in changes.items():
        record[name] = {**record[name], **value} if isinstance(value, dict) else value
    path.write_text(json.dumps(record))


def refused(folder: Path, message: str, kind: type[Exception] | tuple[type[Exception], ...] = ValueError) -> None:
    with pytest.raises(kind, match=message):
        ActivationStore(folder)


def test_a_missing_shard_is_named(folder: Path) -> None:
    shutil.rmtree(folder / "shard_dp1_pp0_tp1")
    message = "shard_dp1_pp0_tp1 is missing .*collected with dp_size=2 pp_size=2 tp_size=2"
    refused(folder, message, FileNotFoundError)


def test_a_damaged_file_of_a_shard_is_named(folder: Path) -> None:
    with open(folder / "shard_dp0_pp1_tp1" / "mlp_label_10.mmap", "ab") as file:
        file.write(b"??")
    refused(folder, "shard_dp0_pp1_tp1/mlp_label_10.mmap is too long")


def test_a_shard_in_the_place_of_another_is_named(folder: Path) -> None:
    shutil.rmtree(folder / "shard_dp1_pp0_tp1")
    shutil.copytree(folder / "shard_dp1_pp0_tp0", folder / "shard_dp1_pp0_tp1")
    refused(folder, "shard_dp1_pp0_tp1 holds no shard of this name of a store of dp_size=2")


def test_a_shard_opened_alone_names_the_folder_above(folder: Path) -> None:
    refused(folder / "shard_dp0_pp0_tp0", "shard_dp0_pp0_tp0 is one shard of a store; open the folder above")


@pytest.mark.parametrize(
    ("shard", "changes", "message"),
    [
        ("dp0_pp1_tp1", {"config_hash": "ff"}, "dp0_pp1_tp1 is a shard of another store: config_hash is '0123abcd'"),
        ("dp0_pp0_tp1", {"part": {"neurons": [4, 10]}}, "dp0_pp0_tp1 holds neurons from 4, expected from 5"),
        ("dp1_pp1_tp1", {"part": {"heads": [1, 2]}}, "dp1_pp1_tp1 holds heads from 1, expected from 2"),
        ("dp1_pp1_tp1", {"part": {"dp_size": 3}}, "dp1_pp1_tp1 holds no shard of this name"),
    ],
)
def test_a_shard_of_something_else_is_named(folder: Path, shard: str, changes: dict[str, Any], message: str) -> None:
    edit(folder / f"shard_{shard}" / "manifest.json", **changes)
    refused(folder, message)


def test_columns_and_layers_must_make_up_the_whole(
    tmp_path: Path, make_layout: Layout, make_document: MakeDocument
) -> None:
    short = replace(CUT, neurons=(0, 5, 10))
    collect_sharded(tmp_path / "short", make_layout(), short, make_document, PIECES)
    refused(tmp_path / "short", "shard_dp0_pp0_tp1: neurons end at 10, of 11")
    gap = replace(CUT, stages=((1,), ()))
    collect_sharded(tmp_path / "gap", make_layout(), gap, make_document, PIECES)
    refused(tmp_path / "gap", r"shard_dp0_pp0_tp0 and its other stages hold mlp of layers \[1\], not of \[1, 10\]")
    shutil.copytree(tmp_path / "gap" / "shard_dp0_pp1_tp1", tmp_path / "spare")
    whole = tmp_path / "whole"
    collect_sharded(whole, make_layout(), CUT, make_document, PIECES)
    shutil.rmtree(whole / "shard_dp0_pp1_tp1")
    shutil.copytree(tmp_path / "spare", whole / "shard_dp0_pp1_tp1")
    refused(whole, r"shard_dp0_pp1_tp1 holds mlp of layers \[\], its stage that of \[10\]")


def test_ranks_of_a_replica_with_other_documents_are_named(
    tmp_path: Path, make_layout: Layout, make_document: MakeDocument, folder: Path
) -> None:
    other = [("0", 3), ("1", 4), ("9", 3), ("3", 1), ("4", 5)]
    collect_sharded(tmp_path / "other", make_layout(), CUT, make_document, other)
    shutil.rmtree(folder / "shard_dp0_pp1_tp0")
    shutil.copytree(tmp_path / "other" / "shard_dp0_pp1_tp0", folder / "shard_dp0_pp1_tp0")
    refused(folder, "shard_dp0_pp1_tp0 holds document '9' up to row 6 where .*shard_dp0_pp0_tp0 holds '2' up to 5")


@pytest.mark.parametrize(("shard", "replica"), [("dp1_pp1_tp0", 1), ("dp0_pp0_tp0", 0)])
def test_complete_shards_whose_pieces_do_not_interleave_are_named(
    tmp_path: Path, make_layout: Layout, make_document: MakeDocument, folder: Path, shard: str, replica: int
) -> None:
    fewer = PIECES[:1] if replica else PIECES[:2]
    collect_sharded(tmp_path / "fewer", make_layout(), CUT, make_document, fewer)
    for path in sorted((tmp_path / "fewer").glob(f"shard_dp{replica}_*")):
        if path.name == f"shard_{shard}" or replica == 0:
            shutil.rmtree(folder / path.name)
            shutil.copytree(path, folder / path.name)
    refused(folder, r"shard_dp\d_pp\d_tp0 holds \d pieces of documents, but \d pieces dealt to 2 replicas in turn give")


def test_a_store_is_resumed_only_with_the_same_sizes(
    tmp_path: Path, make_layout: Layout, make_document: MakeDocument, folder: Path
) -> None:
    layout = make_layout()
    stored, wide = "collected with dp_size=2 pp_size=2 tp_size=2", replace(CUT, dp_size=3)
    with pytest.raises(ValueError, match=f"{stored}, this run has dp_size=3 pp_size=2 tp_size=2; give the same sizes"):
        collect_sharded(folder, layout, wide, make_document, PIECES, resume=True)
    with pytest.raises(ValueError, match=f"{stored}, this run has dp_size=1 pp_size=1 tp_size=1"):
        ActivationStoreWriter(folder, layout, resume=True)
    collect_whole(tmp_path / "plain", layout, make_document, PIECES)
    with pytest.raises(ValueError, match="collected with dp_size=1 pp_size=1 tp_size=1, this run has dp_size=2"):
        collect_sharded(tmp_path / "plain", layout, CUT, make_document, PIECES, resume=True)
    assert not list((tmp_path / "plain").glob("shard_*"))


def test_a_store_is_never_overwritten_or_mixed(
    tmp_path: Path, make_layout: Layout, make_document: MakeDocument, folder: Path
) -> None:
    layout = make_layout()
    collect_whole(tmp_path / "plain", layout, make_document, PIECES)
    for occupied in (folder, tmp_path / "plain"):
        before = {path: path.stat().st_mtime_ns for path in occupied.rglob("*")}
        with pytest.raises(FileExistsError, match="already holds an activation store: give --resume"):
            collect_sharded(occupied, layout, CUT, make_document, PIECES)
        assert {path: path.stat().st_mtime_ns for path in occupied.rglob("*")} == before
    with pytest.raises(FileExistsError, match="already holds an activation store"):
        ActivationStoreWriter(folder, layout)
    with pytest.raises(ValueError, match="cannot resume .*: config_hash is '0123abcd' in the store, 'ff' now"):
        collect_sharded(folder, make_layout(config_hash="ff"), CUT, make_document, PIECES, resume=True)
    narrow = replace(CUT, neurons=(0, 6, 11))
    with pytest.raises(ValueError, match=r"cannot resume .*: neurons is \(0, 5\) in the store, \(0, 6\) now"):
        collect_sharded(folder, layout, narrow, make_document, PIECES, resume=True)
    (folder / "manifest.json").unlink()
    with pytest.raises(FileNotFoundError, match="is no activation store"):
        collect_sharded(folder, layout, CUT, make_document, PIECES, resume=True)


def test_the_free_disk_is_checked_for_the_whole_before_anything_is_written(
    tmp_path: Path, make_layout: Layout, make_document: MakeDocument
) -> None:
    with pytest.raises(ValueError, match=r"tokens need [\d.]+ GB in .* are free; take fewer tokens"):
        collect_sharded(tmp_path / "deep/store", make_layout(), CUT, make_document, PIECES, expected_rows=10**15)
    assert not (tmp_path / "deep").exists()


def test_a_folder_that_the_processes_do_not_share_is_refused(
    tmp_path: Path, make_layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data.activation_store.VISIBLE_WITHIN_S", 0.0)
    hosts = [tmp_path / "here", tmp_path / "there"]
    with pytest.raises(ValueError, match="there/manifest.json.* is not visible here: the folder must be shared"):
        on_ranks(
            replace(ALONE, dp_size=2, stages=((1, 10),)).parts(),
            lambda part, gather: open_shard_writer(
                hosts[part.dp_rank], replace(make_layout(), part=part), gather
            ).close(),
        )


def test_a_rank_that_never_began_is_collected_by_a_resumed_run(
    tmp_path: Path, make_layout: Layout, make_document: MakeDocument, folder: Path
) -> None:
    shutil.rmtree(folder / "shard_dp1_pp0_tp1")
    skipped = collect_sharded(folder, make_layout(), CUT, make_document, PIECES, resume=True)
    assert skipped == [3] * 4 + [0] * 4, "the other ranks of its replica run along"
    assert ActivationStore(folder).manifest.complete


@pytest.mark.parametrize(
    ("damage", "kept"),
    [
        (lambda path: os.truncate(path, path.stat().st_size - 1), 2),
        (lambda path: path.unlink(), 0),
        (lambda path: path.write_bytes(bytes(path.stat().st_size)), 0),
    ],
    ids=["truncated", "missing", "zeroed"],
)
def test_a_damaged_shard_is_repaired_by_a_resumed_run(
    make_layout: Layout, make_document: MakeDocument, folder: Path, damage: Callable[[Path], None], kept: int
) -> None:
    before = {path: path.read_bytes() for path in folder.glob("shard_*/*")}
    path = folder / "shard_dp0_pp1_tp1" / "mlp_label_10.mmap"
    damage(path)
    refused(folder, r"mlp_label_10.mmap.*collect again with --resume", (ValueError, FileNotFoundError))
    skipped = collect_sharded(folder, make_layout(), CUT, make_document, PIECES, resume=True)
    assert skipped == [kept] * 4 + [2] * 4, "the other ranks of its replica run along"
    assert {path: path.read_bytes() for path in folder.glob("shard_*/*")} == before


def test_a_kill_while_surplus_pieces_are_dropped_loses_nothing_else(
    tmp_path: Path, make_layout: Layout, make_document: MakeDocument, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = make_layout()
    killed_after = [3, 2, 3, 3, 2, 2, 2, 2]
    collect_sharded(tmp_path / "store", layout, CUT, make_document, PIECES, killed_after=killed_after)
    shard = tmp_path / "store" / "shard_dp0_pp0_tp0"

    def write_and_die(*args: Any) -> None:
        write_manifest(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr("data.store_files.write_manifest", write_and_die)
    with pytest.raises(KeyboardInterrupt):
        ActivationStoreWriter(shard, replace(layout, part=CUT.parts()[0]), resume=True, keep_documents=2)
    monkeypatch.undo()
    assert ActivationStore(tmp_path / "store").num_rows == 15 - 5
    collect_sharded(tmp_path / "store", layout, CUT, make_document, PIECES, resume=True)
    assert ActivationStore(tmp_path / "store").num_rows == 15
