"""WINA's weighting without its rotation: the entries of an input that can add most to the product."""

from torch import Tensor

from modules.decoder import Decoder
from modules.linear import Linear
from modules.sparsity import BLOCKS
from modules.thinned_input import ThinnedInput
from sparse_predictor.calibration import Statistic, quantiles_of
from sparse_predictor.methods.registry import InputMethod, Setting
from sparse_predictor.thinning import OUTPUT_PROJECTIONS, PLACES, Thin, matrices_of, norms_of_inputs

NAME = "wina-unrotated"


def weighted_size(model: Decoder, layer: int, name: str, states: Tensor, output: Tensor) -> Tensor:
    """Quantiles of |x_i| * ||W[:, i]||, rounded as in a run."""
    sizes = states.abs()
    return quantiles_of(sizes * norms_of_inputs(model, layer, name).to(sizes.dtype))


def norms(model: Decoder, layer: int, name: str, states: Tensor, output: Tensor) -> Tensor:
    """||W[:, i]|| over all outputs, of which a rank may have a part."""
    return norms_of_inputs(model, layer, name)


WEIGHTED = Statistic(name="weighted_quantiles", of=tuple(PLACES), measure=weighted_size, is_stacked=True)
NORMS = Statistic(
    name="input_norms",
    width=lambda config, layer: config.hidden_size,
    of=tuple(name for name in PLACES if name not in OUTPUT_PROJECTIONS),
    measure=norms,
    is_stacked=True,
)


def wina(setting: Setting) -> Thin:
    """The weighting of WINA (Chen et al. 2025, Weight Informed Neuron Activation, section 3) without its rotation: as
    TEAL on all matrices, but an entry counts by |x_i| * ||W[:, i]||, what it can add to the product.

    This is not WINA, hence the name wina-unrotated: the weights stay as they are, where the paper first rotates them
    until their columns are orthogonal, without which its bound does not hold. There is one threshold per layer and
    matrix (a quantile of this weighted magnitude on calibration text) instead of the top entries of each token.
    """
    model = setting.model

    def thin(layer: int, name: str, projection: Linear, density: float, counted: Tensor | None) -> ThinnedInput:
        known = setting.statistics(layer)
        quantiles = known.require(WEIGHTED.name, NAME)[matrices_of(model.config).index(name)]
        if name in OUTPUT_PROJECTIONS:
            weights = norms_of_inputs(model, layer, name)
        else:
            weights = known.require(NORMS.name, NAME)[NORMS.projections(model.config).index(name)]
        weights = weights.to(device=model.device, dtype=model.compute_dtype)
        threshold = known.threshold(NAME, density, quantiles, PLACES[name])
        return ThinnedInput(projection, threshold, counted, weights, density)

    return thin


METHOD = InputMethod(
    name=NAME,
    summary="The entries of each input that are large times the norm of their weights.",
    paper="WINA, arXiv 2505.19427",
    order=60,
    colour="#56B4E9",
    marker="P",
    blocks=BLOCKS,
    files="calibration",
    statistics=(WEIGHTED, NORMS),
    sets_thresholds=True,
    formerly=("wina", "its rotation of the weights is not done here"),
    make=wina,
)
