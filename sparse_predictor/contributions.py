"""What each unit of a dense block writes, and which of them a predictor should find at a density.

Legend: B batch, T tokens, U units (neurons, or key-value groups of heads).
"""

import torch
from torch import Tensor

from modules.decoder import Decoder
from modules.feed_forward import unit_norms
from modules.selectors import contribution
from modules.sparsity import ActiveSet, Block
from sparse_predictor.streams import Stream, advance


def advance_observed(model: Decoder, stream: Stream, layer: int, block: Block) -> Tensor:
    """Past one dense half-block; what its units wrote: [B * T, U], at least float32.

    |a_j| * ||down_j|| of neurons, the L2 norm of a group's head outputs. From what the pass itself computes.
    """
    mlp, attention = model.mlp(layer), model.attention(layer)
    point = mlp.activations if block == "mlp" else attention.head_outputs
    seen: list[Tensor] = []
    handle = point.register_forward_hook(lambda _module, _args, output: seen.append(output))
    try:
        advance(model, stream, layer, block)
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
