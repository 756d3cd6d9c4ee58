"""The activation store: what is written is read, by document, whatever the lengths."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.activation_store import ActivationStore, ActivationStoreWriter
from data.store_manifest import StoreLayout, split_documents


def fill(directory: Path, layout: StoreLayout, make_document: Callable[..., Any], lengths: list[int]) -> None:
    with ActivationStoreWriter(directory, layout, command_line="collect", git_commit="abc") as writer:
        for document_idx, num_tokens in enumerate(lengths):
            writer.append_document(str(document_idx), *make_document(layout, str(document_idx), num_tokens))


@pytest.mark.usefixtures("without_fsync")
@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    label_format=st.sampled_from(["raw", "packed"]),
    units=st.sampled_from(["mlp", "attention", "both"]),
    intermediate_size=st.integers(1, 20),
    flush_bytes=st.integers(1, 2000),
)
def test_every_document_is_read_as_it_was_written(
    make_layout: Callable[..., StoreLayout],
    make_document: Callable[..., Any],
    lengths: list[int],
    label_format: str,
    units: str,
    intermediate_size: int,
    flush_bytes: int,
) -> None:
    layout = make_layout(label_format=label_format, units=units, intermediate_size=intermediate_size)
    with tempfile.TemporaryDirectory() as folder:
        with ActivationStoreWriter(folder, layout, flush_bytes=flush_bytes) as writer:
            for idx, num_tokens in enumerate(lengths):
                writer.append_document(str(idx), *make_document(layout, str(idx), num_tokens))
        store = ActivationStore(folder)
        assert store.num_rows == sum(lengths)
        assert store.layers == (1, 10)
        assert [document.stop - document.start for document in store.documents] == lengths
        readers = {
            "mlp_x": lambda layer_idx, rows: store.mlp_x(layer_idx)[rows],
            "mlp_label": lambda layer_idx, rows: store.read_mlp_label(layer_idx, rows.start, rows.stop),
            "att_x": lambda layer_idx, rows: store.att_x(layer_idx)[rows],
            "att_label": lambda layer_idx, rows: store.att_label(layer_idx)[rows],
        }
        for document in store.documents:
            rows = slice(document.start, document.stop)
            token_ids, activations = make_document(layout, document.document_id, rows.stop - rows.start)
            np.testing.assert_array_equal(store.token_ids[rows], token_ids)
            for layer_idx, arrays in activations.items():
                for kind, array in arrays.items():
                    found = readers[kind](layer_idx, rows)
                    assert found.dtype == array.dtype
                    np.testing.assert_array_equal(found, array)


def test_files_are_raw_float16_that_plain_numpy_opens(
    tmp_path: Path, make_layout: Callable[..., StoreLayout], make_document: Callable[..., Any]
) -> None:
    layout = make_layout()
    fill(tmp_path, layout, make_document, [4, 2])
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["manifest.json", "token_ids.mmap"]
        + [f"{kind}_{i}.mmap" for i in (1, 10) for kind in ("mlp_x", "mlp_label", "att_x", "att_label")]
    )
    label = np.memmap(tmp_path / "mlp_label_10.mmap", dtype="float16", mode="r", shape=(6, 11))
    np.testing.assert_array_equal(label[:4], make_document(layout, "0", 4)[1][10]["mlp_label"])


def test_ten_short_documents_in_a_store_meant_for_many_rows_validate_on_real_rows(
    tmp_path: Path, make_layout: Callable[..., StoreLayout], make_document: Callable[..., Any]
) -> None:
    layout = make_layout()
    with ActivationStoreWriter(tmp_path, layout, expected_rows=400_000) as writer:
        for idx in range(10):
            writer.append_document(str(idx), *make_document(layout, str(idx), 3))
    store = ActivationStore(tmp_path)
    assert store.num_rows == 30
    assert store.mlp_x(1).shape == (30, 5)
    validation = store.row_ranges("validation")
    assert validation
    for start, stop in validation:
        assert np.all(np.any(store.mlp_x(1)[start:stop] != 0, axis=1))
        assert np.all(store.token_ids[start:stop] > 0)


@settings(max_examples=50, deadline=None)
@given(document_ids=st.lists(st.text(max_size=4), min_size=1, max_size=60))
def test_split_is_by_document_about_a_tenth_and_independent_of_order(document_ids: list[str]) -> None:
    splits = split_documents(document_ids)
    assert splits == split_documents(reversed(document_ids))
    num_documents = len(set(document_ids))
    num_validation = sum(split == "validation" for split in splits.values())
    if num_documents == 1:
        assert num_validation == 0
    else:
        assert 1 <= num_validation < num_documents
        assert abs(num_validation - 0.1 * num_documents) <= 1


def test_no_row_and_no_document_is_in_both_splits_even_if_a_document_has_several_pieces(
    tmp_path: Path, make_layout: Callable[..., StoreLayout], make_document: Callable[..., Any]
) -> None:
    layout = make_layout()
    with ActivationStoreWriter(tmp_path, layout) as writer:
        for idx in range(12):
            for _ in range(3):
                writer.append_document(str(idx), *make_document(layout, str(idx), 2))
    store = ActivationStore(tmp_path)
    rows = {
        split: {row for start, stop in store.row_ranges(split) for row in range(start, stop)}
        for split in ("train", "validation")
    }
    assert rows["train"] | rows["validation"] == set(range(72))
    assert not rows["train"] & rows["validation"]
    by_split = {
        split: {document.document_id for document in store.documents if document.split == split}
        for split in ("train", "validation")
    }
    assert by_split["validation"]
    assert not by_split["train"] & by_split["validation"]


def test_manifest_states_model_definitions_provenance_and_shapes(
    tmp_path: Path, make_layout: Callable[..., StoreLayout], make_document: Callable[..., Any]
) -> None:
    layout = make_layout(label_format="packed", definitions={"corpus": "c4:train", "active": ["energy", 0.9]})
    fill(tmp_path, layout, make_document, [4, 2])
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    expected = {
        "format_version": 1,
        "model": "tiny",
        "config_hash": "0123abcd",
        "dtype": "float32",
        "layers": [1, 10],
        "label_format": "packed",
        "bit_order": "little",
        "definitions": {"corpus": "c4:train", "active": ["energy", 0.9]},
        "command_line": "collect",
        "git_commit": "abc",
        "num_rows": 6,
        "complete": True,
    }
    assert {name: manifest[name] for name in expected} == expected
    assert manifest["files"]["mlp_label_1.mmap"] == {"dtype": "uint8", "shape": [6, 2]}
    assert [(entry["document_id"], entry["start"], entry["stop"]) for entry in manifest["documents"]] == [
        ("0", 0, 4),
        ("1", 4, 6),
    ]
    assert ActivationStore(tmp_path).layout == layout


def test_wider_floats_are_stored_as_float16(
    tmp_path: Path, make_layout: Callable[..., StoreLayout], make_document: Callable[..., Any]
) -> None:
    layout = make_layout(units="mlp", layers=(0,))
    token_ids, activations = make_document(layout, "0", 4)
    exact = activations[0]["mlp_x"].astype(np.float32) * 1.0001
    activations[0]["mlp_x"] = exact
    with ActivationStoreWriter(tmp_path, layout) as writer:
        writer.append_document("0", token_ids, activations)
    np.testing.assert_array_equal(ActivationStore(tmp_path).mlp_x(0), exact.astype(np.float16))


def test_arrays_that_are_not_contiguous_are_stored_right(
    tmp_path: Path, make_layout: Callable[..., StoreLayout], make_document: Callable[..., Any]
) -> None:
    layout = make_layout(units="attention", layers=(0,))
    token_ids, activations = make_document(layout, "0", 4)
    fortran = {0: {kind: np.asfortranarray(array) for kind, array in activations[0].items()}}
    with ActivationStoreWriter(tmp_path, layout) as writer:
        writer.append_document("0", token_ids[::-1], fortran)
    store = ActivationStore(tmp_path)
    np.testing.assert_array_equal(store.att_x(0), activations[0]["att_x"])
    np.testing.assert_array_equal(store.token_ids, token_ids[::-1])


def test_a_store_without_documents_is_read_as_empty(tmp_path: Path, make_layout: Callable[..., StoreLayout]) -> None:
    ActivationStoreWriter(tmp_path, make_layout()).close()
    store = ActivationStore(tmp_path)
    assert store.num_rows == 0
    assert store.mlp_x(1).shape == (0, 5)
    assert store.row_ranges("train") == []


def test_reading_a_chunk_maps_the_file_instead_of_loading_it(
    tmp_path: Path, make_layout: Callable[..., StoreLayout], make_document: Callable[..., Any]
) -> None:
    fill(tmp_path, make_layout(), make_document, [4])
    store = ActivationStore(tmp_path)
    assert isinstance(store.mlp_x(1), np.memmap)
    assert not isinstance(store.read_mlp_label(1, 0, 2), np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        store.mlp_x(1)[0] = 0
