"""Reduced-rank linear regression in closed form, from sums that are added up chunk by chunk.

    minimise sum over rows ||y - second (first x) - bias||^2,   first [R, D], second [O, R], bias [O]

The optimum projects the full regression onto its R strongest directions in output space (Izenman 1975; Velu &
Reinsel 1998, chapter 2). Used for the linear stand-in of skipped neurons and to start a predictor.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# Share of the inputs' mean variance added to the diagonal: a few massive channels make the covariance near singular.
RIDGE = 1e-4
RIDGE_AT_MOST = 1e-2  # of the same, to make up for rounding


@dataclass(frozen=True)
class LowRankMap:
    """x -> second (first x) + bias."""

    first: Tensor  # [R, D]
    second: Tensor  # [O, R]
    bias: Tensor  # [O]


class RegressionSums:
    """First and second moments of (x, y) rows: each chunk's products in its own float32, sums in float64."""

    def __init__(self, num_inputs: int, num_outputs: int, device: torch.device | str) -> None:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=device)

        self.count = 0.0
        self.x, self.y, self.yy = zeros(num_inputs), zeros(num_outputs), zeros(num_outputs)
        self.xx, self.xy = zeros(num_inputs, num_inputs), zeros(num_inputs, num_outputs)

    def add(self, x: Tensor, y: Tensor, weight: Tensor | None = None) -> None:
        """x [n, D] and y [n, O], float32; weight [n] > 0 counts a row that many times (None: once)."""
        if weight is None:
            weight = torch.ones_like(x[:, 0])
        self.count += float(weight.sum())
        # Means are taken from second moments: what their sums are rounded by counts as often as the mean is large.
        self.x += (weight[:, None] * x).sum(0, dtype=torch.float64)
        self.y += (weight[:, None] * y).sum(0, dtype=torch.float64)
        root = weight.sqrt()[:, None]
        x, y = x * root, y * root
        self.yy += y.square().sum(0)
        self.xx += x.T @ x
        self.xy += x.T @ y

    def y_variance(self) -> Tensor:
        """Variance of each output, float64 [O]."""
        return (self.yy / self.count - (self.y / self.count).square()).clamp_min(1e-12)

    def fit(self, rank: int) -> LowRankMap:
        """The best map of `rank` (float32). ValueError without rows."""
        if self.count == 0:
            raise ValueError("regression without rows")
        mean_x, mean_y = self.x / self.count, self.y / self.count
        covariance = self.xx / self.count - torch.outer(mean_x, mean_x)
        covariance.diagonal().add_(RIDGE * covariance.diagonal().mean().clamp_min(1e-12))
        cross = self.xy / self.count - torch.outer(mean_x, mean_y)
        # With C = G G', the fitted outputs' strongest directions are the top singular vectors of G^-1 cross.
        root, failed = torch.linalg.cholesky_ex(covariance)
        # Products were rounded to float32: where means are large beside what varies, that alone can make an eigenvalue
        # negative. Not where rounding is all there is.
        rounding = torch.finfo(torch.float32).eps * self.xx.diagonal().sum() / self.count
        if bool(failed) and bool(rounding < RIDGE_AT_MOST * covariance.diagonal().mean()):
            covariance.diagonal().add_(rounding)
            root, failed = torch.linalg.cholesky_ex(covariance)
        if bool(failed) or not bool(root.isfinite().all()):
            raise ValueError(
                f"regression: inputs ({self.count:.0f} rows of {len(mean_x)}) that are too few, constant or not "
                "finite; give more text"
            )
        whitened = torch.linalg.solve_triangular(root, cross, upper=False)  # [D, O]
        _, vectors = torch.linalg.eigh(whitened @ whitened.T)
        left = vectors[:, -min(rank, vectors.shape[1]) :].flip(1)  # [D, R], strongest first
        second = whitened.T @ left  # [O, R]
        first = torch.linalg.solve_triangular(root.T, left, upper=True)  # [D, R]
        bias = mean_y - second @ (first.T @ mean_x)
        return LowRankMap(first.T.float().contiguous(), second.float().contiguous(), bias.float())
