"""The model's configuration, and the one place that knows how Hugging Face spells it.

Everything else reads values (`norm`, `gated_mlp`, `pre_norm`, ...), never a family's name.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

ACTIVATIONS = {"silu": "silu", "swish": "silu", "relu": "relu", "gelu": "gelu"}


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched (`linear`: Chen et al. 2023; `llama3`: Llama 3.1 release)."""

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape and kind of one decoder-only model; names are Hugging Face's. Frozen, hashable, JSON-able."""

    model_type: Literal["llama", "opt", "decoder"]  # decoder: a mixture that no family of Hugging Face's has
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    norm: Literal["rms", "layer"]
    norm_eps: float
    norm_affine: bool = True
    pre_norm: bool = True
    final_norm: bool = True
    activation: Literal["silu", "relu", "gelu"]
    gated_mlp: bool
    positions: Literal["rotary", "learned"]
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    word_embed_proj_dim: int
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
            "word_embed_proj_dim",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"config: {name} must be a positive integer, got {value!r}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"config: num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if self.positions == "rotary" and self.head_dim % 2:
            raise ValueError(f"config: rotary positions need an even head_dim, got {self.head_dim}")

    @property
    def queries_per_group(self) -> int:
        """Query heads that share one key-value head."""
        return self.num_attention_heads // self.num_key_value_heads

    @property
    def mlp_num_parameters(self) -> int:
        """Weights of one MLP's matrices (biases not counted): the 100 % of *MLP bytes read*."""
        return (3 if self.gated_mlp else 2) * self.hidden_size * self.intermediate_size

    @property
    def position_embedding_offset(self) -> int:
        """Rows before position 0 in a learned position table (OPT keeps fairseq's two)."""
        return 2 if self.positions == "learned" else 0

    def config_hash(self) -> str:
        """Twelve hex digits that name this configuration: predictors and stores carry it."""
        return hashlib.sha256(json.dumps(dataclasses.asdict(self), sort_keys=True).encode()).hexdigest()[:12]

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
            return _from_llama(hf)
        if model_type == "opt":
            return _from_opt(hf)
        if model_type == "decoder":
            return _from_fields(hf)
        raise ValueError(f"config: model_type {model_type!r} is not supported; supported: llama, opt, decoder")


