"""The matmuls of a block. Output projections are held unit-major, so that an active unit is one contiguous row."""

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
    """A projection that drops the small entries of its input first (TEAL): each dropped entry is an unread weight row.

    Wraps a matmul from outside; the matmul itself stays as it was. `density` tells how much was used.
    """

    def __init__(self, projection: nn.Module, threshold: float) -> None:
        super().__init__()
        self.projection = projection
        self.threshold = threshold
        self.enabled = True
        self.valid: Tensor | None = None  # bool [B, T]: rows that are no padding, and count; None: all
        self._kept: Tensor | None = None
        self._seen = 0

    def forward(self, states: Tensor) -> Tensor:
        """As the wrapped projection, on the input's entries with magnitude >= threshold."""
        if not self.enabled:
            return self.projection(states)
        # An exact zero (ReLU) is skipped for free, also where the threshold itself is zero.
        mask = (states.abs() >= self.threshold) & ((states != 0) | (self.threshold == float("-inf")))
        counted = mask if self.valid is None else mask[self.valid]
        kept = counted.sum()
        self._kept = kept if self._kept is None else self._kept + kept
        self._seen += counted.numel()
        return self.projection(states.masked_fill(~mask, 0))

    @property
    def density(self) -> float:
        """Share of input entries used so far; 1.0 before the first call."""
        return 1.0 if self._kept is None else float(self._kept) / self._seen
