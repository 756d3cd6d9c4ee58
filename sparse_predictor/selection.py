"""`attach_selection`: the one function that makes a dense model sparse, whatever the method."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch
from loguru import logger

from data.files import convert_json
from modules.decoder import Decoder
from modules.feed_forward import unit_norms
from modules.selectors import OracleSelector, PromptSelector, RandomSelector, StaticSelector
from modules.sparsity import BLOCKS, Block, Selector, SparsityStats, num_kept
from sparse_predictor.budgets import DensityBudget, Thresholds, read_budget
from sparse_predictor.calibration import LayerCalibration, threshold_at
from sparse_predictor.selectors import CatsSelector, PredictorSelector, SparsePhaseGate
from sparse_predictor.store import Density, load_calibration, load_predictors, parse_manifest, read_manifest
from sparse_predictor.thinning import (
    densities_of_matrices,
    is_thinning,
    prepare_kernels,
    restore_inputs,
    thin_inputs,
    thin_of,
    thinned_by_name,
    thins_attention,
)

Method = Literal[
    "dense", "predictor", "oracle", "static", "random", "cats", "teal", "teal-all", "wina-unrotated", "griffin"
]
SparsePhases = Literal["decode", "all"]
WITHOUT_FILES: tuple[Method, ...] = ("dense", "oracle", "random", "griffin")  # methods that need no predictors


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What to skip. Densities are shares of units kept, or of inputs where a method thins these out, uniform over
    layers unless `density_budget` (a file, or what it says) has others; None, with method `predictor`: that which the
    predictors were trained for, if they were for one, at its density. `mlp_density` is also attention's where teal-all
    or wina-unrotated thin it out; `head_density` is of methods that choose heads."""

    method: Method = "dense"
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
        """What can be told before a model is loaded, which may take minutes: ValueError or FileNotFoundError for a
        method that is none, densities outside (0, 1], a budget that is none, and predictors that the method needs and
        that are not there."""
        check_method(self.method)
        budget = self.budget()
        self.densities(1 if budget is None else len(next(iter(budget.densities.values()))))
        if self.method not in WITHOUT_FILES:
            parse_manifest(_predictor_dir(self))

    def budget(self) -> DensityBudget | None:
        """What the budget file says, if there is one; FileNotFoundError or ValueError if it cannot be read."""
        if isinstance(self.density_budget, Path):
            return read_budget(self.density_budget)
        if self.density_budget is None and self.method == "predictor" and self.predictors is not None:
            return trained_budget(self.predictors, self.mlp_density)
        return self.density_budget


def check_method(method: str) -> None:
    """ValueError if there is no such method."""
    if method == "wina":
        raise ValueError("method wina is now wina-unrotated: its rotation of the weights is not done here")
    if method not in get_args(Method):
        raise ValueError(f"method {method} is not one of {', '.join(get_args(Method))}")


