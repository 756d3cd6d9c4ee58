"""Tiny models of every supported kind, built with Hugging Face's own classes, every parameter drawn at random.

Biases and norms too: Hugging Face initialises those to zeros and ones, which hides a missing or misplaced one.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from modules.checkpoint import build_on_meta, load_weights
from modules.checkpoint_files import StateDict
from modules.checkpoint_keys import expected_shapes
from modules.config import ModelConfig
from modules.decoder import Decoder

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
OPT: dict[str, Any] = {
    "model_type": "opt",
    "vocab_size": 131,
    "hidden_size": 48,
    "ffn_dim": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 64,
    "word_embed_proj_dim": 48,
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 1,
}

KINDS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama-24-heads-8-groups": LLAMA | {"hidden_size": 96, "num_attention_heads": 24, "num_key_value_heads": 8},
    "llama-9-heads-3-groups": LLAMA | {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3},
    "llama-tied": LLAMA | {"tie_word_embeddings": True},
    "llama-no-grouping": LLAMA | {"num_key_value_heads": 6},
    "llama-explicit-head-dim": LLAMA | {"head_dim": 16},
    "llama-biases": LLAMA | {"attention_bias": True, "mlp_bias": True},
    "llama-linear-scaling": LLAMA | {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama-llama3-scaling": LLAMA | {"rope_theta": 500000.0, "rope_scaling": LLAMA3_SCALING},
    "llama-rope-parameters": {key: value for key, value in LLAMA.items() if key != "rope_theta"}
    | {"rope_parameters": LLAMA3_SCALING | {"rope_theta": 500000.0}},
    "opt": OPT,
    "opt-post-norm-projected": OPT | {"do_layer_norm_before": False, "word_embed_proj_dim": 24},
    "opt-untied": OPT | {"tie_word_embeddings": False},
    "opt-untied-projected": OPT | {"tie_word_embeddings": False, "word_embed_proj_dim": 24},
    "opt-no-biases": OPT | {"enable_bias": False},
    "opt-plain-norms": OPT | {"layer_norm_elementwise_affine": False},
    "opt-no-final-norm": OPT | {"_remove_final_layer_norm": True},
    "opt-gelu": OPT | {"activation_function": "gelu"},
}


def tiny_hf_model(hf_config: dict[str, Any], seed: int = 0) -> PreTrainedModel:
    """A Hugging Face model of this config, float32, all parameters random."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**hf_config)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
            if "norm" in name and name.endswith("weight"):
                parameter.add_(1.0)
    return model.requires_grad_(False)


def tiny_decoder(hf_config: dict[str, Any], seed: int = 0, dtype: torch.dtype | None = None) -> Decoder:
    """Our decoder with the weights of `tiny_hf_model(hf_config, seed)`."""
    config = ModelConfig.from_hf(hf_config)
    model = build_on_meta(config)
    weights = tiny_hf_model(hf_config, seed).state_dict()
    load_weights(model, StateDict(weights, config, expected_shapes(model, config), "tiny"), dtype=dtype)
    return model


def save_hf_folder(directory: Path, hf_config: dict[str, Any], seed: int = 0, **options: Any) -> PreTrainedModel:
    """Write `tiny_hf_model` as a Hugging Face folder (`max_shard_size` shards it); returns the model."""
    model = tiny_hf_model(hf_config, seed)
    model.save_pretrained(directory, **options)
    return model


def random_tokens(batch: int, tokens: int, seed: int = 1, vocab_size: int = 131) -> torch.Tensor:
    """Token ids [batch, tokens], none of them special."""
    return torch.randint(3, vocab_size, (batch, tokens), generator=torch.Generator().manual_seed(seed))
