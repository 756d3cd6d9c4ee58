"""GGUF files: dequantised exactly, with their tokenizer; what would be lost is refused."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from convert_llama_checkpoint import Options, main
from modules.checkpoint.gguf import GgufFile
from modules.checkpoint.load import load_config, load_model
from modules.families.registry import from_hf_config
from tests.modules.tiny_kinds import LLAMA, LLAMA3_SCALING, random_tokens
from tests.modules.tiny_models import tiny_decoder, tiny_hf_model

TOKENS = ["<unk>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "12", "123"]
GGUF = LLAMA | {
    "vocab_size": len(TOKENS),
    "hidden_size": 64,
    "num_attention_heads": 8,
    "intermediate_size": 96,
}


def write_gguf(
    path: Path,
    hf_config: dict[str, Any],
    *,
    extra: dict[str, np.ndarray] | None = None,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    architecture: str = "llama",
    rule: str = "smollm",
    add_bos: bool | None = False,
    ends: dict[str, int] | None = None,
    tokens: Callable[[gguf.GGUFWriter], None] | None = None,
    metadata: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> None:
    """A GGUF of `tiny_hf_model(hf_config)`, as llama.cpp's converter lays it out, with a byte-level tokenizer."""
    config = from_hf_config(hf_config)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(hf_config["rope_theta"])
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_vocab_size(config.vocab_size)
    metadata(writer)
    if tokens is not None:
        tokens(writer)
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(rule)
        writer.add_token_list(TOKENS)
        writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
        writer.add_token_merges(["1 2"])
        writer.add_bos_token_id(1)
        if add_bos is not None:
            writer.add_add_bos_token(add_bos)
        for name, token_id in ({"eos": 2} if ends is None else ends).items():
            writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token_id)
        writer.add_chat_template("{{ messages[0]['content'] }}")
    is_qwen2 = hf_config["model_type"] == "qwen2"
    kind_of_model = gguf.MODEL_ARCH.QWEN2 if is_qwen2 else gguf.MODEL_ARCH.LLAMA
    names = gguf.get_tensor_name_map(kind_of_model, config.num_hidden_layers)
    weights = tiny_hf_model(hf_config).state_dict()
    if config.tie_word_embeddings:
        weights.pop("lm_head.weight")
    for name, tensor in weights.items():
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        if heads is not None and not is_qwen2:  # halves -> interleaved pairs
            tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(tensor.shape)
        stored = kind if tensor.dim() == 2 else gguf.GGMLQuantizationType.F32
        array = tensor.contiguous().numpy()
        stem, _, suffix = name.rpartition(".")
        writer.add_tensor(f"{names.get_name(stem)}.{suffix}", gguf.quantize(array, stored), raw_dtype=stored)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def convert(path: Path) -> Path:
    """Convert into `out` beside the file."""
    output_dir = path.parent / "out"
    main(Options(source=str(path), output_dir=output_dir, quiet=True))
    return output_dir


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("family", "kind"), [("llama", "F32"), ("llama", "Q8_0"), ("llama", "Q4_1"), ("qwen2", "F32"), ("qwen2", "Q8_0")]
)
def test_gguf_is_dequantised_as_transformers_does(family: str, kind: str, tied: bool, tmp_path: Path) -> None:
    path, hf_config = tmp_path / "tiny.gguf", GGUF | {"model_type": family, "tie_word_embeddings": tied}
    write_gguf(path, hf_config, kind=gguf.GGMLQuantizationType[kind], architecture=family)
    model = load_model(convert(path))
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", dtype=torch.float32)
    token_ids = random_tokens(1, 20)
    with torch.inference_mode():
        expected = reference(token_ids).logits
        torch.testing.assert_close(model.logits(model(token_ids)), expected, rtol=0, atol=1e-4)
    assert (model.lm_head.weight is model.embeddings.tokens.weight) == tied
    if kind == "F32":
        original = tiny_decoder(hf_config)
        pairs = zip(model.parameters(), original.parameters(), strict=True)
        assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ({"eos": 2, "eot": 5}, (2, 5)),
        ({"eos": 2, "eot": 2}, (2,)),
        ({"eos": 2, "eot": 5, "eom": 7}, (2, 5, 7)),
        ({"eot": 5}, (5,)),
        ({}, ()),
    ],
)
def test_a_text_ends_at_any_end_that_a_gguf_names(
    ends: dict[str, int], expected: tuple[int, ...], tmp_path: Path
) -> None:
    write_gguf(tmp_path / "tiny.gguf", GGUF, ends=ends)
    assert GgufFile(tmp_path / "tiny.gguf").config.eos_token_ids == expected


