"""A low-rank predictor of one block's active units, with an optional linear stand-in for the units it skips.

    scores(x) = second (first x) + bias                       x [rows, D] -> [rows, U]
    standin(x) = standin_out (standin_in x) + standin_bias    x [rows, D] -> [rows, D]

x is the block's input after its norm (of the layer `lookahead` layers earlier for the scores). Low rank as in Deja Vu
(Liu et al. 2023, section 4.2), whose fixed rank 1000 is scaled to the model here. A stand-in belongs to the density it
was fitted at; a run reads one of them, and none where everything is active.

Legend: D hidden, U units, R rank, r stand-in rank, S stand-ins, Q quantiles.
"""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from modules.config import ModelConfig
from sparse_predictor.calibration import NUM_QUANTILES, threshold_at

Rule = Literal["topk", "threshold"]
AUTO_RANK_SHARE = 0.05  # of the MLP's bytes


def auto_rank(config: ModelConfig) -> int:
    """Inner width whose bytes are about 5 % of the MLP's, to the nearest multiple of 8 and at least 8."""
    per_rank = config.hidden_size + config.intermediate_size
    rank = AUTO_RANK_SHARE * config.mlp_num_parameters / per_rank
    return max(8, int(rank / 8 + 0.5) * 8)


class Predictor(nn.Module):
    """Scores of one block's units; see the module docstring for the equations and shapes."""

    first: Tensor
    second: Tensor
    bias: Tensor
    score_quantiles: Tensor
    standin_densities: Tensor
    standin_in: Tensor
    standin_out: Tensor
    standin_bias: Tensor

    def __init__(
        self, hidden_size: int, num_units: int, rank: int, *, num_standins: int = 0, standin_rank: int = 0
    ) -> None:
        super().__init__()
        shapes: dict[str, tuple[int, ...]] = {
            "first": (rank, hidden_size),
            "second": (num_units, rank),
            "bias": (num_units,),
            "score_quantiles": (NUM_QUANTILES,),
            "standin_densities": (num_standins,),
            "standin_in": (num_standins, standin_rank, hidden_size),
            "standin_out": (num_standins, hidden_size, standin_rank),
            "standin_bias": (num_standins, hidden_size),
        }
        for name, shape in shapes.items():
            self.register_buffer(name, torch.zeros(shape))

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

    def threshold(self, density: float) -> float:
        """The score that a share `density` of calibration scores reaches."""
        return threshold_at(self.score_quantiles.float(), density)

    def standin_index(self, density: float) -> int | None:
        """The stand-in fitted nearest to `density`, or None if there is none or nothing is skipped."""
        if density == 1.0 or self.standin_densities.numel() == 0:
            return None
        return int((self.standin_densities.float() - density).abs().argmin())

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
