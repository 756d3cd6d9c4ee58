"""A low-rank predictor of one block's active units, with an optional linear stand-in for the units it skips.

    scores(x) = second (first x) + bias                       x [rows, D] -> [rows, U]
    standin(x) = standin_out (standin_in x) + standin_bias    x [rows, D] -> [rows, D]

x is the block's input after its norm (of the layer `lookahead` layers earlier for the scores). Low rank as in Deja Vu
(Liu et al. 2023, section 4.2), whose fixed rank 1000 is scaled to the model here. Thresholds and stand-ins belong to
the density they were fitted at; a run reads one stand-in, and none where everything is active.

Legend: L layers, n rows, D hidden, U units, R rank, r stand-in rank, S calibrated densities, Q quantiles.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from modules.sparsity import UnitShard
from modules.specs import Dense, Grouped
from sparse_predictor.calibration import NUM_QUANTILES, threshold_at

Rule = Literal["topk", "threshold"]
AUTO_RANK_SHARE = 0.05  # of the block's bytes
AUTO_STANDIN_SHARE = 0.028


def auto_rank(spec: Grouped | Dense, hidden_size: int) -> int:
    """Inner width whose bytes are about 5 % of those of the block it predicts, to the nearest multiple of 8 and
    at least 8; of heads never more than the groups there are to score (a linear map of higher rank is the same map)."""
    rank = AUTO_RANK_SHARE * spec.num_weights(hidden_size) / (hidden_size + spec.num_units)
    rounded = max(8, int(rank / 8 + 0.5) * 8)
    return min(rounded, spec.num_units) if isinstance(spec, Grouped) else rounded


def auto_standin_rank(spec: Dense, hidden_size: int) -> int:
    """Rank whose two factors are about 2.8 % of the MLP's bytes, so that predictor and stand-in stay within 8 %."""
    rank = AUTO_STANDIN_SHARE * spec.num_weights(hidden_size) / (2 * hidden_size)
    return max(8, int(rank / 8) * 8)


class Predictor(nn.Module):
    """Scores of one block's units; see the module docstring for the equations and shapes."""

    first: Tensor
    second: Tensor
    bias: Tensor
    score_quantiles: Tensor
    densities: Tensor
    thresholds: Tensor
    standin_in: Tensor
    standin_out: Tensor
    standin_bias: Tensor

    def __init__(
        self,
        hidden_size: int,
        num_units: int,
        rank: int,
        *,
        densities: Sequence[float] = (),
        standin_rank: int = 0,
    ) -> None:
        super().__init__()
        num_standins = len(densities) if standin_rank else 0
        shapes: dict[str, tuple[int, ...]] = {
            "first": (rank, hidden_size),
            "second": (num_units, rank),
            "bias": (num_units,),
            "score_quantiles": (NUM_QUANTILES,),
            "thresholds": (len(densities),),
            "standin_in": (num_standins, standin_rank, hidden_size),
            "standin_out": (num_standins, hidden_size, standin_rank),
            "standin_bias": (num_standins, hidden_size),
        }
        for name, shape in shapes.items():
            self.register_buffer(name, torch.zeros(shape))
        self.register_buffer("densities", torch.tensor(densities, dtype=torch.float64))

    @property
    def rank(self) -> int:
        """Inner width of the scores."""
        return self.first.shape[0]

    @property
    def num_units(self) -> int:
        """Units scored."""
        return self.second.shape[0]

    def scores(self, hidden_states: Tensor) -> Tensor:
        """[..., D] -> [..., U]; larger is more likely active."""
        return F.linear(F.linear(hidden_states, self.first), self.second, self.bias)

    def keep_units(self, units: UnitShard) -> None:
        """Score the units of one rank only, padding 0, and hold stand-ins only where they are added."""
        for name in ("second", "bias"):
            rows = getattr(self, name)[units.local.clamp(min=0)]
            rows[~units.real] = 0
            setattr(self, name, rows)
        if not units.is_first:
            for name in ("standin_in", "standin_out", "standin_bias"):
                setattr(self, name, getattr(self, name)[:0])

    def calibrated_index(self, density: float) -> int | None:
        """The place of `density` among those this predictor was calibrated at, or None."""
        found = ((self.densities.double() - density).abs() < 1e-6).nonzero()
        return int(found[0]) if found.numel() else None

    def threshold(self, density: float) -> float:
        """The score that a share `density` of the units reaches: measured in a sparse run where the predictor was
        calibrated at that density, else read off the scores of a dense run."""
        index = self.calibrated_index(density)
        if index is not None and density < 1.0:
            return float(self.thresholds[index])
        return threshold_at(self.score_quantiles.float(), density)

    def standin_index(self, density: float) -> int | None:
        """The stand-in fitted nearest to `density`, or None if there is none or nothing is skipped."""
        if density == 1.0 or self.standin_in.shape[0] == 0:
            return None
        return int((self.densities.double() - density).abs().argmin())

    def standin(self, hidden_states: Tensor, index: int) -> Tensor:
        """[..., D] -> [..., D]: what the skipped units are expected to add."""
        inner = F.linear(hidden_states, self.standin_in[index])
        return F.linear(inner, self.standin_out[index], self.standin_bias[index])

    def num_parameters_read(self, density: float) -> int:
        """Weights read a token: scores, and the one stand-in in use."""
        count = self.first.numel() + self.second.numel() + self.bias.numel()
        index = self.standin_index(density)
        if index is not None:
            count += sum(part[index].numel() for part in (self.standin_in, self.standin_out, self.standin_bias))
        return count


class PredictorStack(nn.Module):
    """The predictors of all layers of one kind of block, trained together as batched matrices: float32 parameters of L
    predictors; `to_predictors` returns them one by one.

    `standin_*` has one stand-in per density of `densities`, all trained; none if `standin_rank` is 0. These densities
    are means over layers; `layer_densities` has the share of each layer's units, where it differs.
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
