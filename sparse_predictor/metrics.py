"""How well a choice of units matches the truth, measured inside the run that is being scored.

recall = |chosen and true| / |true|, precision = |chosen and true| / |chosen|, pooled over tokens. The truth is taken
from the states the sparse model itself sees.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from modules.decoder import Decoder
from modules.feed_forward import unit_norms
from modules.sparsity import BLOCKS, ActiveSet, Block, Reduce, SelectionContext, Selector, num_kept
from sparse_predictor.labels import contribution, default_definition, true_active


@dataclass
class SetOverlap:
    """Pooled counts of one block, on the device until read: chosen, true, both."""

    counts: Tensor | None = None

    def add(self, chosen: Tensor, true: Tensor, keep: Tensor | None) -> None:
        """chosen, true bool [rows, U]; keep bool, broadcast to these, leaves padding out."""
        if keep is not None:
            chosen, true = chosen & keep, true & keep
        counts = torch.stack([chosen.sum(), true.sum(), (chosen & true).sum()])
        self.counts = counts if self.counts is None else self.counts + counts

    @property
    def recall(self) -> float:
        """1.0 if nothing was true."""
        return self._share(1)

    @property
    def precision(self) -> float:
        """1.0 if nothing was chosen."""
        return self._share(0)

    def _share(self, denominator: int) -> float:
        if self.counts is None or int(self.counts[denominator]) == 0:
            return 1.0
        return float(self.counts[2]) / float(self.counts[denominator])


@dataclass
class SelectionQuality:
    """Overlaps of every block; filled by the `MeasuredSelector`s that `measure_selection` attaches."""

    overlaps: dict[tuple[int, Block], SetOverlap] = field(default_factory=dict)

    def of(self, layer_idx: int, block: Block) -> SetOverlap:
        """One block's counts, made on first use."""
        return self.overlaps.setdefault((layer_idx, block), SetOverlap())

    def summed(self, num_layers: int, reduce: Reduce) -> "SelectionQuality":
        """The overlaps of all ranks together."""
        places: list[tuple[int, Block]] = [(layer, block) for layer in range(num_layers) for block in BLOCKS]
        counts = [self.overlaps.get(place, SetOverlap()).counts for place in places]
        mine = torch.tensor([[0, 0, 0] if found is None else found.tolist() for found in counts])
        sums = zip(places, reduce(mine), strict=True)
        return SelectionQuality({place: SetOverlap(found) for place, found in sums if bool(found.any())})

    def per_layer(self, block: Block) -> list[SetOverlap]:
        """In layer order."""
        return [overlap for (_, kind), overlap in sorted(self.overlaps.items()) if kind == block]

    def pooled(self, block: Block) -> SetOverlap | None:
        """All layers together; None if no selector of that block chose anything."""
        counts = [overlap.counts for overlap in self.per_layer(block) if overlap.counts is not None]
        return SetOverlap(torch.stack(counts).sum(0)) if counts else None

    def to_record(self) -> dict[str, Any]:
        """Recall and precision: of the MLP, and of heads and each layer where they were selected."""
        found: dict[str, Any] = {"per_layer": {}}
        for block in BLOCKS:
            pooled = self.pooled(block)
            if pooled is None:
                continue
            layers = self.per_layer(block)
            found["per_layer"][block] = {
                "recall": [overlap.recall for overlap in layers],
                "precision": [overlap.precision for overlap in layers],
            }
            prefix = "" if block == "mlp" else "head_"
            found[f"{prefix}recall"], found[f"{prefix}precision"] = pooled.recall, pooled.precision
        return found


class MeasuredSelector:
    """Passes a selector's choice on unchanged and compares it with the true set at the same density."""

    def __init__(
        self, model: Decoder, inner: Selector, quality: SelectionQuality, density: float, block: Block
    ) -> None:
        self.inner = inner
        self.model = model
        self.quality = quality
        self.definition = default_definition(model.config, density)
        self.density, self.block = density, block
        self._norms: Tensor | None = None

    @property
    def lookahead(self) -> int:
        """As the selector inside."""
        return self.inner.lookahead

    def select(self, hidden_states: Tensor, context: SelectionContext) -> ActiveSet | None:
        """As the selector inside, after counting the overlap."""
        active = self.inner.select(hidden_states, context)
        if active is None:
            return None
        output = context.dense_output()
        if self.block == "mlp":
            if self._norms is None:
                self._norms = unit_norms(self.model.mlp(context.layer_idx)).to(output.dtype)
            true = true_active(output.flatten(0, 1), self._norms, self.definition, context.units)
        else:
            scores = contribution(output, None, context.units)
            num_groups = num_kept(self.density, scores.shape[-1])
            true = ActiveSet.from_scores(scores, num_groups, context.units).mask
        keep = None if context.valid is None else context.valid.reshape(-1, 1)
        if context.units is not None:
            keep = context.units.counted if keep is None else keep & context.units.counted
        self.quality.of(context.layer_idx, self.block).add(active.mask, true, keep)
        return active


def measure_selection(model: Decoder, densities: Mapping[Block, Sequence[float]]) -> SelectionQuality:
    """Wrap every attached selector; detach with `remove_sparsity`."""
    quality = SelectionQuality()
    for layer in model.layers:
        for block in BLOCKS:
            module = model.half_block(layer, block).block
            if module.selector is not None:
                module.selector = MeasuredSelector(model, module.selector, quality, densities[block][layer], block)
    return quality
