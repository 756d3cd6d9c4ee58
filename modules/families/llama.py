"""Llama (Touvron et al. 2023; Llama 3), and what the families that descend from it share."""

import dataclasses
from typing import Any, Self

import msgspec

from data.files import convert_json
from modules.config import Epsilon, ModelConfig
from modules.families.family import Family, Gguf, HfConfig, Rename, Transpose, activation, shared_keys
from modules.specs import Dense, Grouped, LayerSpec, NumPositions, Positive, Rope, RopeScaling, Size

GGUF_LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}


class HfRope(msgspec.Struct, kw_only=True):
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
        if self.rope_type is not None and self.type not in (None, self.rope_type):
            raise ValueError(f"rope type is {self.type!r}, but {self.rope_type!r} as rope_type; make them one")
        return self.rope_type or self.type or "default"


class LlamaConfig(HfConfig, kw_only=True):
    """Keys that Llama and its descendants have."""

    intermediate_size: Size
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    hidden_act: str = "silu"
    rms_norm_eps: Epsilon = 1e-6
    rope_parameters: HfRope | None = None
    rope_scaling: HfRope | None = None
    rope_theta: Positive | None = None
    partial_rotary_factor: Positive | None = None
    original_max_position_embeddings: NumPositions | None = None
    attention_bias: bool | None = None
    mlp_bias: bool | None = None

    @classmethod
    def read(cls, hf: dict[str, Any]) -> Self:
        """Of a `config.json`; ValueError for rotary keys that are of no kind that there is here."""
        read = convert_json(hf, cls, "config")
        read._rope()  # says what kinds there are
        for name in ("rope_parameters", "rope_scaling"):
            if unknown := (hf.get(name) or {}).keys() - set(HfRope.__struct_fields__):
                raise ValueError(f"{name} has an unknown key {', '.join(sorted(unknown))}")
        return read

    def layer(self, *, qkv_bias: bool, output_bias: bool, mlp_bias: bool) -> LayerSpec:
        """A layer, without a window."""
        return LayerSpec(
            attention=Grouped(
                num_attention_heads=self.num_attention_heads,
                num_key_value_heads=self.num_key_value_heads or self.num_attention_heads,
                head_dim=self.head_dim or self.size_of_head,
                qkv_bias=qkv_bias,
                output_bias=output_bias,
                rope=self._rope(),
            ),
            feed_forward=Dense(
                intermediate_size=self.intermediate_size,
                gated=True,
                activation=activation(self.hidden_act),
                bias=mlp_bias,
            ),
        )

    def model(self, model_type: str, layers: tuple[LayerSpec, ...]) -> ModelConfig:
        """The model of these layers."""
        return ModelConfig(
            **self.shared(),
            model_type=model_type,
            layers=layers,
            norm="rms",
            norm_eps=self.rms_norm_eps,
            tie_word_embeddings=bool(self.tie_word_embeddings),
            word_embed_proj_dim=self.hidden_size,
        )

    def _rope(self) -> Rope:
        """From `rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling` (hub files). ValueError where a file
        has both and they differ: readers of either would compute different models."""
        newer, older = self.rope_parameters, self.rope_scaling
        theta = self.rope_theta
        for name, rope in (("rope_scaling", older), ("rope_parameters", newer)):
            if rope is not None and rope.rope_theta is not None:
                if theta not in (None, rope.rope_theta):
                    raise ValueError(f"rope_theta is {theta}, but {rope.rope_theta} in {name}; make them one")
                theta = rope.rope_theta
        if newer is not None and older is not None and self._scaling(older) != self._scaling(newer):
            raise ValueError("rope_scaling differs from rope_parameters; make them one")
        parameters = newer or older or HfRope()
        if (parameters.partial_rotary_factor or self.partial_rotary_factor or 1.0) != 1.0:
            raise ValueError("partial_rotary_factor other than 1.0 is not supported")
        return Rope(theta=theta or 10000.0, scaling=self._scaling(parameters))

    def _scaling(self, rope: HfRope) -> RopeScaling | None:
        if rope.kind == "default":
            if rope.rope_type is None and rope.type is None and rope.factor not in (None, 1.0):
                raise ValueError(f"rotary positions have factor={rope.factor}, but no rope_type; say linear or llama3")
            return None
        names = {"linear": ["factor"], "llama3": ["factor", "low_freq_factor", "high_freq_factor"]}.get(rope.kind)
        if names is None:
            raise ValueError(f"rope type {rope.kind!r} is not supported; supported: default, linear, llama3")
        values: dict[str, Any] = {name: getattr(rope, name) for name in names}
        if missing := [name for name, value in values.items() if value is None]:
            raise ValueError(f"rope type {rope.kind!r} needs {', '.join(missing)}")
        if rope.kind == "llama3":
            # Beside the scaling, it wins over the one in it, as in transformers.
            values["original_max_position_embeddings"] = (
                self.original_max_position_embeddings or rope.original_max_position_embeddings or self.num_positions
            )
        return RopeScaling(kind=rope.kind, **values)  # type: ignore[arg-type]


