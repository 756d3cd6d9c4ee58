"""A store that several processes collected is the one that a single process would have written."""

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

from data.activation_store import ActivationStore
from data.store_manifest import StoreLayout
from data.store_shards import JoinedArray
from tests.data.sharded_runs import Cut, MakeDocument, Pieces, collect_sharded, collect_whole

Layout = Callable[..., StoreLayout]
LAYERS = (1, 10, 12)
# Neuron 5 of 11 begins the second rank in the middle of a byte; the third has nothing.
UNEVEN = Cut(dp_size=2, neurons=(0, 5, 11, 11), heads=(0, 2, 3, 3), stages=((1,), (10, 12)))
PIECES: Pieces = [("0", 3), ("1", 4), ("1", 4), ("1", 1), ("2", 2), ("3", 1), ("4", 5)]


@st.composite
def cuts(draw: st.DrawFn) -> Cut:
    """dp in 1..3, tp in 1..3, pp in 1..2, of 11 neurons, 3 heads and LAYERS."""
    tp_size = draw(st.integers(1, 3))
    bounds = [
        (0, *sorted(draw(st.lists(st.integers(0, size), min_size=tp_size - 1, max_size=tp_size - 1))), size)
        for size in (11, 3)
    ]
    stages = [(LAYERS,), ((1,), (10, 12)), (LAYERS, ())]
    return Cut(
        dp_size=draw(st.integers(1, 3)), neurons=bounds[0], heads=bounds[1], stages=draw(st.sampled_from(stages))
    )


@st.composite
def documents(draw: st.DrawFn) -> Pieces:
    """Documents of one to three pieces of one to six tokens."""
    lengths = draw(st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=3), min_size=1, max_size=6))
    return [(str(idx), length) for idx, pieces in enumerate(lengths) for length in pieces]


def assert_same(joined: ActivationStore, whole: ActivationStore) -> None:
    assert joined.layout == whole.layout and joined.layers == whole.layers
    assert joined.num_rows == whole.num_rows and joined.manifest.complete == whole.manifest.complete
    assert list(joined.documents) == list(whole.documents)
    for split in ("train", "validation"):
        assert joined.row_ranges(split) == whole.row_ranges(split)
    np.testing.assert_array_equal(joined.token_ids, whole.token_ids)
    assert joined.token_ids.dtype == whole.token_ids.dtype
    for layer in whole.layers:
        for kind in whole.layout.kinds:
            found, expected = getattr(joined, kind)(layer), getattr(whole, kind)(layer)
            assert found.shape == expected.shape and found.dtype == expected.dtype
            np.testing.assert_array_equal(found, expected)
        if whole.layout.units != "attention":
            middle = whole.num_rows // 2
            for rows in ((0, whole.num_rows), (middle, whole.num_rows), (middle, middle)):
                found, expected = joined.read_mlp_label(layer, *rows), whole.read_mlp_label(layer, *rows)
                assert found.dtype == expected.dtype
                np.testing.assert_array_equal(found, expected)


@pytest.mark.usefixtures("without_fsync")
@settings(max_examples=40, deadline=None)
@given(
    cut=cuts(),
    pieces=documents(),
    label_format=st.sampled_from(["raw", "packed"]),
    units=st.sampled_from(["mlp", "attention", "both"]),
)
def test_joined_shards_equal_the_store_of_one_process(
    make_layout: Layout, make_document: MakeDocument, cut: Cut, pieces: Pieces, label_format: str, units: str
) -> None:
    layout = make_layout(layers=LAYERS, label_format=label_format, units=units)
    with tempfile.TemporaryDirectory() as folder:
        collect_sharded(Path(folder) / "joined", layout, cut, make_document, pieces)
        collect_whole(Path(folder) / "whole", layout, make_document, pieces)
        assert_same(ActivationStore(Path(folder) / "joined"), ActivationStore(Path(folder) / "whole"))


@pytest.mark.usefixtures("without_fsync")
@settings(max_examples=20, deadline=None)
@given(cut=cuts(), pieces=documents(), data=st.data(), label_format=st.sampled_from(["raw", "packed"]))
def test_a_killed_collection_reads_up_to_what_all_ranks_have_and_resumes_to_the_same_store(
    make_layout: Layout, make_document: MakeDocument, cut: Cut, pieces: Pieces, data: st.DataObject, label_format: str
) -> None:
    layout = make_layout(layers=LAYERS, label_format=label_format)
    parts = cut.parts()
    dealt = [len(pieces[part.dp_rank :: part.dp_size]) for part in parts]
    flushed = [data.draw(st.integers(0, most)) for most in dealt]
    slowest = [
        min(number for number, part in zip(flushed, parts, strict=True) if part.dp_rank == replica)
        for replica in range(cut.dp_size)
    ]
    num_valid = min(number * cut.dp_size + replica for replica, number in enumerate(slowest))
    with tempfile.TemporaryDirectory() as folder:
        joined, whole = Path(folder) / "joined", Path(folder) / "whole"
        collect_sharded(joined, layout, cut, make_document, pieces, killed_after=flushed)
        for path in sorted(joined.glob("shard_*/*.mmap")):
            with open(path, "ab") as file:  # written, not yet valid
                file.write(b"?" * data.draw(st.integers(0, 2)))
        collect_whole(Path(folder) / "cut", layout, make_document, pieces[:num_valid], complete=False)
        assert_same(ActivationStore(joined), ActivationStore(Path(folder) / "cut"))

        skipped = collect_sharded(joined, layout, cut, make_document, pieces, resume=True)
        assert skipped == [slowest[part.dp_rank] for part in parts], "the ranks of a replica run the same batches"
        collect_whole(whole, layout, make_document, pieces)
        assert_same(ActivationStore(joined), ActivationStore(whole))
        assert collect_sharded(joined, layout, cut, make_document, pieces, resume=True) == dealt
        assert_same(ActivationStore(joined), ActivationStore(whole))