def test_gguf_tokenizer_keeps_template_special_tokens_and_cuts_digits_as_trained(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", GGUF)
    out = convert(tmp_path / "tiny.gguf")
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.decode(tokenizer("ab  12\n").input_ids) == "ab  12\n"
    assert tokenizer.tokenize("12") == ["1", "2"]  # the merge "1 2" never applies: digits stand alone
    assert tokenizer.chat_template == "{{ messages[0]['content'] }}"
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    config = load_config(out)
    assert (config.bos_token_id, config.eos_token_ids, config.head_dim) == (1, (2,), 8)


def test_a_qwen2_gguf_cuts_text_as_its_tokenizer_was_trained(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", GGUF | {"model_type": "qwen2"}, architecture="qwen2", rule="qwen2", add_bos=None)
    tokenizer = AutoTokenizer.from_pretrained(convert(tmp_path / "tiny.gguf"))
    assert tokenizer.tokenize("12 e\u0301") == ["1", "2", "Ġ", "Ã", "©"]  # digits alone; letters composed; no BOS
    assert tokenizer("a").input_ids == [TOKENS.index("a")]


def assert_read_by_older_transformers(folder: Path, hf_config: dict[str, Any]) -> None:
    """They know neither rope_parameters nor dtype, and take their defaults without a word."""
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"], config["dtype"]
    assert from_hf_config(config) == load_config(folder)
    assert config["torch_dtype"] == "float32" and config["rope_theta"] == hf_config["rope_theta"]
    assert json.loads((folder / "tokenizer_config.json").read_text())["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_llama3_frequencies_of_a_gguf_become_its_rope_scaling(tmp_path: Path) -> None:
    scaled = GGUF | {"rope_theta": 500000.0, "max_position_embeddings": 16384}
    scaled["rope_scaling"] = LLAMA3_SCALING | {"factor": 32.0, "original_max_position_embeddings": 8192}
    wavelengths = 2 * np.pi * 500000.0 ** (np.arange(0, 8, 2) / 8)
    smooth = np.clip((8192 / wavelengths - 1) / 3, 0, 1)
    factors = (1 / ((1 - smooth) / 32 + smooth)).astype(np.float32)
    path = tmp_path / "tiny.gguf"
    write_gguf(path, scaled, extra={"rope_freqs.weight": factors * 1.5})
    with pytest.raises(ValueError, match="rope_freqs.weight is not Llama 3.1's scaling; convert the original"):
        convert(path)
    write_gguf(path, scaled, extra={"rope_freqs.weight": factors}, rule="llama-bpe", add_bos=True)
    assert load_config(convert(path)) == from_hf_config(scaled | {"head_dim": 8})
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.tokenize("12345") == ["123", "4", "5"]  # cut into three digits; a whole token needs no merge
    assert tokenizer("a").input_ids[0] == 1
    assert_read_by_older_transformers(tmp_path / "out", scaled)


@pytest.mark.parametrize("key", ["rope.scaling.factor", "rope.scale_linear"])
def test_a_scaling_factor_without_a_type_is_linear_as_in_llama_cpp(key: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, GGUF, metadata=lambda writer: writer.add_float32(f"llama.{key}", 4.0))
    expected = from_hf_config(GGUF | {"rope_scaling": {"rope_type": "linear", "factor": 4.0}})
    assert GgufFile(path).config == expected
    write_gguf(path, GGUF, metadata=lambda writer: writer.add_float32(f"llama.{key}", 1.0))
    assert GgufFile(path).config == from_hf_config(GGUF)


def test_a_gguf_whose_attention_is_another_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, GGUF, metadata=lambda writer: writer.add_sliding_window(16))
    with pytest.raises(ValueError, match=r"tiny\.gguf: config: sliding_window=16 is not supported"):
        convert(path)
    write_gguf(path, GGUF, metadata=lambda writer: writer.add_causal_attention(False))
    with pytest.raises(ValueError, match=r"tiny\.gguf: config: is_causal=false is not supported"):
        convert(path)


def test_a_gguf_with_a_tokenizer_that_cannot_be_built_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        sys.modules[__name__], "TOKENS", ["13" if token == "12" else token for token in TOKENS]
    )  # the merge "1 2" has no token
    write_gguf(tmp_path / "tiny.gguf", GGUF)
    with pytest.raises(ValueError, match=r"tiny\.gguf: its tokenizer cannot be read: "):
        convert(tmp_path / "tiny.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


def test_gguf_files_that_would_lose_something_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, GGUF, extra={"blk.0.attn_q.bias": np.ones(64, dtype=np.float32)})
    with pytest.raises(ValueError, match="the tensors do not fit 'llama': unknown blk.0.attn_q.bias"):
        convert(path)
    write_gguf(path, GGUF, architecture="gemma")
    with pytest.raises(ValueError, match="GGUF architecture 'gemma'; supported: llama, qwen2"):
        convert(path)
    write_gguf(path, GGUF)
    whole = path.read_bytes()
    for content in (whole[:-5000], whole[:3000], whole[:10], b"not a gguf file at all, though long enough"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"tiny\.gguf: .*truncated"):
            convert(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["tiny.gguf"]
