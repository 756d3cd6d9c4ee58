"""OPT (Zhang et al. 2022)."""

from typing import Any

import msgspec

from data.files import convert_json
from modules.config import ModelConfig
from modules.families.family import Family, HfConfig, Rename, Transpose, activation, shared_keys
from modules.specs import Dense, Grouped, LayerSpec, Size


class OptConfig(HfConfig, kw_only=True):
    """OPT's keys."""

    ffn_dim: Size
    word_embed_proj_dim: Size | None = None
    activation_function: str = "relu"
    do_layer_norm_before: bool = True
    layer_norm_elementwise_affine: bool = True
    remove_final_layer_norm: bool = msgspec.field(default=False, name="_remove_final_layer_norm")
    enable_bias: bool = True


def _parse(hf: dict[str, Any]) -> ModelConfig:
    read = convert_json(hf, OptConfig, "config")
    read.refuse_windows("opt")
    layer = LayerSpec(
        attention=Grouped(
            num_attention_heads=read.num_attention_heads,
            num_key_value_heads=read.num_attention_heads,
            head_dim=read.size_of_head,
            qkv_bias=read.enable_bias,
            output_bias=read.enable_bias,
        ),
        feed_forward=Dense(
            intermediate_size=read.ffn_dim,
            gated=False,
            activation=activation(read.activation_function),
            bias=read.enable_bias,
        ),
    )
    return ModelConfig(
        **read.shared(),
        model_type="opt",
        layers=(layer,) * read.num_hidden_layers,
        norm="layer",
        norm_eps=1e-5,
        norm_affine=read.layer_norm_elementwise_affine,
        norm_placement="pre" if read.do_layer_norm_before else "post",
        final_norm=read.do_layer_norm_before and not read.remove_final_layer_norm,
        position_embedding_offset=2,  # fairseq's
        tie_word_embeddings=read.tie_word_embeddings is not False,
        word_embed_proj_dim=read.word_embed_proj_dim or read.hidden_size,
    )


def _write(config: ModelConfig) -> dict[str, Any]:
    feed_forward = config.layers[0].feed_forward
    return {
        **shared_keys(config, "OPTForCausalLM"),
        "ffn_dim": feed_forward.intermediate_size,
        "word_embed_proj_dim": config.word_embed_proj_dim,
        "activation_function": feed_forward.activation,
        "do_layer_norm_before": config.pre_norm,
        "layer_norm_elementwise_affine": config.norm_affine,
        "_remove_final_layer_norm": config.pre_norm and not config.final_norm,
        "enable_bias": config.layers[0].attention.qkv_bias,
        "dropout": 0.0,
    }


OPT = Family(
    parse=_parse,
    write=_write,
    prefixes=("model.decoder.", "decoder.", ""),
    embeddings=(
        Rename("embeddings.tokens", "embed_tokens"),
        Rename("embeddings.positions", "embed_positions"),
        Rename("embeddings.project_in", "project_in"),
    ),
    head=(Rename("lm_head", "lm_head"), Rename("project_out", "project_out")),
    attention=(
        Rename("q_proj", "self_attn.q_proj"),
        Rename("k_proj", "self_attn.k_proj"),
        Rename("v_proj", "self_attn.v_proj"),
        Transpose("o_proj", "self_attn.out_proj"),
    ),
    feed_forward=(Rename("up_proj", "fc1"), Transpose("down_proj", "fc2")),
    attention_norm="self_attn_layer_norm",
    feed_forward_norm="final_layer_norm",
    final_norm="final_layer_norm",
)