def llama_keys(config: ModelConfig, architecture: str) -> dict[str, Any]:
    """The way back from `LlamaConfig`, without the biases."""
    attention, feed_forward = config.layers[0].attention, config.layers[0].feed_forward
    return {
        **shared_keys(config, architecture),
        "intermediate_size": feed_forward.intermediate_size,
        "num_key_value_heads": attention.num_key_value_heads,
        "head_dim": attention.head_dim,
        "hidden_act": feed_forward.activation,
        "rms_norm_eps": config.norm_eps,
        **rope_keys(attention.rope or Rope()),
    }


def rope_keys(rope: Rope) -> dict[str, Any]:
    """Rotary positions as transformers 5 reads them, and as 4 does, which without its own keys takes theta 10,000."""
    scaling = None
    if rope.scaling is not None:
        values = dataclasses.asdict(rope.scaling)
        kind = values.pop("kind")
        scaling = {"rope_type": kind, **(values if kind == "llama3" else {"factor": values["factor"]})}
    return {
        "rope_theta": rope.theta,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_theta": rope.theta, **(scaling or {"rope_type": "default"})},
    }


def _parse(hf: dict[str, Any]) -> ModelConfig:
    read = LlamaConfig.read(hf)
    read.refuse_windows("llama")
    has_bias = bool(read.attention_bias)
    layer = read.layer(qkv_bias=has_bias, output_bias=has_bias, mlp_bias=bool(read.mlp_bias))
    return read.model("llama", (layer,) * read.num_hidden_layers)


def _write(config: ModelConfig) -> dict[str, Any]:
    layer = config.layers[0]
    biases = {"attention_bias": layer.attention.qkv_bias, "mlp_bias": layer.feed_forward.bias}
    return llama_keys(config, "LlamaForCausalLM") | biases


LLAMA = Family(
    parse=_parse,
    write=_write,
    prefixes=("model.", ""),
    embeddings=(Rename("embeddings.tokens", "embed_tokens"),),
    head=(Rename("lm_head", "lm_head"),),
    attention=(
        Rename("q_proj", "self_attn.q_proj"),
        Rename("k_proj", "self_attn.k_proj"),
        Rename("v_proj", "self_attn.v_proj"),
        Transpose("o_proj", "self_attn.o_proj"),
    ),
    feed_forward=(
        Rename("gate_proj", "mlp.gate_proj"),
        Rename("up_proj", "mlp.up_proj"),
        Transpose("down_proj", "mlp.down_proj"),
    ),
    attention_norm="input_layernorm",
    feed_forward_norm="post_attention_layernorm",
    final_norm="norm",
    gguf=Gguf(
        architecture="llama",
        hf_class="LlamaForCausalLM",
        unsaid={"attention_bias": False, "mlp_bias": False},
        layer=GGUF_LAYER,
        interleaved=True,
    ),
)
