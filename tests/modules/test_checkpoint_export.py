"""A decoder in memory as a checkpoint folder, and under Hugging Face's names."""

from pathlib import Path
from typing import Any

import pytest
import torch

from modules.checkpoint import load_model, random_model
from modules.checkpoint_export import hf_state_dict, write_model
from modules.config import ModelConfig
from modules.shards import Shard
from tests.modules.test_checkpoint_config import MIXTURES, mixture
from tests.modules.tiny_kinds import KINDS, LLAMA
from tests.modules.tiny_models import same_weights, tiny_decoder, tiny_hf_model


@pytest.mark.parametrize("hf_config", KINDS.values(), ids=KINDS.keys())
def test_tensors_have_the_names_and_layout_of_hugging_faces_class(hf_config: dict[str, Any]) -> None:
    theirs = tiny_hf_model(hf_config)
    ours = hf_state_dict(tiny_decoder(hf_config))
    expected = theirs.state_dict()
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[name], expected[name]) for name in expected)


@pytest.mark.parametrize(("activation", "positions", "norm"), MIXTURES)
def test_a_written_model_is_read_as_it_was(tmp_path: Path, activation: str, positions: str, norm: str) -> None:
    model = random_model(mixture(activation, positions, norm), seed=3)
    (tmp_path / "tokenizer.json").write_text("{}")
    write_model(model, tmp_path / "model", model_id="mixed", other_files=[tmp_path / "tokenizer.json"])
    again = load_model(tmp_path / "model")
    assert again.config == model.config and same_weights(again, model)
    assert (tmp_path / "model/tokenizer.json").is_file()


def test_a_part_of_a_model_is_not_written(tmp_path: Path) -> None:
    model = random_model(ModelConfig.from_hf(LLAMA))
    model.shards["lm_head.weight"] = Shard(0, ((0, 131),), 131, 131)
    with pytest.raises(ValueError, match="only a whole model can be written"):
        write_model(model, tmp_path / "model", model_id="part")
    assert not (tmp_path / "model").exists()
