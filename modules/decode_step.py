"""One decode step in fused kernels: what they share, and the choices that are made before the block they are for.

A step of one row is bound by the bytes of the weights that it reads, so every half-block is a few kernels that stream
weights and nothing else: the residual junction is a part of the kernel that follows it (`DeferredNorm`), sums go into
memory that one fill has zeroed for the whole step, positions are rotated and cached where keys are computed. Attention
of several rows together stays with the library (`Attention.forward`); their MLPs take the kernels where units are
skipped.

`can_fuse` says which models decode like that, with `begin_step` and `run_step`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

from modules.cache import KVCache
from modules.forward_pass import ForwardPass
from modules.kernels.arguments import DTYPES, MAX_QUERIES_PER_GROUP
from modules.kernels.deferred_norm import DeferredNorm, triton
from modules.kernels.early_selection import EarlyGroups, EarlySelection, EarlyUnits, ExtraRows
from modules.kernels.norm_linear import norm_linear
from modules.normalization import Norm, add_norm, deferred_add_norm
from modules.sparsity import BLOCKS, ActiveList, ActiveSet, Block, SelectionContext, Selector

if TYPE_CHECKING:
    from modules.decoder import Decoder

Choice = ActiveList | ActiveSet | None  # None: dense


@runtime_checkable
class StepSelector(Selector, Protocol):
    """A selector with kernels of its own for a decode step."""

    def select_in_step(self, source: DeferredNorm, context: SelectionContext, counters: Tensor) -> Choice:
        """Choose from `source` [rows, D], the normed input of the block `lookahead` layers back.

        `counters` int32 [1 + rows], zeros, may become the `length` and `num_active` of an ActiveList.
        """
        ...


@runtime_checkable
class EarlySelector(StepSelector, Protocol):
    """A step selector whose choice, where it looks ahead, is made by kernels of blocks before (see early_selection)."""

    @property
    def scoring_rows(self) -> Tensor:
        """[R, D]: the choice begins with their products with the source."""
        ...

    def selects_early(self, block: Block) -> bool:
        """Whether it does: other choices need kernels of their own."""
        ...

    def rest_of_choice(self, inner: Tensor, block: Block, counters: Tensor) -> EarlyUnits | EarlyGroups:
        """The rest of the choice, from these products [R]."""
        ...

    def chosen_early(self, early: EarlyUnits | EarlyGroups) -> Choice:
        """What will have been chosen, once a kernel has made it."""
        ...


def innermost(selector: Selector | None) -> object:
    """A selector without the gate around it."""
    inner: object = selector
    while hasattr(inner, "inner"):
        inner = inner.inner
    return inner


def has_kernels(selector: Selector | None) -> bool:
    """Whether a selector has kernels of its own; None, which chooses nothing, needs none."""
    inner = innermost(selector)
    return inner is None or isinstance(inner, StepSelector)


def choose(selector: Selector, source: DeferredNorm, context: SelectionContext, counters: Tensor) -> Choice:
    """What a selector chooses in a step, whether or not it has kernels of its own."""
    if isinstance(selector, StepSelector):
        return selector.select_in_step(source, context, counters)
    return selector.select(source.normed()[:, None], context)


def can_fuse(model: Decoder) -> bool:
    """Whether decode steps run in fused kernels: pre-norm models of any type but float64, whole on one GPU, or
    dense and with each layer shared by several."""
    whole = model.links is None and (not model.is_sparse if model.shards else model.add_norm is add_norm)
    on_gpu = triton is not None and model.device.type == "cuda" and model.compute_dtype in DTYPES
    fits = model.config.pre_norm and model.config.queries_per_group <= MAX_QUERIES_PER_GROUP
    return whole and on_gpu and fits


def begin_step(model: Decoder, token_ids: Tensor, cache: KVCache) -> ForwardPass:
    """What the step of token_ids [B, 1] carries, over a cache of static shape; as `Decoder.begin`."""
    rotary = None if model.rotary is None else model.rotary.table(cache.max_seqlen, model.device)
    fused = DecodeStep(model, len(token_ids), rotary)
    if not fused.fuses_attention:  # then attention takes a mask, and rotates by itself
        forward_pass = model.begin(token_ids, cache=cache, phase="decode")
        forward_pass.fused = fused
        return forward_pass
    end = cache.reserve(1)
    model.check_context(end)
    return ForwardPass(
        phase="decode",
        positions=cache.cache_seqlens[:, None],
        valid=None,
        attention_mask=None,
        cos_sin=None,
        cache=cache,
        cache_end=end,
        stats=model.stats,
        max_lookahead=model.max_lookahead,
        fused=fused,
    )


def run_step(model: Decoder, token_ids: Tensor, forward_pass: ForwardPass) -> Tensor:
    """token_ids [B, 1] -> logits [B, V]: the embeddings, all half-blocks and the head. Those of a single row are
    float32, from a kernel with the final norm in it."""
    leave = _reduce if model.shards else _defer
    embedded = model.embeddings(token_ids, forward_pass.positions)
    hidden_states, residual = leave(model, embedded, None, model.first_norm, None)
    for idx in model.span:
        half_block = model.half_block(idx // 2, BLOCKS[idx % 2])
        residual = half_block.residual_in(residual)
        partial = half_block.block(hidden_states, forward_pass)
        hidden_states, residual = leave(model, partial, residual, half_block.norm, half_block.bias)
    if model.project_out is None and len(hidden_states.partial) == 1 and not model.shards:
        return norm_linear(hidden_states, model.lm_head.kernel_argument(), None, out_dtype=torch.float32)
    return model.logits(hidden_states.normed())


def _defer(
    model: Decoder, partial: Tensor, residual: Tensor | None, norm: Norm | None, bias: Tensor | None
) -> tuple[DeferredNorm, Tensor]:
    """Leave the residual junction to the next kernel."""
    return deferred_add_norm(partial, residual, norm, bias, dtype=model.compute_dtype)


def _reduce(
    model: Decoder, partial: Tensor, residual: Tensor | None, norm: Norm | None, bias: Tensor | None
) -> tuple[DeferredNorm, Tensor]:
    """The residual junction here and now: ranks that share a layer have to add up first."""
    hidden_states, residual = model.add_norm(partial, residual, norm, bias, pre_norm=True, dtype=model.compute_dtype)
    return DeferredNorm.plain(hidden_states.flatten(0, 1)), residual


class DecodeStep:
    """What the half-blocks of one step of `num_rows` rows share."""

    def __init__(self, model: Decoder, num_rows: int, rotary: Tensor | None) -> None:
        self.model, self.num_rows, self.rotary = model, num_rows, rotary
        num_blocks, hidden_size = len(model.half_blocks), model.config.hidden_size
        num_sums, num_counters = num_blocks * num_rows * hidden_size, num_blocks * (1 + num_rows)
        zeros = torch.zeros(num_sums + num_counters, device=model.device)  # one fill per step
        self._sums = zeros[:num_sums].view(num_blocks, num_rows, hidden_size)
        self._counters = zeros[num_sums:].view(torch.int32).view(num_blocks, 1 + num_rows)
        self._sources: dict[tuple[Block, int], DeferredNorm] = {}  # inputs that later layers look back at
        self._inner: dict[tuple[Block, int], Tensor] = {}  # of choices that have begun
        self._chosen: dict[tuple[Block, int], Choice] = {}
        self._thinned: Tensor | None = None
        # All layers' attention or none: where they look ahead, they read each other's inputs.
        selectors = [model.attention(layer_idx).selector for layer_idx in model.layers]
        self.fuses_attention = num_rows == 1 and all(map(has_kernels, selectors))

    def sums(self, block: Block, layer_idx: int) -> Tensor:
        """Zeros [rows, D] float32 for the partial sums of one half-block."""
        return self._sums[_place(block, layer_idx)]

    def thinned_sums(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Zeros for a layer that drops small inputs: float32 [M, F] for the gate's and the up projection's sums (M 1
        without a gate), int32 [M + 1] for the entries that each matrix keeps of its input. One fill per step."""
        config = self.model.config
        num_layers, num_matrices, width = config.num_hidden_layers, 1 + config.gated_mlp, config.intermediate_size
        if self._thinned is None:
            size = -(-num_matrices * width // 4) * 4  # 16 bytes, so that the next layer's are aligned
            self._thinned = torch.zeros(num_layers * (size + num_matrices + 1), device=self.model.device)
        num_counters = num_layers * (num_matrices + 1)
        counters = self._thinned[-num_counters:].view(torch.int32).view(num_layers, -1)
        zeros = self._thinned[:-num_counters].view(num_layers, -1)
        return zeros[layer_idx, : num_matrices * width].view(num_matrices, width), counters[layer_idx]

    def select(
        self,
        block: Block,
        layer_idx: int,
        states: DeferredNorm,
        forward_pass: ForwardPass,
        dense_output: Callable[[], Tensor],
    ) -> tuple[Choice, SelectionContext]:
        """What a block computes, whose input is `states`: chosen now, or already."""
        context = forward_pass.step_context(block, layer_idx, dense_output)
        selector = self._selector(block, layer_idx)
        if self.model.max_lookahead:
            self._sources[block, layer_idx] = states.unwritten()
        if selector is None:
            return None, context
        if (block, layer_idx) in self._chosen:
            return self._chosen[block, layer_idx], context
        source = self._sources[block, layer_idx - selector.lookahead] if selector.lookahead else states.unwritten()
        return choose(selector, source, context, self._counters[_place(block, layer_idx)]), context

    def extra_rows(self, block: Block, layer_idx: int, dtype: torch.dtype) -> ExtraRows | None:
        """What a kernel that holds a block's input is to compute besides, for a layer that looks back at it."""
        for target in range(layer_idx + 1, min(layer_idx + self.model.max_lookahead, self.model.layers.stop - 1) + 1):
            selector = self._selector(block, target)
            learned = innermost(selector)
            if self.num_rows > 1 or selector is None or selector.lookahead != target - layer_idx:
                continue
            if isinstance(learned, EarlySelector) and learned.selects_early(block):
                rows = learned.scoring_rows
                self._inner[block, target] = torch.empty(len(rows), dtype=dtype, device=rows.device)
                return ExtraRows(rows, self._inner[block, target])
        return None

    def early_selection(self) -> EarlySelection:
        """The choices that have begun, for attention to make: from now on they count as made."""
        selection = EarlySelection()
        for (block, target), inner in list(self._inner.items()):
            learned = innermost(self._selector(block, target))
            assert isinstance(learned, EarlySelector)
            early = learned.rest_of_choice(inner, block, self._counters[_place(block, target)])
            if not selection.add(early):
                continue
            self._chosen[block, target] = learned.chosen_early(early)
            del self._inner[block, target]
        return selection

    def _selector(self, block: Block, layer_idx: int) -> Selector | None:
        return self.model.half_block(layer_idx, block).block.selector


def _place(block: Block, layer_idx: int) -> int:
    return 2 * layer_idx + (block == "mlp")
