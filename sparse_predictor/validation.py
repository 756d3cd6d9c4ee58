"""Recall, precision and density of freshly trained scores, on documents that training never saw."""

from collections.abc import Sequence
from typing import Any

import torch

from modules.sparsity import ActiveSet, num_kept
from sparse_predictor.calibration import quantiles_of, threshold_at
from sparse_predictor.labels import LabelDefinition
from sparse_predictor.metrics import SetOverlap
from sparse_predictor.predictor import Rule
from sparse_predictor.stack import PredictorStack
from sparse_predictor.train import targets_of
from sparse_predictor.training_data import TrainingRows

MAX_ROWS = 4096


@torch.no_grad()
def validation_metrics(
    stack: PredictorStack, rows: TrainingRows, label: LabelDefinition, densities: Sequence[float], rule: Rule
) -> dict[str, Any]:
    """`{"layers": [...], "at": {density: {"recall": [per layer], "precision": ..., "density": ...}}}`.

    The truth is the label, at the share that a layer keeps where labels are shares. Choosing everything has recall 1,
    so the density that was really chosen stands beside it.
    """
    sample = rows.sample("validation", MAX_ROWS)
    at: dict[str, dict[str, list[float]]] = {
        f"{density:g}": {"recall": [], "precision": [], "density": []} for density in densities
    }
    for index in range(stack.num_layers):
        batch = rows.layer_rows(index, sample)
        scores = stack.layer_scores(index, batch.inputs[0])
        quantiles = quantiles_of(scores)
        for density in densities:
            kept = stack.kept(index, density)
            share = LabelDefinition(kind=label.kind, share=kept)
            true = targets_of(batch, rows.block, share).true[0]
            if rule == "topk":
                chosen = ActiveSet.from_scores(scores, num_kept(kept, scores.shape[-1])).mask
            else:
                chosen = scores >= threshold_at(quantiles, kept)
            overlap = SetOverlap()
            overlap.add(chosen, true, None)
            found = at[f"{density:g}"]
            found["recall"].append(overlap.recall)
            found["precision"].append(overlap.precision)
            found["density"].append(float(chosen.float().mean()))
    return {"layers": rows.layers, "rows": sum(stop - start for start, stop in sample), "at": at}
