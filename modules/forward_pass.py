"""The state of one forward pass that blocks share: positions, masks, cache, phase, inputs kept for look-ahead; and the
residual stream."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from modules.cache import Cache
from modules.decode_step import DecodeStep
from modules.kernels.deferred_norm import DeferredNorm
from modules.linear import Linear
from modules.normalization import AddNorm, Norm
from modules.positions import RotaryKey
from modules.sparsity import BLOCKS, ActiveList, ActiveSet, Block, Phase, SelectionContext, SparsityStats, UnitShard
from modules.specs import NormPlacement, Sliding


@dataclass(kw_only=True)
class ForwardPass:
    """Shared by all half-blocks of one call of the decoder.

    positions [B, T] int64; valid [B, T] bool (False: padding) or None when every token is real; num_prompt [B] as in
    `Decoder.forward`;
    attention_masks [B or 1, 1, T, S] (0 or -inf), None for plain causal attention, for each window that blocks have;
    cos_sin as `RotaryPositions.cos_sin`, for each kind of rotation; reads_cache: attention reads what was cached;
    partial_memory(rows) [rows, D] is where the ranks of a layer read each other's partial sums, or None.
    """

    phase: Phase
    positions: Tensor
    valid: Tensor | None
    attention_masks: Mapping[Sliding | None, Tensor | None]
    cos_sin: Mapping[RotaryKey, tuple[Tensor, Tensor]]
    cache: Cache | None
    cache_end: int
    reads_cache: bool
    stats: SparsityStats | None
    max_lookahead: int
    partial_memory: Callable[[int], Tensor | None] | None = None
    num_prompt: Tensor | None = None
    fused: DecodeStep | None = None  # what the kernels of a fused decode step share
    inputs: dict[Block, dict[int, Tensor]] = field(default_factory=lambda: {"attention": {}, "mlp": {}})

    def selection_context(
        self,
        block: Block,
        layer_idx: int,
        hidden_states: Tensor,
        dense_output: Callable[[], Tensor],
        units: UnitShard | None = None,
    ) -> SelectionContext:
        """The context of one block's selector; also remembers this block's input for the layers that follow."""
        kept = self.inputs[block]
        if self.max_lookahead:
            kept[layer_idx] = hidden_states
            kept.pop(layer_idx - self.max_lookahead - 1, None)
        return SelectionContext(
            layer_idx=layer_idx,
            block=block,
            phase=self.phase,
            positions=self.positions,
            valid=self.valid,
            num_prompt=self.num_prompt,
            cache=self.cache,
            earlier_inputs=kept,
            dense_output=dense_output,
            units=units,
        )

    def step_context(self, block: Block, layer_idx: int, dense_output: Callable[[], Tensor]) -> SelectionContext:
        """The context of one block's selector in a fused decode step, which looks ahead by itself (`DecodeStep`)."""
        return SelectionContext(
            layer_idx=layer_idx,
            block=block,
            phase=self.phase,
            positions=self.positions,
            valid=self.valid,
            cache=self.cache,
            earlier_inputs={},
            dense_output=dense_output,
        )

    def partial(self, projection: nn.Module, states: Tensor) -> Tensor:
        """A block's part of the residual sum, projection(states) [B, T, D], in the memory where it will be read."""
        if self.partial_memory is None or not isinstance(projection, Linear) or torch.is_grad_enabled():
            return projection(states)
        return projection(states, self.partial_memory(states.shape[:-1].numel()))

    def count(
        self, context: SelectionContext, num_units: int, execution: str, active: ActiveSet | ActiveList | None
    ) -> None:
        """Add one block's call to the statistics, if they are kept; `active` None: dense."""
        if self.stats is not None:
            self.stats.count(context, num_units, execution, active)


@dataclass(kw_only=True)
class ResidualStream:
    """The states between two half-blocks: what the next block reads, and the residual that blocks add to.

    hidden_states [B, T, D] in `dtype` (in a fused step [B, D], still to be normed); residual [B, T, D], None before the
    first half-block. `junction` is what adds a block's output to the stream and norms it for the next.
    """

    forward_pass: ForwardPass
    junction: AddNorm
    placement: NormPlacement
    dtype: torch.dtype
    hidden_states: Any = None  # Tensor | DeferredNorm
    residual: Any = None  # Tensor | None

    def read(self) -> Tensor | DeferredNorm:
        """What the next block reads."""
        return self.hidden_states

    def add(self, partial: Tensor, norm: Norm | None, bias: Tensor | None) -> None:
        """The residual junction: add a block's output [B, T, D], and norm the sum for the next one."""
        self.hidden_states, self.residual = self.junction(
            partial, self.residual, norm, bias, placement=self.placement, dtype=self.dtype
        )

    def branch(self) -> Self:
        """A copy to continue with separately; running it does not change this one."""
        inputs = {block: dict(kept) for block, kept in self.forward_pass.inputs.items()}
        return replace(self, forward_pass=replace(self.forward_pass, inputs=inputs))


def lookahead_inputs(half_block_idx: int, max_lookahead: int) -> list[tuple[Block, int]]:
    """The earlier entries (block, layer) of `ForwardPass.inputs` that half-blocks from `half_block_idx` on may read. A
    pipeline stage that starts there receives them in this order."""
    upcoming: dict[Block, int] = {"attention": (half_block_idx + 1) // 2, "mlp": half_block_idx // 2}
    return [
        (block, layer) for block in BLOCKS for layer in range(max(0, upcoming[block] - max_lookahead), upcoming[block])
    ]


def real_tokens(token_ids: Tensor, num_tokens: Tensor) -> Tensor:
    """Which of right-padded token_ids [B, T] are not padding, with num_tokens [B] per row: bool [B, T]."""
    return torch.arange(token_ids.shape[1], device=token_ids.device) < num_tokens[:, None]


def attention_mask(positions: Tensor, end: int, dtype: torch.dtype, window: Sliding | None = None) -> Tensor:
    """[B, T] query positions -> [B, 1, T, end], 0 or -inf: a query sees cached positions up to and with its own, of a
    window only the last.

    To be added to scores: a mask of bool would be turned into this in every layer.
    """
    keys = torch.arange(end, device=positions.device)
    hidden = keys[None, None, None, :] > positions[:, None, :, None]
    if window is not None:
        hidden |= keys[None, None, None, :] <= positions[:, None, :, None] - window.size
    return torch.zeros(hidden.shape, dtype=dtype, device=positions.device).masked_fill_(hidden, float("-inf"))
