"""Grouped-query attention over a static cache, with key-value groups as the units that can be skipped.

Legend: B batch, T tokens, S cached positions, D hidden, N query heads, G key-value groups, R = N / G queries per
group, H head_dim, A active groups.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from modules.cache import KVCache
from modules.forward_pass import ForwardPass
from modules.kernels.arguments import MAX_QUERIES_PER_GROUP
from modules.kernels.decode_attention import attend
from modules.kernels.deferred_norm import DeferredNorm
from modules.kernels.project_heads import project_heads
from modules.kernels.qkv_projection import project_qkv
from modules.linear import Linear
from modules.positions import RotaryKey, apply_rotary
from modules.shards import Shard
from modules.sparsity import MAX_GATHER_ROWS, ActiveList, Selector, Units, UnitShard
from modules.specs import Grouped
from modules.thinned_input import ThinnedInput, path_without_a_choice


class Attention(nn.Module):
    """One layer's heads. Keys and values are computed and cached for every head, whatever is selected."""

    def __init__(self, spec: Grouped, hidden_size: int, layer_idx: int) -> None:
        super().__init__()
        self.spec, self.hidden_size, self.layer_idx = spec, hidden_size, layer_idx
        self.units = Units("groups", spec.num_key_value_heads)
        self.num_units = spec.num_key_value_heads  # here, with padding
        self.queries_per_group = spec.queries_per_group  # here, with padding
        self.unit_shard: UnitShard | None = None  # which groups are here, where a tensor-parallel rank computes a part
        self.query_heads: tuple[int, int] | None = None  # global range of the heads here, where that is a part
        self.head_dim = spec.head_dim
        query_size, key_size = spec.num_attention_heads * spec.head_dim, spec.num_key_value_heads * spec.head_dim
        self.q_proj = Linear(hidden_size, query_size, bias=spec.qkv_bias)
        self.k_proj = Linear(hidden_size, key_size, bias=spec.qkv_bias)
        self.v_proj = Linear(hidden_size, key_size, bias=spec.qkv_bias)
        self.o_proj = Linear(query_size, hidden_size, rows_are="inputs")
        self.head_outputs = nn.Identity()  # a named point for forward hooks: sees [B, T, N, H]
        self.selector: Selector | None = None
        self.force_mask = False

    def forward(self, hidden_states: Tensor | DeferredNorm, forward_pass: ForwardPass) -> Tensor:
        """[B, T, D] normed -> [B, T, D], the block's part of the residual sum, without bias."""
        if isinstance(hidden_states, DeferredNorm):
            if forward_pass.fused is not None and forward_pass.fused.fuses_attention:
                return self.step(hidden_states, forward_pass)
            hidden_states = hidden_states.normed()[:, None]
        batch, tokens, _ = hidden_states.shape
        keys = self._keys(self.k_proj(hidden_states), forward_pass)
        values = self._split(self.v_proj(hidden_states))
        if forward_pass.cache is not None:
            keys, values = forward_pass.cache.write(
                self.layer_idx, forward_pass.positions, keys, values, forward_pass.cache_end
            )

        def dense_heads() -> Tensor:
            queries = self._queries(self.q_proj(hidden_states), forward_pass)
            return self._attend(queries, keys, values, forward_pass)

        def grouped_heads() -> Tensor:
            heads = dense_heads()
            if self.query_heads is not None:  # heads of padding write nothing, so they must not look large
                heads[:, :, self.query_heads[1] - self.query_heads[0] :] = 0
            return heads.unflatten(2, (self.num_units, self.queries_per_group))

        context = forward_pass.selection_context(
            "attention", self.layer_idx, hidden_states, grouped_heads, self.unit_shard
        )
        active = None if self.selector is None else self.selector.select(hidden_states, context)
        if active is None:
            forward_pass.count(context, self.num_units, path_without_a_choice(self.thinned_parts()), None)
            return forward_pass.partial(self.o_proj, self.head_outputs(dense_heads()).flatten(2))
        # One new token a row and few rows: skip. The union of the rows' groups is gathered on the host side,
        # which on a GPU would stall the stream; there several rows share one masked pass.
        gather = tokens == 1 and batch <= (MAX_GATHER_ROWS if hidden_states.device.type == "cpu" else 1)
        gather = gather and not self.force_mask and forward_pass.fused is None
        forward_pass.count(context, self.num_units, "gather" if gather else "mask", active)
        if gather:
            output = self._gathered(hidden_states, keys, values, active.mask, forward_pass)
        else:
            mask = active.mask.view(batch, tokens, self.num_units, 1, 1)
            heads = self.head_outputs(grouped_heads().masked_fill(~mask, 0).flatten(2, 3))
            output = self.o_proj(heads.flatten(2))
        if active.compensation is not None:
            output = output + active.compensation.view_as(output)
        return output

    def step(self, states: DeferredNorm, forward_pass: ForwardPass) -> Tensor:
        """A decode step of one row in three kernels; inactive groups skip their queries, attention and output rows."""
        fused, cache = forward_pass.fused, forward_pass.cache
        assert fused is not None and cache is not None
        context = forward_pass.step_context("attention", self.layer_idx, _not_computed)
        active = fused.select(states, context)
        assert not isinstance(active, ActiveList), "attention takes the flags of its groups, not a list"
        forward_pass.count(context, self.num_units, "dense" if active is None else "gather", active)
        groups = None if active is None else active.mask
        keys, values = cache.layer(self.layer_idx)
        lengths = cache.cache_seqlens
        queries = project_qkv(
            states,
            self.q_proj.kernel_argument(),
            self.k_proj.kernel_argument(),
            self.v_proj.kernel_argument(),
            self.q_proj.bias,
            self.k_proj.bias,
            self.v_proj.bias,
            rotary=None if self.rotary_key is None else fused.rotary[self.rotary_key],
            cache_seqlens=lengths,
            keys=keys,
            values=values,
            active_groups=groups,
            extra=fused.extra_rows("attention", self.layer_idx, states.dtype),
        )
        heads = attend(
            queries,
            keys,
            values,
            lengths,
            active_groups=groups,
            early=fused.early_selection(),
        )
        sums = fused.sums("attention", self.layer_idx)
        return project_heads(heads, self.o_proj.kernel_argument(), active_groups=groups, output=sums)[:, None]

    def _gathered(
        self, hidden_states: Tensor, keys: Tensor, values: Tensor, mask: Tensor, forward_pass: ForwardPass
    ) -> Tensor:
        """Queries, attention and output rows of the active groups only; hidden_states [B, 1, D], mask [B, G]."""
        groups = mask.any(0).nonzero().squeeze(-1)
        if not groups.numel():  # all of the rows' groups are on other ranks
            return torch.zeros_like(hidden_states)
        width = self.queries_per_group * self.head_dim
        channels = (groups[:, None] * width + torch.arange(width, device=groups.device)).flatten()
        bias = None if self.q_proj.bias is None else self.q_proj.bias[channels]
        queries = self._queries(F.linear(hidden_states, self.q_proj.rows(channels), bias), forward_pass)
        heads = self._attend(queries, keys[:, groups], values[:, groups], forward_pass)
        if mask.shape[0] > 1:
            heads = heads.unflatten(2, (-1, self.queries_per_group))
            heads = heads.masked_fill(~mask[:, groups].view(mask.shape[0], 1, -1, 1, 1), 0).flatten(2, 3)
        return torch.matmul(heads.flatten(2), self.o_proj.rows(channels))

    @property
    def rotary_key(self) -> RotaryKey | None:
        """Whose rotations it takes, of those that a pass makes."""
        return None if self.spec.rope is None else (self.spec.rope, self.head_dim)

    def can_fuse(self) -> bool:
        """Whether a decode step of it runs in kernels: not with too many queries per group, a weight
        format without kernels or thinned inputs."""
        parts = (self.q_proj, self.k_proj, self.v_proj, self.o_proj)
        fits = self.queries_per_group <= MAX_QUERIES_PER_GROUP and all(part.has_kernels for part in parts)
        return fits and not self.thinned_parts()

    def sees_all_of(self, max_seqlen: int) -> bool:
        """Whether a query sees all positions before it in texts of so many: kernels of a step have no window."""
        return self.spec.window is None or max_seqlen <= self.spec.window.size

    def new_cache(self, batch_size: int, max_seqlen: int) -> KVCache:
        """An empty cache for the heads that are here."""
        weight = next(self.parameters())
        shape = (batch_size, self.num_units, max_seqlen, self.head_dim)
        return KVCache(shape, dtype=self.o_proj.compute_dtype, device=weight.device)

    def bytes_read(self, density: float) -> float:
        """Bytes of the weights here that a token reads if this share of the groups is active: that share of queries and
        output, and all of keys and values."""
        chosen = self.q_proj.num_bytes + self.o_proj.num_bytes
        return density * chosen + self.k_proj.num_bytes + self.v_proj.num_bytes

    def cut(
        self, *, groups: tuple[int, int], query_heads: tuple[int, int], num_groups: int, queries_per_group: int
    ) -> dict[str, Shard]:
        """Cut a block on `meta` to ranges of groups and of query heads, padded to so many. Returns, by name, which part
        of the full parameter each one then is."""
        size, spec = self.head_dim, self.spec
        rows = {
            "q_proj": (query_heads, num_groups * queries_per_group, spec.num_attention_heads),
            "k_proj": (groups, num_groups, spec.num_key_value_heads),
            "v_proj": (groups, num_groups, spec.num_key_value_heads),
            "o_proj": (query_heads, num_groups * queries_per_group, spec.num_attention_heads),
        }
        shards: dict[str, Shard] = {}
        for name, ((start, stop), here, everywhere) in rows.items():
            shard = Shard.of_rows(start * size, stop * size, here * size, everywhere * size)
            shards |= {f"{name}.{kind}": part for kind, part in getattr(self, name).cut(shard).items()}
        self.num_units, self.queries_per_group, self.query_heads = num_groups, queries_per_group, query_heads
        return shards

    def thinned_parts(self) -> list[tuple[ThinnedInput, int]]:
        """Those of the four projections whose inputs are thinned out, and the weights an entry stands for (of what this
        rank counts)."""
        groups = self.num_units if self.unit_shard is None else self.unit_shard.num_counted
        found: list[tuple[ThinnedInput, int]] = []
        for part, width in (
            (self.q_proj, self.num_real_channels),
            (self.k_proj, groups * self.head_dim),
            (self.v_proj, groups * self.head_dim),
            (self.o_proj, self.hidden_size),
        ):
            if isinstance(part, ThinnedInput):
                found.append((part, width))
        return found

    @property
    def num_real_channels(self) -> int:
        """Channels of the query heads that are here, without padding, which comes last."""
        first, last = self.query_heads or (0, self.num_units * self.queries_per_group)
        return (last - first) * self.head_dim

    def _split(self, states: Tensor) -> Tensor:
        """[B, T, heads * H] -> [B, heads, T, H]."""
        return states.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _queries(self, projected: Tensor, forward_pass: ForwardPass) -> Tensor:
        """[B, T, heads * H] -> [B, heads, T, H] at their positions. A spec that norms queries does it here, before."""
        return self._rotated(self._split(projected), forward_pass)

    def _keys(self, projected: Tensor, forward_pass: ForwardPass) -> Tensor:
        """As `_queries`, of keys."""
        return self._rotated(self._split(projected), forward_pass)

    def _rotated(self, heads: Tensor, forward_pass: ForwardPass) -> Tensor:
        return heads if self.rotary_key is None else apply_rotary(heads, *forward_pass.cos_sin[self.rotary_key])

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor, forward_pass: ForwardPass) -> Tensor:
        """queries [B, N, T, H], keys/values [B, G, S, H] -> [B, T, N, H]; softmax scale 1 / sqrt(H), applied once."""
        mask = forward_pass.attention_masks[self.spec.window]
        if queries.shape[2] == 1:
            # One new token: a group's queries stand where tokens would, since they see the same keys. The kernels for
            # that form are several times faster on a CPU than those for grouped queries.
            batch, groups = keys.shape[:2]
            grouped = queries.reshape(batch, groups, -1, self.head_dim)
            heads = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)
            return heads.reshape(batch, 1, -1, self.head_dim)
        output = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=self.queries_per_group > 1
        )
        return output.transpose(1, 2)


def _not_computed() -> Tensor:
    raise AssertionError("a selector with kernels of its own does not ask what the dense block computes")
