"""`attach_selection`: the one function that makes a dense model sparse, whatever the method."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from modules.decode_step import Choice, choose, innermost
from modules.decoder import Decoder
from modules.kernels.deferred_norm import DeferredNorm
from modules.sparsity import BLOCKS, ActiveSet, Block, SelectionContext, Selector, SparsityStats
from sparse_predictor.budgets import DensityBudget, read_budget
from sparse_predictor.calibration import LayerCalibration
from sparse_predictor.methods.registry import (
    InputMethod,
    Method,
    Setting,
    SparsePhases,
    ThresholdSelector,
    UnitMethod,
    calibration_shapes,
    check_method,
    find_method,
    method_names,
    needs_files,
    thins_attention,
)
from sparse_predictor.store import load_calibration, parse_manifest, read_manifest
from sparse_predictor.thinning import (
    densities_of_matrices,
    matrices_of,
    prepare_kernels,
    restore_inputs,
    thin_inputs,
    thinned_by_name,
)

if TYPE_CHECKING:
    MethodName = str
else:
    MethodName = Literal[method_names()]  # the choices of --method


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The method, and how much it is to compute. A density is a share of units kept, or of inputs where a method thins
    these out. Densities are uniform over layers unless `density_budget` (a file, or its content) has others. With None,
    a method with predictors uses the budget that they were trained for, if there was one and it has this density.
    `mlp_density` also holds for attention where its inputs are thinned out; `head_density` is for chosen heads."""

    method: MethodName = "dense"
    predictors: Path | None = None
    mlp_density: float = 1.0
    head_density: float = 1.0
    sparse_phases: SparsePhases = "decode"
    density_budget: Path | DensityBudget | None = None
    seed: int = 0

    def densities(self, num_layers: int) -> dict[Block, list[float]]:
        """Target density of every layer; ValueError for values outside (0, 1] or a budget of the wrong length."""
        attention = self.mlp_density if thins_attention(self.method) else self.head_density
        found: dict[Block, list[float]] = {
            "mlp": [self.mlp_density] * num_layers,
            "attention": [attention] * num_layers,
        }
        if (budget := self.budget()) is not None:
            found.update(budget.densities)
        for block, values in found.items():
            if len(values) != num_layers:
                raise ValueError(f"density budget: {len(values)} {block} densities for {num_layers} layers")
            for density in (*values, self.head_density) if block == "attention" else values:
                if not 0.0 < density <= 1.0:
                    raise ValueError(f"{block} density must lie in (0, 1], got {density}")
        return found

    def check(self) -> None:
        """Check what needs no model, since loading one may take minutes. ValueError or FileNotFoundError for an unknown
        method, densities outside (0, 1], a file that is no budget, and predictors that the method needs and that do not
        exist."""
        check_method(self.method)
        budget = self.budget()
        self.densities(1 if budget is None else len(next(iter(budget.densities.values()))))
        if needs_files(self.method):
            parse_manifest(_predictor_dir(self))

    def budget(self) -> DensityBudget | None:
        """What the budget file says, if there is one; FileNotFoundError or ValueError if it cannot be read."""
        if isinstance(self.density_budget, Path):
            return read_budget(self.density_budget)
        if self.density_budget is None and self.method != "dense" and self.predictors is not None:
            trained = find_method(self.method).trained_densities
            densities = None if trained is None else trained(self.predictors, self.mlp_density)
            return None if densities is None else DensityBudget(densities={"mlp": densities})
        return self.density_budget


def apply_sparsity(model: Decoder, selectors: Mapping[tuple[int, Block], Selector]) -> SparsityStats:
    """Attach selectors by (layer, block), replacing any there were; returns the model's fresh statistics."""
    remove_sparsity(model)
    for (layer, block), selector in selectors.items():
        model.half_block(layer, block).block.selector = selector
    model.max_lookahead = max((selector.lookahead for selector in selectors.values()), default=0)
    model.is_sparse = bool(selectors)
    model.stats = SparsityStats()
    return model.stats


def remove_sparsity(model: Decoder) -> None:
    """Make the model dense again: no selectors, no thinned matmuls, no statistics."""
    for layer in model.layers:
        for block in BLOCKS:
            model.half_block(layer, block).block.selector = None
    restore_inputs(model)
    model.max_lookahead = 0
    model.is_sparse = False
    model.stats = None


