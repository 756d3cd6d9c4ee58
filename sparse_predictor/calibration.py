"""What the untrained methods need to know about a model, measured on calibration text and stored beside predictors.

One file, `calibration.safetensors`, keyed by layer: how often each unit is active (static), and quantiles of
|act(gate)| (CATS, Lee et al. 2024, section 3), of the |inputs| of matrices (TEAL, Liu et al. 2024, section 4), also
weighted by the matrices' norms (WINA, Chen et al. 2025, section 3). At the densities of training there are thresholds,
too, each set in the sparse run of its method, as the predictors' own are.
Legend: D hidden, F neurons, G key-value groups, Q quantiles, M matrices of a layer (`thinning.matrices`), N densities.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from modules.config import ModelConfig

NUM_QUANTILES = 1025
MAX_SORTED = 1 << 19


def quantiles_of(values: Tensor) -> Tensor:
    """NUM_QUANTILES evenly spaced quantiles of a sample [..., U], float32, ascending.

    At most about MAX_SORTED of the values are sorted, taken evenly over rows and units: a share read off so many is
    within 0.001 of the sample's own.
    """
    step = -(-values.numel() // MAX_SORTED)
    while math.gcd(step, values.shape[-1]) > 1:  # else the same few units of every row would stand for all
        step += 1
    ordered = values.flatten()[::step].float().sort().values
    places = torch.linspace(0, ordered.numel() - 1, NUM_QUANTILES, dtype=torch.float64).round().long()
    return ordered[places.to(ordered.device)]


def threshold_at(quantiles: Tensor, density: float) -> float:
    """The value that a share `density` of the sample reaches or exceeds; -inf at density 1 (nothing is left out)."""
    if not 0.0 < density <= 1.0:
        raise ValueError(f"density must lie in (0, 1], got {density}")
    if density == 1.0:
        return float("-inf")
    place = (1.0 - density) * (quantiles.numel() - 1)
    low = int(place)
    weight = place - low
    high = min(low + 1, quantiles.numel() - 1)
    return float(quantiles[low] * (1.0 - weight) + quantiles[high] * weight)


def thresholds_name(method: str) -> str:
    """The statistic that holds a method's thresholds of sparse runs."""
    return f"{method.replace('-', '_')}_thresholds"


@dataclass(frozen=True, kw_only=True)
class LayerCalibration:
    """Statistics of one layer; None: of the frequencies where the store that was read did not have that kind of unit,
    of others where older versions did not measure them."""

    neuron_frequency: Tensor | None = None  # [F] mean share of tokens in which a neuron is active
    group_frequency: Tensor | None = None  # [G]
    gate_quantiles: Tensor | None = None  # [Q] of |act(gate)|, gated models
    input_quantiles: Tensor | None = None  # [Q] of |normed MLP input|
    activation_quantiles: Tensor | None = None  # [Q] of |act(gate) * up|
    attention_input_quantiles: Tensor | None = None  # [Q] of |normed attention input|
    head_output_quantiles: Tensor | None = None  # [Q] of |what o_proj reads|
    weighted_quantiles: Tensor | None = None  # [M, Q] of |x_i| * ||W[:, i]||, each matrix's input
    input_norms: Tensor | None = None  # [M - 2, D] ||W[:, i]||, of the matrices that are no output projections

    densities: Tensor | None = None  # [N] of the thresholds below, float64
    cats_thresholds: Tensor | None = None  # [1, N]
    teal_thresholds: Tensor | None = None  # [M - 4, N] of the MLP's matrices
    teal_all_thresholds: Tensor | None = None  # [M, N]
    wina_unrotated_thresholds: Tensor | None = None  # [M, N]

    def threshold_in_run(self, method: str, density: float, place: int = 0) -> float | None:
        """The threshold that was set in a sparse run of a method, of the matrix at a place where it thins these out;
        None where there was no run at this density."""
        values = getattr(self, thresholds_name(method))
        if values is None or self.densities is None or density not in self.densities.tolist():
            return None
        return float(values[place, self.densities.tolist().index(density)])

    def check_shapes(self, config: ModelConfig, where: str) -> None:
        """ValueError for a statistic that is not of this model's shape."""
        num_matrices = 7 if config.gated_mlp else 6
        num_densities = 0 if self.densities is None else self.densities.numel()
        expected: dict[str, tuple[int, ...]] = {
            "neuron_frequency": (config.intermediate_size,),
            "group_frequency": (config.num_key_value_heads,),
            "weighted_quantiles": (num_matrices, NUM_QUANTILES),
            "input_norms": (num_matrices - 2, config.hidden_size),
            "densities": (num_densities,),
            "cats_thresholds": (1, num_densities),
            "teal_thresholds": (num_matrices - 4, num_densities),
            "teal_all_thresholds": (num_matrices, num_densities),
            "wina_unrotated_thresholds": (num_matrices, num_densities),
        }
        for name, value in vars(self).items():
            shape = expected.get(name, (NUM_QUANTILES,))
            if value is not None and tuple(value.shape) != shape:
                raise ValueError(f"{where}.{name} has shape {tuple(value.shape)}, expected {shape}")

    def require(self, name: str, method: str) -> Tensor:
        """A statistic that a method cannot do without."""
        value = getattr(self, name)
        if value is None:
            raise ValueError(
                f"method {method} needs {name}, which these predictors were calibrated without; "
                "train again on a store that has those activations"
            )
        assert isinstance(value, Tensor)
        return value
