"""The model's configuration, and the one place that knows how Hugging Face spells it.

Everything else reads values (`norm`, `layers`, ...), never a family's name. A `config.json` is checked
by its types: what has another type, or a size that no model has, is one line that names the key.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec

from data.files import convert_json
from modules.specs import Activation, Dense, Grouped, LayerSpec, NumPositions, Positive, Rope, RopeScaling, Size

NumLayers = Annotated[int, msgspec.Meta(ge=1, le=1000)]
TokenId = Annotated[int, msgspec.Meta(ge=-1, le=2**31)]  # some files say -1 for none
Epsilon = Annotated[float, msgspec.Meta(ge=0, le=1)]
ACTIVATIONS = {"silu": "silu", "swish": "silu", "relu": "relu", "gelu": "gelu"}
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
    norm_placement: Literal["pre", "post"] = "pre"  # before a block, or after its residual sum
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
        return _hash({"version": HASH_VERSION, **told(self)})

    def version_1_hash(self) -> str | None:
        """As the first version hashed it: all fields, of the set that it had. None for a model that it had none for."""
        flat = flat_fields(self)
        return None if flat is None else _hash(dataclasses.asdict(flat))

    def has_hash(self, found: str) -> bool:
        """Whether a manifest's `config_hash` names this configuration, whichever version wrote it."""
        return found in (self.config_hash(), self.version_1_hash())

    @staticmethod
    def from_hf(hf: Mapping[str, Any]) -> "ModelConfig":
        """Read a `config.json`: Hugging Face's (hub files and transformers 5 spellings) or ours of a mixture.

        Raises ValueError for any architecture or option that this decoder would not compute faithfully.
        """
        model_type = hf.get("model_type")
        if hf.get("quantization_config"):
            raise ValueError(
                "config: quantised checkpoints are not supported (quantization_config is set); convert the "
                "original bfloat16/float16 weights, or a GGUF file, which is dequantised"
            )
        if model_type == "llama":
            values = _from_llama(convert_json(dict(hf), _Llama, "config"))
        elif model_type == "opt":
            values = _from_opt(convert_json(dict(hf), _Opt, "config"))
        elif model_type == "decoder":
            values = _from_fields(hf)
        else:
            raise ValueError(f"config: model_type {model_type!r} is not supported; supported: llama, opt, decoder")
        flat = convert_json(values, FlatFields, "config")
        try:
            return flat.config()
        except ValueError as error:
            raise ValueError(f"config: {error}") from error

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
        return self._of_all_layers("feed_forward", "gated")

    @property
    def activation(self) -> Activation:
        return self._of_all_layers("feed_forward", "activation")

    @property
    def mlp_bias(self) -> bool:
        return self._of_all_layers("feed_forward", "bias")

    @property
    def num_attention_heads(self) -> int:
        return self._of_all_layers("attention", "num_attention_heads")

    @property
    def num_key_value_heads(self) -> int:
        return self._of_all_layers("attention", "num_key_value_heads")

    @property
    def queries_per_group(self) -> int:
        return self._of_all_layers("attention", "queries_per_group")

    @property
    def head_dim(self) -> int:
        return self._of_all_layers("attention", "head_dim")

    @property
    def rope(self) -> Rope | None:
        return self._of_all_layers("attention", "rope")

    @property
    def mlp_num_parameters(self) -> int:
        """Weights of one MLP's matrices (biases not counted): the 100 % of *MLP bytes read*."""
        return (3 if self.gated_mlp else 2) * self.hidden_size * self.intermediate_size


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


def told(spec: Any) -> dict[str, Any]:
    """What a spec says beyond its defaults, below the names of its class and fields: JSON, the text that is hashed."""
    values = {}
    for field in dataclasses.fields(spec):
        value = getattr(spec, field.name)
        if value == field.default:
            continue
        if dataclasses.is_dataclass(value):
            value = told(value)
        elif field.name == "layers":
            value = [told(layer) for layer in value]
        values[field.name] = value
    return {type(spec).__name__: values}


