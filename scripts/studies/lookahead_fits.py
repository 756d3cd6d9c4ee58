"""The same predictor at several distances: closed-form fits of one layer's units to the inputs of earlier layers.

A fit is the reduced-rank regression that training starts from (`low_rank.py`, `train.initialise_closed_form`): of the
units' relative magnitudes on a normed input. Text runs through the model layer by layer, all of it through one layer
before the next, so only the inputs of the last few layers are kept. Second moments of inputs are summed once per layer
and shared by all layers that look back at it; each pair of layers has cross moments of its own, summed while the text
passes and gone after the fit.

Legend: B batch, T tokens, n rows, D hidden, U units (neurons, or key-value groups of heads), R rank.
"""

from collections.abc import Collection, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from modules.decoder import Decoder
from modules.feed_forward import unit_norms
from modules.forward_pass import ResidualStream
from modules.sparsity import ActiveSet, Block
from sparse_predictor.labels import contribution
from sparse_predictor.low_rank import LowRankMap, RegressionSums
from sparse_predictor.predictor import Predictor
from sparse_predictor.train import relative_magnitude


def advance_observed(model: Decoder, stream: ResidualStream, layer: int, block: Block) -> Tensor:
    """Past one dense half-block; what its units wrote: [B * T, U], at least float32.

    |a_j| * ||down_j|| of neurons, the L2 norm of a group's head outputs. From what the pass itself computes.
    """
    mlp, attention = model.mlp(layer), model.attention(layer)
    point = mlp.activations if block == "mlp" else attention.head_outputs
    seen: list[Tensor] = []
    handle = point.register_forward_hook(lambda _module, _args, output: seen.append(output))
    try:
        model.half_block(layer, block)(stream)
    finally:
        handle.remove()
    output = seen[0].to(torch.promote_types(seen[0].dtype, torch.float32))
    if block == "mlp":
        return contribution(output, unit_norms(mlp))
    return contribution(output.unflatten(2, (attention.num_units, attention.queries_per_group)), None)


def largest_writers(contributions: Tensor, count: int) -> Tensor:
    """The top `count` units of each row, less those that write nothing: bool [rows, U].

    One definition for every activation function, so that models compare at equal density. Where a ReLU leaves fewer
    than `count` neurons above zero, the others are no part of the truth: which zeros fill the count means nothing.
    """
    return ActiveSet.from_scores(contributions, count).mask & (contributions > 0)


# Tokens that pass a layer together: on a GPU more, as each product is a launch.
CHUNK_TOKENS = {"cpu": 4096, "cuda": 16384}


class Reach(NamedTuple):
    """What a fit learns from: the input of how many layers back, and how much text."""

    lookahead: int
    calibration_tokens: int


@dataclass(frozen=True)
class RankedMap:
    """A fit of the largest rank, from which those of smaller ranks are cut: directions stand strongest first."""

    largest: LowRankMap
    mean_inner: Tensor  # [R], first times the mean input

    def at(self, rank: int) -> LowRankMap:
        """The best map of `rank`, as `RegressionSums.fit(rank)`; rank 0 is the mean, the same for every input."""
        first, second, bias = self.largest.first, self.largest.second, self.largest.bias
        return LowRankMap(first[:rank], second[:, :rank], bias + second[:, rank:] @ self.mean_inner[rank:])


def scores_of(fitted: LowRankMap, inputs: Tensor) -> Tensor:
    """[n, D] -> [n, U], in the wider of the two types."""
    inputs = inputs.to(torch.promote_types(inputs.dtype, fitted.first.dtype))
    return inputs @ fitted.first.T.to(inputs.dtype) @ fitted.second.T.to(inputs.dtype) + fitted.bias.to(inputs.dtype)


def as_predictor(fitted: LowRankMap, dtype: torch.dtype) -> Predictor:
    """The map as a run attaches it, in the run's type, where the map is."""
    (rank, hidden_size), num_units = fitted.first.shape, fitted.second.shape[0]
    with fitted.first.device:
        predictor = Predictor(hidden_size, num_units, rank)
    for name in ("first", "second", "bias"):
        getattr(predictor, name).copy_(getattr(fitted, name))
    return predictor.to(dtype)


