"""The predictors of all layers of one kind of block, trained together as batched matrices.

Legend: L layers, n rows, D hidden, U units, R rank, r stand-in rank.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from sparse_predictor.predictor import Predictor


class PredictorStack(nn.Module):
    """Float32 parameters of L predictors; `to_predictors` hands them out one by one.

    `standin_*` has one stand-in a density of `densities`, all trained; none if `standin_rank` is 0. Where a layer keeps
    another share of its units than such a density says, its mean over layers, `layer_densities` has it.
    """

    def __init__(
        self,
        num_layers: int,
        hidden_size: int,
        num_units: int,
        rank: int,
        *,
        densities: Sequence[float] = (),
        layer_densities: Mapping[float, Sequence[float]] | None = None,
        standin_rank: int = 0,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.densities, self.layer_densities = tuple(densities), dict(layer_densities or {})

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

    def layer_scores(self, index: int, inputs: Tensor) -> Tensor:
        """Scores of one layer: [n, D] -> [n, U]."""
        return torch.addmm(self.bias[index], inputs @ self.first[index].T, self.second[index].T)

    def kept(self, index: int, density: float) -> float:
        """The share of units that one layer keeps at `density`."""
        return self.layer_densities[density][index] if density in self.layer_densities else density

    def layer_standin(self, index: int, inputs: Tensor, density: float) -> Tensor | None:
        """What one layer's stand-in for `density` adds, [..., D] -> [..., D]; None if there is none, or nothing to
        stand in for."""
        if not self.standin_in.shape[1] or self.kept(index, density) == 1.0:
            return None
        place = self.densities.index(density)
        inner = inputs @ self.standin_in[index, place].T
        return inner @ self.standin_out[index, place].T + self.standin_bias[index, place]

    def to_predictors(self) -> list[Predictor]:
        """One predictor per layer; thresholds are still to be calibrated."""
        rank, hidden_size = self.first.shape[1:]
        standin_rank, num_standins = self.standin_in.shape[2], self.standin_in.shape[1]
        predictors = []
        for index in range(self.num_layers):
            predictor = Predictor(
                hidden_size,
                self.second.shape[1],
                rank,
                densities=[self.kept(index, density) for density in self.densities],
                standin_rank=standin_rank if num_standins else 0,
            )
            for name in ("first", "second", "bias", "standin_in", "standin_out", "standin_bias"):
                getattr(predictor, name).copy_(getattr(self, name)[index].detach())
            predictors.append(predictor)
        return predictors
