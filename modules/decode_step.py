"""One decode step in fused kernels: the memory they share, and selections that are made before their block runs.

A step of one row is bound by the bytes of the weights that it reads, so every half-block is a few kernels that stream
weights and nothing else: the residual junction is a part of the kernel that follows it (`DeferredNorm`), sums go into
memory that one fill has zeroed for the whole step, positions are rotated and cached where keys are computed. Attention
of several rows together stays with the library (`Attention.forward`); their MLPs take the kernels where units are
skipped.

`Decoder.can_fuse` says which models decode like that.
"""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from modules.kernels.deferred_norm import DeferredNorm
from modules.kernels.early_selection import EarlyGroups, EarlySelection, EarlyUnits, ExtraRows
from modules.positions import RotaryKey
from modules.sparsity import ActiveList, ActiveSet, Block, SelectionContext, Selector

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
    """A step selector whose choice, with look-ahead, is made by kernels of earlier blocks (see early_selection)."""

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


class DecodeStep:
    """What the half-blocks of one step of `num_rows` rows share. `selectors`: of each block that is here, by kind and
    layer. `rotary`: cosines and sines of all positions, by kind. `neuron_sums`: (matrices, neurons) of each layer."""

    def __init__(
        self,
        selectors: Mapping[tuple[Block, int], Selector | None],
        *,
        num_rows: int,
        hidden_size: int,
        max_lookahead: int,
        rotary: Mapping[RotaryKey, Tensor],
        neuron_sums: Mapping[int, tuple[int, int]],
        has_windows: bool,
        device: torch.device,
    ) -> None:
        self.selectors, self.num_rows, self.max_lookahead, self.rotary = selectors, num_rows, max_lookahead, rotary
        self._places = {block: place for place, block in enumerate(selectors)}
        num_sums, num_counters = len(selectors) * num_rows * hidden_size, len(selectors) * (1 + num_rows)
        zeros = torch.zeros(num_sums + num_counters, device=device)  # one fill per step
        self._sums = zeros[:num_sums].view(-1, num_rows, hidden_size)
        self._counters = zeros[num_sums:].view(torch.int32).view(-1, 1 + num_rows)
        self._sources: dict[tuple[Block, int], DeferredNorm] = {}  # inputs that later layers look back at
        self._inner: dict[tuple[Block, int], Tensor] = {}  # of choices that have begun
        self._chosen: dict[tuple[Block, int], Choice] = {}
        self._neuron_sums, self._thinned = neuron_sums, dict[int, tuple[Tensor, Tensor]]()
        # All layers' attention or none: where they look ahead, they read each other's inputs.
        choosing = [selector for (block, _), selector in selectors.items() if block == "attention"]
        self.fuses_attention = num_rows == 1 and not has_windows and all(map(has_kernels, choosing))

    def sums(self, block: Block, layer_idx: int) -> Tensor:
        """Zeros [rows, D] float32 for the partial sums of one half-block."""
        return self._sums[self._places[block, layer_idx]]

    def thinned_sums(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Zeros for a layer that drops small inputs: float32 [M, F] for the gate's and the up projection's sums (M 1
        without a gate), int32 [M + 1] for the entries that each matrix keeps of its input. One fill per step."""
        if not self._thinned:
            # 16 bytes, so that the next layer's are aligned; then the counters.
            sizes = [-(-matrices * width // 4) * 4 for matrices, width in self._neuron_sums.values()]
            counts = [matrices + 1 for matrices, _ in self._neuron_sums.values()]
            zeros = torch.zeros(sum(sizes) + sum(counts), device=self._sums.device).split([*sizes, *counts])
            for place, (layer, (matrices, width)) in enumerate(self._neuron_sums.items()):
                sums = zeros[place][: matrices * width].view(matrices, width)
                self._thinned[layer] = sums, zeros[len(sizes) + place].view(torch.int32)
        return self._thinned[layer_idx]

    def select(self, states: DeferredNorm, context: SelectionContext) -> Choice:
        """The active units of the context's block, whose input is `states`: chosen now, or by an earlier kernel."""
        place = context.block, context.layer_idx
        selector = self.selectors[place]
        if self.max_lookahead:
            self._sources[place] = states.unwritten()
        if selector is None:
            return None
        if place in self._chosen:
            return self._chosen[place]
        earlier = context.block, context.layer_idx - selector.lookahead
        source = self._sources[earlier] if selector.lookahead else states.unwritten()
        return choose(selector, source, context, self._counters[self._places[place]])

    def extra_rows(self, block: Block, layer_idx: int, dtype: torch.dtype) -> ExtraRows | None:
        """Rows that a kernel with this block's input is to compute as well, for a later layer with look-ahead."""
        for target in range(layer_idx + 1, layer_idx + self.max_lookahead + 1):
            selector = self.selectors.get((block, target))
            learned = innermost(selector)
            if self.num_rows > 1 or selector is None or selector.lookahead != target - layer_idx:
                continue
            if isinstance(learned, EarlySelector) and learned.selects_early(block):
                rows = learned.scoring_rows
                self._inner[block, target] = torch.empty(len(rows), dtype=dtype, device=rows.device)
                return ExtraRows(rows, self._inner[block, target])
        return None

    def early_selection(self) -> EarlySelection:
        """The selections that attention's kernel is to finish; from now on they count as made."""
        selection = EarlySelection()
        for (block, target), inner in list(self._inner.items()):
            learned = innermost(self.selectors[block, target])
            assert isinstance(learned, EarlySelector)
            early = learned.rest_of_choice(inner, block, self._counters[self._places[block, target]])
            if not selection.add(early):
                continue
            self._chosen[block, target] = learned.chosen_early(early)
            del self._inner[block, target]
        return selection
