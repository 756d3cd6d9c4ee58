"""The `config.json` of a model that we made ourselves: the way back from `ModelConfig.from_hf`.

A model that is a Llama or an OPT is written as one, so that Hugging Face's classes run it. A mixture of both (a gated
MLP with learned positions, say) has no class there: its file holds the fields of `ModelConfig` under their names.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from modules.config import ModelConfig, flat_fields
from modules.specs import Rope


def to_hf_config(config: ModelConfig) -> dict[str, Any]:
    """What `ModelConfig.from_hf` reads as this configuration. ValueError for a family that would not compute it."""
    hf = _WRITERS[config.model_type](config)
    if (read := ModelConfig.from_hf(hf)) != config:
        ours, theirs = flat_fields(config) or config, flat_fields(read)
        fields = (field.name for field in dataclasses.fields(ours))
        lost = (name for name in fields if getattr(theirs, name, None) != getattr(ours, name))
        raise ValueError(
            f"config: model_type {config.model_type!r} cannot have "
            f"{', '.join(f'{name}={getattr(ours, name)!r}' for name in lost)}; use model_type 'decoder'"
        )
    return hf


def in_family(config: ModelConfig) -> ModelConfig:
    """The same configuration as the family that computes it; of a mixture as `decoder`."""
    for model_type, write in _WRITERS.items():
        named = dataclasses.replace(config, model_type=model_type)
        try:
            fits = ModelConfig.from_hf(write(named)) == named
        except ValueError:  # a shape that this family does not allow
            fits = False
        if fits:
            return named
    raise AssertionError("a mixture can be anything")


def _shared_keys(config: ModelConfig) -> dict[str, Any]:
    """What both families spell alike."""
    names = (
        "model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
        "max_position_embeddings", "tie_word_embeddings", "bos_token_id", "pad_token_id",
    )  # fmt: skip
    eos: int | list[int] | None = list(config.eos_token_ids)
    if len(config.eos_token_ids) < 2:
        eos = config.eos_token_ids[0] if config.eos_token_ids else None
    return {**{name: getattr(config, name) for name in names}, "eos_token_id": eos}


def rope_keys(theta: float, scaling: dict[str, Any] | None) -> dict[str, Any]:
    """Rotary positions as transformers 5 reads them, and as 4 does, which without its own keys takes theta 10,000."""
    return {
        "rope_theta": theta,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_theta": theta, **(scaling or {"rope_type": "default"})},
    }


def _to_llama(config: ModelConfig) -> dict[str, Any]:
    attention, feed_forward = config.layers[0].attention, config.layers[0].feed_forward
    rope, scaling = attention.rope or Rope(), None
    if rope.scaling is not None:
        values = dataclasses.asdict(rope.scaling)
        kind = values.pop("kind")
        scaling = {"rope_type": kind, **(values if kind == "llama3" else {"factor": values["factor"]})}
    return {
        **_shared_keys(config),
        "architectures": ["LlamaForCausalLM"],
        "intermediate_size": feed_forward.intermediate_size,
        "num_key_value_heads": attention.num_key_value_heads,
        "head_dim": attention.head_dim,
        "hidden_act": feed_forward.activation,
        "rms_norm_eps": config.norm_eps,
        **rope_keys(rope.theta, scaling),
        "attention_bias": attention.qkv_bias,
        "mlp_bias": feed_forward.bias,
    }


def _to_opt(config: ModelConfig) -> dict[str, Any]:
    attention, feed_forward = config.layers[0].attention, config.layers[0].feed_forward
    return {
        **_shared_keys(config),
        "architectures": ["OPTForCausalLM"],
        "ffn_dim": feed_forward.intermediate_size,
        "word_embed_proj_dim": config.word_embed_proj_dim,
        "activation_function": feed_forward.activation,
        "do_layer_norm_before": config.pre_norm,
        "layer_norm_elementwise_affine": config.norm_affine,
        "_remove_final_layer_norm": config.pre_norm and not config.final_norm,
        "enable_bias": attention.qkv_bias,
        "dropout": 0.0,
    }


def _to_fields(config: ModelConfig) -> dict[str, Any]:
    flat = flat_fields(config)
    if flat is None:
        raise ValueError("config: model_type 'decoder' needs layers that are alike, without a window")
    return {**dataclasses.asdict(flat), "eos_token_ids": list(config.eos_token_ids)}


# Families first: in_family takes the first that fits.
_WRITERS: dict[str, Callable[[ModelConfig], dict[str, Any]]] = {
    "llama": _to_llama,
    "opt": _to_opt,
    "decoder": _to_fields,
}
