"""Divide a layer's bytes over its matrices, for methods that thin out inputs: TEAL's greedy allocation.

Liu et al. 2024, algorithm 1: all matrices begin dense; step by step the matrix gives up some of its inputs whose loss
costs the least error of the layer's output per weight saved, until the layer keeps what it should. The error is the L2
distance from the dense output (the residual stream behind the layer) on calibration text, relative to its norm; what
comes before the layer is dense. `teal` has the MLP as its layer, `teal-all` the whole of it.

Differs: a step is STEP of a matrix's own inputs, compared by error per weight, where the paper takes steps of equal
bytes; of a key projection such a step would be all of it. No matrix falls below LEAST.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from modules.decoder import Decoder
from modules.sparsity import BLOCKS, Block
from modules.thinned_input import ThinnedInput
from sparse_predictor.calibration import quantiles_of, threshold_at
from sparse_predictor.streams import Stream, advance, begin_stream
from sparse_predictor.thinning import PROJECTIONS, Thin, holder_of

STEP = 0.05
LEAST = 0.05
GREEDY_TOKENS = 4096  # of the text at most: a layer runs once per matrix and step


@dataclass(frozen=True, kw_only=True)
class GreedyPath:
    """What the matrices of one layer give up: `steps` names them in order, a STEP each; `sizes` are their weights;
    `errors[i]` is the layer's relative error after so many steps."""

    sizes: Mapping[str, int]
    steps: Sequence[str]
    errors: Sequence[float]

    def densities(self, target: float) -> dict[str, float]:
        """Of each matrix, where the layer keeps a share `target` of its weights; the last step is taken in part.
        ValueError if the path does not go so far."""
        total = sum(self.sizes.values())
        found, left = dict.fromkeys(self.sizes, 1.0), (1.0 - target) * total
        for name in self.steps:
            cost = min(STEP * self.sizes[name], left)
            found[name], left = found[name] - cost / self.sizes[name], left - cost
        if left > 1e-6 * total:
            raise ValueError(f"a layer cannot keep {target:.3g} of its weights, {LEAST} of each matrix at least")
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
    stream, found = begin_stream(model, token_ids), []
    for layer in range(model.config.num_hidden_layers):
        for block in BLOCKS[: BLOCKS.index(blocks[0])]:
            advance(model, stream, layer, block)
        found.append(_path(model, thin, names, blocks, layer, least[layer], stream))
        for block in blocks:
            advance(model, stream, layer, block)
        on_layer()
    return found


def _path(
    model: Decoder, thin: Thin, names: Sequence[str], blocks: Sequence[Block], layer: int, least: float, before: Stream
) -> GreedyPath:
    places = {name: (holder_of(model, layer, name), getattr(holder_of(model, layer, name), name)) for name in names}
    parts = {name: thin(layer, name, projection, 1.0, None) for name, (_, projection) in places.items()}
    sizes = {name: projection.weight.numel() for name, (_, projection) in places.items()}
    quantiles: dict[str, Tensor] = {}

    def see(name: str) -> Callable[[ThinnedInput, tuple[Tensor]], None]:
        return lambda part, args: quantiles.update({name: quantiles_of(part.compared(args[0]))})

    def output() -> Tensor:
        branch = before.branch()
        for block in blocks:
            advance(model, branch, layer, block)
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
            part.threshold = threshold_at(quantiles[name], densities[name] - STEP)
            error = float((output() - dense).norm()) / norm
            part.threshold = kept
            return error

        total, saved, error = sum(sizes.values()), 0.0, 0.0
        densities, steps, errors = dict.fromkeys(names, 1.0), list[str](), [0.0]
        while saved < (1.0 - least) * total:
            tried = {name: error_with(name) for name in names if densities[name] - STEP > LEAST - 1e-9}
            if not tried:
                break
            best = min(tried, key=lambda name: (tried[name] - error) / sizes[name])
            densities[best], error = round(densities[best] - STEP, 9), tried[best]
            parts[best].threshold = threshold_at(quantiles[best], densities[best])
            saved += STEP * sizes[best]
            steps.append(best)
            errors.append(error)
    finally:
        for name, (holder, projection) in places.items():
            setattr(holder, name, projection)
    return GreedyPath(sizes=sizes, steps=steps, errors=errors)
