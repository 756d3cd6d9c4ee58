"""The learned predictor: a low-rank map scores units before they are computed (see `sparse_predictor/predictor.py`)."""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch
from loguru import logger
from torch import Tensor

from data.files import convert_json
from modules.decode_step import Choice
from modules.kernels.choose_groups import MAX_GROUPS, MAX_RANK, choose_groups
from modules.kernels.deferred_norm import DeferredNorm
from modules.kernels.early_selection import EarlyGroups, EarlyUnits
from modules.kernels.norm_linear import norm_linear
from modules.kernels.select_units import select_units
from modules.sparsity import ActiveSet, Block, SelectionContext, Selector, StandIn, UnitShard, num_kept
from sparse_predictor.budgets import DensityBudget
from sparse_predictor.methods.registry import Setting, ThresholdSelector, UnitMethod, at_least
from sparse_predictor.predictor import Predictor, Rule
from sparse_predictor.store import Density, load_predictors, parse_manifest, read_manifest


class PredictorSelector(ThresholdSelector):
    """Active units from learned scores: those above one threshold per layer, or the top count per token.

    Deja Vu (Liu et al. 2023, section 4) with rule `topk`; the threshold, the stand-in for what is skipped and how the
    scores are trained differ (see `predictor.py`, `standin.py`, `refine.py`).
    """

    def __init__(self, predictor: Predictor, density: float, rule: Rule, lookahead: int) -> None:
        self.predictor = predictor
        self.lookahead = lookahead
        self.count = num_kept(density, predictor.num_units) if rule == "topk" else None
        self.threshold, self.has_threshold = predictor.threshold(density), self.count is None
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


def trained_densities(predictors: Path, density: float) -> list[float] | None:
    """The density of each MLP that a directory of predictors was trained for, if that was a budget of this mean;
    ValueError if its manifest says nothing that can be used."""
    if not (predictors / "manifest.json").is_file():
        return None  # whoever needs the predictors will say so
    manifest = parse_manifest(predictors)
    found = manifest.training.get("density_budget")
    if found is None or manifest.densities != [density]:
        return None
    where = f"{predictors}/manifest.json: training.density_budget"
    budget = DensityBudget(densities={"mlp": convert_json(found, list[Density], where)})
    return budget.of_mlps(density)


def make(setting: Setting) -> Callable[[int, Block], Selector]:
    """Reads the files of the layers that are here, and warns where a density was not calibrated."""
    model, densities = setting.model, setting.densities
    assert setting.predictors is not None
    predictors, manifest = load_predictors(setting.predictors, model)
    places = [(layer, density) for layer, density in enumerate(densities["mlp"]) if (layer, "mlp") in predictors]
    between = sorted(
        {
            density
            for layer, density in places
            if density < 1.0 and predictors[layer, "mlp"].calibrated_index(density) is None
        }
    )
    calibrated = sorted({value for layer, _ in places for value in predictors[layer, "mlp"].densities.tolist()})
    if between and not setting.has_thresholds:
        logger.warning(
            f"{setting.predictors} is calibrated at MLP densities {calibrated}, not in every layer at {between}: "
            "thresholds come from dense states, stand-ins from the nearest; train with --densities for exact ones"
        )

    def learned(layer: int, block: Block) -> Selector:
        if (layer, block) not in predictors:
            raise ValueError(
                f"{setting.predictors}: no {block} predictor for layer {layer}; train with --units "
                f"{block} or both, on all layers"
            )
        # The first layers have nothing that far back: they were trained on, and read, their own input.
        lookahead = manifest.lookahead if layer >= manifest.lookahead else 0
        rule = manifest.mlp_rule if block == "mlp" else "topk"
        selector = PredictorSelector(predictors[layer, block], densities[block][layer], rule, lookahead)
        # Only now: in half precision the calibrated densities and thresholds would no longer be themselves.
        selector.predictor.to(device=model.device, dtype=model.compute_dtype)
        units = model.half_block(layer, block).block.unit_shard
        if units is not None:
            selector.keep_units(units)
        return selector

    return learned


def lookahead_of(setting: Setting) -> int:
    """Of all layers: a pipeline stage keeps inputs for the stages after it, too."""
    assert setting.predictors is not None
    return read_manifest(setting.predictors, setting.model).lookahead


METHOD = UnitMethod(
    name="predictor",
    summary="The units that a trained low-rank predictor scores highest, with a linear stand-in for the others.",
    paper="Deja Vu, arXiv 2310.17157",
    order=20,
    colour="#0072B2",
    marker="o",
    blocks=("attention", "mlp"),
    role="learned",
    files="predictors",
    trained_densities=trained_densities,
    lookahead=lookahead_of,
    make=make,
)
