"""What a sparse run achieved, for its record: densities, calls by path, and the bytes that a token reads, as a share of
the dense model's. Methods are compared at equal density and at equal bytes."""

from statistics import mean
from typing import Any

import torch
from torch import Tensor

from modules.config import ModelConfig
from modules.decode_step import innermost
from modules.decoder import Decoder
from modules.sparsity import BLOCKS, Block, Reduce, SparsityStats
from sparse_predictor.methods.registry import find_method, is_thinning
from sparse_predictor.selection import Selection


def _alone(counts: Tensor) -> Tensor:
    """The sum over ranks in one process."""
    return counts


def thinned_densities(model: Decoder, reduce: Reduce = _alone, block: Block = "mlp") -> list[float]:
    """Per layer, the share of a block's weights that are used where inputs are thinned out; 1.0 where none are."""
    counts = torch.zeros(model.config.num_hidden_layers, 2, dtype=torch.int64)
    for layer in model.layers:
        for part, width in model.half_block(layer, block).block.thinned_parts():
            counts[layer] += torch.tensor([int(part.kept) * width + int(part.extra), int(part.seen) * width])
    return [used / seen if seen else 1.0 for used, seen in reduce(counts).tolist()]


def predictor_bytes_share(model: Decoder, reduce: Reduce = _alone, block: Block = "mlp") -> float:
    """Weights of the attached predictors and stand-ins of a kind of block, over those of these blocks; 0.0 without."""
    read, dense = 0, 0
    for layer in model.layers:
        spec = model.config.layers[layer].of(block)
        dense += spec.num_weights(model.config.hidden_size)  # of the whole layer, as is what its predictor reads
        selector = innermost(model.half_block(layer, block).block.selector)  # of a phase gate or a measurement
        read += getattr(selector, "num_parameters_read", 0)
    read, dense = reduce(torch.tensor([read, dense])).tolist()
    return read / dense


def num_weights(config: ModelConfig, block: Block) -> float:
    """Weights of a block's matrices (biases not counted), mean over layers."""
    return mean(layer.of(block).num_weights(config.hidden_size) for layer in config.layers)


def weights_by_density(config: ModelConfig, method: str, block: Block) -> float:
    """The weights of a block that are read in proportion to its density, mean over layers; a budget of bytes divides
    these. MLP: all but the matrices that are read whole (CATS: the gate). Chosen heads: the queries' and the output
    projection's."""
    if is_thinning(method) and block == "attention":
        return float(num_weights(config, block))
    weights = mean(layer.of(block).num_unit_weights(config.hidden_size) for layer in config.layers)
    return weights * (find_method(method).share_by_density if block == "mlp" else 1.0)


def mlp_bytes_share(model: Decoder, method: str, stats: SparsityStats, reduce: Reduce = _alone) -> float:
    """Where units are chosen: `Method.mlp_share` of their density (CATS: (1 + 2 density) / 3, its gate being read
    whole), and predictors with their stand-ins. Where inputs are thinned out: the share of weights used.

    An oracle's own cost is not counted, nor GRIFFIN's statistics, which cost no weights beside the prompt's. `stats`
    are those of all ranks (`SparsityStats.summed`)."""
    if is_thinning(method):
        return mean(thinned_densities(model, reduce))
    share = 1.0 if method == "dense" else find_method(method).mlp_share(stats.mean_density("mlp"))
    return share + predictor_bytes_share(model, reduce)


def attention_bytes_share(model: Decoder, method: str, stats: SparsityStats, reduce: Reduce = _alone) -> float:
    """TEAL on all matrices and WINA: the share of weights used. Heads that are chosen: their queries' and outputs'
    weights, all keys' and values', and the predictors of heads."""
    if is_thinning(method):
        return mean(thinned_densities(model, reduce, "attention"))
    layers = model.config.layers
    queries = mean(layer.attention.num_attention_heads for layer in layers)
    keys = mean(layer.attention.num_key_value_heads for layer in layers)
    share = (queries * stats.mean_density("attention") + keys) / (queries + keys)
    return share + predictor_bytes_share(model, reduce, "attention")


def layer_bytes_share(model: Decoder, method: str, stats: SparsityStats, reduce: Reduce = _alone) -> float:
    """Of all weights of all layers, attention's and the MLPs' (without embeddings and head)."""
    mlp, attention = num_weights(model.config, "mlp"), num_weights(model.config, "attention")
    read = mlp * mlp_bytes_share(model, method, stats, reduce)
    return (read + attention * attention_bytes_share(model, method, stats, reduce)) / (mlp + attention)


def own_density(model: Decoder, selection: Selection, own_stats: SparsityStats) -> float | None:
    """Mean density of the MLPs over the layers that are here, of this rank alone; None without a batch."""
    if not own_stats.blocks:
        return None
    if is_thinning(selection.method):
        return mean(thinned_densities(model)[layer] for layer in model.layers)
    return own_stats.mean_density("mlp")


def achieved(model: Decoder, selection: Selection, own_stats: SparsityStats, reduce: Reduce = _alone) -> dict[str, Any]:
    """Of a sparse run, all ranks together (a collective call under `reduce`): densities by layer and their means,
    calls by path, and the shares of bytes read. Where inputs are thinned out, densities are shares of weights used."""
    stats, method = own_stats.summed(model.config.num_hidden_layers, reduce), selection.method
    per_layer = {block: stats.densities(block) for block in BLOCKS}
    if is_thinning(method):
        per_layer = {block: thinned_densities(model, reduce, block) for block in BLOCKS}
    executions = stats.executions()
    return {
        "mlp_density": mean(per_layer["mlp"]) if per_layer["mlp"] else 1.0,
        "head_density": mean(per_layer["attention"]) if per_layer["attention"] else 1.0,
        "per_layer": per_layer,
        "executions": executions,
        "sparse_calls": executions["gather"] + executions["mask"],
        "bytes_read_share": mlp_bytes_share(model, method, stats, reduce),
        "layer_bytes_share": layer_bytes_share(model, method, stats, reduce),
    }
