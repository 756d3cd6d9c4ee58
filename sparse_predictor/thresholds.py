"""Thresholds that keep a stated share of neurons, measured in the run they are for.

A layer's scores depend on what the layers before it skipped. So each layer's threshold is set on states that the
already calibrated sparse layers before it produced, all in one pass over held-out text.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy

import torch
from torch import Tensor

from modules.decoder import Decoder
from modules.sparsity import ActiveSet, SelectionContext
from sparse_predictor.calibration import quantiles_of, threshold_at
from sparse_predictor.predictor import Predictor
from sparse_predictor.selection import apply_sparsity, remove_sparsity
from sparse_predictor.selectors import PredictorSelector


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
    model: Decoder, predictors: Mapping[int, Predictor], token_ids: Tensor, densities: Sequence[float], lookahead: int
) -> None:
    """Set score quantiles (dense run) and the threshold at each of `densities` (sparse runs) of every layer's MLP
    predictor, in place. token_ids [B, T]: held-out text, one pass a density. Leaves the model dense."""
    for density in (None, *densities):
        selectors = {
            (layer, "mlp"): CalibratingSelector(predictor, density, lookahead if layer >= lookahead else 0, model.dtype)
            for layer, predictor in predictors.items()
        }
        apply_sparsity(model, selectors)  # type: ignore[arg-type]
        model(token_ids)
    remove_sparsity(model)
