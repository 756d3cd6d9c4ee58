"""TEAL: the large entries of each matmul's input, in the MLP or in all matrices of a layer."""

from torch import Tensor

from modules.decoder import Decoder
from modules.linear import Linear
from modules.sparsity import BLOCKS
from modules.thinned_input import ThinnedInput
from sparse_predictor.calibration import Statistic, quantiles_of
from sparse_predictor.methods.registry import InputMethod, Setting
from sparse_predictor.thinning import PLACES, Thin


def size_of_input(model: Decoder, layer: int, name: str, states: Tensor, output: Tensor) -> Tensor:
    """Quantiles of the |entries| of an input."""
    return quantiles_of(states.abs())


ATTENTION_INPUT = Statistic(name="attention_input_quantiles", of=("q_proj",), measure=size_of_input)
HEAD_OUTPUT = Statistic(name="head_output_quantiles", of=("o_proj",), measure=size_of_input)
MLP_INPUT = Statistic(name="input_quantiles", of=("up_proj",), measure=size_of_input)
ACTIVATION = Statistic(name="activation_quantiles", of=("down_proj",), measure=size_of_input)
# Several matrices share an input.
INPUTS = dict.fromkeys(("q_proj", "k_proj", "v_proj"), ATTENTION_INPUT) | {"o_proj": HEAD_OUTPUT}
INPUTS |= {"gate_proj": MLP_INPUT, "up_proj": MLP_INPUT, "down_proj": ACTIVATION}


def teal(setting: Setting, method: str) -> Thin:
    """TEAL (Liu et al. 2024, section 4): drop the entries of a matmul's input that are small in magnitude, by one
    threshold per layer and matrix, a quantile of calibration text.

    Densities are uniform, or those of a budget file, where `scripts.budget` puts what the paper's greedy allocation
    (algorithm 1) finds (see `greedy_paths`). Differs: thresholds are those of the sparse run where they were set in one
    (the densities of training, and budgets), and with sparse phases `all` every token is thinned out, where the paper
    spares the first half of a text. `teal` thins out the MLP alone, for comparison at equal bytes of it; `teal-all` all
    seven matrices.
    """

    def thin(layer: int, name: str, projection: Linear, density: float, counted: Tensor | None) -> ThinnedInput:
        known = setting.statistics(layer)
        threshold = known.threshold(method, density, known.require(INPUTS[name].name, method), PLACES[name])
        return ThinnedInput(projection, threshold, counted, density=density)

    return thin


METHODS = (
    InputMethod(
        name="teal",
        summary="The large entries of the inputs of the MLP's matrices.",
        paper="TEAL, arXiv 2408.14690",
        order=40,
        colour="#D55E00",
        marker="s",
        files="calibration",
        statistics=(MLP_INPUT, ACTIVATION),
        sets_thresholds=True,
        make=lambda setting: teal(setting, "teal"),
    ),
    InputMethod(
        name="teal-all",
        summary="The large entries of the inputs of all matrices of a layer.",
        paper="TEAL, arXiv 2408.14690",
        order=50,
        colour="#5D3A9B",
        marker="*",
        blocks=BLOCKS,
        files="calibration",
        statistics=(ATTENTION_INPUT, HEAD_OUTPUT, MLP_INPUT, ACTIVATION),
        sets_thresholds=True,
        make=lambda setting: teal(setting, "teal-all"),
    ),
)