def attach_selection(model: Decoder, selection: Selection) -> SparsityStats:
    """Make `model` sparse as `selection` says (dense: removes what was attached). ValueError names what is missing."""
    check_method(selection.method)
    remove_sparsity(model)
    densities = selection.densities(model.config.num_hidden_layers)
    if selection.method == "dense":
        return apply_sparsity(model, {})
    method, budget = find_method(selection.method), selection.budget()
    thresholds = None if budget is None else budget.thresholds_for(method.name, selection.predictors)
    matrices = None if budget is None else budget.matrices
    if matrices is not None and not isinstance(method, InputMethod):
        raise ValueError(
            f"density budget: it has densities of matrices, whose inputs method {method.name} does not thin out"
        )
    takes_heads = not thins_attention(method.name) and min(densities["attention"]) < 1.0
    method.check(
        model.config,
        chooses_heads=takes_heads or (isinstance(method, InputMethod) and selection.head_density < 1.0),
        is_cut=any(model.mlp(layer).unit_shard is not None for layer in model.layers),
    )
    wrong = dict if isinstance(method, UnitMethod) else list
    if isinstance(thresholds, wrong):
        raise ValueError(
            "density budget: it has thresholds of matrices, where neurons are chosen"
            if wrong is dict
            else f"density budget: it has thresholds of MLPs, where {method.name} needs them of matrices"
        )
    setting = Setting(
        model=model,
        densities=densities,
        predictors=_predictor_dir(selection) if needs_files(method.name) else None,
        calibration=_calibration(model, selection) if method.files == "calibration" else None,
        sparse_phases=selection.sparse_phases,
        seed=selection.seed,
        # A budget that is no file is being made: what is missing of its thresholds will be set in the run.
        has_thresholds=isinstance(selection.density_budget, DensityBudget) or thresholds is not None,
    )
    stats = apply_method(model, method, setting, matrices)
    if isinstance(thresholds, dict):
        set_thinning(model, thresholds)
    elif thresholds is not None:
        for layer in model.layers:
            if (selector := model.mlp(layer).selector) is not None:
                set_threshold(selector, thresholds[layer])
    if isinstance(method, InputMethod):
        prepare_kernels(model)
    return stats


def apply_method(
    model: Decoder, method: Method, setting: Setting, matrices: Mapping[str, Sequence[float]] | None = None
) -> SparsityStats:
    """Make a model sparse by a method; `matrices`: densities of these, where a budget has them."""
    if isinstance(method, InputMethod):
        names = matrices_of(model.config, method.blocks)
        of_matrices = densities_of_matrices(model.config, method.name, names, setting.densities, matrices)
        thin, stats = method.make(setting), apply_sparsity(model, {})
        thin_inputs(model, thin, of_matrices, decode_only=setting.sparse_phases == "decode")
        model.is_sparse = True
        return stats
    assert isinstance(method, UnitMethod)
    make, densities = method.make(setting), setting.densities
    blocks: list[tuple[int, Block]] = [
        (layer, "attention") for layer, density in enumerate(densities["attention"]) if density < 1.0
    ]
    # Heads alone: the MLPs stay dense and need no predictors. MLPs that are all at density 1 go the sparse way, to be
    # checked; one at density 1 among others is left dense, and its predictor is not read.
    least = min(densities["mlp"])
    if not blocks or least < 1.0:
        blocks += [(layer, "mlp") for layer, density in enumerate(densities["mlp"]) if density < 1.0 or least == 1.0]
    selectors = {place: make(*place) for place in blocks if model.has_block(*place)}
    if setting.sparse_phases == "decode" and not method.sees_prompt:
        selectors = {place: SparsePhaseGate(selector) for place, selector in selectors.items()}
    stats = apply_sparsity(model, selectors)
    model.is_sparse = True  # also on a pipeline stage whose own blocks are all dense: the stages must act alike
    model.max_lookahead = max(model.max_lookahead, method.lookahead(setting))
    return stats


def set_threshold(selector: Selector, threshold: float) -> None:
    """Set the threshold of a selector of neurons; ValueError if it has none."""
    inner = innermost(selector)
    if not isinstance(inner, ThresholdSelector) or not inner.has_threshold:
        raise ValueError("density budget: it has thresholds, but these neurons are not chosen by one")
    inner.threshold = threshold


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


def set_thinning(model: Decoder, thresholds: Mapping[str, Sequence[float]]) -> None:
    """Set the thresholds of thinned inputs, by name of the matrix and layer; ValueError if they are for other
    matrices."""
    thinned = thinned_by_name(model)
    if set(thresholds) != set(thinned):
        raise ValueError(
            f"density budget: it has thresholds of {', '.join(thresholds)}; thinned out are {', '.join(thinned)}"
        )
    for name, parts in thinned.items():
        for layer, part in zip(model.layers, parts, strict=True):
            part.threshold = thresholds[name][layer]


def _predictor_dir(selection: Selection) -> Path:
    if selection.predictors is None:
        raise ValueError(f"method {selection.method} needs --predictors (a directory written by scripts.train)")
    return selection.predictors


def _calibration(model: Decoder, selection: Selection) -> dict[int, LayerCalibration]:
    directory = _predictor_dir(selection)
    calibration = load_calibration(directory, read_manifest(directory, model).sums)
    missing = set(range(model.config.num_hidden_layers)) - set(calibration)
    if missing:
        raise ValueError(f"{directory}: no calibration for layers {sorted(missing)}")
    for layer, statistics in calibration.items():
        num_densities = statistics.statistics.get("densities", torch.empty(0)).numel()
        expected = calibration_shapes(model.config, layer, num_densities)
        statistics.check_shapes(expected, f"{directory}: calibration {layer}")
    return calibration