@pytest.fixture(scope="module")
def stores(
    tmp_path_factory: pytest.TempPathFactory, make_layout: Layout, make_document: MakeDocument
) -> tuple[ActivationStore, ActivationStore]:
    """(in shards, by one process), packed."""
    folder, layout = tmp_path_factory.mktemp("stores"), make_layout(layers=LAYERS, label_format="packed")
    collect_sharded(folder / "joined", layout, UNEVEN, make_document, PIECES)
    collect_whole(folder / "whole", layout, make_document, PIECES)
    return ActivationStore(folder / "joined"), ActivationStore(folder / "whole")


ROWS = np.array([19, 0, 7, 7, -1])
INDICES: list[Any] = [
    3, -2, np.int64(5), slice(2, 9), slice(None), slice(15, 3, -4), slice(30, 40), ..., ROWS, ROWS.tolist(), [],
    ROWS.astype(np.int32), ROWS[:4].reshape(2, 2), np.arange(20) % 3 == 0, (4, 1), (slice(3, 8), 1),
    (ROWS, slice(0, 2)), (ROWS[:2], [1, 0]), (..., 1), (3,), (slice(None), None), (slice(2, 5), ...),
    (np.arange(20) % 3 == 0, 1),
]  # fmt: skip


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_a_joined_array_is_indexed_like_a_numpy_array(
    stores: tuple[ActivationStore, ActivationStore], index: Any
) -> None:
    for kind in ("mlp_x", "mlp_label", "att_label"):
        joined, whole = (getattr(store, kind)(10) for store in stores)
        assert isinstance(joined, JoinedArray) and isinstance(whole, np.memmap)
        found, expected = joined[index], whole[index]
        assert type(found) is np.ndarray or np.isscalar(found)
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)


def test_a_joined_array_behaves_as_an_array_elsewhere(stores: tuple[ActivationStore, ActivationStore]) -> None:
    joined, whole = (store.att_x(12) for store in stores)
    assert isinstance(joined, JoinedArray)
    assert (len(joined), joined.shape, joined.ndim, joined.dtype) == (20, whole.shape, 2, np.float16)
    np.testing.assert_array_equal(np.array(joined, np.float32), np.array(whole, np.float32))
    np.testing.assert_array_equal(np.abs(joined).sum(1), np.abs(whole).sum(1))
    np.testing.assert_array_equal(np.stack(list(joined)), whole)
    with pytest.raises(ValueError, match="can only be copied together"):
        np.asarray(joined, copy=False)
    for index in (20, -21, [0, 20], 0.5, [0.5], np.ones(19, bool), None):
        with pytest.raises((IndexError, TypeError)):
            joined[index]


def test_blocks_of_rows_are_read_one_after_another(
    stores: tuple[ActivationStore, ActivationStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data.store_shards.BLOCK_ROWS", 3)
    joined, whole = (store.mlp_label(1) for store in stores)
    np.testing.assert_array_equal(joined, whole)


def test_what_lies_on_the_disk(stores: tuple[ActivationStore, ActivationStore]) -> None:
    folder = stores[0].directory
    names = [part.name for part in UNEVEN.parts()]
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", *sorted(names)]
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["shards"] == {"dp_size": 2, "pp_size": 2, "tp_size": 3}
    assert manifest["layers"] == list(LAYERS) and "num_rows" not in manifest and "part" not in manifest
    first, second = folder / "shard_dp1_pp1_tp0", folder / "shard_dp1_pp1_tp1"
    kinds = ("mlp_x", "mlp_label", "att_x", "att_label")
    assert {path.name for path in first.glob("*.mmap")} == {
        "token_ids.mmap", *(f"{kind}_{layer}.mmap" for kind in kinds for layer in (10, 12))
    }  # fmt: skip
    assert {path.name for path in second.glob("*.mmap")} == {
        "token_ids.mmap", *(f"{kind}_{layer}.mmap" for kind in ("mlp_label", "att_label") for layer in (10, 12))
    }  # fmt: skip
