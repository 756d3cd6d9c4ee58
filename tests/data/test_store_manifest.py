"""A manifest with any wrong value, of a store or above shards, is one line that names the file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data.activation_store import ActivationStore, ActivationStoreWriter
from data.store_files import write_manifest
from data.store_manifest import ShardedManifest, StoreLayout
from tests.data.spoiled_json import spoiled


def test_any_wrong_value_in_a_manifest_is_told(
    tmp_path: Path, make_layout: Callable[..., StoreLayout], make_document: Callable[..., Any]
) -> None:
    layout = make_layout(layers=(0,), units="attention")
    with ActivationStoreWriter(tmp_path, layout, git_commit="0123") as writer:
        for idx in range(3):
            writer.append_document(str(idx), *make_document(layout, str(idx), 2))
    path, refused = tmp_path / "manifest.json", set()
    for what, text in spoiled(json.loads(path.read_bytes())):
        path.write_bytes(text)
        try:
            store = ActivationStore(tmp_path)
            assert store.num_rows == len(store.token_ids) == sum(one.stop - one.start for one in store.documents)
        except (ValueError, OSError) as error:
            assert str(tmp_path) in str(error) and len(str(error)) < 1000, what
            refused.add(what)
    for key in (
        "num_rows",
        "complete",
        "hidden_size",
        "documents",
        "layers",
        "files",
        "sums",
        "samples",
        "definitions",
    ):
        assert {f"('{key}',): null", f"('{key}',): 1e30"} <= refused
    assert {"('layers', 0): true", "('documents', 0, 'stop'): 1.5", "('command_line',): left out"} <= refused


def test_any_wrong_value_in_a_manifest_above_shards_is_told(
    tmp_path: Path, make_layout: Callable[..., StoreLayout]
) -> None:
    sizes = {"dp_size": 2, "pp_size": 1, "tp_size": 2}
    write_manifest(tmp_path, ShardedManifest(layout=make_layout(), sizes=sizes, command_line="", git_commit=None))
    path = tmp_path / "manifest.json"
    for what, text in spoiled(json.loads(path.read_bytes())):
        path.write_bytes(text)
        with pytest.raises((ValueError, FileNotFoundError), match="manifest.json|is missing from the store") as caught:
            ActivationStore(tmp_path)
        assert len(str(caught.value)) < 1000, what
