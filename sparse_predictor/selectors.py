"""Selectors that need calibration or training: the learned predictor and CATS, and the gate for sparse phases.

Oracle, static and random selectors need neither and live in `modules/selectors.py`.
"""

from dataclasses import dataclass

from torch import Tensor

from modules.kernels.sparse_mlp import ACTIVATION_FUNCTIONS
from modules.mlp import Mlp
from modules.sparsity import ActiveSet, SelectionContext, Selector, UnitShard, num_kept
from sparse_predictor.predictor import Predictor, Rule


class PredictorSelector:
    """Active units from learned scores: those above one threshold a layer, or the top count a token."""

    def __init__(self, predictor: Predictor, density: float, rule: Rule, lookahead: int) -> None:
        self.predictor = predictor
        self.lookahead = lookahead
        self.count = num_kept(density, predictor.num_units) if rule == "topk" else None
        self.threshold = predictor.threshold(density)
        self.standin_index = predictor.standin_index(density)
        self.num_parameters_read = predictor.num_parameters_read(density)

    def keep_units(self, units: UnitShard) -> None:
        """Choose among one rank's units, as every other rank among its own; the first one adds the stand-in."""
        self.predictor.keep_units(units)
        if not units.is_first:
            self.standin_index = None

    def source(self, hidden_states: Tensor, context: SelectionContext) -> Tensor:
        """The normed input that the scores are made from: this layer's, or an earlier one's."""
        return context.earlier_inputs[context.layer_idx - self.lookahead] if self.lookahead else hidden_states

    def select(self, hidden_states: Tensor, context: SelectionContext) -> ActiveSet | None:
        scores = self.predictor.scores(self.source(hidden_states, context)).flatten(0, 1)
        compensation = None
        if self.standin_index is not None:
            compensation = self.predictor.standin(hidden_states, self.standin_index).flatten(0, 1)
        if self.count is not None:
            everywhere = scores if context.units is None else context.units.gather(scores)
            return ActiveSet(ActiveSet.from_scores(everywhere, self.count, context.units).mask, compensation)
        return ActiveSet(at_least(scores, self.threshold, context.units), compensation)


def at_least(scores: Tensor, threshold: float, units: UnitShard | None) -> Tensor:
    """Units whose score [rows, U] reaches the threshold; padding of a shard never does."""
    return scores >= threshold if units is None else (scores >= threshold) & units.real


class CatsSelector:
    """CATS (Lee et al. 2024): compute the gate for every neuron, keep those with |act(gate)| above a threshold."""

    lookahead = 0

    def __init__(self, mlp: Mlp, threshold: float) -> None:
        if mlp.gate_proj is None:
            raise ValueError("method cats needs a gated MLP; this model has none")
        self.gate_proj = mlp.gate_proj
        self.activate = ACTIVATION_FUNCTIONS[mlp.activation]
        self.threshold = threshold

    def select(self, hidden_states: Tensor, context: SelectionContext) -> ActiveSet | None:
        gate_values = self.activate(self.gate_proj(hidden_states)).flatten(0, 1)
        return ActiveSet(at_least(gate_values.abs(), self.threshold, context.units), gate_values=gate_values)


@dataclass(frozen=True)
class SparsePhaseGate:
    """Lets a selector choose only while decoding (`sparse_phases=decode`): the prompt stays dense."""

    inner: Selector

    @property
    def lookahead(self) -> int:
        """As the selector inside."""
        return self.inner.lookahead

    def select(self, hidden_states: Tensor, context: SelectionContext) -> ActiveSet | None:
        return self.inner.select(hidden_states, context) if context.phase == "decode" else None
