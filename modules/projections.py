"""The matmuls of a block. Output projections are held unit-major, so that an active unit is one contiguous row."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


class OutputProjection(nn.Module):
    """x @ weight with weight [in_features, out_features]: row j is what unit j writes to the residual.

    Hugging Face stores the transpose; the checkpoint reader turns it once, at load. The bias of an output
    projection belongs to the residual junction (`HalfBlock.bias`), never to this sum.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(in_features, out_features))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, states: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]."""
        return torch.matmul(states, self.weight)


class ThinnedInput(nn.Module):
    """A projection that drops small entries of its input first (TEAL, WINA wrap a matmul in one of these).

    `keep(states)` returns a bool mask of the entries that are used; the module counts them for the record.
    """

    def __init__(self, projection: nn.Module, keep: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.projection = projection
        self.keep = keep
        self.kept_entries: Tensor | None = None
        self.seen_entries = 0

    @property
    def density(self) -> float:
        """Share of input entries used so far: the share of the weight's columns that had to be read."""
        return 1.0 if self.kept_entries is None else float(self.kept_entries) / self.seen_entries

    @property
    def weight(self) -> nn.Parameter:
        """The wrapped projection's weight."""
        return self.projection.weight  # type: ignore[return-value]

    def forward(self, states: Tensor) -> Tensor:
        """As the wrapped projection, on the thinned input."""
        mask = self.keep(states)
        kept = mask.sum()
        self.kept_entries = kept if self.kept_entries is None else self.kept_entries + kept
        self.seen_entries += mask.numel()
        return self.projection(states.masked_fill(~mask, 0))
