"""What a predictor's scores are trained towards. A loss is a value: a name in LOSSES, a function of one batch.

Legend: L layers, n rows, U units.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

# A neuron's weight in the energy-weighted loss: its share of the token's output energy over the mean share, between
# these. The floor keeps the many small neurons from drifting up; the cap keeps a massive one from being all there is.
ENERGY_WEIGHT_FLOOR = 0.1
ENERGY_WEIGHT_CAP = 20.0
MAGNITUDE_CAP = 12.0


@dataclass(frozen=True)
class LossTargets:
    """`true` bool [L, n, U]: the active units. `contributions` [L, n, U] >= 0: what each unit writes, or None where
    the store keeps labels only."""

    true: Tensor
    contributions: Tensor | None

    def sizes(self, loss: str) -> Tensor:
        """The contributions; ValueError if a loss needs them and there are none."""
        if self.contributions is None:
            raise ValueError(
                f"--loss {loss} needs activations, and this store keeps packed labels only; use --loss bce"
            )
        return self.contributions


def bce(scores: Tensor, targets: LossTargets) -> Tensor:
    """Binary cross-entropy on the labels, every unit alike (Deja Vu, Liu et al. 2023, section 4.2): [L]."""
    return F.binary_cross_entropy_with_logits(scores, targets.true.to(scores.dtype), reduction="none").mean((1, 2))


def energy_bce(scores: Tensor, targets: LossTargets) -> Tensor:
    """Binary cross-entropy weighted by each unit's share of the token's output energy: [L]."""
    energy = targets.sizes("energy_bce").square()
    share = energy / energy.mean(-1, keepdim=True).clamp_min(torch.finfo(energy.dtype).tiny)
    weight = (ENERGY_WEIGHT_FLOOR + share).clamp(max=ENERGY_WEIGHT_CAP)
    true = targets.true.to(scores.dtype)
    return F.binary_cross_entropy_with_logits(scores, true, weight=weight, reduction="none").mean((1, 2))


def magnitude(scores: Tensor, targets: LossTargets) -> Tensor:
    """Squared error to the root of each unit's relative contribution: [L]."""
    return (scores - relative_magnitude(targets.sizes("magnitude"))).square().mean((1, 2))


def relative_magnitude(contributions: Tensor) -> Tensor:
    """sqrt(contribution / the token's mean), capped: what a score has to order, on one scale for all tokens."""
    mean = contributions.mean(-1, keepdim=True).clamp_min(torch.finfo(contributions.dtype).tiny)
    return (contributions / mean).clamp(max=MAGNITUDE_CAP).sqrt()


LOSSES: dict[str, Callable[[Tensor, LossTargets], Tensor]] = {
    "bce": bce,
    "energy_bce": energy_bce,
    "magnitude": magnitude,
}