def _hash(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


class _Rope(msgspec.Struct, kw_only=True):
    """`rope_parameters` of transformers 5, or `rope_scaling` of older files."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: Positive | None = None
    factor: Positive | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    original_max_position_embeddings: NumPositions | None = None
    partial_rotary_factor: Positive | None = None

    @property
    def kind(self) -> str:
        return self.rope_type or self.type or "default"


class _Family(msgspec.Struct, kw_only=True):
    """What both families spell alike. Many a file has null where a default is meant."""

    vocab_size: Size
    hidden_size: Size
    num_hidden_layers: NumLayers
    num_attention_heads: Size
    max_position_embeddings: NumPositions | None = None
    tie_word_embeddings: bool | None = None
    bos_token_id: TokenId | None = None
    eos_token_id: TokenId | list[TokenId] | None = None
    pad_token_id: TokenId | None = None

    def values(self) -> dict[str, Any]:
        """As `ModelConfig` has them."""
        return {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "max_position_embeddings": self.max_position_embeddings or 2048,
            "bos_token_id": self.bos_token_id,
            "eos_token_ids": _token_ids(self.eos_token_id),
            "pad_token_id": self.pad_token_id,
        }

    @property
    def size_of_head(self) -> int:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"config: hidden_size={self.hidden_size} is not a multiple of "
                f"num_attention_heads={self.num_attention_heads}"
            )
        return self.hidden_size // self.num_attention_heads


class _Llama(_Family, kw_only=True):
    intermediate_size: Size
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    hidden_act: str = "silu"
    rms_norm_eps: Epsilon = 1e-6
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    rope_parameters: _Rope | None = None
    rope_scaling: _Rope | None = None
    rope_theta: Positive | None = None
    partial_rotary_factor: Positive | None = None
    original_max_position_embeddings: NumPositions | None = None


class _Opt(_Family, kw_only=True):
    ffn_dim: Size
    word_embed_proj_dim: Size | None = None
    activation_function: str = "relu"
    do_layer_norm_before: bool = True
    layer_norm_elementwise_affine: bool = True
    remove_final_layer_norm: bool = msgspec.field(default=False, name="_remove_final_layer_norm")
    enable_bias: bool = True


def _token_ids(value: Any) -> Any:
    """A list of token ids, of what may be one or none."""
    return () if value is None else (value,) if isinstance(value, int) else value


def _activation(name: Any) -> Any:
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ValueError(f"config: activation {name!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _rope(hf: _Llama) -> tuple[float, dict[str, Any] | None]:
    """Theta and scaling from `rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling` (hub files).

    ValueError where a file has both and they differ: readers of either would compute different models.
    """
    newer, older = hf.rope_parameters, hf.rope_scaling
    theta = hf.rope_theta or (older.rope_theta if older is not None else None) or 10000.0
    if newer is not None:
        if newer.rope_theta is not None:
            if hf.rope_theta not in (None, newer.rope_theta):
                raise ValueError(
                    f"config: rope_theta is {hf.rope_theta}, but {newer.rope_theta} in rope_parameters; make them one"
                )
            theta = newer.rope_theta
        if older is not None and _scaling(hf, older) != _scaling(hf, newer):
            raise ValueError("config: rope_scaling differs from rope_parameters; make them one")
    parameters = newer or older or _Rope()
    if (parameters.partial_rotary_factor or hf.partial_rotary_factor or 1.0) != 1.0:
        raise ValueError("config: partial_rotary_factor other than 1.0 is not supported")
    return theta, _scaling(hf, parameters)


def _scaling(hf: _Llama, rope: _Rope) -> dict[str, Any] | None:
    if rope.kind == "default":
        return None
    names = {"linear": ["factor"], "llama3": ["factor", "low_freq_factor", "high_freq_factor"]}.get(rope.kind)
    if names is None:
        raise ValueError(f"config: rope type {rope.kind!r} is not supported; supported: default, linear, llama3")
    values = {name: getattr(rope, name) for name in names}
    if missing := [name for name, value in values.items() if value is None]:
        raise ValueError(f"config: rope type {rope.kind!r} needs {', '.join(missing)}")
    if rope.kind == "llama3":
        # Beside the scaling, it wins over the one in it, as in transformers.
        values["original_max_position_embeddings"] = (
            hf.original_max_position_embeddings
            or rope.original_max_position_embeddings
            or hf.max_position_embeddings
            or 2048
        )
    return {"kind": rope.kind, **values}


def _from_llama(hf: _Llama) -> dict[str, Any]:
    theta, scaling = _rope(hf)
    return hf.values() | {
        "model_type": "llama",
        "intermediate_size": hf.intermediate_size,
        "num_key_value_heads": hf.num_key_value_heads or hf.num_attention_heads,
        "head_dim": hf.head_dim or hf.size_of_head,
        "norm": "rms",
        "norm_eps": hf.rms_norm_eps,
        "activation": _activation(hf.hidden_act),
        "gated_mlp": True,
        "positions": "rotary",
        "rope_theta": theta,
        "rope_scaling": scaling,
        "attention_bias": bool(hf.attention_bias),
        "mlp_bias": bool(hf.mlp_bias),
        "tie_word_embeddings": bool(hf.tie_word_embeddings),
        "word_embed_proj_dim": hf.hidden_size,
    }


def _from_opt(hf: _Opt) -> dict[str, Any]:
    return hf.values() | {
        "model_type": "opt",
        "intermediate_size": hf.ffn_dim,
        "num_key_value_heads": hf.num_attention_heads,
        "head_dim": hf.size_of_head,
        "norm": "layer",
        "norm_eps": 1e-5,
        "norm_affine": hf.layer_norm_elementwise_affine,
        "pre_norm": hf.do_layer_norm_before,
        "final_norm": hf.do_layer_norm_before and not hf.remove_final_layer_norm,
        "activation": _activation(hf.activation_function),
        "gated_mlp": False,
        "positions": "learned",
        "attention_bias": hf.enable_bias,
        "mlp_bias": hf.enable_bias,
        "tie_word_embeddings": hf.tie_word_embeddings is not False,
        "word_embed_proj_dim": hf.word_embed_proj_dim or hf.hidden_size,
    }


def _from_fields(hf: Mapping[str, Any]) -> dict[str, Any]:
    """A mixture's `config.json`: these fields under their own names (see families.registry)."""
    names = {field.name for field in dataclasses.fields(FlatFields)}
    known = {name: value for name, value in hf.items() if name in names}
    if "activation" in known:
        known["activation"] = _activation(known["activation"])
    _check_choices(FlatFields, known)
    if isinstance(scaling := known.get("rope_scaling"), Mapping):
        _check_choices(RopeScaling, scaling)
        if unknown := scaling.keys() - {field.name for field in dataclasses.fields(RopeScaling)}:
            raise ValueError(f"config: rope_scaling has an unknown key {', '.join(sorted(unknown))}")
    return known | {"eos_token_ids": _token_ids(known.get("eos_token_ids"))}


def _check_choices(owner: type, values: Mapping[str, Any]) -> None:
    for field in dataclasses.fields(owner):
        if get_origin(field.type) is Literal and (value := values.get(field.name)) not in (None, *get_args(field.type)):
            allowed = ", ".join(get_args(field.type))
            raise ValueError(f"config: {field.name} {value!r} is not supported; supported: {allowed}")
