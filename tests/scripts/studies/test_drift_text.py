"""The two texts of the drift study: no token in both, and as much of each as was asked for."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.model_loading import ModelOptions
from scripts.studies.drift_sources import check_calibration, read_texts
from tests.modules.tiny_kinds import LLAMA
from tests.sparse_predictor.tiny_stages import model_folder, write_corpus


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
