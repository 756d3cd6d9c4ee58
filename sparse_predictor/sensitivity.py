"""What it costs a model that blocks become sparse: the divergence from the dense model's logits, nats per token.

The measure is that of refinement: mean KL(dense || sparse) of the next-token distributions (Hinton et al. 2015). Of one
block alone it is measured by branches: the dense stream is carried on layer by layer, and at each block it branches
off, once per density, through the sparse block and the dense rest. So a block near the end costs next to nothing.

A layer's bytes are divided over its matrices, where inputs are thinned out, by TEAL's greedy allocation
(Liu et al. 2024, algorithm 1): all matrices begin dense; step by step the matrix gives up some of its inputs whose loss
costs the least error of the layer's output per weight saved, until the layer keeps what it should. The error is the L2
distance from the dense output (the residual stream behind the layer) on calibration text, relative to its norm; what
comes before the layer is dense. `teal` has the MLP as its layer, `teal-all` the whole of it.

Differs: a step is GREEDY_STEP of a matrix's own inputs, compared by error per weight, where the paper takes steps of
equal bytes; of a key projection such a step would be all of it. No matrix falls below GREEDY_LEAST.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from modules.decoder import Decoder
from modules.forward_pass import ResidualStream
from modules.sparsity import BLOCKS, Block
from modules.thinned_input import ThinnedInput
from sparse_predictor.budgets import DensityBudget, Place
from sparse_predictor.calibration import quantiles_of, threshold_at
from sparse_predictor.refine import divergence_and_gradient
from sparse_predictor.selection import Selection, attach_selection, remove_sparsity
from sparse_predictor.thinning import PROJECTIONS, Thin, block_of
from sparse_predictor.thresholds import sets_its_threshold, setting_threshold

LOGITS_POSITIONS = 128  # few at a time: a large float32 block is new memory at every use
SELECTOR = "selector"
GREEDY_STEP = 0.05
GREEDY_LEAST = 0.05
GREEDY_TOKENS = 4096  # of the text at most: a layer runs once per matrix and step

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
    """The sparse parts of each block at each density of its kind. The model is dense afterwards, but still keeps inputs
    for look-ahead."""
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
            stream = model.begin_stream(chunk)
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
                    model.half_block(layer, block)(stream)
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


def _branch_through(model: Decoder, stream: ResidualStream, place: Place, parts: Parts) -> ResidualStream:
    """A branch of the dense stream through one sparse block, and on to the end."""
    branch, before = stream.branch(), parts_of(model, place)
    put(model, place, parts)
    try:
        model.half_block(*place)(branch)
    finally:
        put(model, place, before)
    for idx in range(2 * place[0] + (place[1] == "mlp") + 1, len(model.half_blocks)):
        model.half_blocks[idx](branch)
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


@dataclass(frozen=True, kw_only=True)
class GreedyPath:
    """TEAL's greedy path of one layer. `steps`: the matrix that each step thins out further, by GREEDY_STEP; `sizes`:
    the weights of each matrix; `errors[i]`: the layer's relative error after i steps."""

    sizes: Mapping[str, int]
    steps: Sequence[str]
    errors: Sequence[float]

    def densities(self, target: float) -> dict[str, float]:
        """Of each matrix, where the layer keeps a share `target` of its weights; the last step is taken in part.
        ValueError if the path does not go so far."""
        total = sum(self.sizes.values())
        found, left = dict.fromkeys(self.sizes, 1.0), (1.0 - target) * total
        for name in self.steps:
            cost = min(GREEDY_STEP * self.sizes[name], left)
            found[name], left = found[name] - cost / self.sizes[name], left - cost
        if left > 1e-6 * total:
            raise ValueError(f"a layer cannot keep {target:.3g} of its weights, {GREEDY_LEAST} of each matrix at least")
        return {name: round(density, 9) for name, density in found.items()}


@torch.inference_mode()
def greedy_paths(
    model: Decoder,
    thin: Thin,
    names: Sequence[str],
    least: Sequence[float],
    token_ids: Tensor,
    on_layer: Callable[[], object] = lambda: None,
) -> list[GreedyPath]:
    """The path of every layer down to where it keeps `least` (one per layer) of the weights of the matrices `names`,
    on token_ids [B, T]. The model is dense, and stays so."""
    blocks = [block for block in BLOCKS if any(name in PROJECTIONS[block] for name in names)]
    stream, found = model.begin_stream(token_ids), []
    for layer in range(model.config.num_hidden_layers):
        for block in BLOCKS[: BLOCKS.index(blocks[0])]:
            model.half_block(layer, block)(stream)
        found.append(_path(model, thin, names, blocks, layer, least[layer], stream))
        for block in blocks:
            model.half_block(layer, block)(stream)
        on_layer()
    return found


def _path(
    model: Decoder,
    thin: Thin,
    names: Sequence[str],
    blocks: Sequence[Block],
    layer: int,
    least: float,
    before: ResidualStream,
) -> GreedyPath:
    places = {name: (block_of(model, layer, name), getattr(block_of(model, layer, name), name)) for name in names}
    parts = {name: thin(layer, name, projection, 1.0, None) for name, (_, projection) in places.items()}
    sizes = {name: projection.num_rows * projection.width for name, (_, projection) in places.items()}
    quantiles: dict[str, Tensor] = {}

    def see(name: str) -> Callable[[ThinnedInput, tuple[Tensor]], None]:
        return lambda part, args: quantiles.update({name: quantiles_of(part.compared(args[0]))})

    def output() -> Tensor:
        branch = before.branch()
        for block in blocks:
            model.half_block(layer, block)(branch)
        return branch.residual  # float32 where the model is in half precision

    for name, (holder, _) in places.items():
        setattr(holder, name, parts[name])
    try:
        handles = [part.register_forward_pre_hook(see(name)) for name, part in parts.items()]
        dense = output()  # nothing is dropped yet
        for handle in handles:
            handle.remove()
        norm = float(dense.norm())

        def error_with(name: str) -> float:
            part, kept = parts[name], parts[name].threshold
            part.threshold = threshold_at(quantiles[name], densities[name] - GREEDY_STEP)
            error = float((output() - dense).norm()) / norm
            part.threshold = kept
            return error

        total, saved, error = sum(sizes.values()), 0.0, 0.0
        densities, steps, errors = dict.fromkeys(names, 1.0), list[str](), [0.0]
        while saved < (1.0 - least) * total:
            tried = {name: error_with(name) for name in names if densities[name] - GREEDY_STEP > GREEDY_LEAST - 1e-9}
            if not tried:
                break
            best = min(tried, key=lambda name: (tried[name] - error) / sizes[name])
            densities[best], error = round(densities[best] - GREEDY_STEP, 9), tried[best]
            parts[best].threshold = threshold_at(quantiles[best], densities[best])
            saved += GREEDY_STEP * sizes[best]
            steps.append(best)
            errors.append(error)
    finally:
        for name, (holder, projection) in places.items():
            setattr(holder, name, projection)
    return GreedyPath(sizes=sizes, steps=steps, errors=errors)
