"""Checkpoints of trained models: kept if they are whole and of the same training."""

import os
from pathlib import Path

import pytest

from modules.checkpoint_export import write_model
from scripts.trained_models import is_trained
from tests.modules.tiny_kinds import LLAMA
from tests.modules.tiny_models import tiny_decoder


def test_a_damaged_checkpoint_is_trained_again(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    assert not is_trained(folder, {"seed": 0})
    write_model(tiny_decoder(LLAMA), folder, model_id="tiny", manifest={"training": {"seed": 0}})
    assert is_trained(folder, {"seed": 0})
    with pytest.raises(ValueError, match="was trained otherwise"):
        is_trained(folder, {"seed": 1})
    os.truncate(folder / "pytorch_1.pt", 5000)
    assert not is_trained(folder, {"seed": 0})