def trained_budget(predictors: Path, density: float) -> DensityBudget | None:
    """What a directory of predictors was trained for, if that was a budget of this density; ValueError if its manifest
    says nothing that can be used."""
    if not (predictors / "manifest.json").is_file():
        return None  # whoever needs the predictors will say so
    manifest = parse_manifest(predictors)
    found = manifest.training.get("density_budget")
    if found is None or manifest.densities != [density]:
        return None
    where = f"{predictors}/manifest.json: training.density_budget"
    budget = DensityBudget(densities={"mlp": convert_json(found, list[Density], where)})
    budget.of_mlps(density)
    return budget


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
    config = model.config
    densities = selection.densities(config.num_hidden_layers)
    method = selection.method
    if method == "dense":
        return apply_sparsity(model, {})
    budget = selection.budget()
    thresholds = None if budget is None else budget.thresholds_for(method, selection.predictors)
    if is_thinning(method):
        return _attach_thinning(model, selection, densities, thresholds)
    if budget is not None and budget.matrices is not None:
        raise ValueError(
            f"density budget: it has densities of matrices, whose inputs method {method} does not thin out"
        )
    heads = [layer for layer, density in enumerate(densities["attention"]) if density < 1.0]
    if method in ("cats", "griffin") and heads:
        raise ValueError(f"method {method} does not choose heads; leave --head-density at 1.0")
    if method == "cats" and not config.gated_mlp:
        raise ValueError("method cats needs a gated MLP; this model has none")
    make = _selector_maker(model, selection, densities)
    blocks: list[tuple[int, Block]] = [(layer, "attention") for layer in heads]
    # Heads alone: the MLPs stay dense and need no predictors. MLPs that are all at density 1 go the sparse way, to be
    # checked; one at density 1 among others is left dense, and its predictor is not read.
    least = min(densities["mlp"])
    if not heads or least < 1.0:
        blocks += [(layer, "mlp") for layer, density in enumerate(densities["mlp"]) if density < 1.0 or least == 1.0]
    selectors = {place: make(*place) for place in blocks if model.has_block(*place)}
    if thresholds is not None:
        if isinstance(thresholds, dict):
            raise ValueError("density budget: it has thresholds of matrices, where neurons are chosen")
        for (layer, block), selector in selectors.items():
            if block == "mlp":
                set_threshold(selector, thresholds[layer])
    if (
        selection.sparse_phases == "decode" and method != "griffin"
    ):  # which needs to see the prompt, and leaves it dense
        selectors = {place: SparsePhaseGate(selector) for place, selector in selectors.items()}
    stats = apply_sparsity(model, selectors)
    model.is_sparse = True  # also on a pipeline stage whose own blocks are all dense: the stages must act alike
    if method == "predictor":  # of all layers: a pipeline stage keeps inputs for the stages after it, too
        model.max_lookahead = read_manifest(_predictor_dir(selection), model).lookahead
    return stats


def set_threshold(selector: Selector, threshold: float) -> None:
    """Let a selector of neurons choose by this threshold; ValueError if it has none."""
    if not isinstance(selector, (PredictorSelector, CatsSelector)) or getattr(selector, "count", None) is not None:
        raise ValueError("density budget: it has thresholds, but these neurons are not chosen by one")
    selector.threshold = threshold


def set_thinning(model: Decoder, thresholds: Mapping[str, Sequence[float]]) -> None:
    """Let the inputs that are thinned out be so by these thresholds, by name of the matrix and layer; ValueError if
    they are of other matrices."""
    thinned = thinned_by_name(model)
    if set(thresholds) != set(thinned):
        raise ValueError(
            f"density budget: it has thresholds of {', '.join(thresholds)}; thinned out are {', '.join(thinned)}"
        )
    for name, parts in thinned.items():
        for layer, part in zip(model.layers, parts, strict=True):
            part.threshold = thresholds[name][layer]


def _attach_thinning(
    model: Decoder,
    selection: Selection,
    densities: Mapping[Block, Sequence[float]],
    thresholds: Thresholds | None,
) -> SparsityStats:
    method, budget = selection.method, selection.budget()
    assert is_thinning(method)
    if selection.head_density < 1.0 or (not thins_attention(method) and min(densities["attention"]) < 1.0):
        raise ValueError(f"method {method} does not choose heads; leave --head-density at 1.0")
    given = None if budget is None else budget.matrices
    of_matrices = densities_of_matrices(model.config, method, densities, given)
    if isinstance(thresholds, list):
        raise ValueError(f"density budget: it has thresholds of MLPs, where {method} needs them of matrices")
    calibration, stats = _calibration(model, selection), apply_sparsity(model, {})
    thin = thin_of(model, calibration, method)
    thin_inputs(model, thin, of_matrices, decode_only=selection.sparse_phases == "decode")
    if thresholds is not None:
        set_thinning(model, thresholds)
    prepare_kernels(model)
    model.is_sparse = True
    return stats


