"""What it costs a model that blocks become sparse: the divergence from the dense model's logits, nats per token.

The measure is that of refinement: mean KL(dense || sparse) of the next-token distributions (Hinton et al. 2015). Of one
block alone it is measured by branches: the dense stream is carried on layer by layer, and at each block it branches
off, once a density, through the sparse block and the dense rest. So a block near the end costs next to nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from modules.decoder import Decoder
from modules.sparsity import BLOCKS, Block
from modules.thinned_input import ThinnedInput
from sparse_predictor.budgets import DensityBudget, Place
from sparse_predictor.refine import divergence_and_gradient
from sparse_predictor.selection import Selection, attach_selection, remove_sparsity
from sparse_predictor.streams import Stream, advance, begin_stream
from sparse_predictor.thinning import PROJECTIONS
from sparse_predictor.thresholds import sets_its_threshold, setting_threshold

LOGITS_POSITIONS = 128  # few at a time: a large float32 block is new memory at every use
SELECTOR = "selector"

# What makes a block sparse: its selector and projections, by attribute.
Parts = dict[str, Any]


def parts_of(model: Decoder, place: Place) -> Parts:
    """What stands in a block now."""
    block = model.half_block(*place).block
    return {name: getattr(block, name) for name in (SELECTOR, *PROJECTIONS[place[1]])}


def put(model: Decoder, place: Place, parts: Parts) -> None:
    """Let these stand in a block."""
    for name, part in parts.items():
        setattr(model.half_block(*place).block, name, part)


def sparse_parts(
    model: Decoder, selection: Selection, densities: Mapping[Block, Sequence[float]]
) -> dict[Place, dict[float, Parts]]:
    """What would stand in each block at each of its kind's densities. Leaves the model dense, but for the inputs that
    it keeps for look-ahead."""
    num_layers, lookahead = model.config.num_hidden_layers, 0
    found: dict[Place, dict[float, Parts]] = {}
    for block, grid in densities.items():
        for density in grid:
            alone = {kind: [density if kind == block else 1.0] * num_layers for kind in BLOCKS}
            attach_selection(model, replace(selection, density_budget=DensityBudget(densities=alone)))
            for layer in range(num_layers):
                parts = parts_of(model, (layer, block))
                for part in parts.values():
                    if isinstance(part, ThinnedInput):
                        part.input_major = None  # copies for decode kernels, which nothing here runs
                        sets_its_threshold(part)
                found.setdefault((layer, block), {})[density] = {
                    **parts,
                    SELECTOR: setting_threshold(parts[SELECTOR], density),
                }
            lookahead = max(lookahead, model.max_lookahead)
    remove_sparsity(model)
    model.max_lookahead = lookahead
    return found


@torch.inference_mode()
def block_divergences(
    model: Decoder,
    selection: Selection,
    densities: Mapping[Block, Sequence[float]],
    token_ids: Tensor,
    on_block: Callable[[], object] = lambda: None,
    *,
    batch_size: int,
) -> dict[Place, dict[float, float]]:
    """KL when one block alone runs at each density of its kind (at thresholds that keep it), by (layer, block), over
    token_ids [B, T], `batch_size` windows together. `selection` says the method (sparse phases `all`). Leaves the model
    dense."""
    parts = sparse_parts(model, selection, densities)
    found: dict[Place, dict[float, float]] = {place: dict.fromkeys(grid, 0.0) for place, grid in parts.items()}
    try:
        for chunk in token_ids.split(batch_size):
            share = chunk.shape[0] / token_ids.shape[0]
            stream = begin_stream(model, chunk)
            expected = [
                F.log_softmax(model.logits(states).float(), dim=-1)
                for states in model(chunk).flatten(0, 1).split(LOGITS_POSITIONS)
            ]
            for layer in range(model.config.num_hidden_layers):
                for block in BLOCKS:
                    for density, there in parts.get((layer, block), {}).items():
                        branch = _branch_through(model, stream, (layer, block), there)
                        loss = _divergence(model, branch.hidden_states, expected)
                        found[layer, block][density] += share * loss
                    advance(model, stream, layer, block)
                    on_block()
    finally:
        remove_sparsity(model)
    return found


def _divergence(model: Decoder, hidden_states: Tensor, expected: Sequence[Tensor]) -> float:
    """Mean KL from log-probabilities that are kept: as refinement's, which makes those anew."""
    total = 0.0
    for states, target in zip(hidden_states.flatten(0, 1).split(LOGITS_POSITIONS), expected, strict=True):
        predicted = F.log_softmax(model.logits(states).float(), dim=-1)
        total += float(F.kl_div(predicted, target, reduction="sum", log_target=True))
    return total / sum(len(target) for target in expected)


def _branch_through(model: Decoder, stream: Stream, place: Place, parts: Parts) -> Stream:
    """A branch of the dense stream through one sparse block, and on to the end."""
    branch, before = stream.branch(), parts_of(model, place)
    put(model, place, parts)
    try:
        advance(model, branch, *place)
    finally:
        put(model, place, before)
    for idx in range(2 * place[0] + (place[1] == "mlp") + 1, len(model.half_blocks)):
        advance(model, branch, idx // 2, BLOCKS[idx % 2])
    return branch


@torch.inference_mode()
def divergence_of(model: Decoder, attach: Callable[[], object], token_ids: Tensor, *, batch_size: int) -> float:
    """KL of the model that `attach` makes sparse (in all phases) from the dense one, over token_ids [B, T],
    `batch_size` windows together. Leaves it sparse, with statistics of this run."""
    remove_sparsity(model)
    chunks = token_ids.split(batch_size)
    dense = [model(chunk) for chunk in chunks]
    attach()
    total = 0.0
    for chunk, states in zip(chunks, dense, strict=True):
        total += divergence_and_gradient(model, model(chunk), states)[0] * chunk.shape[0]
    return total / token_ids.shape[0]
