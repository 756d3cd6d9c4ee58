"""MLP bytes a token reads, as a share of the dense MLP's: what methods are compared at besides density."""

import torch
from torch import Tensor

from modules.decoder import Decoder
from modules.mlp import mean_share
from modules.sparsity import Reduce, SparsityStats
from sparse_predictor.selection import Method
from sparse_predictor.selectors import PredictorSelector


def _alone(counts: Tensor) -> Tensor:
    """The sum over ranks in one process."""
    return counts


def thinned_densities(model: Decoder, reduce: Reduce = _alone) -> list[float]:
    """Per layer, the mean share of matmul inputs used (TEAL); 1.0 where nothing is thinned."""
    counts = torch.zeros(model.config.num_hidden_layers, 3, 2, dtype=torch.int64)
    for layer in model.layers:
        counts[layer] = torch.tensor(model.mlp(layer).thinned_counts())
    return [mean_share(layer_counts) for layer_counts in reduce(counts).tolist()]


def predictor_bytes_share(model: Decoder, reduce: Reduce = _alone) -> float:
    """Weights of the attached MLP predictors and stand-ins in use, over those of the MLPs; 0.0 without any."""
    read, dense = 0, 0
    for layer in model.layers:
        dense += model.config.mlp_num_parameters  # of the whole layer, as is what its predictor reads
        selector: object = model.mlp(layer).selector
        while hasattr(selector, "inner"):  # a phase gate or a measurement around it
            selector = selector.inner
        if isinstance(selector, PredictorSelector):
            read += selector.num_parameters_read
    read, dense = reduce(torch.tensor([read, dense])).tolist()
    return read / dense


def mlp_bytes_share(model: Decoder, method: Method, stats: SparsityStats, reduce: Reduce = _alone) -> float:
    """Predictor: density + predictor + stand-in. CATS: (1 + 2 density) / 3, its gate being read whole. TEAL: the
    share of inputs used. Oracle, static, random: density alone (an oracle's own cost is not counted). `stats` are
    those of all ranks (`SparsityStats.summed`)."""
    if method == "teal":
        densities = thinned_densities(model, reduce)
        return sum(densities) / len(densities)
    density = stats.mean_density("mlp")
    if method == "cats":
        return (1.0 + 2.0 * density) / 3.0
    return density + predictor_bytes_share(model, reduce)
