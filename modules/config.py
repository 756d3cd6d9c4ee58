"""A model's configuration: its layers, what is the model's as a whole, and the hash that names it on disk.

Other code reads values (`norm`, `layers`, ...), never a family's name. How a `config.json` spells them: see families.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from modules.specs import (
    Activation,
    Dense,
    Grouped,
    LayerSpec,
    NormPlacement,
    NumPositions,
    Positive,
    Rope,
    RopeScaling,
    Size,
)

NumLayers = Annotated[int, msgspec.Meta(ge=1, le=1000)]
TokenId = Annotated[int, msgspec.Meta(ge=-1, le=2**31)]  # some files say -1 for none
Epsilon = Annotated[float, msgspec.Meta(ge=0, le=1)]
HASH_VERSION = 2


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape and kind of one decoder-only model: its layers, and what is the model's as a whole. Names are Hugging
    Face's. Frozen, hashable.

    `model_type` is the family whose names its tensors have. `position_embedding_offset`: rows before position 0 in the
    table of learned positions, None where there is no such table.
    """

    model_type: str
    vocab_size: Size
    hidden_size: Size
    layers: tuple[LayerSpec, ...]
    max_position_embeddings: NumPositions
    norm: Literal["rms", "layer"]
    norm_eps: Epsilon
    norm_affine: bool = True
    norm_placement: NormPlacement = "pre"
    final_norm: bool = True
    position_embedding_offset: int | None = None
    word_embed_proj_dim: Size
    tie_word_embeddings: bool = False
    bos_token_id: TokenId | None = None
    eos_token_ids: tuple[TokenId, ...] = ()
    pad_token_id: TokenId | None = None

    @property
    def num_hidden_layers(self) -> int:
        """Layers of the whole model."""
        return len(self.layers)

    @property
    def pre_norm(self) -> bool:
        """Whether a block reads the normed stream, rather than the stream itself."""
        return self.norm_placement == "pre"

    def config_hash(self) -> str:
        """Twelve hex digits that name this configuration: predictors and stores carry it.

        Only what differs from a default is hashed, so a new field with a default changes no hash.
        """
        return _hash({"version": HASH_VERSION, **non_defaults(self)})

    def version_1_hash(self) -> str | None:
        """As the first version hashed it: all fields, of the set that it had. None for a model that it had none for."""
        flat = flat_fields(self)
        return None if flat is None else _hash(dataclasses.asdict(flat))

    def has_hash(self, found: str) -> bool:
        """Whether a manifest's `config_hash` names this configuration, whichever version wrote it."""
        return found in (self.config_hash(), self.version_1_hash())

    # What layers that are all alike have; ValueError where they differ.

    def _of_all_layers(self, part: str, name: str) -> Any:
        found = {getattr(getattr(layer, part), name) for layer in self.layers}
        if len(found) > 1:
            raise ValueError(f"{name} differs from layer to layer: {found}")
        return found.pop()

    @property
    def intermediate_size(self) -> int:
        return self._of_all_layers("feed_forward", "intermediate_size")

    @property
    def gated_mlp(self) -> bool:
        """Whether every layer's MLP has a gate."""
        return all(layer.feed_forward.gated for layer in self.layers)

    @property
    def activation(self) -> Activation:
        return self._of_all_layers("feed_forward", "activation")

    @property
    def num_attention_heads(self) -> int:
        return self._of_all_layers("attention", "num_attention_heads")

    @property
    def num_key_value_heads(self) -> int:
        return self._of_all_layers("attention", "num_key_value_heads")

    @property
    def head_dim(self) -> int:
        return self._of_all_layers("attention", "head_dim")


@dataclass(frozen=True, kw_only=True)
class FlatFields:
    """A model of equal layers in one set of fields: what version 1 hashed, and the `config.json` of a mixture that no
    family of Hugging Face's has. Frozen: no field is ever added, and no default changed.
    """

    model_type: Literal["llama", "opt", "decoder"]
    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: NumLayers
    num_attention_heads: Size
    num_key_value_heads: Size
    head_dim: Size
    max_position_embeddings: NumPositions
    norm: Literal["rms", "layer"]
    norm_eps: Epsilon
    norm_affine: bool = True
    pre_norm: bool = True
    final_norm: bool = True
    activation: Activation
    gated_mlp: bool
    positions: Literal["rotary", "learned"]
    rope_theta: Positive = 10000.0
    rope_scaling: RopeScaling | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    word_embed_proj_dim: Size
    bos_token_id: TokenId | None = None
    eos_token_ids: tuple[TokenId, ...] = ()
    pad_token_id: TokenId | None = None

    def config(self) -> ModelConfig:
        """The configuration that these fields mean; ValueError for sizes that do not go together."""
        is_rotary = self.positions == "rotary"
        layer = LayerSpec(
            attention=Grouped(
                num_attention_heads=self.num_attention_heads,
                num_key_value_heads=self.num_key_value_heads,
                head_dim=self.head_dim,
                qkv_bias=self.attention_bias,
                output_bias=self.attention_bias,
                rope=Rope(theta=self.rope_theta, scaling=self.rope_scaling) if is_rotary else None,
            ),
            feed_forward=Dense(
                intermediate_size=self.intermediate_size,
                gated=self.gated_mlp,
                activation=self.activation,
                bias=self.mlp_bias,
            ),
        )
        own = {field.name for field in dataclasses.fields(ModelConfig)} & vars(self).keys()
        return ModelConfig(
            **{name: getattr(self, name) for name in own},
            layers=(layer,) * self.num_hidden_layers,
            norm_placement="pre" if self.pre_norm else "post",
            position_embedding_offset=None if is_rotary else 2,
        )


def flat_fields(config: ModelConfig) -> FlatFields | None:
    """The way back from `FlatFields.config`; None for a model that they cannot say."""
    layer = config.layers[0]
    attention, feed_forward, rope = layer.attention, layer.feed_forward, layer.attention.rope
    rotary: dict[str, Any] = {} if rope is None else {"rope_theta": rope.theta, "rope_scaling": rope.scaling}
    own = {field.name for field in dataclasses.fields(FlatFields)} & vars(config).keys()
    flat = FlatFields(
        **{name: getattr(config, name) for name in own},
        intermediate_size=feed_forward.intermediate_size,
        num_hidden_layers=len(config.layers),
        num_attention_heads=attention.num_attention_heads,
        num_key_value_heads=attention.num_key_value_heads,
        head_dim=attention.head_dim,
        pre_norm=config.norm_placement == "pre",
        activation=feed_forward.activation,
        gated_mlp=feed_forward.gated,
        positions="learned" if rope is None else "rotary",
        **rotary,
        attention_bias=attention.qkv_bias,
        mlp_bias=feed_forward.bias,
    )
    return flat if flat.config() == config else None


def non_defaults(spec: Any) -> dict[str, Any]:
    """What a spec says beyond its defaults, below the names of its class and fields: JSON, the text that is hashed."""
    values = {}
    for field in dataclasses.fields(spec):
        value = getattr(spec, field.name)
        if value == field.default:
            continue
        if dataclasses.is_dataclass(value):
            value = non_defaults(value)
        elif field.name == "layers":
            value = [non_defaults(layer) for layer in value]
        values[field.name] = value
    return {type(spec).__name__: values}


def _hash(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]
