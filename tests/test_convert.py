"""The converter: every kind of source, streamed, and one clear line for what cannot be converted faithfully."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import convert_llama_checkpoint
from convert_llama_checkpoint import run
from modules.checkpoint.load import load_model
from modules.checkpoint.sources import ShardFiles
from tests.modules.tiny_kinds import KINDS, LLAMA, OPT, random_tokens
from tests.modules.tiny_models import save_hf_folder, tiny_decoder, tiny_hf_model
from tests.pipeline_parallel.launching import start_ranks, wait_all

Convert = Callable[..., str]


def converter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Convert:
    """Runs the command into tmp_path/out; returns stdout, or the line on stderr if it exits with code 2."""

    def call(source: Path | str, *flags: str) -> str:
        capsys.readouterr()
        try:
            run(["--source", str(source), "--output-dir", str(tmp_path / "out"), "--quiet", *flags])
        except SystemExit as stop:
            assert stop.code == 2
            error = capsys.readouterr().err
            assert error.startswith("error: ") and error.count("\n") == 1, error
            return error
        return capsys.readouterr().out

    return call


@pytest.fixture
def convert(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Convert:
    return converter(tmp_path, capsys)


def add_tokenizer(folder: Path) -> None:
    words = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    tokenizer.save_pretrained(folder)


def assert_same_logits(folder: Path, hf_config: dict[str, Any]) -> None:
    token_ids = random_tokens(1, 9)
    with torch.inference_mode():
        ours, expected = load_model(folder), tiny_decoder(hf_config)
        assert torch.equal(ours.logits(ours(token_ids)), expected.logits(expected(token_ids)))


@pytest.mark.parametrize("kind", KINDS)
def test_sharded_safetensors_of_every_kind_convert(kind: str, tmp_path: Path, convert: Convert) -> None:
    save_hf_folder(tmp_path / "source", KINDS[kind], max_shard_size="40KB")
    assert f"{tmp_path / 'out'}: source, 3 layers" in convert(tmp_path / "source")
    assert_same_logits(tmp_path / "out", KINDS[kind])


def test_bin_weights_in_shards_convert(tmp_path: Path, convert: Convert) -> None:
    source = tmp_path / "source"
    source.mkdir()
    weights = tiny_hf_model(OPT).state_dict()
    names = sorted(weights)
    index = {}
    for shard, part in enumerate((names[:20], names[20:])):
        torch.save({name: weights[name] for name in part}, source / f"pytorch_model-{shard}.bin")
        index |= dict.fromkeys(part, f"pytorch_model-{shard}.bin")
    (source / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": index}))
    (source / "config.json").write_text(json.dumps(OPT))
    convert(source)
    assert_same_logits(tmp_path / "out", OPT)


def test_tokenizer_generation_config_and_config_come_along(tmp_path: Path, convert: Convert) -> None:
    source = tmp_path / "source"
    save_hf_folder(source, LLAMA)
    add_tokenizer(source)
    (source / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    convert(source, "--dtype", "bfloat16")
    out = tmp_path / "out"
    assert (out / "generation_config.json").read_bytes() == (source / "generation_config.json").read_bytes()
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer("a").input_ids == [1] and tokenizer.chat_template == "{{ messages[0]['content'] }}"
    given = json.loads((source / "config.json").read_text())
    assert json.loads((out / "config.json").read_text()) == given | {"dtype": "bfloat16"}
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["dtype"] == "bfloat16" and manifest["source"] == str(source)
    assert not list(out.glob("*.safetensors"))


def test_running_twice_writes_once_and_only_overwrite_replaces(tmp_path: Path, convert: Convert) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    save_hf_folder(source, LLAMA)
    convert(source)
    before = (out / "manifest.json").stat().st_mtime_ns
    assert "already converted" in convert(source)
    assert (out / "manifest.json").stat().st_mtime_ns == before
    assert "pass --overwrite to replace it" in convert(source, "--dtype", "float16")
    save_hf_folder(source, LLAMA, seed=9)  # the same place, other weights
    assert "holds source (float32), converted from" in convert(source)
    assert_same_logits(out, LLAMA)
    assert "3 layers" in convert(source, "--overwrite", "--dtype", "float16")
    assert load_model(out).compute_dtype == torch.float16


def test_a_hub_id_that_was_converted_needs_no_network_again(
    tmp_path: Path, convert: Convert, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "models--owner--name" / "snapshots" / "0123"
    save_hf_folder(folder, LLAMA)
    fetched = []
    monkeypatch.setattr(convert_llama_checkpoint, "fetch", lambda hub_id: fetched.append(hub_id) or folder)
    assert "owner/name, 3 layers" in convert("owner/name")
    assert "already converted from owner/name" in convert("owner/name")
    assert fetched == ["owner/name"]


def test_at_most_one_shard_is_open_at_a_time(tmp_path: Path, convert: Convert, monkeypatch: pytest.MonkeyPatch) -> None:
    save_hf_folder(tmp_path / "source", LLAMA, max_shard_size="40KB")
    opened: list[str] = []
    original = ShardFiles._open

    def counted(self: ShardFiles, shard: str) -> list[str]:
        if shard != self._open_name:
            opened.append(shard)
        return original(self, shard)

    monkeypatch.setattr(ShardFiles, "_open", counted)
    convert(tmp_path / "source")
    num_shards = len(set(opened))
    assert num_shards > 4
    assert len(opened) <= 3 * num_shards  # names once, tensors in order, a shard again where a layer straddles


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gemma"}, "model_type 'gemma' is not supported; supported: llama, opt, qwen2, mistral"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised checkpoints are not supported"),
        ({"num_hidden_layers": 2}, "the tensors do not fit the config: unknown model.layers.2.input_layernorm.weight"),
        ({"num_hidden_layers": 4}, "missing model.layers.3.input_layernorm.weight"),
        ({"attention_bias": True}, "missing model.layers.0.self_attn.o_proj.bias"),
        ({"intermediate_size": 96}, "shape (80, 48), but the config asks for (96, 48)"),
        ({"num_key_value_heads": 3}, "shape (16, 48), but the config asks for (24, 48)"),
        ({"hidden_act": "gelu_new"}, "activation 'gelu_new' is not supported"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope type 'yarn' is not supported"),
        ({"vocab_size": None}, "`vocab_size`: expected `int`, got `null`"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(
    change: dict[str, Any], message: str, tmp_path: Path, convert: Convert
) -> None:
    source = tmp_path / "source"
    save_hf_folder(source, LLAMA)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | change))
    assert message in convert(source)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_quantised_tensors_and_nan_are_refused(tmp_path: Path, convert: Convert) -> None:
    source = tmp_path / "source"
    save_hf_folder(source, LLAMA)
    weights = load_file(source / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    save_file(weights | {name: weights[name].to(torch.float8_e4m3fn)}, source / "model.safetensors")
    assert f"model.safetensors: {name}: type torch.float8_e4m3fn is not supported (quantised?)" in convert(source)
    weights[name][3, 4] = float("nan")
    save_file(weights, source / "model.safetensors")
    assert f"{name}: 1 of 3840 weights are NaN or infinite" in convert(source)
    weights[name][3, 4] = 1e6
    save_file(weights, source / "model.safetensors")
    assert f"{name}: too large for torch.float16; use bfloat16 or float32" in convert(source, "--dtype", "float16")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_places_that_cannot_be_converted_are_refused(
    tmp_path: Path, convert: Convert, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    save_hf_folder(source, LLAMA)
    assert "not a Hugging Face hub id" in convert(tmp_path / "nowhere" / "deep" / "folder")
    assert "not a Hugging Face hub id" in convert("missing.gguf")
    assert "not fetched from the Hugging Face hub" in convert("owner/no-such-model")
    assert "not a folder and not a .gguf file" in convert(source / "model.safetensors")
    convert(source)
    shutil.move(tmp_path / "out", tmp_path / "done")
    assert "is already a converted checkpoint" in convert(tmp_path / "done")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").touch()
    assert "is not a checkpoint that this command wrote; choose another folder" in convert(source, "--overwrite")
    (tmp_path / "out" / "notes.txt").unlink()
    full = shutil._ntuple_diskusage(1, 1, 10)  # type: ignore[attr-defined]
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: full)
    assert "the checkpoint needs 0.0 GB, only 0.0 GB are free" in convert(source)


def test_the_command_line_prints_one_line_and_no_traceback(tmp_path: Path) -> None:
    command = ["convert_llama_checkpoint.py", "--source", str(tmp_path), "--output-dir", str(tmp_path / "out")]
    runs = [start_ranks(words, 1, forked=True)[0] for words in (command, [*command, "--no-such-flag"])]
    result, unknown = wait_all(runs, 60)
    assert result.exit_code == 2
    assert result.stderr == (
        f"error: {tmp_path}/config.json: missing; a converted or Hugging Face checkpoint folder has one\n"
    )
    assert unknown.exit_code == 2 and "--no-such-flag" in unknown.stderr
