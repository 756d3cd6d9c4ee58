"""`attach_selection`: the one function that makes a dense model sparse, whatever the method."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from loguru import logger
from torch import nn

from modules.decoder import Decoder
from modules.forward_pass import real_tokens
from modules.fused_decode import can_fuse
from modules.mlp import unit_norms
from modules.projections import ThinnedInput
from modules.selectors import OracleSelector, RandomSelector, StaticSelector
from modules.sparsity import BLOCKS, Block, Selector, SparsityStats, num_kept
from modules.thinned_step import lay_out_for_kernels
from sparse_predictor.calibration import NUM_QUANTILES, LayerCalibration, load_calibration, threshold_at
from sparse_predictor.selectors import CatsSelector, PredictorSelector, SparsePhaseGate
from sparse_predictor.store import load_predictors, read_manifest

Method = Literal["dense", "predictor", "oracle", "static", "random", "cats", "teal"]
SparsePhases = Literal["decode", "all"]


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What to skip. Densities are shares of units kept, uniform over layers unless `density_budget` names a file.

    The budget file is JSON: `{"mlp": [one density a layer], "attention": [...]}`, either key optional.
    """

    method: Method = "dense"
    predictors: Path | None = None
    mlp_density: float = 1.0
    head_density: float = 1.0
    sparse_phases: SparsePhases = "decode"
    density_budget: Path | None = None
    seed: int = 0

    def densities(self, num_layers: int) -> dict[Block, list[float]]:
        """Target density of every layer; ValueError for values outside (0, 1] or a budget of the wrong length."""
        found: dict[Block, list[float]] = {
            "mlp": [self.mlp_density] * num_layers,
            "attention": [self.head_density] * num_layers,
        }
        if self.density_budget is not None:
            found.update(read_density_budget(self.density_budget))
        for block, values in found.items():
            if len(values) != num_layers:
                raise ValueError(f"density budget: {len(values)} {block} densities for {num_layers} layers")
            for density in values:
                if not 0.0 < density <= 1.0:
                    raise ValueError(f"{block} density must lie in (0, 1], got {density}")
        return found


def read_density_budget(path: Path) -> dict[Block, list[float]]:
    """Densities of the blocks that a budget file names; ValueError if it is not one."""
    try:
        budget = json.loads(path.read_text())
    except ValueError as problem:
        raise ValueError(f"{path}: not JSON ({problem})") from problem
    numbers = isinstance(budget, dict) and all(
        isinstance(values, list) and all(type(value) in (int, float) for value in values) for values in budget.values()
    )
    if not numbers or not budget or set(budget) - set(BLOCKS):
        raise ValueError(f'{path}: expected {{"mlp": [one density a layer], "attention": [...]}}, either or both')
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
        mlp = model.mlp(layer)
        for name in THINNED_PROJECTIONS:
            projection = getattr(mlp, name)
            if isinstance(projection, ThinnedInput):
                setattr(mlp, name, projection.projection)
    if model.sparsity_hook is not None:
        model.sparsity_hook.remove()
        model.sparsity_hook = None
    model.max_lookahead = 0
    model.is_sparse = False
    model.stats = None


