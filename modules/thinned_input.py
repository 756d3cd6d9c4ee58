"""Input thinning: a projection that drops the small entries of its input, each of which is an unread weight row."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from modules.kernels.thinned_rows import kept_entries
from modules.linear import Linear
from modules.sparsity import Count


class ThinnedInput(nn.Module):
    """A projection that drops the small entries of its input first (TEAL): each dropped entry is an unread weight row.

    Wraps a `Linear`, which stays as it was (`projection`). `kept` of `seen` entries were used, over rows that
    are no padding and inputs that are `counted` (bool [in_features]; None: all). `last_rows` [2, B] are those numbers
    of the last call alone, for each batch row; None where it was not thinned out. With `input_norms` [in_features] an
    entry counts as large by its magnitude times this (WINA). `density` is the share that the threshold is to keep.

    In a decode step that may be a graph (see thinned_in_step) nothing is counted, but `kept_in_step` [B] left behind.
    `input_major` [M, in, out]: the weights that kernels read, of all M matrices which have this input; None without.
    """

    def __init__(
        self,
        projection: Linear,
        threshold: float,
        counted: Tensor | None = None,
        input_norms: Tensor | None = None,
        density: float = 1.0,
    ) -> None:
        super().__init__()
        self.projection = projection
        self.threshold = threshold
        self.density = density
        self.counted = counted
        self.input_norms = input_norms
        self.num_counted = projection.in_features if counted is None else int(counted.sum())
        self.enabled = True
        self.valid: Tensor | None = None  # bool [B, T]: rows that are no padding, and count; None: all
        self.kept = Count()
        self.seen = Count()
        self.last_rows: Tensor | None = None
        self.in_step = False
        self.kept_in_step: Tensor | None = None
        self.input_major: Tensor | None = None

    @property
    def bias(self) -> Tensor | None:
        """Of the projection, as what follows."""
        return self.projection.bias

    @property
    def compute_dtype(self) -> torch.dtype:
        """See Linear."""
        return self.projection.compute_dtype

    def rows(self, indices: Tensor) -> Tensor:
        """See Linear."""
        return self.projection.rows(indices)

    def dequantised(self) -> Tensor:
        """See Linear."""
        return self.projection.dequantised()

    def compared(self, states: Tensor) -> Tensor:
        """What the threshold is compared with: the sizes of an input's entries [..., in]."""
        return (states if self.input_norms is None else states * self.input_norms).abs()

    def forget_counts(self) -> None:
        """Count from zero."""
        self.kept, self.seen = Count(), Count()

    def forward(self, states: Tensor) -> Tensor:
        """As the wrapped projection, on the input's entries with magnitude >= threshold."""
        if not self.enabled:  # the run has these tokens, too, as it has those of a selector that leaves them dense
            self.last_rows = None
            tokens = states.shape[:-1].numel() if self.valid is None else self.valid.sum()
            self.kept.add(tokens * self.num_counted)
            self.seen.add(tokens * self.num_counted)
            return self.projection(states)
        mask = kept_entries(self.compared(states), self.threshold)
        kept = mask if self.counted is None else mask & self.counted
        kept = kept if self.valid is None else kept & self.valid[..., None]
        if self.in_step:
            self.kept_in_step = kept.sum((-1, -2))
        else:
            seen = kept.new_ones(kept.shape[:-1]) if self.valid is None else self.valid
            self.last_rows = torch.stack((kept.sum((-1, -2)), seen.sum(-1) * self.num_counted))
            self.kept.add(self.last_rows[0].sum())
            self.seen.add(self.last_rows[1].sum())
        return self.projection(states.masked_fill(~mask, 0))


def path_without_a_choice(parts: Sequence[tuple[ThinnedInput, int]]) -> str:
    """How a block that chooses no units runs, for statistics: with inputs thinned out as a mask would, or dense."""
    return "mask" if any(part.enabled for part, _ in parts) else "dense"


def weights_read(parts: Sequence[tuple[ThinnedInput, int]]) -> Tensor | None:
    """int64 [2, B]: weights read, and all there are, for each batch row of the last call of a block whose thinned
    inputs and weights an entry are given; None if it was not thinned out. Sums over ranks are counts again."""
    total: Tensor | None = None
    for part, width in parts:
        if part.last_rows is not None:
            total = part.last_rows * width if total is None else total + part.last_rows * width
    return total
