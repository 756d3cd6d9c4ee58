"""Measure what the untrained methods need (see `calibration.py`): how often units are active from an activation store,
and all else in the model's own pass over held-out text."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from modules.decoder import Decoder
from modules.kernels.arguments import ACTIVATION_FUNCTIONS
from sparse_predictor.calibration import LayerCalibration, quantiles_of
from sparse_predictor.labels import LabelDefinition
from sparse_predictor.thinning import OUTPUT_PROJECTIONS, STATISTICS, holder_of, matrices, norms_of_inputs
from sparse_predictor.train import targets_of
from sparse_predictor.training_data import TrainingRows

FREQUENCY_ROWS = 8192


@torch.no_grad()
def calibrate_layer(
    mlp_rows: TrainingRows | None, attention_rows: TrainingRows | None, index: int, label: LabelDefinition
) -> LayerCalibration:
    """How often the units of the layer at one place of the store's layers are active, from training rows."""
    frequencies = [None if rows is None else unit_frequency(rows, index, label) for rows in (mlp_rows, attention_rows)]
    return LayerCalibration(neuron_frequency=frequencies[0], group_frequency=frequencies[1])


@torch.inference_mode()
def calibrate_inputs(
    model: Decoder, calibration: Mapping[int, LayerCalibration], token_ids: Tensor
) -> dict[int, LayerCalibration]:
    """`calibration` with the quantiles that CATS, TEAL and WINA's weighting read thresholds off, from one dense pass
    over held-out token_ids [B, T], the text that the predictors' own thresholds are set on."""
    found: dict[int, dict[str, Tensor]] = {}
    weighted: dict[int, dict[str, Tensor]] = {}
    norms: dict[int, dict[str, Tensor]] = {}
    handles = []

    def look(layer: int, name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def see(projection: nn.Module, args: tuple[Any, ...]) -> None:
            sizes = args[0].abs()
            weighted[layer][name] = quantiles_of(sizes * norms[layer][name].to(sizes.dtype))  # rounded as in a run
            if name in ("q_proj", "o_proj", "up_proj", "down_proj"):
                found[layer][f"{STATISTICS[name]}_quantiles"] = quantiles_of(sizes)

        return see

    def look_at_gate(layer: int) -> Callable[[nn.Module, tuple[Any, ...], Tensor], None]:
        activate = ACTIVATION_FUNCTIONS[model.mlp(layer).activation]

        def see(gate: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            found[layer]["gate_quantiles"] = quantiles_of(activate(output).abs())

        return see

    for layer in calibration:
        found[layer], weighted[layer] = {}, {}
        norms[layer] = {name: norms_of_inputs(model, layer, name) for name in matrices(model)}
        for name in norms[layer]:
            projection = getattr(holder_of(model, layer, name), name)
            handles.append(projection.register_forward_pre_hook(look(layer, name)))
            if name == "gate_proj":
                handles.append(projection.register_forward_hook(look_at_gate(layer)))
    try:
        model(token_ids)
    finally:
        for handle in handles:
            handle.remove()
    return {
        layer: replace(
            calibration[layer],
            **seen,
            weighted_quantiles=torch.stack([weighted[layer][name] for name in matrices(model)]),
            input_norms=torch.stack([one for name, one in norms[layer].items() if name not in OUTPUT_PROJECTIONS]),
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
