"""Each message that a damaged store or a wrong call can give."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.activation_store import ActivationStore, ActivationStoreWriter
from data.store_manifest import StoreLayout

Layout = Callable[..., StoreLayout]
MakeDocument = Callable[..., Any]


@pytest.fixture
def store_dir(tmp_path: Path, make_layout: Layout, make_document: MakeDocument) -> Path:
    layout = make_layout()
    with ActivationStoreWriter(tmp_path / "store", layout) as writer:
        for idx in range(3):
            writer.append_document(str(idx), *make_document(layout, str(idx), 2))
    return tmp_path / "store"


def edit_manifest(directory: Path, **changes: Any) -> None:
    path = directory / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_file_of_another_layer_is_not_taken_in(store_dir: Path) -> None:
    shutil.copy(store_dir / "mlp_x_1.mmap", store_dir / "mlp_x_11.mmap")
    with pytest.raises(ValueError, match="mlp_x_11.mmap does not belong to the store"):
        ActivationStore(store_dir)


def test_a_complete_store_with_surplus_rows_is_refused(store_dir: Path) -> None:
    with open(store_dir / "att_x_1.mmap", "ab") as file:
        file.write(b"\0" * 10)
    with pytest.raises(ValueError, match="att_x_1.mmap is too long: 6 rows take 60 bytes, it has 70"):
        ActivationStore(store_dir)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format_version": 2}, "format_version 2 is unknown; this program reads 1"),
        ({"format": "other"}, "is not the manifest of an activation store"),
        ({"bit_order": "big"}, "bit_order 'big' is unknown"),
        ({"hidden_size": 6}, r"att_x_1.mmap should be .*6\]"),
        ({"num_rows": 5}, "should be"),
        ({"label_format": "zip"}, "label_format must be one of raw, packed, got 'zip'"),
        ({"units": "all"}, "units must be one of mlp, attention, both, got 'all'"),
        ({"layers": [3, 1]}, "layers must be distinct, ascending and >= 0"),
        ({"layers": "1"}, "manifest.json: "),
        ({"documents": [{"document_id": "0", "start": 0, "stop": 6}]}, "manifest.json: .*split"),
        ({"documents": [{"document_id": "0", "start": 1, "stop": 6, "split": "train"}]}, "bad row range"),
        (
            {"documents": [{"document_id": "0", "start": 0, "stop": "6", "split": "train"}]},
            r"`documents\[0\].stop`: expected `int`",
        ),
        ({"documents": [{"document_id": "0", "start": 0, "stop": 4, "split": "train"}]}, "hold 4 rows"),
        (
            {
                "documents": [
                    {"document_id": "0", "start": 0, "stop": 4, "split": "train"},
                    {"document_id": "0", "start": 4, "stop": 6, "split": "validation"},
                ]
            },
            "document '0' is in both splits",
        ),
    ],
)
def test_a_manifest_that_does_not_fit_names_what_is_wrong(
    store_dir: Path, changes: dict[str, Any], message: str
) -> None:
    edit_manifest(store_dir, **changes)
    with pytest.raises(ValueError, match=message):
        ActivationStore(store_dir)


def test_asking_for_what_is_not_stored_names_what_is(
    tmp_path: Path, store_dir: Path, make_layout: Layout, make_document: MakeDocument
) -> None:
    store = ActivationStore(store_dir)
    with pytest.raises(ValueError, match=r"has no layer 0; it has \[1, 10\]"):
        store.mlp_x(0)
    with pytest.raises(ValueError, match="split must be one of train, validation, got 'test'"):
        store.row_ranges("test")
    with pytest.raises(ValueError, match=r"rows \[2, 7\) are not within the store's 6 rows"):
        store.read_mlp_label(1, 2, 7)
    layout = make_layout(units="attention")
    with ActivationStoreWriter(tmp_path / "attention", layout) as writer:
        writer.append_document("0", *make_document(layout, "0", 2))
    with pytest.raises(ValueError, match="holds units attention, so it has no mlp_label"):
        ActivationStore(tmp_path / "attention").read_mlp_label(1, 0, 1)


def test_a_store_is_never_overwritten_or_mixed(store_dir: Path, make_layout: Layout) -> None:
    with pytest.raises(FileExistsError, match="already holds an activation store: give --resume"):
        ActivationStoreWriter(store_dir, make_layout())
    with pytest.raises(ValueError, match="cannot resume .*: config_hash is '0123abcd' in the store, 'ff' now"):
        ActivationStoreWriter(store_dir, make_layout(config_hash="ff"), resume=True)
    with pytest.raises(ValueError, match="corpus is 'self:0' in the store, 'c4:train' now"):
        ActivationStoreWriter(store_dir, make_layout(definitions={"corpus": "c4:train"}), resume=True)
    (store_dir / "manifest.json").unlink()
    with pytest.raises(FileExistsError, match="remove it, since it lacks its manifest"):
        ActivationStoreWriter(store_dir, make_layout())
    with pytest.raises(FileNotFoundError, match="is no activation store"):
        ActivationStoreWriter(store_dir, make_layout(), resume=True)


def test_a_store_larger_than_the_free_disk_is_refused_before_anything_is_written(
    tmp_path: Path, make_layout: Layout
) -> None:
    directory = tmp_path / "deep" / "store"
    with pytest.raises(ValueError, match=r"tokens need [\d.]+ GB in .* are free; take fewer tokens"):
        ActivationStoreWriter(directory, make_layout(), expected_rows=10**15)
    assert not directory.parent.exists()


@pytest.mark.parametrize(
    ("value", "dtype", "message"),
    [
        (1e5, np.float32, "value 100000.0 is beyond float16's 65504"),
        (np.inf, np.float16, "value inf"),
        (-np.inf, np.float32, "value -inf"),
        (np.nan, np.float16, "value nan"),
        (np.nan, np.float64, "value nan"),
    ],
)
def test_a_value_that_float16_cannot_hold_names_its_layer_and_writes_nothing(
    tmp_path: Path, make_layout: Layout, make_document: MakeDocument, value: float, dtype: type, message: str
) -> None:
    layout = make_layout()
    with ActivationStoreWriter(tmp_path, layout) as writer:
        writer.append_document("0", *make_document(layout, "0", 2))
        token_ids, activations = make_document(layout, "1", 2)
        activations[10]["att_x"] = activations[10]["att_x"].astype(dtype)
        activations[10]["att_x"][1, 3] = value
        with pytest.raises(ValueError, match=rf"att_x of layer 10, document '1': {message} .*row 1, unit 3"):
            writer.append_document("1", token_ids, activations)
        writer.append_document("2", *make_document(layout, "2", 2))
    store = ActivationStore(tmp_path)
    assert [document.document_id for document in store.documents] == ["0", "2"]
    np.testing.assert_array_equal(store.att_x(10)[2:], make_document(layout, "2", 2)[1][10]["att_x"])


def test_the_largest_float16_values_are_kept(tmp_path: Path, make_layout: Layout, make_document: MakeDocument) -> None:
    layout = make_layout(layers=(0,))
    token_ids, activations = make_document(layout, "0", 2)
    activations[0]["mlp_x"][0, :2] = [65504, -65504]
    with ActivationStoreWriter(tmp_path, layout) as writer:
        writer.append_document("0", token_ids, activations)
    assert ActivationStore(tmp_path).mlp_x(0)[0, :2].tolist() == [65504, -65504]


def test_appending_what_the_layout_does_not_hold_is_refused(
    tmp_path: Path, make_layout: Layout, make_document: MakeDocument
) -> None:
    layout = make_layout(label_format="packed")
    writer = ActivationStoreWriter(tmp_path, layout)
    token_ids, activations = make_document(layout, "0", 2)
    first = activations[1]

    def refuse(message: str, ids: Any, arrays: Any) -> None:
        with pytest.raises(ValueError, match=message):
            writer.append_document("0", ids, arrays)

    refuse("non-empty list of integers", [], activations)
    refuse("non-empty list of integers", [0.5, 1.0], activations)
    refuse(r"expected the layers \[1, 10\], got \[1\]", token_ids, {1: first})
    refuse("layer 1: expected .*mlp_label", token_ids, {**activations, 1: {"mlp_x": first["mlp_x"]}})
    short = {**activations, 1: {**first, "mlp_x": first["mlp_x"][:1]}}
    refuse(r"mlp_x of layer 1, .* expected shape \(2, 5\), got \(1, 5\)", token_ids, short)
    floats = {**activations, 1: {**first, "mlp_label": first["mlp_label"].astype(np.float16)}}
    refuse("a packed label is made of bool, got float16", token_ids, floats)
    integers = {**activations, 1: {**first, "att_x": np.ones((2, 5), int)}}
    refuse("att_x of layer 1, .* expected floats, got int64", token_ids, integers)
    writer.close()
    assert ActivationStore(tmp_path).num_rows == 0
    with pytest.raises(ValueError, match="is closed"):
        writer.append_document("0", token_ids, activations)


def test_a_layout_without_sizes_is_refused(make_layout: Layout) -> None:
    with pytest.raises(ValueError, match="hidden_size must be >= 1, got 0"):
        make_layout(hidden_size=0)
    with pytest.raises(ValueError, match="layers must be distinct"):
        make_layout(layers=())