def _token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _activation(name: str) -> Any:
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ValueError(f"config: activation {name!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _rope(hf: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Theta and scaling from `rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling` (hub files)."""
    parameters = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
    theta = float(parameters.get("rope_theta", hf.get("rope_theta", 10000.0)))
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if parameters.get("partial_rotary_factor", hf.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ValueError("config: partial_rotary_factor other than 1.0 is not supported")
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling(kind="linear", factor=float(parameters["factor"]))
    if kind == "llama3":
        return theta, RopeScaling(
            kind="llama3",
            factor=float(parameters["factor"]),
            low_freq_factor=float(parameters["low_freq_factor"]),
            high_freq_factor=float(parameters["high_freq_factor"]),
            # Beside the scaling, it wins over the one in it, as in transformers.
            original_max_position_embeddings=int(
                hf.get("original_max_position_embeddings")
                or parameters.get("original_max_position_embeddings")
                or hf["max_position_embeddings"]
            ),
        )
    raise ValueError(f"config: rope type {kind!r} is not supported; supported: default, linear, llama3")


def _required(hf: Mapping[str, Any], *names: str) -> None:
    missing = [name for name in names if name not in hf]
    if missing:
        raise ValueError(f"config: missing {', '.join(missing)}")


def _from_llama(hf: Mapping[str, Any]) -> ModelConfig:
    _required(hf, "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    heads = hf["num_attention_heads"]
    theta, scaling = _rope(hf)
    return ModelConfig(
        model_type="llama",
        vocab_size=hf["vocab_size"],
        hidden_size=hf["hidden_size"],
        intermediate_size=hf["intermediate_size"],
        num_hidden_layers=hf["num_hidden_layers"],
        num_attention_heads=heads,
        num_key_value_heads=hf.get("num_key_value_heads") or heads,
        head_dim=hf.get("head_dim") or hf["hidden_size"] // heads,
        max_position_embeddings=hf.get("max_position_embeddings", 2048),
        norm="rms",
        norm_eps=hf.get("rms_norm_eps", 1e-6),
        activation=_activation(hf.get("hidden_act", "silu")),
        gated_mlp=True,
        positions="rotary",
        rope_theta=theta,
        rope_scaling=scaling,
        attention_bias=bool(hf.get("attention_bias", False)),
        mlp_bias=bool(hf.get("mlp_bias", False)),
        tie_word_embeddings=bool(hf.get("tie_word_embeddings", False)),
        word_embed_proj_dim=hf["hidden_size"],
        bos_token_id=hf.get("bos_token_id"),
        eos_token_ids=_token_ids(hf.get("eos_token_id")),
        pad_token_id=hf.get("pad_token_id"),
    )


def _from_opt(hf: Mapping[str, Any]) -> ModelConfig:
    _required(hf, "vocab_size", "hidden_size", "ffn_dim", "num_hidden_layers", "num_attention_heads")
    heads = hf["num_attention_heads"]
    if hf["hidden_size"] % heads:
        raise ValueError(f"config: hidden_size={hf['hidden_size']} is not a multiple of num_attention_heads={heads}")
    pre_norm = bool(hf.get("do_layer_norm_before", True))
    bias = bool(hf.get("enable_bias", True))
    return ModelConfig(
        model_type="opt",
        vocab_size=hf["vocab_size"],
        hidden_size=hf["hidden_size"],
        intermediate_size=hf["ffn_dim"],
        num_hidden_layers=hf["num_hidden_layers"],
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=hf["hidden_size"] // heads,
        max_position_embeddings=hf.get("max_position_embeddings", 2048),
        norm="layer",
        norm_eps=1e-5,
        norm_affine=bool(hf.get("layer_norm_elementwise_affine", True)),
        pre_norm=pre_norm,
        final_norm=pre_norm and not hf.get("_remove_final_layer_norm", False),
        activation=_activation(hf.get("activation_function", "relu")),
        gated_mlp=False,
        positions="learned",
        attention_bias=bias,
        mlp_bias=bias,
        tie_word_embeddings=bool(hf.get("tie_word_embeddings", True)),
        word_embed_proj_dim=hf.get("word_embed_proj_dim") or hf["hidden_size"],
        bos_token_id=hf.get("bos_token_id"),
        eos_token_ids=_token_ids(hf.get("eos_token_id")),
        pad_token_id=hf.get("pad_token_id"),
    )


def _from_fields(hf: Mapping[str, Any]) -> ModelConfig:
    """A mixture's `config.json`: these fields under their own names (see checkpoint_config)."""
    fields = {field.name: field for field in dataclasses.fields(ModelConfig)}
    known = {name: value for name, value in hf.items() if name in fields}
    _required(hf, *(name for name, field in fields.items() if field.default is dataclasses.MISSING))
    known["activation"] = _activation(known["activation"])
    known["eos_token_ids"] = _token_ids(known.get("eos_token_ids"))
    if (scaling := known.get("rope_scaling")) is not None:
        names = [field.name for field in dataclasses.fields(RopeScaling)]
        if not isinstance(scaling, Mapping) or set(scaling) - set(names) or not {"kind", "factor"} <= set(scaling):
            raise ValueError(
                f"config: rope_scaling must be null or have kind, factor and nothing else but {', '.join(names[2:])}, "
                f"got {scaling!r}"
            )
        _check_kinds(RopeScaling, scaling)
        known["rope_scaling"] = RopeScaling(**scaling)
    _check_kinds(ModelConfig, known)
    return ModelConfig(**known)


def _check_kinds(owner: type, values: Mapping[str, Any]) -> None:
    """ValueError for a value that is none of its field's kind: JSON has "no" for a boolean, too."""
    for field in dataclasses.fields(owner):
        if field.name not in values:
            continue
        value: Any = values[field.name]
        kind: Any = field.type
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        if get_origin(kind) is Literal:
            if value not in get_args(kind):
                allowed = ", ".join(get_args(kind))
                raise ValueError(f"config: {field.name} {value!r} is not supported; supported: {allowed}")
            continue
        wanted, holds = {
            bool: ("true or false", isinstance(value, bool)),
            float: ("a number", is_integer or isinstance(value, float)),
            int: ("an integer", is_integer),
            int | None: ("an integer or null", is_integer or value is None),
            tuple[int, ...]: (
                "a list of integers",
                isinstance(value, tuple) and all(type(token_id) is int for token_id in value),
            ),
        }.get(kind, ("", True))
        if not holds:
            raise ValueError(f"config: {field.name} must be {wanted}, got {value!r}")
