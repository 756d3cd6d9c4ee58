"""The linear stand-in: what the skipped neurons would have added, as a low-rank map of the MLP's input.

Closed form, one regression a layer and density: the dense MLP's output minus what the chosen neurons give.
"""

import torch

from sparse_predictor.calibration import quantiles_of, threshold_at
from sparse_predictor.low_rank import RegressionSums
from sparse_predictor.stack import PredictorStack
from sparse_predictor.training_data import TrainingRows

THRESHOLD_ROWS = 2048


@torch.no_grad()
def fit_standins(stack: PredictorStack, rows: TrainingRows, *, max_rows: int) -> None:
    """Set the stand-ins of every layer and density of `stack` from stored activations.

    Neurons are chosen by one threshold a layer, at the density each stand-in is for. ValueError if the store keeps
    packed labels, which do not say what was skipped.
    """
    if not stack.densities or not stack.standin_in.shape[2]:
        return
    if rows.store.layout.label_format != "raw":
        raise ValueError("a stand-in needs activations, and this store keeps packed labels only; use --standin-rank 0")
    sample = rows.sample("train", max_rows, seed=1)
    few = rows.sample("train", THRESHOLD_ROWS, seed=2)
    _, _, rank, hidden_size = stack.standin_in.shape
    for index in range(stack.num_layers):
        down = rows.model.mlp(rows.layers[index]).down_proj.weight.float()
        scores = stack.layer_scores(index, rows.layer_rows(index, few).inputs[0])
        quantiles = quantiles_of(scores)
        thresholds = [threshold_at(quantiles, density) for density in stack.densities]
        sums = [RegressionSums(hidden_size, hidden_size, down.device) for _ in thresholds]
        for block in sample:
            batch = rows.layer_rows(index, [block])
            scores = stack.layer_scores(index, batch.inputs[0])
            for threshold, total in zip(thresholds, sums, strict=True):
                skipped = batch.activations[0].masked_fill(scores >= threshold, 0.0)
                total.add(batch.own_inputs[0], skipped @ down)
        for place, total in enumerate(sums):
            fitted = total.fit(rank)
            stack.standin_in[index, place] = fitted.first
            stack.standin_out[index, place] = fitted.second
            stack.standin_bias[index, place] = fitted.bias
