"""Where the drift study gets states from: a model within the memory there is, documents of a store."""

from pathlib import Path

import torch

from data.activation_store import ActivationStore
from scripts.studies.drift_sources import StoredStates, WindowStates
from scripts.studies.embedding_drift import StateRows
from tests.modules.tiny_kinds import LLAMA, random_tokens
from tests.modules.tiny_models import tiny_decoder
from tests.sparse_predictor.tiny_stages import collect, model_folder, ragged_documents


def test_large_models_are_measured_at_fewer_tokens_of_each_window_within_the_memory() -> None:
    model, windows = tiny_decoder(LLAMA, dtype=torch.float32), random_tokens(10, 33)
    row_bytes = 7 * 48 * 4
    thinned = WindowStates(model, windows, batch_size=4, state_bytes=9 * row_bytes)
    rows: list[StateRows] = list(thinned)
    assert all(some.states.numel() * 4 <= 9 * row_bytes for some in rows)
    assert [some.positions.tolist() for some in rows] == [[0, 1, 5, 10, 14, 19, 23, 28, 32]] * 10
    assert thinned.ordinary_weight == 32 / 8 and thinned.num_rows == 90
    whole = list(WindowStates(model, windows, batch_size=4))
    assert len(whole) == 10, "sets of windows are small enough for resampling"
    for some, all_of_them in zip(rows, whole, strict=True):
        torch.testing.assert_close(some.states, all_of_them.states[:, some.positions])
        assert some.groups.unique().tolist() == all_of_them.groups.unique().tolist() == [some.unit]


def test_a_store_is_read_in_documents_taken_evenly_and_pieces_of_one_are_a_group(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", LLAMA)
    collect(folder, tmp_path / "store", ragged_documents([30] * 12), max_document_tokens=20, layers="0-1")
    store = ActivationStore(tmp_path / "store")
    room = 16 * 7 * 48 * 4
    states = StoredStates(store, num_layers=3, max_rows=120, device=torch.device("cpu"), state_bytes=room)
    assert list(states.present) == [True] * 4 + [False] * 3
    assert (states.num_groups, states.num_rows) == (4, 120)
    seen: dict[int, list[int]] = {}
    for some in states:
        assert len(some.positions) <= 16
        for group, position in zip(some.groups.tolist(), some.positions.tolist(), strict=True):
            seen.setdefault(group, []).append(position)
    pieces = sorted([*range(20), *range(10)])
    assert {group: sorted(positions) for group, positions in seen.items()} == dict.fromkeys(range(4), pieces)
