"""Published model shapes with random weights, and random predictors for them: no download, and the speed is real.

It does not depend on the values; what the predictors choose means nothing. They have the rank, and so the bytes, that
training would give them, and thresholds that keep the density asked for in the very run that is timed: calibrated on
random prompts first, then on what the sparse model itself wrote after them. They go through the same files and the same
`attach_selection` as trained ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from loguru import logger
from torch import Tensor

from modules.checkpoint.load import Prepare, build_on_meta, random_model
from modules.config import ModelConfig
from modules.decoder import Decoder
from modules.sparsity import Block
from sparse_predictor.calibration import LayerCalibration
from sparse_predictor.methods.registry import find_method, needs_files
from sparse_predictor.predictor import Predictor, auto_rank
from sparse_predictor.selection import Selection, attach_selection
from sparse_predictor.store import PredictorManifest, save_predictors, weights_sample
from sparse_predictor.thresholds import set_thresholds_in_run

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


Write = Callable[[], Sequence[Sequence[int]]]  # texts of one length that the sparse model writes now, prompts included
Predictors = dict[tuple[int, Block], Predictor]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Inner widths of the MLPs' predictors and stand-ins, and how far back the scores look."""

    predictor_rank: int
    standin_rank: int
    lookahead: int


def attach_random(
    model: Decoder, selection: Selection, sizes: Sizes, prompts: Tensor, write: Write, num_rounds: int = 2
) -> None:
    """Make a model of random weights sparse as `selection` says, with files written to `selection.predictors`.

    `prompts` int64 [B, T] begin the texts that `write` gives. The states of later tokens differ from those of a prompt,
    and which texts are written depends on the thresholds: they are set again on what was written by the last ones.
    """
    if needs_files(selection.method):
        write_random_files(model, selection, sizes)
    attach_selection(model, selection)
    densities = selection.densities(model.config.num_hidden_layers)["mlp"]
    token_ids, start = prompts, 0
    for round_idx in range(num_rounds + 1):
        if set_thresholds_in_run(model, densities, token_ids, start=start) is None:
            return  # nothing is chosen by threshold
        if round_idx < num_rounds:
            token_ids, start = torch.tensor(write(), device=model.device)[:, :-1], prompts.shape[1]


def write_random_files(model: Decoder, selection: Selection, sizes: Sizes) -> None:
    """Predictors, and what else the method wants to know of a layer."""
    assert selection.predictors is not None
    method, config = find_method(selection.method), model.config
    generator = torch.Generator().manual_seed(selection.seed)
    predictors = draw_predictors(model, selection, sizes) if method.files == "predictors" else {}
    calibration = {
        layer_idx: LayerCalibration(
            {known.name: torch.rand(known.shape(config, layer_idx), generator=generator) for known in method.statistics}
        )
        for layer_idx in range(config.num_hidden_layers)
    }
    blocks: list[Block] = sorted({block for _, block in predictors})
    manifest = PredictorManifest(
        model_id="random weights",
        config_hash=config.config_hash(),
        weights_sample=weights_sample(model),
        layers=list(range(config.num_hidden_layers)),
        blocks=blocks,
        lookahead=sizes.lookahead,
        mlp_rule="threshold",
        predictor_rank={block: predictors[0, block].rank for block in blocks},
        standin_rank=sizes.standin_rank,
        densities=[selection.mlp_density],
        definitions={"values": "random"},
        training={"seed": selection.seed},
    )
    save_predictors(selection.predictors, predictors, calibration, {}, manifest)


def draw_predictors(model: Decoder, selection: Selection, sizes: Sizes) -> Predictors:
    """Scores of neurons are N(0, 1) for inputs whose mean square is 1, which is what a norm gives. Those of groups are
    N(0, 1) for all inputs but for a tenth: among so few, half precision would often flip the last one in, and with it
    what follows, so that decoding and prefill could no longer be compared."""
    config = model.config
    generator = torch.Generator(model.device).manual_seed(selection.seed)
    predictors: Predictors = {}
    for layer_idx in range(config.num_hidden_layers):
        predictors[layer_idx, "mlp"] = Predictor(
            config.hidden_size,
            config.layers[layer_idx].feed_forward.num_units,
            sizes.predictor_rank,
            densities=(selection.mlp_density,),
            standin_rank=sizes.standin_rank,
        )
        if selection.head_density < 1.0:
            heads = config.layers[layer_idx].attention
            rank = auto_rank(heads, config.hidden_size)
            predictors[layer_idx, "attention"] = Predictor(config.hidden_size, heads.num_units, rank)
    for (_, block), predictor in predictors.items():
        predictor.to(model.device)
        for name in ("first", "second", "standin_in", "standin_out"):
            matrix = getattr(predictor, name)
            if matrix.numel():
                scale = {"standin_out": 0.02, "first": 0.1 if block == "attention" else 1.0}.get(name, 1.0)
                matrix.normal_(generator=generator).mul_(matrix.shape[-1] ** -0.5 * scale)
        if block == "attention":
            predictor.bias.normal_(generator=generator)
    return predictors
