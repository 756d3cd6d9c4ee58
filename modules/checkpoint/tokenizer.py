"""The tokenizer of a checkpoint folder: opened, built from a GGUF file, and checked when a model is converted.

A wrong tokenizer is an error at conversion, where it can be mended. Later it would silently give other token ids.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from loguru import logger

from data.files import read_json, write_json
from modules.checkpoint.sources import refuse_pointer

# What makes a folder have a tokenizer, preferred first, and what may lie beside it.
MAIN_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
TOKENIZER_FILES = (
    *MAIN_FILES,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "merges.txt",
    "added_tokens.json",
    "chat_template.json",
)
SAMPLE = "Hello world, it's 12345 tokens:\n  - naïve (café) \t!"

# How a GGUF's byte-level tokenizer cuts text before merging (`tokenizer.ggml.pre`), where it is not as GPT-2's does.
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Where a rule is one of these, a text begins with BOS unless the file says otherwise, and a piece that is a token needs
# no merging.
WHOLE_TOKENS = dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"), LLAMA3_SPLIT) | {
    "tekken": TEKKEN_SPLIT
}
SPLITS = WHOLE_TOKENS | {"qwen2": LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")}
# Token types of GGUF (llama.cpp's enum).
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4


def open_tokenizer(directory: Path) -> Any | None:
    """The tokenizer of a folder, None where it has none; ValueError names the file that cannot be read."""
    main = next((directory / name for name in MAIN_FILES if (directory / name).is_file()), None)
    if main is None:
        return None
    for path in (directory / name for name in TOKENIZER_FILES if (directory / name).is_file()):
        refuse_pointer(path)
        if path.suffix == ".json":
            read_json(path, dict[str, msgspec.Raw])  # values unread: a vocabulary takes a second
    readers = ("sentencepiece", "tiktoken")
    if main.name == "tokenizer.model" and not any(importlib.util.find_spec(name) for name in readers):
        raise ValueError(
            f"{main}: needs the package sentencepiece (pip install sentencepiece protobuf), or a tokenizer.json beside "
            "it"
        )
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(directory), trust_remote_code=False)
        tokenizer("text")  # some settings are looked at only now
        return tokenizer
    except Exception as error:  # tokenizers and transformers raise what they stumble over: KeyError, plain Exception
        raise ValueError(f"{main}: the tokenizer cannot be opened ({type(error).__name__}: {_line(error)})") from error


def check_tokenizer(tokenizer: Any, vocab_size: int, source: Path) -> None:
    """ValueError for a tokenizer that is not this model's; a warning for tokens that the model has no embedding of,
    and for a chat template that fails. `source`: the folder or the file that it came from."""
    if tokenizer.vocab_size > vocab_size:  # without what was added later
        raise ValueError(
            f"{source}: the tokenizer has {tokenizer.vocab_size} tokens, and the model {vocab_size}: is it another "
            "model's?"
        )
    beyond = sorted(idx for idx in tokenizer.get_vocab().values() if idx >= vocab_size)
    if beyond:
        names = ", ".join(map(repr, tokenizer.convert_ids_to_tokens(beyond[:4])))
        logger.warning(
            f"{source}: the tokenizer's {names} ({len(beyond)} in all) lie beyond the model's vocabulary of "
            f"{vocab_size}; a text with one of them cannot be run"
        )
    if getattr(tokenizer, "chat_template", None):
        try:
            chat_text(tokenizer, [{"role": "user", "content": "Hello"}])
        except ValueError as error:
            logger.warning(f"{template_file(source)}: {error}; --chat will not work with this model")


def template_file(directory: Path) -> Path:
    """The file of a folder that holds its chat template; a GGUF file is that itself."""
    names = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
    return next((directory / name for name in names if (directory / name).is_file()), directory)


def chat_text(tokenizer: Any, messages: list[dict[str, str]], *, answer_follows: bool = True) -> str:
    """A conversation in the chat template, up to where the answer begins, or else within the last message; ValueError
    if the template fails."""
    try:
        return tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=answer_follows,
            continue_final_message=not answer_follows,
        )
    except Exception as error:  # a template is a program: it may raise anything
        raise ValueError(f"the chat template fails ({type(error).__name__}: {_line(error)})") from error


def write_gguf_tokenizer(field: Callable[..., Any], source: Path, target: Path) -> Any | None:
    """Write the tokenizer that a GGUF's metadata describes into a folder; what is read there, checked.

    None where the file has none. ValueError if it cannot be built, or if a token comes back as another one.
    """
    if field("tokenizer.ggml.model") is None:
        return None
    try:
        backend = _backend(field)
        roles = {name: _token_of(field, key) for name, key in _ROLES.items()}
        from transformers import PreTrainedTokenizerFast

        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=backend, chat_template=field("tokenizer.chat_template"), **roles
        )
    except Exception as error:  # tokenizers raises plain Exception for a vocabulary it cannot build
        raise ValueError(f"{source}: its tokenizer cannot be read: {_line(error)}") from error
    try:
        tokenizer.save_pretrained(target)
    except Exception as error:  # and here, too
        raise OSError(f"{target}: the tokenizer cannot be written: {_line(error)}") from error
    try:
        path = target / "tokenizer_config.json"
        # transformers 4 does not know the name that 5 writes; both know this one.
        write_json(path, read_json(path, dict) | {"tokenizer_class": "PreTrainedTokenizerFast"})
        written = open_tokenizer(target)
    except ValueError as error:
        raise ValueError(f"{source}: its tokenizer cannot be rebuilt: {error}") from error
    _check_gguf_tokenizer(written, field, source)
    return written


_ROLES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def _token_of(field: Callable[..., Any], key: str) -> str | None:
    idx = field(f"tokenizer.ggml.{key}")
    return None if idx is None else field("tokenizer.ggml.tokens")[idx]


def _backend(field: Callable[..., Any]) -> Any:
    """The `tokenizers` object of a GGUF's metadata, as llama.cpp understands it."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    kind, rule = field("tokenizer.ggml.model"), field("tokenizer.ggml.pre")
    tokens = field("tokenizer.ggml.tokens")
    types = field("tokenizer.ggml.token_type") or [1] * len(tokens)
    vocab = {token: idx for idx, token in enumerate(tokens)}
    if kind == "gpt2":
        merges = [tuple(merge.split(" ")) for merge in field("tokenizer.ggml.merges") or []]
        backend = Tokenizer(models.BPE(vocab, merges, ignore_merges=rule in WHOLE_TOKENS))
        if rule == "qwen2":
            backend.normalizer = normalizers.NFC()
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule not in SPLITS)
        first: list[Any] = []
        if rule in SPLITS:
            first = [pre_tokenizers.Split(Regex(SPLITS[rule]), behavior="isolated")]
        elif rule == "smollm":
            first = [pre_tokenizers.Digits(individual_digits=True)]
        elif rule not in (None, "default", "gpt-2"):
            logger.warning(f"GGUF pre-tokenizer {rule!r} is not known here: text is cut as GPT-2 does")
        backend.pre_tokenizer = pre_tokenizers.Sequence([*first, byte_level])
        backend.decoder = decoders.ByteLevel()
    elif kind == "llama":
        unknown = _token_of(field, "unknown_token_id")
        merges = _sentencepiece_merges(tokens, field("tokenizer.ggml.scores"), vocab)
        backend = Tokenizer(models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
        prefix = bool(field("tokenizer.ggml.add_space_prefix", True))
        scheme = "first" if prefix else "never"
        backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
        strip = [decoders.Strip(content=" ", left=1)] if prefix else []
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        )
    else:
        raise ValueError(f"tokenizer.ggml.model {kind!r} is not supported; supported: gpt2, llama")
    named = zip(tokens, types, strict=True)
    added = [(token, type_) for token, type_ in named if type_ in (UNKNOWN, CONTROL, USER_DEFINED)]
    backend.add_special_tokens([AddedToken(token, normalized=False) for token, type_ in added if type_ != USER_DEFINED])
    backend.add_tokens([AddedToken(token, normalized=False) for token, type_ in added if type_ == USER_DEFINED])
    ends = [_token_of(field, "bos_token_id") if _adds_bos(field) else None, None]
    if field("tokenizer.ggml.add_eos_token"):
        ends[1] = _token_of(field, "eos_token_id")
    template = [token for token in (ends[0], "$A", ends[1]) if token is not None]
    if len(template) > 1:
        second = [f"{'$B' if token == '$A' else token}:1" for token in template]
        backend.post_processor = processors.TemplateProcessing(
            single=template,
            pair=template + second,
            special_tokens=[(token, vocab[token]) for token in ends if token is not None],
        )
    return backend


