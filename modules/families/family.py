"""What defines a family of models: how its `config.json` is read and written, and what its tensors are called.

A family is one file with one `Family`, listed in `registry`. A rule ties a module of the decoder to Hugging Face's name
of it; another kind of rule (a tensor that holds several modules, say) is another class beside `Rename`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, get_args

import msgspec

from modules.config import ModelConfig, NumLayers, TokenId
from modules.specs import Activation, NumPositions, Size

SPELLINGS = {"swish": "silu"}


@dataclass(frozen=True)
class Rename:
    """The decoder's `module` (in the half-block, or in the model) is called `key` (in the layer, or after the prefix),
    its weight and its bias alike."""

    module: str
    key: str


@dataclass(frozen=True)
class Transpose(Rename):
    """As `Rename`, and the decoder holds the transpose of the weight."""


@dataclass(frozen=True, kw_only=True)
class Gguf:
    """A family's GGUF files (ggml-org/ggml docs/gguf.md). `hf_class`: Hugging Face's. `unsaid`: keys of a `config.json`
    that their metadata lack. `layer`: key -> name of a layer's tensors, after `blk.{i}`. `interleaved`: rows of query
    and key heads are paired (0, 1), (2, 3), ..., where Hugging Face pairs halves."""

    architecture: str
    hf_class: str
    unsaid: Mapping[str, Any]
    layer: Mapping[str, str]
    interleaved: bool


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family. `parse` reads a `config.json`, ValueError for what the decoder would not compute faithfully; `write`
    is the way back, of a configuration that the family may have."""

    parse: Callable[[dict[str, Any]], ModelConfig]
    write: Callable[[ModelConfig], dict[str, Any]]
    prefixes: tuple[str, ...]  # before every name of the body; base models are saved without "model."
    embeddings: tuple[Rename, ...]
    head: tuple[Rename, ...]
    attention: tuple[Rename, ...]
    feed_forward: tuple[Rename, ...]
    attention_norm: str  # pre-norm: before attention; post-norm: after it
    feed_forward_norm: str
    final_norm: str
    gguf: Gguf | None = None


class HfConfig(msgspec.Struct, kw_only=True):
    """What all families spell alike. Many a file has null where a default is meant."""

    default_positions: ClassVar[int] = 2048
    vocab_size: Size
    hidden_size: Size
    num_hidden_layers: NumLayers
    num_attention_heads: Size
    max_position_embeddings: NumPositions | None = None
    tie_word_embeddings: bool | None = None
    bos_token_id: TokenId | None = None
    eos_token_id: TokenId | list[TokenId] | None = None
    pad_token_id: TokenId | None = None
    # Families without windows have these keys, too: Hugging Face's cache drops positions outside of them.
    is_causal: bool | None = None
    attention_chunk_size: NumPositions | None = None
    sliding_window: NumPositions | None = None
    layer_types: list[str] | None = None

    def shared(self) -> dict[str, Any]:
        """As `ModelConfig` has them; ValueError for attention over other positions than those before a token."""
        if self.is_causal is False:
            raise ValueError("is_causal=false is not supported: a token sees those before it only")
        if self.attention_chunk_size is not None and self.attention_chunk_size < self.num_positions:
            raise ValueError(f"attention_chunk_size={self.attention_chunk_size} is not supported; null: no chunks")
        return {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "max_position_embeddings": self.num_positions,
            "bos_token_id": self.bos_token_id,
            "eos_token_ids": tuple(token_ids(self.eos_token_id)),
            "pad_token_id": self.pad_token_id,
        }

    def refuse_windows(self, model_type: str) -> None:
        """ValueError for a window in a family that has none."""
        if self.sliding_window is not None and self.sliding_window < self.num_positions:
            raise ValueError(
                f"sliding_window={self.sliding_window} is not supported of model_type {model_type!r}; set it to null "
                "if a token sees all before it; model_type 'mistral' and 'qwen2' have windows"
            )
        if others := sorted(set(self.layer_types or ()) - {"full_attention"}):
            raise ValueError(f"layer_types has {others[0]!r}, which is not supported of model_type {model_type!r}")

    @property
    def num_positions(self) -> int:
        """The context."""
        return self.max_position_embeddings or self.default_positions

    @property
    def size_of_head(self) -> int:
        """Where the file does not say it."""
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} is not a multiple of num_attention_heads={self.num_attention_heads}"
            )
        return self.hidden_size // self.num_attention_heads


def shared_keys(config: ModelConfig, architecture: str) -> dict[str, Any]:
    """The way back from `HfConfig.shared`, and the name of Hugging Face's class."""
    names = (
        "model_type", "vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings",
        "tie_word_embeddings", "bos_token_id", "pad_token_id",
    )  # fmt: skip
    eos: int | list[int] | None = list(config.eos_token_ids)
    if len(config.eos_token_ids) < 2:
        eos = config.eos_token_ids[0] if config.eos_token_ids else None
    return {
        **{name: getattr(config, name) for name in names},
        "num_attention_heads": config.layers[0].attention.num_attention_heads,
        "eos_token_id": eos,
        "architectures": [architecture],
    }


def token_ids(value: Any) -> Any:
    """Several token ids, of what may be one or none."""
    return () if value is None else (value,) if isinstance(value, int) else value


def activation(name: Any) -> Any:
    """An activation as the specs spell it; ValueError for one that they do not have."""
    found = SPELLINGS.get(name, name) if isinstance(name, str) else None
    if found not in get_args(Activation):
        raise ValueError(f"activation {name!r} is not supported; supported: silu, swish, relu, gelu")
    return found
