"""The predictors of all layers of one kind of block, trained together as batched matrices.

Legend: L layers, n rows, D hidden, U units, R rank, r stand-in rank.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class PredictorStack(nn.Module):
    """Float32 parameters of L predictors; `to_predictors` hands them out one by one.

    `standin_*` has one stand-in a density of `densities`, all trained; none if `standin_rank` is 0.
    """

    def __init__(
        self,
        num_layers: int,
        hidden_size: int,
        num_units: int,
        rank: int,
        *,
        densities: Sequence[float] = (),
        standin_rank: int = 0,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.densities = tuple(densities)

        def normal(*shape: int, fan_in: int) -> nn.Parameter:
            return nn.Parameter((torch.randn(shape, generator=generator) * fan_in**-0.5).to(device))

        def zeros(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.zeros(shape, device=device))

        self.first = normal(num_layers, rank, hidden_size, fan_in=hidden_size)
        self.second = normal(num_layers, num_units, rank, fan_in=rank)
        self.bias = zeros(num_layers, num_units)
        num_standins = len(self.densities) if standin_rank else 0
        self.standin_in = zeros(num_layers, num_standins, standin_rank, hidden_size)
        self.standin_out = zeros(num_layers, num_standins, hidden_size, standin_rank)
        self.standin_bias = zeros(num_layers, num_standins, hidden_size)

    @property
    def num_layers(self) -> int:
        """L."""
        return self.first.shape[0]

    def scores(self, inputs: Tensor) -> Tensor:
        """[L, n, D] -> [L, n, U]."""
        inner = torch.bmm(inputs, self.first.transpose(1, 2))
        return torch.baddbmm(self.bias[:, None], inner, self.second.transpose(1, 2))
