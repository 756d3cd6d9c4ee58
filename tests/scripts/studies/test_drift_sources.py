"""Where the drift study gets states from: a model within its memory, documents of a store; and its two texts."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from data.activation_store import ActivationStore
from scripts.model_loading import ModelOptions
from scripts.studies.drift_sources import StoredStates, WindowStates, check_calibration, read_texts
from scripts.studies.embedding_drift import StateRows
from tests.modules.tiny_kinds import LLAMA, random_tokens
from tests.modules.tiny_models import tiny_decoder
from tests.sparse_predictor.tiny_stages import collect, model_folder, ragged_documents, write_corpus


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


def loaded_model(tmp_path: Path) -> Any:
    return ModelOptions(model=str(model_folder(tmp_path / "model", LLAMA)), quiet=True).load()


def test_calibration_and_test_windows_share_no_token(tmp_path: Path) -> None:
    loaded = loaded_model(tmp_path)
    numbers = [list(range(start, start + 10)) for start in range(0, 120, 10)]
    one_file = write_corpus(tmp_path / "one.jsonl", numbers)
    amounts: dict[str, Any] = {"window": 4, "calibration_tokens": 12, "test_tokens": 8}
    calibration, test = read_texts(loaded, one_file, None, **amounts)
    assert calibration.tolist() == [[0, 1, 2, 3], [32, 33, 34, 35], [68, 69, 70, 71]]
    assert test.tolist() == [[72, 73, 74, 75], [116, 117, 118, 119]]
    other = write_corpus(tmp_path / "other.jsonl", numbers[::-1])
    calibration, test = read_texts(loaded, one_file, other, **amounts)
    assert test[0].tolist() == [0, 1, 2, 3] and calibration[0].tolist() == [110, 111, 112, 113]
    nothing, test = read_texts(loaded, one_file, other, **{**amounts, "calibration_tokens": None})
    assert nothing.shape == (0, 4) and test[0].tolist() == [0, 1, 2, 3]
    calibration, test = read_texts(loaded, "self", None, quiet=True, **amounts)
    assert calibration.shape == (3, 4) and test.shape == (2, 4) and not torch.equal(calibration[:2], test)


def test_other_spellings_of_a_path_are_the_same_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = loaded_model(tmp_path)
    one_file = write_corpus(tmp_path / "one.jsonl", [[number] * 4 for number in range(20)])
    (tmp_path / "link.jsonl").symlink_to(one_file)
    monkeypatch.chdir(tmp_path)
    amounts: dict[str, Any] = {"window": 4, "calibration_tokens": 40, "test_tokens": 40}
    wanted = read_texts(loaded, one_file, None, **amounts)
    assert not set(wanted[0].flatten().tolist()) & set(wanted[1].flatten().tolist())
    for spelt in ("one.jsonl", f"..{os.sep}{tmp_path.name}{os.sep}one.jsonl", "link.jsonl"):
        found = read_texts(loaded, one_file, spelt, **amounts)
        assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True)), spelt


@pytest.mark.parametrize(
    ("window", "hidden_size", "least"),
    [(16, 48, 3 * 16 * 8), (256, 576, 3 * 256 * 8), (64, 48, 2 * 64)],
)
def test_predictors_need_more_tokens_than_inputs(window: int, hidden_size: int, least: int) -> None:
    check_calibration(least, window, hidden_size)
    with pytest.raises(ValueError, match=f"--calibration-tokens: .* with {hidden_size} .* at least {least} are needed"):
        check_calibration(least - 1, window, hidden_size)
