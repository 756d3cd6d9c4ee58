"""95 % intervals of what was measured on windows of text, by drawing the windows again (Efron 1979, bootstrap).

Windows are drawn, not tokens: tokens of one window depend on each other. One set of draws serves all quantities of a
study, so a difference of two of them is a paired one. Percentile intervals of few windows are somewhat too narrow.

Legend: W windows, S resamples.
"""

import torch
from torch import Tensor

NUM_RESAMPLES = 2000
CONFIDENCE = 0.95

Interval = tuple[float, float]


class Resampling:
    """`NUM_RESAMPLES` draws of W windows with replacement, a function of (W, seed) alone."""

    def __init__(self, num_windows: int, seed: int) -> None:
        if num_windows < 2:
            raise ValueError(f"an interval needs at least 2 windows of text, got {num_windows}; give more text")
        generator = torch.Generator().manual_seed(seed)
        draws = torch.randint(num_windows, (NUM_RESAMPLES, num_windows), generator=generator)
        ones = torch.ones(draws.shape, dtype=torch.float64)
        self.times_drawn = torch.zeros_like(ones).scatter_add_(1, draws, ones)  # [S, W]

    def totals(self, per_window: Tensor) -> Tensor:
        """Sums over the windows of each draw: [..., W] -> float64 [..., S], on the CPU."""
        return per_window.double().cpu() @ self.times_drawn.T

    def ratios(self, numerators: Tensor, denominators: Tensor) -> Tensor:
        """Ratio of sums in each draw: [..., W] both -> [..., S]."""
        return ratio(self.totals(numerators), self.totals(denominators))


def ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """The quotient; 1 where there is nothing to divide by, as recall where nothing was true."""
    return torch.where(denominator > 0, numerator / denominator, 1.0)


def interval_of(values: Tensor) -> Interval:
    """The middle 95 % of one quantity's resampled values [S]."""
    tail = (1 - CONFIDENCE) / 2
    low, high = torch.quantile(values, torch.tensor([tail, 1 - tail], dtype=values.dtype)).tolist()
    return low, high
