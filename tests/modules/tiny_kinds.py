"""Configurations of tiny models of every supported kind, as Hugging Face spells them; importing this is cheap."""

from typing import Any

import torch

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
    # Beside the scaling instead of in it; transformers lets it win where it is in both.
    "llama-original-context-at-the-top": LLAMA
    | {"rope_scaling": {key: LLAMA3_SCALING[key] for key in LLAMA3_SCALING if not key.startswith("original")}}
    | {"original_max_position_embeddings": 16},
    "llama-original-context-twice": LLAMA | {"rope_scaling": LLAMA3_SCALING, "original_max_position_embeddings": 16},
    "opt": OPT,
    "opt-post-norm-projected": OPT | {"do_layer_norm_before": False, "word_embed_proj_dim": 24},
    "opt-untied": OPT | {"tie_word_embeddings": False},
    "opt-untied-projected": OPT | {"tie_word_embeddings": False, "word_embed_proj_dim": 24},
    "opt-no-biases": OPT | {"enable_bias": False},
    "opt-plain-norms": OPT | {"layer_norm_elementwise_affine": False},
    "opt-no-final-norm": OPT | {"_remove_final_layer_norm": True},
    "opt-gelu": OPT | {"activation_function": "gelu"},
}


def random_tokens(batch: int, tokens: int, seed: int = 1, vocab_size: int = 131) -> torch.Tensor:
    """Token ids [batch, tokens], none of them special."""
    return torch.randint(3, vocab_size, (batch, tokens), generator=torch.Generator().manual_seed(seed))
