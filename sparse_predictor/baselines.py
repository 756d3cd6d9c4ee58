"""Measure what the untrained methods need (see `calibration.py`): from an activation store, and from the model's own
pass over held-out text where the store does not hold it."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from modules.decoder import Decoder
from modules.kernels.activations import ACTIVATION_FUNCTIONS
from sparse_predictor.calibration import LayerCalibration, quantiles_of
from sparse_predictor.labels import LabelDefinition
from sparse_predictor.thinning import OUTPUT_PROJECTIONS, holder_of, matrices, norms_of_inputs
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


@torch.inference_mode()
def calibrate_inputs(
    model: Decoder, calibration: Mapping[int, LayerCalibration], token_ids: Tensor
) -> dict[int, LayerCalibration]:
    """`calibration` with what TEAL on attention and WINA need, from one dense pass over held-out token_ids [B, T]: the
    store does not hold what o_proj reads."""
    found: dict[int, dict[str, Tensor]] = {}
    handles = []

    def look(layer: int, name: str, norms: Tensor) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def see(projection: nn.Module, args: tuple[Any, ...]) -> None:
            sizes = args[0].abs()
            found[layer][name] = quantiles_of(sizes * norms.to(sizes.dtype))  # rounded as in a run
            if name in ("q_proj", "o_proj"):
                kind = "attention_input" if name == "q_proj" else "head_output"
                found[layer][f"{kind}_quantiles"] = quantiles_of(sizes)

        return see

    norms_by_layer = {}
    for layer in calibration:
        norms = {name: norms_of_inputs(model, layer, name) for name in matrices(model)}
        found[layer], norms_by_layer[layer] = {}, norms
        for name in norms:
            projection = getattr(holder_of(model, layer, name), name)
            handles.append(projection.register_forward_pre_hook(look(layer, name, norms[name])))
    try:
        model(token_ids)
    finally:
        for handle in handles:
            handle.remove()
    return {
        layer: replace(
            calibration[layer],
            attention_input_quantiles=seen["attention_input_quantiles"],
            head_output_quantiles=seen["head_output_quantiles"],
            weighted_quantiles=torch.stack([seen[name] for name in matrices(model)]),
            input_norms=torch.stack(
                [found_norms for name, found_norms in norms_by_layer[layer].items() if name not in OUTPUT_PROJECTIONS]
            ),
        )
        for layer, seen in found.items()
    }


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