def _adds_bos(field: Callable[..., Any]) -> bool:
    """Whether a text begins with BOS; where the file does not say it, as llama.cpp does."""
    said = field("tokenizer.ggml.add_bos_token")
    by_default = field("tokenizer.ggml.model") == "llama" or field("tokenizer.ggml.pre") in WHOLE_TOKENS
    return field("tokenizer.ggml.bos_token_id") is not None and bool(by_default if said is None else said)


def _sentencepiece_merges(tokens: list[str], scores: list[float], vocab: dict[str, int]) -> list[tuple[str, str]]:
    """The merges behind sentencepiece's scores: of each token every cut into two tokens, the best token first."""
    merges = []
    for token, score in zip(tokens, scores, strict=True):
        cuts = ((token[:at], token[at:]) for at in range(1, len(token)))
        known = sorted(
            (vocab[left], vocab[right], left, right) for left, right in cuts if left in vocab and right in vocab
        )
        merges += [(-score, left, right) for _, _, left, right in known]
    merges.sort(key=lambda merge: (merge[0], -len(merge[1]), -len(merge[2])))
    return [(left, right) for _, left, right in merges]


def _check_gguf_tokenizer(tokenizer: Any, field: Callable[..., Any], source: Path) -> None:
    """ValueError unless the tokenizer as it was written has the file's tokens, its BOS, and gives back a text."""
    tokens = field("tokenizer.ggml.tokens")
    read = tokenizer.convert_ids_to_tokens(range(len(tokens)))
    wrong = [idx for idx, token in enumerate(tokens) if read[idx] != token]
    if wrong or len(tokenizer) != len(tokens):
        what = f"token {wrong[0]} is {tokens[wrong[0]]!r} there and {read[wrong[0]]!r} here" if wrong else "more tokens"
        raise ValueError(f"{source}: its tokenizer cannot be rebuilt: {what} ({len(wrong)} of {len(tokens)} differ)")
    ids = tokenizer(SAMPLE).input_ids
    has_bos = bool(ids) and ids[0] == field("tokenizer.ggml.bos_token_id")
    text = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    if has_bos != _adds_bos(field) or (text != SAMPLE and field("tokenizer.ggml.unknown_token_id") not in ids):
        raise ValueError(f"{source}: its tokenizer cannot be rebuilt: {SAMPLE!r} becomes {json.dumps(ids)}, {text!r}")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
