"""Static caches: fixed allocations, one length per row, so ragged batches need no left padding.

Every block that keeps something of a text has a cache of its own; rows and their lengths belong to the batch.

Legend: B rows of a forward pass, G key-value heads, T tokens, S positions, H head_dim.
"""

from collections.abc import Hashable, Mapping, Sequence

import torch
from torch import Tensor


class KVCache:
    """Keys and values of an attention block, all rows: [num_rows, num_key_value_heads, max_seqlen, head_dim] each."""

    def __init__(self, shape: tuple[int, int, int, int], *, dtype: torch.dtype, device: torch.device | str) -> None:
        if shape[0] < 1 or shape[2] < 1:
            raise ValueError(f"KV cache: batch_size={shape[0]} and max_seqlen={shape[2]} must be at least 1")
        # Zeros, not empty: masked positions are multiplied by probability 0, and 0 * NaN would be NaN.
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    def write(self, rows: Tensor, positions: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys/values [B, G, T, H] of `rows` [B] at `positions` [B, T]."""
        # Advanced indices around a slice: the indexed view is [B, T, G, H].
        self.keys[rows[:, None], :, positions] = keys.transpose(1, 2)
        self.values[rows[:, None], :, positions] = values.transpose(1, 2)

    def move_row(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of a row over another."""
        for states in (self.keys, self.values):
            states[target, :, :length] = states[source, :, :length]


class Cache:
    """What a batch has cached: its rows, their lengths, and a cache of each attention block, by layer.

    `cache_seqlens` [B] int64 counts the valid positions of each row. A forward pass writes its tokens at
    `cache_seqlens[b] + t`; `advance` then moves the lengths by the row's *real* tokens, so what right padding
    wrote lies beyond the length and is overwritten by the row's next token.

    `first_rows` and `fresh_rows` are views for passes that concern some rows only. `row_states` is what selectors keep
    of each row, by a key of their own; views share it, and it moves with the row.
    """

    def __init__(
        self, blocks: Mapping[int, KVCache], *, batch_size: int, max_seqlen: int, device: torch.device | str
    ) -> None:
        self.blocks, self.max_seqlen = blocks, max_seqlen  # positions a row can hold
        self.rows = torch.arange(batch_size, device=device)
        self.cache_seqlens = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self.num_rows = batch_size  # of the whole cache, also in views
        self.row_states: dict[Hashable, Tensor] = {}  # [num_rows, ...] each
        self.longest = 0  # host copy of the largest length: how far attention has to look
        self.is_fresh = False  # the rows of this view are empty: attention needs only what the pass itself writes
        self.has_static_shapes = False  # attention always looks at all positions: what a CUDA graph needs

    @property
    def states(self) -> list[Tensor]:
        """All that is cached: keys and values of each block, in layer order."""
        return [states for block in self.blocks.values() for states in (block.keys, block.values)]

    @property
    def num_bytes(self) -> int:
        """Bytes of all that is cached."""
        return sum(states.nbytes for states in self.states)

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
        """Store keys/values [B, G, T, H] of a layer at `positions` [B, T]; return what attention reads: [B, G, end, H]
        each."""
        self.blocks[layer_idx].write(self.rows, positions, keys, values)
        if self.is_fresh:
            return keys, values
        keys, values = self.layer(layer_idx)
        return keys[:, :, :end], values[:, :, :end]

    def layer(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, views [B, G, max_seqlen, H] of the first rows."""
        block, num_rows = self.blocks[layer_idx], len(self.rows)
        return block.keys[:num_rows], block.values[:num_rows]

    def advance(self, num_tokens: Tensor, longest_added: int) -> None:
        """Add each row's real tokens [B]; `longest_added` is an upper bound of them, known to the host."""
        self.cache_seqlens += num_tokens
        self.longest += longest_added

    def first_rows(self, num_rows: int, cache_seqlens: Tensor, longest: int) -> "Cache":
        """A view of the first rows, whose lengths [num_rows] are given; `longest` is their largest."""
        view = self._view()
        view.rows, view.cache_seqlens, view.longest = self.rows[:num_rows], cache_seqlens, longest
        return view

    def fresh_rows(self, rows: Sequence[int]) -> "Cache":
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
        for block in self.blocks.values():
            block.move_row(source, target, length)
        for states in self.row_states.values():
            states[target] = states[source]

    def _view(self) -> "Cache":
        view = Cache.__new__(Cache)
        view.__dict__.update(self.__dict__)
        return view
