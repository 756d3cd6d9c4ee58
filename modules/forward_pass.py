"""What one forward pass carries from block to block: positions, mask, cache, phase, inputs kept for look-ahead."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from modules.kv_cache import KVCache
from modules.sparsity import Block, Phase, SelectionContext, SparsityStats


@dataclass(kw_only=True)
class ForwardPass:
    """Shared by all half-blocks of one call of the decoder.

    positions [B, T] int64; valid [B, T] bool (False: padding) or None when every token is real;
    attention_mask [B, 1, T, S] bool or None for plain causal attention; cos, sin as `RotaryPositions.cos_sin`.
    """

    phase: Phase
    positions: Tensor
    valid: Tensor | None
    attention_mask: Tensor | None
    cos_sin: tuple[Tensor, Tensor] | None
    cache: KVCache | None
    cache_end: int
    stats: SparsityStats | None
    max_lookahead: int
    inputs: dict[Block, dict[int, Tensor]] = field(default_factory=lambda: {"attention": {}, "mlp": {}})

    def selection_context(
        self, block: Block, layer_idx: int, hidden_states: Tensor, dense_output: Callable[[], Tensor]
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
            valid=self.valid,
            earlier_inputs=kept,
            dense_output=dense_output,
        )

    def count(
        self, block: Block, layer_idx: int, num_units: int, execution: str, num_active: Tensor | None, num_rows: int
    ) -> None:
        """Add one block's call to the statistics, if they are kept."""
        if self.stats is not None:
            self.stats.of(layer_idx, block, num_units).count(execution, num_active, self.valid, num_rows)


def real_tokens(token_ids: Tensor, num_tokens: Tensor) -> Tensor:
    """Which of right-padded token_ids [B, T] are no padding, num_tokens [B] a row: bool [B, T]."""
    return torch.arange(token_ids.shape[1], device=token_ids.device) < num_tokens[:, None]


def cached_attention_mask(positions: Tensor, end: int) -> Tensor:
    """[B, T] query positions -> bool [B, 1, T, end]: a query sees cached positions up to and with its own."""
    keys = torch.arange(end, device=positions.device)
    return keys[None, None, None, :] <= positions[:, None, :, None]
