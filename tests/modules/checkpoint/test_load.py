"""What is written comes back bit for bit; whatever is wrong with a checkpoint is an error that names it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from modules.checkpoint.load import checkpoint_shapes, load_config, load_model, parts, random_model
from modules.families.registry import from_hf_config
from tests.modules.tiny_kinds import KINDS, LLAMA, OPT, random_tokens
from tests.modules.tiny_models import same_weights, save_hf_folder, tiny_decoder, tiny_hf_model, write_checkpoint

LAYOUT_KINDS = ["llama-tied", "llama-biases", "opt", "opt-post-norm-projected", "opt-no-final-norm", "opt-plain-norms"]


def edit_part(directory: Path, part: str, change: Callable[[dict[str, Any]], object]) -> None:
    """Rewrite one part, and drop the manifest: what another tool's folder may look like."""
    path = directory / f"pytorch_{part}.pt"
    tensors = dict(torch.load(path, weights_only=True))
    change(tensors)
    torch.save(tensors, path)
    (directory / "manifest.json").unlink()


@pytest.fixture
def converted(tmp_path: Path) -> Path:
    folder = tmp_path / "converted"
    write_checkpoint(folder, LLAMA, tiny_hf_model(LLAMA).state_dict(), model_id="tiny")
    return folder


@pytest.mark.parametrize("kind", LAYOUT_KINDS)
def test_a_written_checkpoint_comes_back_bit_for_bit(kind: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "out", KINDS[kind], tiny_hf_model(KINDS[kind]).state_dict(), model_id="tiny")
    assert load_config(tmp_path / "out") == from_hf_config(KINDS[kind])
    assert same_weights(load_model(tmp_path / "out"), tiny_decoder(KINDS[kind]))


def test_one_file_a_layer_with_names_that_the_dejavu_tooling_uses(tmp_path: Path) -> None:
    projected = KINDS["opt-untied-projected"]
    write_checkpoint(tmp_path / "out", projected, tiny_hf_model(projected).state_dict(), model_id="tiny")
    files = (tmp_path / "out").glob("pytorch_*.pt")
    keys = {path.name: set(torch.load(path, weights_only=True)) for path in files}
    assert sorted(keys) == ["pytorch_0.pt", "pytorch_1.pt", "pytorch_2.pt", "pytorch_embs.pt", "pytorch_lm_head.pt"]
    assert keys["pytorch_embs.pt"] == {"embed_tokens.weight", "embed_positions.weight", "project_in.weight"}
    head = {"lm_head.weight", "final_layer_norm.weight", "final_layer_norm.bias", "project_out.weight"}
    assert keys["pytorch_lm_head.pt"] == head
    modules = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj", "fc1", "fc2"]
    modules += ["self_attn_layer_norm", "final_layer_norm"]
    assert keys["pytorch_1.pt"] == {f"{module}.{kind}" for module in modules for kind in ("weight", "bias")}


def test_the_manifest_says_what_is_there(converted: Path) -> None:
    manifest = json.loads((converted / "manifest.json").read_text())
    assert manifest["model_id"] == "tiny" and manifest["dtype"] == "float32" and manifest["num_hidden_layers"] == 3
    config = load_config(converted)
    assert manifest["config_hash"] == config.config_hash()
    (converted / "manifest.json").write_text(json.dumps(manifest | {"config_hash": config.version_1_hash()}))
    assert load_config(converted) == config  # as an older version wrote it
    assert manifest["num_parameters"] == sum(tensor.numel() for tensor in tiny_hf_model(LLAMA).parameters())
    assert manifest["num_tensors"] == sum(len(file["tensors"]) for file in manifest["files"].values())
    for name, file in manifest["files"].items():
        assert file["bytes"] == (converted / name).stat().st_size
    assert manifest["files"]["pytorch_0.pt"]["tensors"]["self_attn.k_proj.weight"] == [16, 48]


def test_a_folder_without_a_manifest_loads(converted: Path) -> None:
    (converted / "manifest.json").unlink()
    assert same_weights(load_model(converted), tiny_decoder(LLAMA))