THINNED_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def attach_selection(model: Decoder, selection: Selection) -> SparsityStats:
    """Make `model` sparse as `selection` says (dense: removes what was attached). ValueError names what is missing."""
    remove_sparsity(model)
    config = model.config
    densities = selection.densities(config.num_hidden_layers)
    method = selection.method
    if method == "dense":
        return apply_sparsity(model, {})
    heads = [layer for layer, density in enumerate(densities["attention"]) if density < 1.0]
    if method in ("cats", "teal") and heads:
        raise ValueError(f"method {method} does not choose heads; leave --head-density at 1.0")
    if method == "cats" and not config.gated_mlp:
        raise ValueError("method cats needs a gated MLP; this model has none")
    if method == "teal":
        stats = apply_sparsity(model, {})
        _thin_mlp_inputs(model, _calibration(model, selection), densities["mlp"], selection.sparse_phases)
        model.is_sparse = True
        return stats
    make = _selector_maker(model, selection, densities)
    blocks: list[tuple[int, Block]] = [(layer, "attention") for layer in heads]
    # Heads alone: the MLPs stay dense and need no predictors. Else every MLP goes the sparse way, at density 1 too.
    if not heads or min(densities["mlp"]) < 1.0:
        blocks += [(layer, "mlp") for layer in range(config.num_hidden_layers)]
    selectors = {place: make(*place) for place in blocks if model.has_block(*place)}
    if selection.sparse_phases == "decode":
        selectors = {place: SparsePhaseGate(selector) for place, selector in selectors.items()}
    stats = apply_sparsity(model, selectors)
    model.is_sparse = True  # also on a pipeline stage whose own blocks are all dense: the stages must act alike
    if method == "predictor":  # of all layers: a pipeline stage keeps inputs for the stages after it, too
        model.max_lookahead = read_manifest(_predictor_dir(selection), model).lookahead
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
            unit_norms(model.mlp(layer)).to(model.dtype) if block == "mlp" else None,
            densities[block][layer],
            num_units[block],
        )
    if selection.method == "random":
        return lambda layer, block: RandomSelector(densities[block][layer], num_units[block], selection.seed)
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
        quantiles = calibration[layer].require("gate_quantiles", "cats")
        return CatsSelector(model.mlp(layer), threshold_at(quantiles, densities[block][layer]))

    return above_gate_threshold


def _predictor_maker(
    model: Decoder, selection: Selection, densities: Mapping[Block, Sequence[float]]
) -> Callable[[int, Block], Selector]:
    predictors, manifest = load_predictors(_predictor_dir(selection), model)
    between = sorted({density for density in densities["mlp"] if density not in (1.0, *manifest.densities)})
    if between and "mlp" in manifest.blocks:
        logger.warning(
            f"{selection.predictors} is calibrated at MLP densities {manifest.densities}, not at {between}: thresholds "
            "come from dense states and stand-ins from the nearest density; train with --densities for exact ones"
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
        selector.predictor.to(device=model.device, dtype=model.dtype)
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
    read_manifest(directory, model)
    calibration = load_calibration(directory)
    missing = set(range(model.config.num_hidden_layers)) - set(calibration)
    if missing:
        raise ValueError(f"{directory}: no calibration for layers {sorted(missing)}")
    units = {"neuron_frequency": model.config.intermediate_size, "group_frequency": model.config.num_key_value_heads}
    for layer, statistics in calibration.items():
        for name, value in vars(statistics).items():
            expected = (units.get(name, NUM_QUANTILES),)
            if value is not None and tuple(value.shape) != expected:
                raise ValueError(
                    f"{directory}: calibration {layer}.{name} has shape {tuple(value.shape)}, expected {expected}"
                )
    return calibration


def _thin_mlp_inputs(
    model: Decoder, calibration: Mapping[int, LayerCalibration], densities: Sequence[float], phases: SparsePhases
) -> None:
    """TEAL (Liu et al. 2024, section 4) on the MLP: drop the inputs of each matmul that are small in magnitude."""
    thinned: list[ThinnedInput] = []
    num_bytes = 0
    for layer in model.layers:
        mlp = model.mlp(layer)
        for name in THINNED_PROJECTIONS:
            projection = getattr(mlp, name)
            if projection is None:
                continue
            statistic = "activation_quantiles" if name == "down_proj" else "input_quantiles"
            threshold = threshold_at(calibration[layer].require(statistic, "teal"), densities[layer])
            # The inputs of gate and up are whole on every rank.
            counted = mlp.units.counted if name == "down_proj" and mlp.units is not None else None
            thinned.append(ThinnedInput(projection, threshold, counted))
            setattr(mlp, name, thinned[-1])
        if can_fuse(model):
            num_bytes += lay_out_for_kernels(mlp)
    if num_bytes:
        logger.info(
            f"teal: input-major copies of the MLP's first matrices take {num_bytes / 2**30:.2f} GiB more memory"
        )

    def follow_the_pass(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        token_ids, num_tokens = args[0] if args else kwargs["token_ids"], kwargs.get("num_tokens")
        for projection in thinned:
            projection.enabled = phases == "all" or kwargs.get("phase", "prefill") == "decode"
            projection.valid = None if num_tokens is None else real_tokens(token_ids, num_tokens)

    model.sparsity_hook = model.register_forward_pre_hook(follow_the_pass, with_kwargs=True)
