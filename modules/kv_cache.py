"""Static key-value cache: one fixed allocation, one length a row, so ragged batches need no left padding."""

import torch
from torch import Tensor

from modules.config import ModelConfig


class KVCache:
    """Keys and values of every layer: [num_layers, B, num_key_value_heads, max_seqlen, head_dim] each.

    `cache_seqlens` [B] int64 counts the valid positions of each row. A forward pass writes its tokens at
    `cache_seqlens[b] + t`; `advance` then moves the lengths by the row's *real* tokens, so what right padding
    wrote lies beyond the length and is overwritten by the row's next token.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        batch_size: int,
        max_seqlen: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        if batch_size < 1 or max_seqlen < 1:
            raise ValueError(f"KV cache: batch_size={batch_size} and max_seqlen={max_seqlen} must be at least 1")
        shape = (config.num_hidden_layers, batch_size, config.num_key_value_heads, max_seqlen, config.head_dim)
        # Zeros, not empty: masked positions are multiplied by probability 0, and 0 * NaN would be NaN.
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.cache_seqlens = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self.longest = 0  # host copy of the largest length: how far attention has to look

    @property
    def max_seqlen(self) -> int:
        """Positions a row can hold."""
        return self.keys.shape[3]

    def reserve(self, num_tokens: int) -> int:
        """Positions in use once `num_tokens` more are written; ValueError if they do not fit."""
        end = self.longest + num_tokens
        if end > self.max_seqlen:
            raise ValueError(f"KV cache: {end} positions needed, {self.max_seqlen} allocated")
        return end

    def write(self, layer_idx: int, positions: Tensor, keys: Tensor, values: Tensor, end: int) -> tuple[Tensor, Tensor]:
        """Store keys/values [B, G, T, H] at `positions` [B, T]; return the layer's first `end` positions."""
        rows = torch.arange(positions.shape[0], device=positions.device)[:, None]
        # Advanced indices around a slice: the indexed view is [B, T, G, H].
        self.keys[layer_idx][rows, :, positions] = keys.transpose(1, 2)
        self.values[layer_idx][rows, :, positions] = values.transpose(1, 2)
        return self.keys[layer_idx, :, :, :end], self.values[layer_idx, :, :, :end]

    def advance(self, num_tokens: Tensor, longest_added: int) -> None:
        """Add each row's real tokens [B]; `longest_added` is an upper bound of them, known to the host."""
        self.cache_seqlens += num_tokens
        self.longest += longest_added
