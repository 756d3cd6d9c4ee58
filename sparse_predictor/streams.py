"""Text on its way through a model, half-block by half-block: for what is measured or fitted in between."""

from dataclasses import dataclass, replace

from torch import Tensor

from modules.decoder import Decoder
from modules.forward_pass import ForwardPass
from modules.sparsity import Block


@dataclass
class Stream:
    """States [B, T, D] as the residual junction leaves them."""

    hidden_states: Tensor
    residual: Tensor
    forward_pass: ForwardPass

    def branch(self) -> "Stream":
        """Another stream from here on; what it computes leaves this one as it is."""
        inputs = {block: dict(kept) for block, kept in self.forward_pass.inputs.items()}
        return replace(self, forward_pass=replace(self.forward_pass, inputs=inputs))


def begin_stream(model: Decoder, token_ids: Tensor) -> Stream:
    """token_ids [B, T] before the first half-block."""
    forward_pass = model.begin(token_ids)
    hidden_states, residual = model.enter(token_ids, forward_pass)
    assert isinstance(hidden_states, Tensor)
    return Stream(hidden_states, residual, forward_pass)


def advance(model: Decoder, stream: Stream, layer: int, block: Block, partial: Tensor | None = None) -> None:
    """Past one half-block; `partial` is its output where somebody else made it."""
    half_block = model.half_block(layer, block)
    if partial is None:
        partial = half_block.block(stream.hidden_states, stream.forward_pass)
    stream.hidden_states, stream.residual = model.leave(half_block, partial, stream.residual)
