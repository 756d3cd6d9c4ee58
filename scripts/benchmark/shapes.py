"""Published model shapes, for benchmarks on random weights: no download, and speed does not depend on the values."""

from typing import Any

import torch
from loguru import logger

from modules.checkpoint.load import Prepare, build_on_meta, random_model
from modules.config import ModelConfig
from modules.decoder import Decoder

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LLAMA3: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}

# Hugging Face's `config.json` of each, as far as it decides shapes.
HF_CONFIGS: dict[str, dict[str, Any]] = {
    "Llama-3.2-3B": LLAMA3
    | {
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "tie_word_embeddings": True,
        "rope_parameters": LLAMA3_ROPE | {"factor": 32.0},
    },
    "Llama-3.1-8B": LLAMA3
    | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
        "rope_parameters": LLAMA3_ROPE | {"factor": 8.0},
    },
    # Its first 8 layers of 80: wide enough to be one, small enough for one GPU.
    "Llama-3.1-70B-8-layers": LLAMA3
    | {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 8,
        "num_attention_heads": 64,
        "tie_word_embeddings": False,
        "rope_parameters": LLAMA3_ROPE | {"factor": 8.0},
    },
    "OPT-6.7B": {
        "model_type": "opt",
        "vocab_size": 50272,
        "hidden_size": 4096,
        "word_embed_proj_dim": 4096,
        "ffn_dim": 16384,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "bos_token_id": 2,
        "eos_token_id": 2,
        "pad_token_id": 1,
    },
    "SmolLM2": {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    # Runs on any CPU, to try a benchmark out.
    "tiny": LLAMA3
    | {
        "vocab_size": 1031,
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
}


def find_shape(name: str) -> str:
    """The shape of this name, however it is capitalised; ValueError lists those there are."""
    found = [shape for shape in HF_CONFIGS if shape.lower() == name.lower()]
    if not found:
        raise ValueError(f"--shape {name!r}: give one of {', '.join(HF_CONFIGS)}")
    return found[0]


def random_weights(
    shape: str,
    config: ModelConfig,
    *,
    seed: int,
    dtype: torch.dtype,
    device: torch.device,
    prepare: Prepare | None = None,
) -> Decoder:
    """`random_model`, of which it first says how large it is: a big one takes minutes to draw on a CPU."""
    num_bytes = sum(parameter.numel() for parameter in build_on_meta(config).parameters()) * dtype.itemsize
    logger.info(
        f"{shape}: drawing random weights of {config.num_hidden_layers} layers, {num_bytes / 2**30:.2f} GiB in all "
        f"as {dtype}, on {device}"
    )
    return random_model(config, seed=seed, dtype=dtype, device=device, prepare=prepare)
