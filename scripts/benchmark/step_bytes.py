"""Bytes that a decode step cannot do without: weights at the density that was achieved, and the cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from modules.decoder import Decoder
from modules.feed_forward import MAX_FUSED_SPARSE_ROWS
from modules.sparsity import BLOCKS
from scripts.benchmark.achieved import Achieved
from sparse_predictor.selection import Method


@dataclass(frozen=True, kw_only=True)
class StepBytes:
    """Of one step of a batch. `weights`: the model's own; `predictor`: of scores and stand-ins; `cache`: keys and
    values read."""

    weights: int
    predictor: int
    cache: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.predictor + self.cache

    def to_record(self, steps_per_s: float, ceiling: float) -> dict[str, Any]:
        """What a record says about bandwidth; `ceiling` in GB/s."""
        achieved = steps_per_s * self.total / 1e9
        return {
            "share_of_ceiling": achieved / ceiling,
            "bytes_per_step": self.total,
            "bytes": vars(self),
            "achieved_gb_per_s": achieved,
            "ceiling_gb_per_s": ceiling,
        }


def step_bytes(
    model: Decoder, method: Method, achieved: Achieved, *, batch_size: int, mean_length: float, dense_bytes: int
) -> StepBytes:
    """Of a step with `mean_length` cached positions per row. Weights are read once for all rows of the batch (the union
    of their units; all of an MLP's where more rows than `MAX_FUSED_SPARSE_ROWS` take a mask); an inactive group's keys
    and values are not read, each row for itself. `dense_bytes`: what a dense step reads of the weights."""
    config, itemsize, num_layers = model.config, model.dtype.itemsize, model.config.num_hidden_layers
    union = achieved.unions if batch_size <= MAX_FUSED_SPARSE_ROWS else {**achieved.unions, "mlp": 1.0}
    # CATS reads its gate whole to choose the rest.
    mlp_share = (1.0 + 2.0 * union["mlp"]) / 3.0 if method == "cats" else union["mlp"]
    query_weights = 2 * config.hidden_size * config.num_attention_heads * config.head_dim  # and the output's
    skipped = (1.0 - mlp_share) * config.mlp_num_parameters + (1.0 - union["attention"]) * query_weights
    cached = 2 * config.num_key_value_heads * config.head_dim * mean_length * batch_size
    return StepBytes(
        weights=round(dense_bytes - num_layers * skipped * itemsize),
        predictor=predictor_parameters(model) * itemsize,
        cache=round(num_layers * cached * achieved.densities["attention"] * itemsize),
    )


def predictor_parameters(model: Decoder) -> int:
    """Weights that a token's scores and stand-ins read, over all blocks."""
    count = 0
    for layer_idx in model.layers:
        for block in BLOCKS:
            selector: object = model.half_block(layer_idx, block).block.selector
            while hasattr(selector, "inner"):
                selector = selector.inner
            count += getattr(selector, "num_parameters_read", 0)
    return count
