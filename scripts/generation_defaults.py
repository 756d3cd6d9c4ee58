"""What a model's authors say about its texts: what ends one, and what of generation_config.json is followed.

The same for every stage that writes text. What is followed is applied as Hugging Face's `generate` does; what is not
is named, once. Greedy text follows the penalties, too; the options of sampling belong to sampled text only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
from loguru import logger

from data.files import convert_json, read_json
from modules.config import ModelConfig

FILE_NAME = "generation_config.json"
TokenId = Annotated[int, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
# What would change a text and is not applied, with the values that change nothing (as null and empty ones do).
NOT_APPLIED: dict[str, tuple[Any, ...]] = {
    "begin_suppress_tokens": (), "constraints": (), "diversity_penalty": (0,), "dola_layers": (),
    "encoder_no_repeat_ngram_size": (0,), "encoder_repetition_penalty": (1,), "epsilon_cutoff": (0,),
    "eta_cutoff": (0,), "exponential_decay_length_penalty": (), "force_words_ids": (), "forced_bos_token_id": (),
    "forced_decoder_ids": (), "forced_eos_token_id": (), "guidance_scale": (1,), "max_time": (), "min_length": (0,),
    "min_new_tokens": (0,), "num_beam_groups": (1,), "num_beams": (1,), "penalty_alpha": (0,), "sequence_bias": (),
    "stop_strings": (), "suppress_tokens": (), "token_healing": (False,), "top_h": (), "typical_p": (1,),
    "watermarking_config": (),
}  # fmt: skip


class GenerationFile(msgspec.Struct):
    """generation_config.json, as far as it is followed; null means Hugging Face's own default."""

    eos_token_id: int | list[int] | None = None
    do_sample: bool | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0.0)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, lt=2**31)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] | None = None
    min_p: Share | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0.0)] | None = None
    no_repeat_ngram_size: Annotated[int, msgspec.Meta(ge=0)] | None = None
    bad_words_ids: list[Annotated[list[TokenId], msgspec.Meta(min_length=1)]] | None = None


@dataclass(frozen=True, kw_only=True)
class GenerationDefaults:
    """What ends a text, and fields of `SamplingParams`: `sampling` of sampled text (None: the authors say greedy, or
    nothing), `penalties` of any text, only those that are set. `ignored`: what is set and not applied."""

    eos_token_ids: tuple[int, ...]
    sampling: dict[str, Any] | None = None
    penalties: dict[str, Any] = field(default_factory=dict)
    ignored: dict[str, Any] = field(default_factory=dict)

    def log(self) -> None:
        """Log what is followed and what is not."""
        if self.penalties:
            told = ", ".join(map(_told, self.penalties.items()))
            logger.info(f"{FILE_NAME} is followed, in greedy text too: {told}")
        if self.ignored:
            told = ", ".join(f"{name} {value!r}" for name, value in self.ignored.items())
            logger.warning(f"{FILE_NAME}: not applied, so texts may differ from Hugging Face's: {told}")


def read_generation_defaults(directory: Path, config: ModelConfig, tokenizer: Any | None) -> GenerationDefaults:
    """Of a checkpoint folder. ValueError names the file and the key.

    A text ends at generation_config.json's EOS ids (the config's where it names none) and at the tokenizer's EOS.
    """
    path = directory / FILE_NAME
    values = read_json(path, dict[str, Any]) if path.is_file() else {}
    file = convert_json(values, GenerationFile, path)
    named = config.eos_token_ids if file.eos_token_id is None else file.eos_token_id
    tokenizers = None if tokenizer is None else tokenizer.eos_token_id
    ends = [*(named if isinstance(named, Sequence) else [named]), *([] if tokenizers is None else [tokenizers])]
    defaults = GenerationDefaults(
        eos_token_ids=tuple(dict.fromkeys(ends)),
        sampling=_sampling(file),
        penalties=_penalties(file, ends),
        ignored={name: values[name] for name in NOT_APPLIED if _changes(name, values.get(name))},
    )
    outside = [i for words in defaults.penalties.get("bad_words_ids", ()) for i in words if i >= config.vocab_size]
    if outside:
        raise ValueError(
            f"{path}: `bad_words_ids`: token id {outside[0]} lies outside the vocabulary of {config.vocab_size}"
        )
    return defaults


def _sampling(file: GenerationFile) -> dict[str, Any] | None:
    if not file.do_sample:
        return None
    # Hugging Face's own defaults; a top_k of 0 is all.
    found: dict[str, Any] = {
        "temperature": 1.0 if file.temperature is None else file.temperature,
        "top_k": 50 if file.top_k is None else file.top_k or -1,
        "top_p": 1.0 if file.top_p is None else file.top_p,
    }
    return found | ({"min_p": file.min_p} if file.min_p else {})


def _penalties(file: GenerationFile, ends: Sequence[int]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if file.repetition_penalty not in (None, 1.0):
        found["repetition_penalty"] = file.repetition_penalty
    if file.no_repeat_ngram_size:
        found["no_repeat_ngram_size"] = file.no_repeat_ngram_size
    words = tuple(tuple(words) for words in file.bad_words_ids or () if words not in [[end] for end in ends])
    return found | ({"bad_words_ids": words} if words else {})


def _told(penalty: tuple[str, Any]) -> str:
    name, value = penalty
    return f"{len(value)} {name}" if isinstance(value, tuple) else f"{name} {value:g}"


def _changes(name: str, value: Any) -> bool:
    return value not in (None, [], {}, "", *NOT_APPLIED[name])
