"""Qwen2 and Qwen2.5 (Yang et al. 2024): Llama with biases of q, k and v; its last layers can have a sliding window."""

from dataclasses import replace
from typing import Any, ClassVar, Literal

from modules.config import ModelConfig
from modules.families.family import Gguf
from modules.families.llama import GGUF_LAYER, LLAMA, LlamaConfig, llama_keys
from modules.specs import NumPositions, Size, Sliding

Kind = Literal["full_attention", "sliding_attention"]
FULL: Kind = "full_attention"
SLIDING: Kind = "sliding_attention"


class Qwen2Config(LlamaConfig, kw_only=True):
    """Qwen2's keys. A file that lacks one means the default of Hugging Face's class."""

    default_positions: ClassVar[int] = 32768
    num_key_value_heads: Size | None = 32
    use_sliding_window: bool = False
    sliding_window: NumPositions | None = 4096
    max_window_layers: int = 28
    layer_types: list[Kind] | None = None  # type: ignore[assignment]

    def windows(self) -> list[Sliding | None]:
        """The window of each layer: of those from `max_window_layers` on, unless the file lists them."""
        size, count = self.sliding_window if self.use_sliding_window else None, self.num_hidden_layers
        first = count if size is None else max(0, self.max_window_layers)
        kinds = self.layer_types
        if kinds is None:
            kinds = [SLIDING if idx >= first else FULL for idx in range(count)]
        if len(kinds) != count:
            raise ValueError(f"layer_types lists {len(kinds)} layers, num_hidden_layers is {count}")
        if size is None and SLIDING in kinds:
            raise ValueError(f"layer_types has {SLIDING!r}, but use_sliding_window or sliding_window says no")
        return [Sliding(size=size) if size is not None and kind == SLIDING else None for kind in kinds]


def _parse(hf: dict[str, Any]) -> ModelConfig:
    read = Qwen2Config.read(hf)
    layer = read.layer(qkv_bias=True, output_bias=False, mlp_bias=False)
    layers = (replace(layer, attention=replace(layer.attention, window=window)) for window in read.windows())
    return read.model("qwen2", tuple(layers))


def _write(config: ModelConfig) -> dict[str, Any]:
    windows = [layer.attention.window for layer in config.layers]
    sizes = sorted({window.size for window in windows if window is not None})
    return llama_keys(config, "Qwen2ForCausalLM") | {
        "use_sliding_window": bool(sizes),
        "sliding_window": sizes[0] if sizes else None,
        "max_window_layers": windows.index(next(filter(None, windows))) if sizes else len(windows),
        "layer_types": [FULL if window is None else SLIDING for window in windows],
    }


QWEN2 = replace(
    LLAMA,
    parse=_parse,
    write=_write,
    gguf=Gguf(
        architecture="qwen2",
        hf_class="Qwen2ForCausalLM",
        unsaid={"use_sliding_window": False},
        layer=GGUF_LAYER | {f"self_attn.{name}_proj.bias": f"attn_{name}.bias" for name in "qkv"},
        interleaved=False,
    ),
)
