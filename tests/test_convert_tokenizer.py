"""A conversion's tokenizer: that of the source, token by token; what is wrong with it is told at conversion."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
from loguru import logger
from transformers import AutoTokenizer

from modules.checkpoint.load import load_config
from modules.checkpoint.tokenizer import open_tokenizer
from tests.modules.tiny_kinds import LLAMA
from tests.modules.tiny_models import save_hf_folder
from tests.test_convert import Convert, add_tokenizer, converter
from tests.test_convert_gguf import GGUF, TOKENS, write_gguf

POINTER = (
    "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1\nsize 132\n"
)
PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
PIECES += ["▁", "a", "b", "c", "▁a", "bc", "abc", "▁abc"]


@pytest.fixture
def convert(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Convert:
    return converter(tmp_path, capsys)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    save_hf_folder(tmp_path / "source", LLAMA)
    add_tokenizer(tmp_path / "source")
    return tmp_path / "source"


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    heard: list[str] = []
    sink = logger.add(lambda message: heard.append(message.record["message"]), level="WARNING")
    yield heard
    logger.remove(sink)


def sentencepiece(**flags: bool) -> Callable[[gguf.GGUFWriter], None]:
    """The metadata of a Llama 2."""

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(PIECES)
        writer.add_token_scores([0.0] * 259 + [-float(idx) for idx in range(len(PIECES) - 259)])
        writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * (len(PIECES) - 259))
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        for name, value in flags.items():
            writer.add_bool(f"tokenizer.ggml.{name}", value)

    return add


def byte_level(special: list[str], **fields: Any) -> Callable[[gguf.GGUFWriter], None]:
    """TOKENS with other special tokens, and more fields."""

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("llama-bpe")
        writer.add_token_list([*special, *TOKENS[3:]][: len(TOKENS)])
        writer.add_token_types([3] * len(special) + [1] * (len(TOKENS) - len(special)))
        writer.add_token_merges(["1 2"])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        for name, value in fields.items():
            add_field = writer.add_string if isinstance(value, str) else writer.add_uint32
            add_field(f"tokenizer.{name}", value)

    return add


@pytest.mark.parametrize(
    ("rule", "add_bos", "has_bos"),
    [("llama-bpe", None, True), ("llama-bpe", False, False), ("pixtral", None, True), ("smollm", None, False)]
    + [("smollm", True, True)],
)
def test_a_gguf_that_does_not_say_it_begins_with_bos_as_in_llama_cpp(
    rule: str, add_bos: bool | None, has_bos: bool, tmp_path: Path, convert: Convert
) -> None:
    write_gguf(tmp_path / "tiny.gguf", GGUF, rule=rule, add_bos=add_bos)
    convert(tmp_path / "tiny.gguf")
    ids = AutoTokenizer.from_pretrained(tmp_path / "out")("ab").input_ids
    assert (ids[0] == 1) == has_bos and len(ids) == 2 + has_bos


@pytest.mark.parametrize(
    ("flags", "pieces"),
    [
        ({}, ["<s>", "▁abc", "▁", "bc"]),
        ({"add_space_prefix": True, "add_bos_token": False}, ["▁abc", "▁", "bc"]),
        ({"add_space_prefix": False}, ["<s>", "abc", "▁", "bc"]),
    ],
)
def test_a_sentencepiece_gguf_keeps_its_bos_and_its_space_before_the_text(
    flags: dict[str, bool], pieces: list[str], tmp_path: Path, convert: Convert
) -> None:
    write_gguf(tmp_path / "tiny.gguf", GGUF | {"vocab_size": len(PIECES)}, tokens=sentencepiece(**flags))
    convert(tmp_path / "tiny.gguf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.convert_ids_to_tokens(range(len(PIECES))) == PIECES
    ids = tokenizer("abc bc").input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == pieces
    assert tokenizer.decode(ids, skip_special_tokens=True) == "abc bc"
    if flags.get("add_space_prefix", True):  # transformers' own reading, which does not know the flag
        theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="tiny.gguf")
        for text in ("abc bc", "  a\nüb </s> c", ""):
            assert tokenizer(text).input_ids == theirs(text).input_ids


def test_a_tokenizer_beside_a_gguf_is_not_taken_for_its_own(tmp_path: Path, convert: Convert) -> None:
    add_tokenizer(tmp_path)
    write_gguf(tmp_path / "tiny.gguf", GGUF)
    convert(tmp_path / "tiny.gguf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.convert_ids_to_tokens(range(len(TOKENS))) == TOKENS


def test_special_tokens_beyond_the_byte_alphabet_keep_their_place(tmp_path: Path, convert: Convert) -> None:
    special = ["<unk>", "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"]  # of DeepSeek's Llamas
    write_gguf(tmp_path / "tiny.gguf", GGUF, tokens=byte_level(special))
    convert(tmp_path / "tiny.gguf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer(f"a{special[2]}").input_ids == [1, TOKENS.index("a"), 2]
    assert len(tokenizer) == len(TOKENS)


def test_end_of_text_and_end_of_turn_of_a_gguf_both_end_a_text(tmp_path: Path, convert: Convert) -> None:
    special = ["<unk>", "<s>", "</s>", "<|eot_id|>"]
    fields = {"ggml.eot_token_id": 3}
    write_gguf(tmp_path / "tiny.gguf", GGUF, tokens=byte_level(special, **fields))
    convert(tmp_path / "tiny.gguf")
    assert load_config(tmp_path / "out").eos_token_ids == (2, 3)
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"] == [2, 3]
    write_gguf(tmp_path / "tiny.gguf", GGUF, tokens=byte_level(special, **fields | {"ggml.eot_token_id": 2}))
    convert(tmp_path / "tiny.gguf", "--overwrite")
    assert load_config(tmp_path / "out").eos_token_ids == (2,)


def test_a_gguf_whose_tokens_do_not_come_back_is_refused(tmp_path: Path, convert: Convert) -> None:
    write_gguf(tmp_path / "tiny.gguf", GGUF, tokens=byte_level(["<unk>", "<s>", "</s>", "a"]))  # "a" is there twice
    error = convert(tmp_path / "tiny.gguf")
    assert "tiny.gguf: its tokenizer cannot be rebuilt: token 3 is 'a' there and None here" in error
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


@pytest.mark.parametrize("fields", [{"ggml.bos_token_id": 9999}, {"ggml.token_type": "x"}, {"ggml.scores": 5}])
def test_gguf_metadata_of_other_types_is_one_line(fields: dict[str, Any], tmp_path: Path, convert: Convert) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        sentencepiece()(writer)
        for name, value in fields.items():
            del writer.kv_data[0][f"tokenizer.{name}"]
            add_field = writer.add_string if isinstance(value, str) else writer.add_uint32
            add_field(f"tokenizer.{name}", value)

    write_gguf(tmp_path / "tiny.gguf", GGUF | {"vocab_size": len(PIECES)}, tokens=add)
    assert "tiny.gguf: its tokenizer cannot be read: " in convert(tmp_path / "tiny.gguf")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("llama.embedding_length", "x", "config: `hidden_size`: expected `int`, got `str`"),
        ("llama.block_count", 1_000_000, "config: `num_hidden_layers`: expected `int` <= 1000, got 1000000"),
        ("llama.attention.head_count", 0, "config: `num_attention_heads`: expected `int` >= 1, got 0"),
        ("llama.rope.freq_base", float("nan"), "config: `rope_theta`: expected `float`"),
        ("llama.attention.key_length", 5, "config: rotary positions need an even head_dim, got 5"),
    ],
)
def test_a_gguf_with_sizes_that_no_model_has_is_one_line(
    key: str, value: Any, message: str, tmp_path: Path, convert: Convert
) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        byte_level(["<unk>", "<s>", "</s>"])(writer)
        del writer.kv_data[0][key]
        kinds = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
        kinds[type(value)](key, value)

    write_gguf(tmp_path / "tiny.gguf", GGUF, tokens=add)
    assert f"tiny.gguf: {message}" in convert(tmp_path / "tiny.gguf")


def only_sentencepiece(source: Path) -> None:
    (source / "tokenizer.json").unlink()
    (source / "tokenizer.model").write_bytes(b"\x0a\x0e\x0a\x05<unk>")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda source: (source / "tokenizer.json").write_text(POINTER),
            "tokenizer.json: a git-lfs pointer, not the f",
        ),
        (
            lambda source: (source / "tokenizer.json").write_text("{}"),
            "tokenizer.json: the tokenizer cannot be opened (",
        ),
        (lambda source: (source / "tokenizer.json").write_text('{"version":'), "tokenizer.json: not JSON"),
        (
            lambda source: (source / "generation_config.json").write_text("[]"),
            "generation_config.json: expected `object`",
        ),
        (
            lambda source: (source / "tokenizer_config.json").write_text("[]"),
            "tokenizer_config.json: expected `object`",
        ),
        (
            lambda source: (source / "tokenizer_config.json").write_text('{"eos_token": 5}'),
            "cannot be opened (TypeError",
        ),
        (
            lambda source: (source / "tokenizer_config.json").write_text('{"model_max_length": [5]}'),
            "cannot be opened (TypeError",
        ),
        (lambda source: (source / "special_tokens_map.json").write_text("[" * 5000), "special_tokens_map.json: "),
        (only_sentencepiece, "tokenizer.model: needs the package sentencepiece (pip install sentencepiece protobuf)"),
    ],
)
def test_a_tokenizer_or_settings_that_cannot_be_read_are_told_at_conversion(
    damage: Callable[[Path], object],
    message: str,
    source: Path,
    tmp_path: Path,
    convert: Convert,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    damage(source)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)  # as where neither reader is installed
    error = convert(source)
    assert f"error: {source}" in error and message in error
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_another_models_tokenizer_is_refused_and_tokens_beyond_the_vocabulary_are_named(
    source: Path, tmp_path: Path, convert: Convert, warnings: list[str]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.add_tokens([f"<extra_{idx}>" for idx in range(130)])  # ids 2 to 131 of 131
    tokenizer.save_pretrained(source)
    convert(source)
    assert any("'<extra_129>' (1 in all) lie beyond the model's vocabulary of 131" in line for line in warnings)
    whole = json.loads((source / "tokenizer.json").read_text())
    whole["model"]["vocab"] |= {f"w{idx}": idx for idx in range(200, 400)}
    (source / "tokenizer.json").write_text(json.dumps(whole))
    assert "source: the tokenizer has 202 tokens, and the model 131" in convert(source, "--overwrite")


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('one user only') }}", "{% for %}", "{{ messages[7].content }}"]
)
def test_a_chat_template_that_fails_is_named_at_conversion(
    template: str, source: Path, tmp_path: Path, convert: Convert, warnings: list[str]
) -> None:
    (source / "chat_template.jinja").write_text(template)
    convert(source)
    assert any("source/chat_template.jinja: the chat template fails (" in line for line in warnings)
    tokenizer = open_tokenizer(tmp_path / "out")
    assert tokenizer is not None and tokenizer.chat_template == template
    write_gguf(tmp_path / "tiny.gguf", GGUF, tokens=byte_level(["<unk>", "<s>", "</s>"], chat_template=template))
    convert(tmp_path / "tiny.gguf", "--overwrite")
    assert any("tiny.gguf: the chat template fails (" in line for line in warnings)