def _selector_maker(
    model: Decoder, selection: Selection, densities: Mapping[Block, Sequence[float]]
) -> Callable[[int, Block], Selector]:
    """What makes one block's selector, for every method that chooses units."""
    num_units: dict[Block, int] = {
        "mlp": model.config.intermediate_size,
        "attention": model.config.num_key_value_heads,
    }
    if selection.method == "oracle":
        return lambda layer, block: OracleSelector(
            unit_norms(model.mlp(layer)).to(model.compute_dtype) if block == "mlp" else None,
            densities[block][layer],
            num_units[block],
        )
    if selection.method == "random":
        return lambda layer, block: RandomSelector(densities[block][layer], num_units[block], selection.seed)
    if selection.method == "griffin":
        scores_text = selection.sparse_phases == "all"
        return lambda layer, block: PromptSelector(densities[block][layer], num_units[block], scores_text=scores_text)
    if selection.method == "predictor":
        return _predictor_maker(model, selection, densities)
    calibration = _calibration(model, selection)
    if selection.method == "static":

        def most_frequent(layer: int, block: Block) -> Selector:
            name = "neuron_frequency" if block == "mlp" else "group_frequency"
            frequency = calibration[layer].require(name, "static")
            kept = frequency.topk(num_kept(densities[block][layer], num_units[block])).indices
            mask = torch.zeros_like(frequency, dtype=torch.bool).scatter_(0, kept, True)
            return StaticSelector(mask.to(model.device))

        return most_frequent

    def above_gate_threshold(layer: int, block: Block) -> Selector:
        quantiles, density = calibration[layer].require("gate_quantiles", "cats"), densities[block][layer]
        threshold = calibration[layer].threshold_in_run("cats", density)
        return CatsSelector(model.mlp(layer), threshold_at(quantiles, density) if threshold is None else threshold)

    return above_gate_threshold


def _predictor_maker(
    model: Decoder, selection: Selection, densities: Mapping[Block, Sequence[float]]
) -> Callable[[int, Block], Selector]:
    predictors, manifest = load_predictors(_predictor_dir(selection), model)
    places = [(layer, density) for layer, density in enumerate(densities["mlp"]) if (layer, "mlp") in predictors]
    between = sorted(
        {
            density
            for layer, density in places
            if density < 1.0 and predictors[layer, "mlp"].calibrated_index(density) is None
        }
    )
    calibrated = sorted({value for layer, _ in places for value in predictors[layer, "mlp"].densities.tolist()})
    # A budget that is no file is being made: what is missing of its thresholds will be set in the run.
    exact = isinstance(selection.density_budget, DensityBudget)
    if isinstance(selection.density_budget, Path):
        exact = read_budget(selection.density_budget).thresholds is not None
    if between and not exact:
        logger.warning(
            f"{selection.predictors} is calibrated at MLP densities {calibrated}, not in every layer at {between}: "
            "thresholds come from dense states, stand-ins from the nearest; train with --densities for exact ones"
        )

    def learned(layer: int, block: Block) -> Selector:
        if (layer, block) not in predictors:
            raise ValueError(
                f"{selection.predictors}: no {block} predictor for layer {layer}; train with --units "
                f"{block} or both, on all layers"
            )
        # The first layers have nothing that far back: they were trained on, and read, their own input.
        lookahead = manifest.lookahead if layer >= manifest.lookahead else 0
        rule = manifest.mlp_rule if block == "mlp" else "topk"
        selector = PredictorSelector(predictors[layer, block], densities[block][layer], rule, lookahead)
        # Only now: in half precision the calibrated densities and thresholds would no longer be themselves.
        selector.predictor.to(device=model.device, dtype=model.compute_dtype)
        units = model.half_block(layer, block).block.units
        if units is not None:
            selector.keep_units(units)
        return selector

    return learned


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
        statistics.check_shapes(model.config, f"{directory}: calibration {layer}")
    return calibration
