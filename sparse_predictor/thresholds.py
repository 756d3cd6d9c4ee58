"""Thresholds that keep a stated share of neurons, or of inputs, measured in the run they are for.

A layer's scores depend on what the layers before it skipped. So each layer's threshold is set on states that the
already calibrated sparse layers before it produced, all in one pass over held-out text.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from modules.decoder import Decoder
from modules.sparsity import BLOCKS, ActiveSet, Block, SelectionContext, Selector
from modules.thinned_input import ThinnedInput
from sparse_predictor.budgets import Thresholds
from sparse_predictor.calibration import LayerCalibration, quantiles_of, threshold_at, thresholds_name
from sparse_predictor.methods.learned_predictor import PredictorSelector
from sparse_predictor.methods.registry import Setting, ThresholdSelector, all_methods
from sparse_predictor.predictor import Predictor
from sparse_predictor.selection import apply_method, apply_sparsity, remove_sparsity
from sparse_predictor.thinning import thinned_by_name


class CalibratingSelector(PredictorSelector):
    """Sets `calibrated`'s threshold from the batch at hand, then selects by it; density None: stays dense and
    records the quantiles of its scores. Scores are computed as in a run: in the model's own dtype."""

    def __init__(self, calibrated: Predictor, density: float | None, lookahead: int, dtype: torch.dtype) -> None:
        super().__init__(calibrated, 1.0 if density is None else density, "threshold", lookahead)
        self.calibrated = calibrated
        self.predictor = deepcopy(calibrated).to(dtype)
        self.density = density

    def select(self, hidden_states: Tensor, context: SelectionContext) -> ActiveSet | None:
        scores = self.predictor.scores(self.source(hidden_states, context)).flatten(0, 1)
        if context.valid is not None:
            scores = scores[context.valid.flatten()]
        quantiles = quantiles_of(scores)
        if self.density is None:
            self.calibrated.score_quantiles.copy_(quantiles)
            return None
        self.threshold = threshold_at(quantiles, self.density)
        index = self.calibrated.calibrated_index(self.density)
        if index is not None:
            self.calibrated.thresholds[index] = self.threshold
        return super().select(hidden_states, context)


@torch.inference_mode()
def calibrate_thresholds(
    model: Decoder, predictors: Mapping[int, Predictor], token_ids: Tensor, lookahead: int
) -> None:
    """Set score quantiles (dense run) and the threshold at each of its densities (sparse runs) of every layer's MLP
    predictor, in place. token_ids [B, T]: held-out text, one pass a density. Leaves the model dense."""
    num_densities = max((predictor.densities.numel() for predictor in predictors.values()), default=0)
    for place in (None, *range(num_densities)):
        selectors = {
            (layer, "mlp"): CalibratingSelector(
                predictor,
                None if place is None else float(predictor.densities[place]),
                lookahead if layer >= lookahead else 0,
                model.compute_dtype,
            )
            for layer, predictor in predictors.items()
        }
        apply_sparsity(model, selectors)  # type: ignore[arg-type]
        model(token_ids)
    remove_sparsity(model)


class SettingThreshold:
    """Sets the threshold of the selector inside from the batch at hand, of tokens from place `start` on, so that it
    keeps `density`; then it selects."""

    def __init__(self, inner: ThresholdSelector, density: float, start: int) -> None:
        self.inner, self.density, self.start = inner, density, start

    @property
    def lookahead(self) -> int:
        """As the selector inside."""
        return self.inner.lookahead

    def select(self, hidden_states: Tensor, context: SelectionContext) -> ActiveSet | None:
        values = self.inner.thresholded(hidden_states, context)
        counted = counted_tokens(context.valid, hidden_states, self.start)
        if counted is not None:
            values = values[counted.flatten()]
        self.inner.threshold = threshold_at(quantiles_of(values), self.density)
        return self.inner.select(hidden_states, context)


def counted_tokens(valid: Tensor | None, states: Tensor, start: int) -> Tensor | None:
    """Bool [B, T] of states [B, T, D]: `valid` (None: all) and from place `start` on; None: all."""
    if start == 0:
        return valid
    later = (torch.arange(states.shape[1], device=states.device) >= start).expand(states.shape[:2])
    return later if valid is None else later & valid


