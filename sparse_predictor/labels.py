"""What counts as an active neuron, in one place: collection, training, metrics and oracles share it."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from modules.config import ModelConfig
from modules.sparsity import ActiveSet, UnitShard, num_kept


@dataclass(frozen=True, kw_only=True)
class LabelDefinition:
    """`positive`: activation > 0 (ReLU). `top`: the `share` of neurons with the largest |a_j| * ||down_j||.
    `energy`: the smallest set of neurons holding `share` of the sum of (|a_j| * ||down_j||)^2. Heads have no exact
    zeros, so for heads `positive` means the top `share` as well.
    """

    kind: Literal["positive", "top", "energy"]
    share: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 < self.share <= 1.0:
            raise ValueError(f"label share must lie in (0, 1], got {self.share}")

    def to_manifest(self) -> dict[str, Any]:
        """As written beside every artefact that depends on it."""
        return {"kind": self.kind, "share": self.share}


def default_definition(config: ModelConfig, density: float) -> LabelDefinition:
    """ReLU models have exact zeros; all others are labelled by their top neurons at `density`."""
    if all(layer.feed_forward.activation == "relu" for layer in config.layers) and not config.gated_mlp:
        return LabelDefinition(kind="positive", share=density)
    return LabelDefinition(kind="top", share=density)


def true_active(
    activations: Tensor, unit_norms: Tensor | None, definition: LabelDefinition, units: UnitShard | None = None
) -> Tensor:
    """activations [rows, F], unit_norms [F] = ||down_j|| -> bool [rows, F]. Of a shard: the F neurons there,
    chosen among all."""
    if definition.kind == "positive":
        return activations > 0
    scores = activations.abs()
    if unit_norms is not None:
        scores = scores * unit_norms
    if units is not None:
        scores = units.gather(scores)
    if definition.kind == "top":
        return ActiveSet.from_scores(scores, num_kept(definition.share, scores.shape[-1]), units).mask
    energy, order = scores.float().square().sort(dim=-1, descending=True)
    held_before = energy.cumsum(-1) - energy
    chosen = held_before < definition.share * energy.sum(-1, keepdim=True)
    mask = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, chosen)
    return mask if units is None else units.columns(mask)


def contribution(dense_output: Tensor, unit_norms: Tensor | None, units: UnitShard | None = None) -> Tensor:
    """Size of each unit's part of the block output, [rows, U]; of a shard, of all units: [rows, num_units].

    MLP: `dense_output` [B, T, F] and `unit_norms` [F] = ||down_j||. Attention: `dense_output` [B, T, G, R, H]
    (key-value groups of R query heads): L2 over a group's heads.
    """
    if dense_output.dim() == 5:
        norms = dense_output.flatten(-2).norm(dim=-1).flatten(0, 1)
        return norms if units is None else units.gather_norms(norms)
    scores = dense_output.abs() if unit_norms is None else dense_output.abs() * unit_norms
    return scores.flatten(0, 1) if units is None else units.gather(scores.flatten(0, 1))
