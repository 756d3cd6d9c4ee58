"""M-CountDown: the neurons whose up projection is large."""

from collections.abc import Callable

from torch import Tensor

from modules.decoder import Decoder
from modules.feed_forward import FeedForward
from modules.sparsity import Block, SelectionContext, Selector
from sparse_predictor.calibration import Statistic, quantiles_of
from sparse_predictor.methods.registry import Setting, ThresholdSelector, UnitMethod

NAME = "m-countdown"


def size_of_up(model: Decoder, layer: int, name: str, states: Tensor, output: Tensor) -> Tensor:
    """Quantiles of |x W_up|."""
    return quantiles_of(output.abs())


UP = Statistic(name="up_quantiles", of=("up_proj",), measure=size_of_up)


class CountDownSelector(ThresholdSelector):
    """M-CountDown (Cheon and Kang 2025): compute u = x W_up for every neuron, keep those with |u| above one
    threshold per layer, a quantile of calibration text; gate and down are computed for these alone. The output is a sum
    of the down projection's rows with coefficients act(gate) * up, and u is the half of a coefficient that no
    activation has squeezed.

    Differs: the threshold at a density of training is set in the sparse run, layer after layer, as that of the other
    methods; and there are no kernels for it, so decode steps run as plain PyTorch.
    """

    def __init__(self, mlp: FeedForward, threshold: float) -> None:
        self.up_proj = mlp.up_proj
        self.threshold = threshold

    def thresholded(self, hidden_states: Tensor, context: SelectionContext) -> Tensor:
        """|x W_up| [rows, U]."""
        return self.up_proj(hidden_states).flatten(0, 1).abs()


def make(setting: Setting) -> Callable[[int, Block], Selector]:
    def above_threshold(layer: int, block: Block) -> Selector:
        known, density = setting.statistics(layer), setting.densities[block][layer]
        threshold = known.threshold(NAME, density, known.require(UP.name, NAME))
        return CountDownSelector(setting.model.mlp(layer), threshold)

    return above_threshold


METHOD = UnitMethod(
    name=NAME,
    summary="The neurons whose up projection, computed for all of them, is large.",
    paper="CountDown, arXiv 2505.17701",
    order=35,
    colour="#AA4499",
    marker="d",
    files="calibration",
    statistics=(UP,),
    sets_thresholds=True,
    needs_gate=True,
    matrices_read_whole=1,
    make=make,
)
