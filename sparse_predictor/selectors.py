"""Selectors that need calibration or training: the learned predictor and CATS, and the gate for sparse phases.

Those that need neither live in `modules/selectors.py`.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from modules.decode_step import Choice, choose
from modules.feed_forward import FeedForward
from modules.kernels.arguments import ACTIVATION_FUNCTIONS
from modules.kernels.choose_groups import MAX_GROUPS, MAX_RANK, choose_groups
from modules.kernels.deferred_norm import DeferredNorm
from modules.kernels.early_selection import EarlyGroups, EarlyUnits
from modules.kernels.norm_linear import norm_linear
from modules.kernels.select_units import select_units
from modules.sparsity import ActiveSet, Block, SelectionContext, Selector, StandIn, UnitShard, num_kept
from sparse_predictor.predictor import Predictor, Rule


class PredictorSelector:
    """Active units from learned scores: those above one threshold per layer, or the top count per token.

    Deja Vu (Liu et al. 2023, section 4) with rule `topk`; the threshold, the stand-in for what is skipped and how the
    scores are trained differ (see `predictor.py`, `standin.py`, `refine.py`).
    """

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

    def thresholded(self, hidden_states: Tensor, context: SelectionContext) -> Tensor:
        """What the threshold is compared with: scores [rows, U]."""
        return self.predictor.scores(self.source(hidden_states, context)).flatten(0, 1)

    def select(self, hidden_states: Tensor, context: SelectionContext) -> ActiveSet | None:
        scores = self.thresholded(hidden_states, context)
        compensation = None
        if self.standin_index is not None:
            compensation = self.predictor.standin(hidden_states, self.standin_index).flatten(0, 1)
        if self.count is not None:
            everywhere = scores if context.units is None else context.units.gather(scores)
            return ActiveSet(ActiveSet.from_scores(everywhere, self.count, context.units).mask, compensation)
        return ActiveSet(at_least(scores, self.threshold, context.units), compensation)

    def select_in_step(self, source: DeferredNorm, context: SelectionContext, counters: Tensor) -> Choice:
        """See `StepSelector`: scores, threshold and list in two kernels (heads: in one)."""
        predictor = self.predictor
        if context.block == "attention":
            assert self.count is not None
            if not self.selects_early("attention"):
                return ActiveSet.from_scores(predictor.scores(source.normed()), self.count)
            flags = choose_groups(source, predictor.first, predictor.second, predictor.bias, count=self.count)
            return ActiveSet(flags, count=self.count)
        inner = DeferredNorm.plain(norm_linear(source, predictor.first, None, out_dtype=source.dtype))
        if self.count is not None:
            scores = norm_linear(inner, predictor.second, predictor.bias, out_dtype=source.dtype)
            return replace(ActiveSet.from_scores(scores, self.count).listed(), standin=self.standin_in_step)
        active = select_units(
            inner,
            predictor.second,
            predictor.bias,
            threshold=self.threshold,
            activation=None,
            keep_values=False,
            counters=counters,
        )
        return replace(active, standin=self.standin_in_step)

    @property
    def scoring_rows(self) -> Tensor:
        """See `EarlySelector`."""
        return self.predictor.first

    def selects_early(self, block: Block) -> bool:
        """See `EarlySelector`: groups, as many as a kernel takes, and neurons by threshold; the top neurons need a
        sort. So does a list whose order must not depend on which program was first."""
        if block == "attention":
            return self.predictor.num_units <= MAX_GROUPS and self.predictor.rank <= MAX_RANK
        return self.count is None and not torch.are_deterministic_algorithms_enabled()

    def rest_of_choice(self, inner: Tensor, block: Block, counters: Tensor) -> EarlyUnits | EarlyGroups:
        """See `EarlySelector`."""
        predictor = self.predictor
        if block == "attention":
            assert self.count is not None
            return EarlyGroups.of(inner, predictor.second, predictor.bias, self.count)
        return EarlyUnits.of(inner, predictor.second, predictor.bias, self.threshold, counters)

    def chosen_early(self, early: EarlyUnits | EarlyGroups) -> Choice:
        """See `EarlySelector`."""
        if isinstance(early, EarlyGroups):
            return ActiveSet(early.flags, is_early=True, count=early.count)
        return replace(early.found, standin=self.standin_in_step)

    @cached_property
    def standin_in_step(self) -> StandIn | None:
        """The stand-in in use with its outputs unit-major, as the MLP's kernel reads them."""
        if self.standin_index is None:
            return None
        predictor, index = self.predictor, self.standin_index
        outputs = predictor.standin_out[index].t().contiguous()
        return StandIn(inputs=predictor.standin_in[index], outputs=outputs, bias=predictor.standin_bias[index])


def at_least(scores: Tensor, threshold: float, units: UnitShard | None) -> Tensor:
    """Units whose score [rows, U] reaches the threshold; padding of a shard never does."""
    return scores >= threshold if units is None else (scores >= threshold) & units.real


class CatsSelector:
    """CATS (Lee et al. 2024, Contextually-Aware Thresholding for Sparsity, section 3): compute the gate for every
    neuron, keep those with |act(gate)| above one threshold per layer, a quantile of calibration text. Differs: no
    fine-tuning after it, which is optional in the paper."""

    lookahead = 0

    def __init__(self, mlp: FeedForward, threshold: float) -> None:
        if mlp.gate_proj is None:
            raise ValueError("method cats needs a gated MLP; this model has none")
        self.gate_proj = mlp.gate_proj
        self.activation = mlp.activation
        self.activate = ACTIVATION_FUNCTIONS[mlp.activation]
        self.threshold = threshold

    def thresholded(self, hidden_states: Tensor, context: SelectionContext) -> Tensor:
        """What the threshold is compared with: |act(gate)| [rows, U]."""
        return self.activate(self.gate_proj(hidden_states)).flatten(0, 1).abs()

    def select(self, hidden_states: Tensor, context: SelectionContext) -> ActiveSet | None:
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

    def select_in_step(self, source: DeferredNorm, context: SelectionContext, counters: Tensor) -> Choice:
        """As the selector inside: a step decodes."""
        return choose(self.inner, source, context, counters)