@dataclass(frozen=True)
class InputMoments:
    """First and second moments of a layer's inputs over `count` rows, as in `RegressionSums`."""

    count: float
    x: Tensor
    xx: Tensor


@dataclass
class EarlierInputs:
    """One kind of block's normed inputs of the last layers, by layer: a list of chunks [n, D]; and their moments by
    (layer, rows), where they are asked for."""

    max_lookahead: int
    chunks: dict[int, list[Tensor]] = field(default_factory=dict)
    moments: dict[tuple[int, int], InputMoments] = field(default_factory=dict)

    def keep(self, layer: int, streams: Sequence[ResidualStream]) -> None:
        """Take in what the streams hold before this layer's block; forget what no later layer looks back at."""
        self.chunks[layer] = [stream.hidden_states.flatten(0, 1) for stream in streams]
        oldest = layer - self.max_lookahead
        self.chunks = {kept: chunks for kept, chunks in self.chunks.items() if kept >= oldest}
        self.moments = {place: sums for place, sums in self.moments.items() if place[0] >= oldest}


def fit_layer(
    model: Decoder,
    streams: Sequence[ResidualStream],
    layer: int,
    block: Block,
    inputs: EarlierInputs,
    reaches: Collection[Reach],
    *,
    amounts: Collection[int],
    rank: int,
) -> dict[Reach, RankedMap]:
    """Fit a block for each reach while the streams pass it; `inputs` has taken in this layer's.

    Chunks end at each of `amounts`, the rows after which later layers may want a fit, too. ValueError for activations
    that are not finite.
    """
    num_units = model.half_block(layer, block).block.num_units
    assert isinstance(num_units, int)
    sums = RegressionSums(model.config.hidden_size, num_units if reaches else 0, model.device)
    cross = {lookahead: torch.zeros_like(sums.xy) for lookahead in {reach.lookahead for reach in reaches} - {0}}
    fits: dict[Reach, RankedMap] = {}
    num_rows = 0
    for place, stream in enumerate(streams):
        rows = _wide(inputs.chunks[layer][place])
        num_rows += len(rows)
        if reaches:
            target = relative_magnitude(advance_observed(model, stream, layer, block))
            sums.add(rows, target)
            for lookahead, pair in cross.items():
                pair += _wide(inputs.chunks[layer - lookahead][place]).T @ target
        else:
            model.half_block(layer, block)(stream)
            sums.add(rows, rows[:, :0])
        if num_rows in amounts:
            if not bool(sums.xx.isfinite().all() and sums.xy.isfinite().all()):
                raise ValueError(f"{block} of layer {layer}: activations that are not finite; try --dtype float32")
            inputs.moments[layer, num_rows] = InputMoments(sums.count, sums.x.clone(), sums.xx.clone())
            for reach in reaches:
                if reach.calibration_tokens == num_rows:
                    source = inputs.moments[layer - reach.lookahead, num_rows]
                    fits[reach] = _fit(source, sums, cross.get(reach.lookahead, sums.xy), rank)
    return fits


def _fit(source: InputMoments, own: RegressionSums, cross: Tensor, rank: int) -> RankedMap:
    """Regression of a layer's targets (sums in `own`) on the inputs of another layer."""
    sums = copy(own)
    sums.x, sums.xx, sums.xy = source.x, source.xx, cross
    fitted = sums.fit(rank)
    return RankedMap(fitted, (fitted.first.double() @ (source.x / source.count)).float())


def _wide(states: Tensor) -> Tensor:
    return states.to(torch.promote_types(states.dtype, torch.float32))


def windows_at_once(windows: Tensor) -> int:
    """How many of the windows [W, T] run together where they are."""
    return max(1, CHUNK_TOKENS[windows.device.type] // windows.shape[1])


def chunks_of(windows: Tensor, boundaries: Collection[int] = ()) -> list[Tensor]:
    """Windows [W, T] in groups that run together; a group ends at each of `boundaries` (in windows)."""
    edges = sorted({0, *boundaries, len(windows)})
    return [
        chunk
        for start, stop in zip(edges, edges[1:], strict=False)
        for chunk in windows[start:stop].split(windows_at_once(windows))
    ]