def setting_threshold(selector: Selector | None, density: float, start: int = 0) -> Selector | None:
    """A selector of neurons that will set its threshold by itself; one without a threshold as it is."""
    if isinstance(selector, ThresholdSelector) and selector.has_threshold:
        return SettingThreshold(selector, density, start)
    return selector


def sets_its_threshold(part: ThinnedInput, start: int = 0) -> RemovableHandle:
    """From now on a thinned input sets its threshold from the batch at hand, of tokens from place `start` on, so that
    it keeps its density."""

    def set_it(module: nn.Module, args: tuple[Tensor]) -> None:
        if part.enabled:
            sizes = part.compared(args[0])
            counted = counted_tokens(part.valid, args[0], start)
            sizes = sizes if counted is None else sizes[counted]
            part.threshold = threshold_at(quantiles_of(sizes), part.density)

    return part.register_forward_pre_hook(set_it)


@torch.inference_mode()
def set_thresholds_in_run(
    model: Decoder, densities: Sequence[float], token_ids: Tensor, *, start: int = 0
) -> Thresholds | None:
    """Set the thresholds of the sparse run that is attached (phases `all`), layer after layer, in one pass over
    token_ids [B, T], on its tokens from place `start` on: of every MLP's selector (one density per layer), or of every
    matrix whose input is thinned out (to its own density; these count from zero afterwards).

    Returns the thresholds, -inf where a layer is dense: one per layer, or by name of the matrix one per layer. None,
    and nothing done, if nothing is chosen by threshold."""
    thinned = thinned_by_name(model)
    if thinned:
        handles = [sets_its_threshold(part, start) for parts in thinned.values() for part in parts]
        try:
            model(token_ids)
        finally:
            for handle in handles:
                handle.remove()
        for parts in thinned.values():
            for part in parts:
                part.count_from()
        return {name: [part.threshold for part in parts] for name, parts in thinned.items()}
    mlps = [model.mlp(layer) for layer in model.layers]
    setting = [setting_threshold(mlp.selector, density, start) for mlp, density in zip(mlps, densities, strict=True)]
    if not any(isinstance(selector, SettingThreshold) for selector in setting):
        return None
    found = []
    for mlp, selector in zip(mlps, setting, strict=True):
        mlp.selector = selector
    try:
        model(token_ids)
    finally:
        for mlp, selector in zip(mlps, setting, strict=True):
            inner = selector.inner if isinstance(selector, SettingThreshold) else None
            mlp.selector = selector if inner is None else inner
            found.append(float("-inf") if inner is None else inner.threshold)
    return found


@torch.inference_mode()
def calibrate_in_runs(
    model: Decoder, calibration: Mapping[int, LayerCalibration], densities: Sequence[float], token_ids: Tensor
) -> dict[int, LayerCalibration]:
    """`calibration` with the thresholds of methods at each density, set as the predictors' are: each in the sparse run
    of its method, in one pass over token_ids [B, T]. Leaves the model dense."""
    if set(calibration) != set(model.layers):
        return dict(calibration)  # these methods need all layers
    found: dict[int, dict[str, list[Tensor]]] = {layer: {} for layer in calibration}
    for method in all_methods().values():
        if not method.sets_thresholds or (method.needs_gate and not model.config.gated_mlp):
            continue
        for density in densities:
            uniform = [density] * model.config.num_hidden_layers
            of_blocks: dict[Block, list[float]] = {block: uniform for block in BLOCKS if block in method.blocks}
            of_blocks = {"attention": [1.0] * len(uniform), **of_blocks}
            apply_method(model, method, Setting(model=model, densities=of_blocks, calibration=calibration))
            thresholds = set_thresholds_in_run(model, uniform, token_ids)
            assert thresholds is not None
            for layer, there in found.items():
                columns = list(thresholds.values()) if isinstance(thresholds, dict) else [thresholds]
                there.setdefault(thresholds_name(method.name), []).append(
                    torch.tensor([values[layer] for values in columns])
                )
    remove_sparsity(model)
    return {
        layer: LayerCalibration(
            {
                **calibration[layer].statistics,
                "densities": torch.tensor(densities, dtype=torch.float64),  # a file does not take one tensor twice
                **{name: torch.stack(values, 1) for name, values in there.items()},
            }
        )
        for layer, there in found.items()
    }
