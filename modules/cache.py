"""Static key-value cache: one fixed allocation, one length per row, so ragged batches need no left padding.

Legend: B rows of a forward pass, G key-value heads, T tokens, S positions, H head_dim.
"""

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor


class KVCache:
    """Keys and values of some layers: [num_layers, rows, num_key_value_heads, max_seqlen, head_dim] each.

    `cache_seqlens` [B] int64 counts the valid positions of each row. A forward pass writes its tokens at
    `cache_seqlens[b] + t`; `advance` then moves the lengths by the row's *real* tokens, so what right padding
    wrote lies beyond the length and is overwritten by the row's next token.

    `first_rows` and `fresh_rows` are views for passes that concern some rows only. `row_states` is what selectors keep
    of each row, by a key of their own; views share it, and it moves with the row.
    """

    def __init__(
        self,
        *,
        layers: range,
        batch_size: int,
        num_key_value_heads: int,
        max_seqlen: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        if batch_size < 1 or max_seqlen < 1:
            raise ValueError(f"KV cache: batch_size={batch_size} and max_seqlen={max_seqlen} must be at least 1")
        shape = (len(layers), batch_size, num_key_value_heads, max_seqlen, head_dim)
        self.layers = layers
        # Zeros, not empty: masked positions are multiplied by probability 0, and 0 * NaN would be NaN.
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.rows = torch.arange(batch_size, device=device)
        self.cache_seqlens = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self.num_rows = batch_size  # of the whole cache, also in views
        self.row_states: dict[Hashable, Tensor] = {}  # [num_rows, ...] each
        self.longest = 0  # host copy of the largest length: how far attention has to look
        self.is_fresh = False  # the rows of this view are empty: attention needs only what the pass itself writes
        self.has_static_shapes = False  # attention always looks at all positions: what a CUDA graph needs

    @property
    def max_seqlen(self) -> int:
        """Positions a row can hold."""
        return self.keys.shape[3]

    @property
    def is_empty(self) -> bool:
        """Whether no row holds anything."""
        return self.longest == 0 and not self.has_static_shapes

    def reserve(self, num_tokens: int) -> int:
        """How many positions attention looks at once `num_tokens` more are written; ValueError if they do not fit."""
        if self.has_static_shapes:
            return self.max_seqlen
        end = self.longest + num_tokens
        if end > self.max_seqlen:
            raise ValueError(f"KV cache: {end} positions needed, {self.max_seqlen} allocated")
        return end

    def write(self, layer_idx: int, positions: Tensor, keys: Tensor, values: Tensor, end: int) -> tuple[Tensor, Tensor]:
        """Store keys/values [B, G, T, H] at `positions` [B, T]; return what attention reads: [B, G, end, H] each."""
        layer = layer_idx - self.layers.start
        # Advanced indices around a slice: the indexed view is [B, T, G, H].
        self.keys[layer][self.rows[:, None], :, positions] = keys.transpose(1, 2)
        self.values[layer][self.rows[:, None], :, positions] = values.transpose(1, 2)
        if self.is_fresh:
            return keys, values
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]

    def layer(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, views [B, G, max_seqlen, H]."""
        return self.keys[layer_idx - self.layers.start], self.values[layer_idx - self.layers.start]

    def advance(self, num_tokens: Tensor, longest_added: int) -> None:
        """Add each row's real tokens [B]; `longest_added` is an upper bound of them, known to the host."""
        self.cache_seqlens += num_tokens
        self.longest += longest_added

    def first_rows(self, num_rows: int, cache_seqlens: Tensor, longest: int) -> "KVCache":
        """A view of the first rows, whose lengths [num_rows] are given; `longest` is their largest."""
        view = self._view()
        view.keys, view.values = self.keys[:, :num_rows], self.values[:, :num_rows]
        view.rows, view.cache_seqlens, view.longest = self.rows[:num_rows], cache_seqlens, longest
        return view

    def fresh_rows(self, rows: Sequence[int]) -> "KVCache":
        """A view of any rows as if they were empty, for one pass that fills them."""
        view = self._view()
        view.rows = torch.tensor(rows, device=self.rows.device)
        view.cache_seqlens, view.longest = torch.zeros_like(view.rows), 0
        view.is_fresh, view.has_static_shapes = True, False
        return view

    def keep(self, key: Hashable, states: Tensor) -> None:
        """Keep `states` [B, ...] of the rows of this pass, in the same memory each time."""
        if key not in self.row_states:
            self.row_states[key] = states.new_zeros(self.num_rows, *states.shape[1:])
        self.row_states[key][self.rows] = states

    def kept(self, key: Hashable) -> Tensor | None:
        """What was kept of the rows of this pass, [B, ...]; None before the first `keep`."""
        found = self.row_states.get(key)
        return None if found is None else found[self.rows]

    def move_row(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of a row over another, and what selectors keep of it."""
        for states in (self.keys, self.values):
            states[:, target, :, :length] = states[:, source, :, :length]
        for states in self.row_states.values():
            states[target] = states[source]

    def _view(self) -> "KVCache":
        view = KVCache.__new__(KVCache)
        view.__dict__.update(self.__dict__)
        return view
