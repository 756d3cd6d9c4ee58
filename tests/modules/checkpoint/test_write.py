"""A checkpoint folder appears under its name when it is whole, or not at all; a decoder in memory is written as one."""

from pathlib import Path
from typing import Any

import pytest
import torch

from modules.checkpoint.load import load_model, random_model
from modules.checkpoint.write import CheckpointWriter, hf_state_dict, write_model
from modules.families.registry import from_hf_config
from modules.shards import Shard
from tests.modules.families.test_registry import MIXTURES, mixture
from tests.modules.tiny_kinds import KINDS, LLAMA
from tests.modules.tiny_models import same_weights, tiny_decoder, tiny_hf_model, write_checkpoint


@pytest.fixture
def converted(tmp_path: Path) -> Path:
    folder = tmp_path / "converted"
    write_checkpoint(folder, LLAMA, tiny_hf_model(LLAMA).state_dict(), model_id="tiny")
    return folder


def test_a_failed_write_leaves_nothing_and_keeps_what_was_there(converted: Path) -> None:
    weights = tiny_hf_model(LLAMA).state_dict()
    weights["model.layers.2.mlp.up_proj.weight"][0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"model\.layers\.2\.mlp\.up_proj\.weight: 1 of 3840 weights are NaN"):
        write_checkpoint(converted, LLAMA, weights, model_id="broken")
    assert [path.name for path in converted.parent.iterdir()] == ["converted"]
    assert same_weights(load_model(converted), tiny_decoder(LLAMA))


def test_what_a_killed_write_leaves_is_replaced(converted: Path) -> None:
    partial = converted.with_name("converted.partial")
    partial.mkdir()
    (partial / "pytorch_0.pt").write_bytes(b"half")
    write_checkpoint(converted, LLAMA, tiny_hf_model(LLAMA, seed=5).state_dict(), model_id="second")
    assert [path.name for path in converted.parent.iterdir()] == ["converted"]
    assert same_weights(load_model(converted), tiny_decoder(LLAMA, seed=5))


def test_a_folder_of_something_else_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ValueError, match="exists and is not a converted checkpoint"):
        write_checkpoint(tmp_path, LLAMA, tiny_hf_model(LLAMA).state_dict(), model_id="tiny")
    assert (tmp_path / "thesis.tex").exists()


def test_a_writer_that_is_given_too_little_does_not_finish(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="parts not written: embs, 0, 1, 2, lm_head"):
        CheckpointWriter(tmp_path / "out", LLAMA, model_id="tiny").__enter__().__exit__(None, None, None)
    assert list(tmp_path.iterdir()) == []


def test_a_link_stays_and_what_it_points_at_is_replaced(converted: Path) -> None:
    link = converted.with_name("link")
    link.symlink_to(converted)
    for seed in (5, 6):
        write_checkpoint(link, LLAMA, tiny_hf_model(LLAMA, seed=seed).state_dict(), model_id="linked")
    assert link.is_symlink() and sorted(path.name for path in link.parent.iterdir()) == ["converted", "link"]
    assert same_weights(load_model(converted), tiny_decoder(LLAMA, seed=6))


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
    model = random_model(from_hf_config(LLAMA))
    model.shards["lm_head.weight"] = Shard(0, ((0, 131),), 131, 131)
    with pytest.raises(ValueError, match="only a whole model can be written"):
        write_model(model, tmp_path / "model", model_id="part")
    assert not (tmp_path / "model").exists()
