"""Thresholds that keep a stated share of neurons, measured in the run they are for.

A layer's scores depend on what the layers before it skipped. So each layer's threshold is set on states that the
already calibrated sparse layers before it produced, all in one pass over held-out text.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy

import torch
from torch import Tensor

from modules.decoder import Decoder
from modules.sparsity import ActiveSet, SelectionContext, Selector
from sparse_predictor.calibration import quantiles_of, threshold_at
from sparse_predictor.predictor import Predictor
from sparse_predictor.selection import apply_sparsity, remove_sparsity
from sparse_predictor.selectors import CatsSelector, PredictorSelector


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
                model.dtype,
            )
            for layer, predictor in predictors.items()
        }
        apply_sparsity(model, selectors)  # type: ignore[arg-type]
        model(token_ids)
    remove_sparsity(model)


class SettingThreshold:
    """Sets the threshold of the selector inside from the batch at hand, so that it keeps `density`; then it selects."""

    def __init__(self, inner: PredictorSelector | CatsSelector, density: float) -> None:
        self.inner, self.density = inner, density

    @property
    def lookahead(self) -> int:
        """As the selector inside."""
        return self.inner.lookahead

    def select(self, hidden_states: Tensor, context: SelectionContext) -> ActiveSet | None:
        values = self.inner.thresholded(hidden_states, context)
        if context.valid is not None:
            values = values[context.valid.flatten()]
        self.inner.threshold = threshold_at(quantiles_of(values), self.density)
        return self.inner.select(hidden_states, context)


def setting_threshold(selector: Selector | None, density: float) -> Selector | None:
    """A selector of neurons that will set its threshold by itself; one without a threshold as it is."""
    if isinstance(selector, CatsSelector) or (isinstance(selector, PredictorSelector) and selector.count is None):
        return SettingThreshold(selector, density)
    return selector


@torch.inference_mode()
def set_thresholds_in_run(model: Decoder, densities: Sequence[float], token_ids: Tensor) -> list[float] | None:
    """Set the threshold of every MLP's selector (one density a layer) in the sparse run that is attached (phases
    `all`), layer after layer, in one pass over token_ids [B, T]. The thresholds, -inf where a layer is dense; None,
    and nothing done, if no neurons are chosen by threshold."""
    mlps = [model.mlp(layer) for layer in model.layers]
    setting = [setting_threshold(mlp.selector, density) for mlp, density in zip(mlps, densities, strict=True)]
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
