"""Measure what the untrained methods need (see `calibration.py`) from an activation store."""

import torch
from torch import Tensor

from modules.kernels.activations import ACTIVATION_FUNCTIONS
from sparse_predictor.calibration import LayerCalibration, quantiles_of
from sparse_predictor.labels import LabelDefinition
from sparse_predictor.train import targets_of
from sparse_predictor.training_data import TrainingRows

# Rows that thresholds are read off, from many documents: their scales differ.
QUANTILE_ROWS = 4096
FREQUENCY_ROWS = 8192


@torch.no_grad()
def calibrate_layer(
    mlp_rows: TrainingRows | None, attention_rows: TrainingRows | None, index: int, label: LabelDefinition
) -> LayerCalibration:
    """Statistics of the layer at one place of the store's layers, from training rows."""
    found: dict[str, Tensor] = {}
    if mlp_rows is not None:
        found["neuron_frequency"] = unit_frequency(mlp_rows, index, label)
        batch = mlp_rows.layer_rows(index, mlp_rows.sample("train", QUANTILE_ROWS))
        mlp = mlp_rows.model.mlp(mlp_rows.layers[index])
        inputs = batch.own_inputs[0]
        found["input_quantiles"] = quantiles_of(inputs.abs())
        if batch.activations.dtype != torch.bool:
            found["activation_quantiles"] = quantiles_of(batch.activations.abs())
        if mlp.gate_proj is not None:
            gate = ACTIVATION_FUNCTIONS[mlp.activation](mlp.gate_proj(inputs.to(mlp.gate_proj.weight.dtype)))
            found["gate_quantiles"] = quantiles_of(gate.abs())
    if attention_rows is not None:
        found["group_frequency"] = unit_frequency(attention_rows, index, label)
    return LayerCalibration(**found)


def unit_frequency(rows: TrainingRows, index: int, label: LabelDefinition) -> Tensor:
    """Share of training tokens in which each unit is active: float32 [U]."""
    counts = torch.zeros(rows.num_units, device=rows.device)
    total = 0
    for block in rows.sample("train", FREQUENCY_ROWS, seed=3):
        batch = rows.layer_rows(index, [block])
        true = targets_of(batch, rows.block, label).true[0]
        counts += true.sum(0)
        total += true.shape[0]
    return counts / max(1, total)