@pytest.mark.parametrize("kind", LAYOUT_KINDS)
@pytest.mark.parametrize("shard_size", ["5GB", "40KB"])
def test_a_hugging_face_folder_loads_directly(kind: str, shard_size: str, tmp_path: Path) -> None:
    save_hf_folder(tmp_path, KINDS[kind], max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size == "40KB")
    assert same_weights(load_model(tmp_path), tiny_decoder(KINDS[kind]))


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "old-torch-format"])
def test_bin_weights_with_old_names_and_harmless_buffers_load(zipped: bool, tmp_path: Path) -> None:
    weights = tiny_hf_model(OPT).state_dict()
    old = {name.removeprefix("model."): tensor for name, tensor in weights.items()}  # as a base model saves them
    old["decoder.version"] = torch.tensor([3.0])
    torch.save(old, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    (tmp_path / "config.json").write_text(json.dumps(OPT))
    assert same_weights(load_model(tmp_path), tiny_decoder(OPT))


def test_rotary_buffers_of_old_checkpoints_are_ignored(tmp_path: Path) -> None:
    weights = tiny_hf_model(LLAMA).state_dict() | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    write_checkpoint(tmp_path / "out", LLAMA, weights, model_id="tiny")
    assert same_weights(load_model(tmp_path / "out"), tiny_decoder(LLAMA))


def test_loaded_weights_are_plain_memory_that_outlives_the_files(converted: Path) -> None:
    model = load_model(converted)
    shutil.rmtree(converted)
    for name, parameter in model.named_parameters():
        assert parameter.is_contiguous() and parameter.data_ptr() % 64 == 0, name
        assert parameter.untyped_storage().nbytes() == parameter.nbytes, name
        assert not parameter.requires_grad and parameter.device.type == "cpu"
    assert not model.training and torch.isfinite(model.logits(model(random_tokens(1, 4)))).all()


def test_dtype_is_the_files_unless_asked_for(tmp_path: Path) -> None:
    weights = tiny_hf_model(LLAMA).state_dict()
    write_checkpoint(tmp_path / "out", LLAMA | {"torch_dtype": "float32"}, weights, model_id="t", dtype=torch.bfloat16)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert {parameter.dtype for parameter in load_model(tmp_path / "out").parameters()} == {torch.bfloat16}
    wide = load_model(tmp_path / "out", dtype=torch.float64)
    assert {parameter.dtype for parameter in wide.parameters()} == {torch.float64}


def test_every_parameter_has_its_own_place_on_disk() -> None:
    for hf_config in KINDS.values():
        config = from_hf_config(hf_config)
        model = random_model(config)
        shapes = checkpoint_shapes(config)
        assert list(shapes) == parts(config)
        named = dict(model.named_parameters(remove_duplicate=False))
        assert sum(len(keys) for keys in shapes.values()) == len(named)


def test_random_models_repeat_by_seed_and_leave_nothing_neutral() -> None:
    config = from_hf_config(KINDS["llama-biases"] | {"tie_word_embeddings": True})
    assert same_weights(random_model(config, seed=3), random_model(config, seed=3))
    assert not same_weights(random_model(config, seed=3), random_model(config, seed=4))
    model = random_model(config, dtype=torch.bfloat16)
    assert model.lm_head.weight is model.embeddings.tokens.weight and model.compute_dtype == torch.bfloat16
    assert all(parameter.float().std() > 0 for parameter in model.parameters())


def test_a_missing_folder_config_or_layer_is_named(converted: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere: no such folder"):
        load_model(tmp_path / "nowhere")
    (converted / "pytorch_1.pt").unlink()
    with pytest.raises(FileNotFoundError, match=r"pytorch_1\.pt: missing; the config asks for 3 layers"):
        load_model(converted)
    (converted / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"config\.json: missing.*; convert the model again"):
        load_model(converted)


def test_a_layer_too_many_is_an_error(converted: Path) -> None:
    shutil.copy(converted / "pytorch_0.pt", converted / "pytorch_10.pt")
    with pytest.raises(ValueError, match=r"pytorch_10\.pt: unexpected; the config asks for layers 0 to 2 only"):
        load_model(converted)


@pytest.mark.parametrize("manifest", [True, False])
def test_a_truncated_file_is_named(manifest: bool, converted: Path) -> None:
    path = converted / "pytorch_2.pt"
    path.write_bytes(path.read_bytes()[:-5000])
    if not manifest:
        (converted / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"pytorch_2\.pt: .*truncated"):
        load_model(converted)


def test_an_empty_or_foreign_file_is_named(converted: Path) -> None:
    (converted / "manifest.json").unlink()
    for content in (b"", b"not a checkpoint"):
        (converted / "pytorch_0.pt").write_bytes(content)
        with pytest.raises(ValueError, match=r"pytorch_0\.pt: cannot be read, truncated or not a tensor file"):
            load_model(converted)
    torch.save([1, 2], converted / "pytorch_0.pt")
    with pytest.raises(ValueError, match=r"pytorch_0\.pt: expected a dictionary of tensors, found list"):
        load_model(converted)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda part: part.pop("mlp.up_proj.weight"), r"pytorch_1\.pt: .*missing mlp\.up_proj\.weight"),
        (lambda part: part.update({"mlp.router.weight": torch.ones(2)}), r"pytorch_1\.pt: .*unknown mlp\.router"),
        (
            lambda part: part.update({"mlp.up_proj.weight": torch.ones(48, 80)}),
            r"pytorch_1\.pt: mlp\.up_proj\.weight: shape \(48, 80\), but the config asks for \(80, 48\)",
        ),
        (
            lambda part: part["mlp.down_proj.weight"].view(-1)[7].fill_(float("nan")),
            r"pytorch_1\.pt: mlp\.down_proj\.weight: 1 of 3840 weights are NaN or infinite",
        ),
        (
            lambda part: part["input_layernorm.weight"].view(-1)[:2].fill_(float("-inf")),
            r"pytorch_1\.pt: input_layernorm\.weight: 2 of 48 weights are NaN",
        ),
        (
            lambda part: part.update({"self_attn.q_proj.weight": torch.ones(48, 48, dtype=torch.int8)}),
            r"pytorch_1\.pt: self_attn\.q_proj\.weight: type torch\.int8 is not supported \(quantised\?\)",
        ),
        (lambda part: part.update({"mlp.up_proj.weight": "text"}), r"expected a tensor, found str"),
    ],
)
def test_what_is_wrong_with_a_tensor_is_said(change: Callable[..., object], message: str, converted: Path) -> None:
    edit_part(converted, "1", change)
    with pytest.raises(ValueError, match=message):
        load_model(converted)


