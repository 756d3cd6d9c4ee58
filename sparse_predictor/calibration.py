"""What methods need to know about a model, measured on calibration text and stored beside predictors.

Methods declare it (`Method.statistics`): how often each unit is active, counted from an activation store; quantiles of
what thresholds are compared with, from one dense pass over held-out text. At the densities of training there are
thresholds, too, each set in the sparse run of its method (`thresholds.py`), as the predictors' own are.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from modules.config import ModelConfig
from modules.decoder import Decoder
from sparse_predictor.thinning import matrices_of, projection_of

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
    """The statistic that holds a method's thresholds of sparse runs, float32 [thresholds per layer, densities]."""
    return f"{method.replace('-', '_')}_thresholds"


# (model, layer, name of a projection, its input [B, T, in], its output [B, T, out]) -> what is kept of them
Measure = Callable[[Decoder, int, str, Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Statistic:
    """Something to be known of each layer, float32 [width].

    `measure`: made of what the projections `of` read and write in a dense pass over held-out text; None: counted by
    training from an activation store. `is_stacked`: [matrices, width], one for each of `of` that the model has.
    """

    name: str
    width: Callable[[ModelConfig, int], int] = lambda config, layer: NUM_QUANTILES
    of: tuple[str, ...] = ()
    measure: Measure | None = None
    is_stacked: bool = False

    def projections(self, config: ModelConfig) -> list[str]:
        """Those of `of` that a layer has."""
        return [name for name in self.of if name in matrices_of(config)]

    def shape(self, config: ModelConfig, layer: int) -> tuple[int, ...]:
        """Of one layer."""
        of_one = (self.width(config, layer),)
        return (len(self.projections(config)), *of_one) if self.is_stacked else of_one


@dataclass(frozen=True)
class LayerCalibration:
    """Statistics of one layer by name; there are fewer where the store had no such units, or older versions measured
    less. `densities` float64 [N]: those of the thresholds."""

    statistics: Mapping[str, Tensor] = field(default_factory=dict)

    def threshold_in_run(self, method: str, density: float, place: int = 0) -> float | None:
        """The threshold that was set in a sparse run of a method, of the matrix at a place where it thins these out;
        None where there was no run at this density."""
        values, densities = self.statistics.get(thresholds_name(method)), self.statistics.get("densities")
        if values is None or densities is None or density not in densities.tolist():
            return None
        return float(values[place, densities.tolist().index(density)])

    def threshold(self, method: str, density: float, quantiles: Tensor, place: int = 0) -> float:
        """The threshold of a method at a density: that of its sparse run, else what quantiles of dense states say."""
        in_run = self.threshold_in_run(method, density, place)
        return threshold_at(quantiles, density) if in_run is None else in_run

    def check_shapes(self, expected: Mapping[str, tuple[int, ...]], where: str) -> None:
        """ValueError for a statistic that is not of this model's shape."""
        for name, value in self.statistics.items():
            if tuple(value.shape) != expected[name]:
                raise ValueError(
                    f"{where}.{name} has shape {tuple(value.shape)}, expected {expected[name]}; train again"
                )

    def require(self, name: str, method: str) -> Tensor:
        """A statistic that a method cannot do without."""
        if name not in self.statistics:
            raise ValueError(
                f"method {method} needs {name}, which these predictors were calibrated without (by an older version, "
                "or on a store without those activations); train into another --output-dir"
            )
        return self.statistics[name]


@torch.inference_mode()
def measure_statistics(
    model: Decoder, statistics: Sequence[Statistic], calibration: Mapping[int, LayerCalibration], token_ids: Tensor
) -> dict[int, LayerCalibration]:
    """`calibration` with the statistics that a dense pass shows, over held-out token_ids [B, T], the text that the
    predictors' own thresholds are set on."""
    found: dict[int, dict[Statistic, dict[str, Tensor]]] = {layer: {} for layer in calibration}
    handles = []

    def look(layer: int, statistic: Statistic, name: str, measure: Measure) -> Callable[..., None]:
        def see(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            found[layer].setdefault(statistic, {})[name] = measure(model, layer, name, args[0], output)

        return see

    for layer in calibration:
        for statistic in statistics:
            if statistic.measure is not None:
                for name in statistic.projections(model.config):
                    see = look(layer, statistic, name, statistic.measure)
                    handles.append(projection_of(model, layer, name).register_forward_hook(see))
    try:
        model(token_ids)
    finally:
        for handle in handles:
            handle.remove()

    def joined(statistic: Statistic, parts: dict[str, Tensor]) -> Tensor:
        values = [parts[name] for name in statistic.projections(model.config)]
        return torch.stack(values) if statistic.is_stacked else values[0]

    return {
        layer: LayerCalibration(
            {**known.statistics, **{one.name: joined(one, parts) for one, parts in found[layer].items()}}
        )
        for layer, known in calibration.items()
    }
