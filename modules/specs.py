"""What a layer is: frozen, hashable values. A block is built from its spec, and what follows from it is asked of the
block. Another kind of attention (latent, say) or of feed-forward block (experts) is another class beside these.

Names are Hugging Face's. None and False mean that the layer has no such thing.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

# Beyond every model, and small enough that a damaged number is told before anything is built of that size.
Size = Annotated[int, msgspec.Meta(ge=1, le=2**24)]
NumPositions = Annotated[int, msgspec.Meta(ge=1, le=2**31)]
Positive = Annotated[float, msgspec.Meta(gt=0, le=1e12)]
Activation = Literal["silu", "relu", "gelu"]
# Where a block's norm stands: before the block, or after its output has been added to the stream (OPT-350M).
# `modules.normalization.add_norm` is what it means.
NormPlacement = Literal["pre", "post"]


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched (`linear`: Chen et al. 2023; `llama3`: Llama 3.1 release)."""

    kind: Literal["linear", "llama3"]
    factor: Positive
    low_freq_factor: Positive = 1.0
    high_freq_factor: Positive = 4.0
    original_max_position_embeddings: NumPositions = 8192

    def __post_init__(self) -> None:
        if self.kind == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor={self.low_freq_factor} must be below high_freq_factor={self.high_freq_factor}"
            )


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary positions over the whole head (Su et al. 2021); halves are paired, as Hugging Face lays them out."""

    theta: Positive = 10000.0
    scaling: RopeScaling | None = None


@dataclass(frozen=True, kw_only=True)
class Sliding:
    """A query sees the last `size` positions, its own among them (Child et al. 2019; Mistral 7B)."""

    size: NumPositions


@dataclass(frozen=True, kw_only=True)
class Grouped:
    """Attention whose query heads share key-value heads in groups; `window` None: a query sees all before it."""

    num_attention_heads: Size
    num_key_value_heads: Size
    head_dim: Size
    qkv_bias: bool = False
    output_bias: bool = False
    rope: Rope | None = None
    window: Sliding | None = None

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if self.rope is not None and self.head_dim % 2:
            raise ValueError(f"rotary positions need an even head_dim, got {self.head_dim}")

    @property
    def queries_per_group(self) -> int:
        """Query heads that share one key-value head."""
        return self.num_attention_heads // self.num_key_value_heads

    @property
    def num_units(self) -> int:
        """Key-value groups, which can be skipped."""
        return self.num_key_value_heads

    def num_weights(self, hidden_size: int) -> int:
        """Of all matrices (biases not counted)."""
        return 2 * hidden_size * self.head_dim * (self.num_attention_heads + self.num_key_value_heads)

    def num_unit_weights(self, hidden_size: int) -> int:
        """Of the matrices of which a skipped unit is not read: those of queries and output."""
        return 2 * hidden_size * self.head_dim * self.num_attention_heads


@dataclass(frozen=True, kw_only=True)
class Dense:
    """A feed-forward block: down(act(gate(x)) * up(x)) if gated, else down(act(up(x)))."""

    intermediate_size: Size
    gated: bool
    activation: Activation
    bias: bool = False

    @property
    def num_units(self) -> int:
        """Neurons, which can be skipped."""
        return self.intermediate_size

    def num_weights(self, hidden_size: int) -> int:
        """Of all matrices (biases not counted): the 100 % of *MLP bytes read*."""
        return (2 + self.gated) * hidden_size * self.intermediate_size

    def num_unit_weights(self, hidden_size: int) -> int:
        """Of the matrices of which a skipped unit is not read: all."""
        return self.num_weights(hidden_size)


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One layer. Layers of a model may all differ."""

    attention: Grouped
    feed_forward: Dense

    def of(self, block: Literal["attention", "mlp"]) -> Grouped | Dense:
        """The spec of one of its blocks."""
        return self.attention if block == "attention" else self.feed_forward
