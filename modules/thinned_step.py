"""A decode step whose MLPs drop small inputs (TEAL): what kernels do of it, and what is noted for the statistics.

The Python code of a captured step runs once, so nothing that it adds up is a count: each `ThinnedInput` leaves the
number of entries that it kept on the device, and `StepCounts` takes that along in the step's message.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from modules.kernels.deferred_norm import DeferredNorm
from modules.kernels.thinned_rows import Activations, thinned_rows
from modules.sparsity import BLOCKS
from modules.thinned_input import ThinnedInput

if TYPE_CHECKING:
    from modules.decode_step import DecodeStep
    from modules.decoder import Decoder
    from modules.feed_forward import FeedForward


@contextmanager
def thinned_in_step(model: Decoder) -> Iterator[list[tuple[ThinnedInput, int]]]:
    """While it lasts, a decode step is run without `Decoder.forward`: inputs are thinned out, every token is real, and
    numbers of entries kept are left at `kept_in_step` instead of being counted. Yields what is thinned out
    (`thinned_parts`)."""
    parts = thinned_parts(model)
    for part, _ in parts:
        part.enabled, part.in_step, part.valid = True, True, None
    try:
        yield parts
    finally:
        for part, _ in parts:
            part.in_step, part.kept_in_step = False, None


def thinned_parts(model: Decoder) -> list[tuple[ThinnedInput, int]]:
    """All projections that are here whose inputs are thinned out, and the weights an entry stands for."""
    blocks = [model.half_block(layer, block).block for layer in model.layers for block in BLOCKS]
    return [part for block in blocks for part in block.thinned_parts()]


def follows_thinning(model: Decoder) -> bool:
    """Whether fused decode steps, and so graphs of sparse ones, compute and count what is thinned out here: where only
    MLPs are, by magnitude alone. Elsewhere decoding takes the plain path."""
    by_magnitude = all(part.input_norms is None for part, _ in thinned_parts(model))
    return by_magnitude and not any(model.attention(layer).thinned_parts() for layer in model.layers)


def lay_out_for_kernels(mlp: FeedForward) -> int:
    """Copy gate and up of an MLP whose inputs are thinned out, input-major, for `thinned_mlp`: the bytes this takes."""
    parts = [part for part, _ in mlp.thinned_parts()]
    # The down projection is input-major as it is.
    weights = torch.stack([part.dequantised().detach().t() for part in parts[:-1]])
    parts[-2].input_major = weights
    parts[-1].input_major = parts[-1].dequantised().detach()[None]
    return weights.numel() * weights.itemsize


def can_thin(mlp: FeedForward, states: DeferredNorm) -> bool:
    """Whether `thinned_mlp` computes this: one row, in a step, laid out for it."""
    down = mlp.down_proj
    return isinstance(down, ThinnedInput) and down.in_step and down.input_major is not None and len(states.partial) == 1


def thinned_mlp(mlp: FeedForward, states: DeferredNorm, fused: DecodeStep) -> Tensor:
    """[1, D] still to be normed -> [1, 1, D] float32, in two kernels: gate and up, then down."""
    parts = [part for part, _ in mlp.thinned_parts()]
    up, down = parts[-2:]
    assert up.input_major is not None and down.input_major is not None
    sums, counters = fused.thinned_sums(mlp.layer_idx)
    first = parts[:-1]  # gate and up read one input, each with its own threshold
    thinned_rows(
        states, up.input_major, thresholds=[part.threshold for part in first], counters=counters[:-1], output=sums
    )
    activations = Activations(
        gate=None if len(first) == 1 else sums[0],
        up=sums[-1],
        gate_bias=None if len(first) == 1 else first[0].bias,
        up_bias=up.bias,
        activation=mlp.activation,
        dtype=states.dtype,
    )
    output = fused.sums("mlp", mlp.layer_idx)
    thinned_rows(activations, down.input_major, thresholds=[down.threshold], counters=counters[-1:], output=output)
    for place, part in enumerate(parts):
        part.kept_in_step = counters[place : place + 1]
    return output[:, None]
