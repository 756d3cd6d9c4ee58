"""CATS: the neurons whose gate is large."""

from collections.abc import Callable

from torch import Tensor

from modules.decode_step import Choice
from modules.decoder import Decoder
from modules.feed_forward import FeedForward
from modules.kernels.arguments import ACTIVATION_FUNCTIONS
from modules.kernels.deferred_norm import DeferredNorm
from modules.kernels.select_units import select_units
from modules.sparsity import ActiveSet, Block, SelectionContext, Selector
from sparse_predictor.calibration import Statistic, quantiles_of
from sparse_predictor.methods.registry import Setting, ThresholdSelector, UnitMethod, at_least


def size_of_gate(model: Decoder, layer: int, name: str, states: Tensor, output: Tensor) -> Tensor:
    """Quantiles of |act(gate)|."""
    return quantiles_of(ACTIVATION_FUNCTIONS[model.mlp(layer).activation](output).abs())


GATE = Statistic(name="gate_quantiles", of=("gate_proj",), measure=size_of_gate)


class CatsSelector(ThresholdSelector):
    """CATS (Lee et al. 2024, Contextually-Aware Thresholding for Sparsity, section 3): compute the gate for every
    neuron, keep those with |act(gate)| above one threshold per layer, a quantile of calibration text. Differs: no
    fine-tuning after it, which is optional in the paper."""

    def __init__(self, mlp: FeedForward, threshold: float) -> None:
        if mlp.gate_proj is None:
            raise ValueError("method cats needs a gated MLP; this model has none")
        self.gate_proj = mlp.gate_proj
        self.activation = mlp.activation
        self.activate = ACTIVATION_FUNCTIONS[mlp.activation]
        self.threshold = threshold

    def thresholded(self, hidden_states: Tensor, context: SelectionContext) -> Tensor:
        """|act(gate)| [rows, U]."""
        return self.activate(self.gate_proj(hidden_states)).flatten(0, 1).abs()

    def select(self, hidden_states: Tensor, context: SelectionContext) -> ActiveSet | None:
        """As a threshold does, and keeps the gates' values, which need not be computed twice."""
        gate_values = self.activate(self.gate_proj(hidden_states)).flatten(0, 1)
        return ActiveSet(at_least(gate_values.abs(), self.threshold, context.units), gate_values=gate_values)

    def select_in_step(self, source: DeferredNorm, context: SelectionContext, counters: Tensor) -> Choice:
        """See `StepSelector`: gate, threshold and list in one kernel."""
        return select_units(
            source,
            self.gate_proj.kernel_argument(),
            self.gate_proj.bias,
            threshold=self.threshold,
            activation=self.activation,
            keep_values=True,
            counters=counters,
        )


def make(setting: Setting) -> Callable[[int, Block], Selector]:
    def above_threshold(layer: int, block: Block) -> Selector:
        known, density = setting.statistics(layer), setting.densities[block][layer]
        threshold = known.threshold("cats", density, known.require(GATE.name, "cats"))
        return CatsSelector(setting.model.mlp(layer), threshold)

    return above_threshold


METHOD = UnitMethod(
    name="cats",
    summary="The neurons whose gate, computed for all of them, is large.",
    paper="CATS, arXiv 2404.08763",
    order=30,
    colour="#CC79A7",
    marker="D",
    files="calibration",
    statistics=(GATE,),
    sets_thresholds=True,
    needs_gate=True,
    matrices_read_whole=1,
    make=make,
)