def test_weights_too_large_for_the_asked_dtype_are_an_error(converted: Path) -> None:
    edit_part(converted, "0", lambda part: part["mlp.up_proj.weight"].view(-1)[0].fill_(1e5))
    with pytest.raises(ValueError, match=r"mlp\.up_proj\.weight: too large for torch\.float16; use bfloat16"):
        load_model(converted, dtype=torch.float16)
    assert load_model(converted).compute_dtype == torch.float32


def test_a_tied_head_that_differs_from_the_embedding_is_an_error(tmp_path: Path) -> None:
    tied = KINDS["llama-tied"]
    write_checkpoint(tmp_path / "out", tied, tiny_hf_model(tied).state_dict(), model_id="tiny")
    edit_part(tmp_path / "out", "lm_head", lambda part: part["lm_head.weight"].view(-1)[0].add_(1))
    with pytest.raises(ValueError, match=r"lm_head\.weight: differs from the token embeddings, although .*tie_word"):
        load_model(tmp_path / "out")


def test_an_untied_model_without_its_head_is_an_error(tmp_path: Path) -> None:
    save_hf_folder(tmp_path, KINDS["llama-tied"])
    config = json.loads((tmp_path / "config.json").read_text()) | {"tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"the tensors do not fit the config: missing lm_head\.weight"):
        load_model(tmp_path)


def test_wrong_shards_are_named(tmp_path: Path) -> None:
    save_hf_folder(tmp_path, LLAMA, max_shard_size="60KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    name, shard = next(iter(index["weight_map"].items()))
    weights = load_file(tmp_path / shard)
    save_file({key: value for key, value in weights.items() if key != name}, tmp_path / shard)
    with pytest.raises(ValueError, match=f"{shard}: {name} is missing, though the index lists it there"):
        load_model(tmp_path)
    save_file(weights | {"model.layers.0.mlp.expert.weight": torch.ones(2)}, tmp_path / shard)
    with pytest.raises(ValueError, match=rf"unknown model\.layers\.0\.mlp\.expert\.weight \({shard}\)"):
        load_model(tmp_path)
    (tmp_path / shard).write_bytes((tmp_path / shard).read_bytes()[:-100])
    with pytest.raises(ValueError, match=f"{shard}: cannot be read, truncated or not safetensors"):
        load_model(tmp_path)
    (tmp_path / shard).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 132\n")
    with pytest.raises(ValueError, match=f"{shard}: a git-lfs pointer, not the file itself"):
        load_model(tmp_path)
    (tmp_path / shard).unlink()
    with pytest.raises(FileNotFoundError, match=f"{shard}: missing, though the index lists it"):
        load_model(tmp_path)


def test_a_folder_without_weights_says_what_was_looked_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "model.q4.gguf").touch()
    with pytest.raises(FileNotFoundError, match=r"no weights; looked for model\.safetensors.*it holds model\.q4\.gguf"):
        load_model(tmp_path)


def test_a_later_format_and_bad_json_are_errors(converted: Path) -> None:
    manifest = json.loads((converted / "manifest.json").read_text())
    (converted / "manifest.json").write_text(json.dumps(manifest | {"format_version": 99}))
    with pytest.raises(ValueError, match=r"manifest\.json: format_version 99 is not supported; supported: 1"):
        load_model(converted)
    (converted / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: not JSON"):
        load_model(converted)
    (converted / "config.json").write_text(json.dumps(LLAMA | {"model_type": "mamba"}))
    with pytest.raises(ValueError, match=r"config\.json: config: model_type 'mamba' is not supported"):
        load_model(converted)
