"""Mistral (Jiang et al. 2023): Llama without biases, whose layers may all have a sliding window.

Its GGUF files say that they are Llama's, and have no window.
"""

from dataclasses import replace
from typing import Any, ClassVar

from modules.config import ModelConfig
from modules.families.llama import LLAMA, LlamaConfig, llama_keys
from modules.specs import NumPositions, Size, Sliding


class MistralConfig(LlamaConfig, kw_only=True):
    """Mistral's keys. A file that lacks one means the default of Hugging Face's class; a null window is none."""

    default_positions: ClassVar[int] = 131072
    num_key_value_heads: Size | None = 8
    sliding_window: NumPositions | None = 4096
    layer_types: list[str] | None = None


def _parse(hf: dict[str, Any]) -> ModelConfig:
    read = MistralConfig.read(hf)
    if read.layer_types is not None:
        raise ValueError("layer_types is not supported: all layers of a Mistral have the same window")
    layer = read.layer(qkv_bias=False, output_bias=False, mlp_bias=False)
    window = None if read.sliding_window is None else Sliding(size=read.sliding_window)
    layer = replace(layer, attention=replace(layer.attention, window=window))
    return read.model("mistral", (layer,) * read.num_hidden_layers)


def _write(config: ModelConfig) -> dict[str, Any]:
    window = config.layers[0].attention.window
    return llama_keys(config, "MistralForCausalLM") | {"sliding_window": None if window is None else window.size}


MISTRAL = replace(LLAMA, parse=_parse, write=_write, gguf=None)
