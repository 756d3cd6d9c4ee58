"""MLP bytes a token reads, as a share of the dense MLP's: what methods are compared at besides density."""

from modules.decoder import Decoder
from modules.sparsity import SparsityStats
from sparse_predictor.selection import Method
from sparse_predictor.selectors import PredictorSelector


def thinned_densities(model: Decoder) -> list[float]:
    """Per layer, the mean share of matmul inputs used (TEAL); 1.0 where nothing is thinned."""
    return [model.mlp(layer).thinned_density() for layer in range(model.config.num_hidden_layers)]


def predictor_bytes_share(model: Decoder) -> float:
    """Weights of the attached MLP predictors and stand-ins in use, over those of the MLPs; 0.0 without any."""
    read = 0
    for layer in range(model.config.num_hidden_layers):
        selector: object = model.mlp(layer).selector
        while hasattr(selector, "inner"):  # a phase gate or a measurement around it
            selector = selector.inner
        if isinstance(selector, PredictorSelector):
            read += selector.num_parameters_read
    return read / (model.config.num_hidden_layers * model.config.mlp_num_parameters)


def mlp_bytes_share(model: Decoder, method: Method, stats: SparsityStats) -> float:
    """Predictor: density + predictor + stand-in. CATS: (1 + 2 density) / 3, its gate being read whole. TEAL: the
    share of inputs used. Oracle, static, random: density alone (an oracle's own cost is not counted)."""
    if method == "teal":
        densities = thinned_densities(model)
        return sum(densities) / len(densities)
    density = stats.mean_density("mlp")
    if method == "cats":
        return (1.0 + 2.0 * density) / 3.0
    return density + predictor_bytes_share(model)
