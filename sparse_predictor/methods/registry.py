"""What a selection method is, and where methods are found. How to add one: the docstring of this folder."""

import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Literal

from torch import Tensor

from modules.config import ModelConfig
from modules.decoder import Decoder
from modules.sparsity import ActiveSet, Block, SelectionContext, Selector, UnitShard
from sparse_predictor.calibration import LayerCalibration, Statistic, thresholds_name
from sparse_predictor.thinning import Thin, matrices_of

SparsePhases = Literal["decode", "all"]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a method is to do to a model, everything checked. `densities`: of each layer, by block. `predictors`: their
    directory, of methods that need files; `calibration`: its statistics by layer, of methods that need these.
    `has_thresholds`: they will be set from outside, by a budget."""

    model: Decoder
    densities: Mapping[Block, Sequence[float]]
    predictors: Path | None = None
    calibration: Mapping[int, LayerCalibration] | None = None
    sparse_phases: SparsePhases = "all"
    seed: int = 0
    has_thresholds: bool = False

    def num_units(self, layer: int, block: Block) -> int:
        """Neurons, or key-value groups of heads, of a layer."""
        return self.model.config.layers[layer].of(block).num_units

    def statistics(self, layer: int) -> LayerCalibration:
        """What was measured of a layer."""
        assert self.calibration is not None, "of a method whose `files` say so"
        return self.calibration[layer]


@dataclass(frozen=True, kw_only=True)
class Method:
    """The facts about a method that stages need.

    `paper`: its source, for readers. `order`: its place in choices, tables and plots; `colour` and `marker` in plots,
    a pair that no other method has. `blocks`: those whose units it can choose, or whose inputs it thins out. `files`:
    what it needs of --predictors. `sets_thresholds`: training sets its thresholds in sparse runs. `role`: in tables. A
    bound cannot save anything in practice, a baseline does not look at the token, a published method is compared with
    the learned ones. `trained_densities`: those of each MLP that a directory was trained for, if not the uniform one.
    `formerly`: an older name, and why it has another.
    """

    name: str
    summary: str
    paper: str = ""
    order: int
    colour: str
    marker: str
    blocks: tuple[Block, ...] = ("mlp",)
    files: Literal["none", "calibration", "predictors"] = "none"
    statistics: tuple[Statistic, ...] = ()
    sets_thresholds: bool = False
    needs_gate: bool = False
    needs_whole_matrices: bool = False
    role: Literal["learned", "published", "baseline", "bound"] = "published"
    trained_densities: Callable[[Path, float], list[float] | None] | None = None
    formerly: tuple[str, str] | None = None

    def check(self, config: ModelConfig, *, chooses_heads: bool, is_cut: bool) -> None:
        """ValueError for what it cannot be combined with: a kind of model, chosen heads, tensor parallelism."""
        if chooses_heads and (isinstance(self, InputMethod) or "attention" not in self.blocks):
            raise ValueError(f"method {self.name} does not choose heads; leave --head-density at 1.0")
        if self.needs_gate and not config.gated_mlp:
            raise ValueError(f"method {self.name} needs a gated MLP; this model has none")
        if self.needs_whole_matrices and is_cut:
            raise ValueError(f"method {self.name} needs whole matrices, and does not run with --tp-size above 1")

    def num_thresholds(self, config: ModelConfig) -> int:
        """Thresholds per layer and density."""
        return 1

    def mlp_share(self, density: float) -> float:
        """Weights of an MLP that are read, as a share of all, without those of predictors."""
        return density

    @property
    def share_by_density(self) -> float:
        """Of an MLP's weights, the share whose reading is in proportion to its density: what a budget divides."""
        return 1.0


@dataclass(frozen=True, kw_only=True)
class UnitMethod(Method):
    """Chooses units. `make(setting)` checks what it needs, and returns what makes a block's selector.

    `matrices_read_whole`: of the MLP's three, to choose from. `sees_prompt`: the selector sees the prompt, too, and
    leaves it dense by itself. `lookahead`: how many layers back its selectors read, on any stage.
    """

    make: Callable[[Setting], Callable[[int, Block], Selector]]
    matrices_read_whole: int = 0
    sees_prompt: bool = False
    lookahead: Callable[[Setting], int] = lambda setting: 0

    def mlp_share(self, density: float) -> float:
        """The matrices that are read whole, and of the others what is active."""
        if not self.matrices_read_whole:
            return density
        return (self.matrices_read_whole + (3.0 - self.matrices_read_whole) * density) / 3.0

    @property
    def share_by_density(self) -> float:
        """All but the matrices that are read whole."""
        return (3 - self.matrices_read_whole) / 3


@dataclass(frozen=True, kw_only=True)
class InputMethod(Method):
    """Thins out the inputs of matrices. `make(setting)` returns what wraps a projection.

    The kernels of a decode step (`modules.kernels.thinned_rows`) compare plain magnitudes with the threshold, and in
    MLPs only. None of them honours `ThinnedInput.input_norms`, a subclass of `ThinnedInput`, or a thinned attention
    matrix: `can_fuse` of the block then is False, and decode steps are not fused.
    """

    make: Callable[[Setting], Thin]

    def num_thresholds(self, config: ModelConfig) -> int:
        """One per matrix."""
        return len(matrices_of(config, self.blocks))


class ThresholdSelector(ABC):
    """Keeps the units whose score reaches one threshold per layer. A subclass says what the score is."""

    lookahead = 0
    threshold: float
    has_threshold = True  # False: this one chooses otherwise

    @abstractmethod
    def thresholded(self, hidden_states: Tensor, context: SelectionContext) -> Tensor:
        """What the threshold is compared with: a score per unit that is here, [B, T, D] -> [B * T, U]."""

    def select(self, hidden_states: Tensor, context: SelectionContext) -> ActiveSet | None:
        """See `Selector`."""
        return ActiveSet(at_least(self.thresholded(hidden_states, context), self.threshold, context.units))


def at_least(scores: Tensor, threshold: float, units: UnitShard | None) -> Tensor:
    """Units whose score [rows, U] reaches the threshold; padding of a shard never does."""
    return scores >= threshold if units is None else (scores >= threshold) & units.real


@cache
def all_methods() -> dict[str, Method]:
    """Every method by name, in order: what the files of this folder define as METHOD or METHODS."""
    found: list[Method] = []
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if module.name != Path(__file__).stem:
            file = import_module(f"{__package__}.{module.name}")
            found += getattr(file, "METHODS", None) or [file.METHOD]
    return in_order(found)


def in_order(methods: Sequence[Method]) -> dict[str, Method]:
    """By name, in order; ValueError for two methods of one name, or of one colour and marker."""
    by_name, by_style = dict[str, Method](), dict[tuple[str, str], Method]()
    for method in sorted(methods, key=lambda method: method.order):
        if method.name in by_name:
            raise ValueError(f"two methods are named {method.name}: rename one, in sparse_predictor/methods")
        style = method.colour, method.marker
        other = by_style.setdefault(style, method)
        if other is not method:
            raise ValueError(
                f"methods {other.name} and {method.name} have one colour and marker in plots ({', '.join(style)}): "
                "give one of them another"
            )
        by_name[method.name] = method
    return by_name


def method_names() -> tuple[str, ...]:
    """All that --method can say."""
    return ("dense", *all_methods())


def find_method(name: str) -> Method:
    """The method of this name, which is not dense; ValueError if there is none."""
    if name in all_methods():
        return all_methods()[name]
    for method in all_methods().values():
        if method.formerly is not None and name == method.formerly[0]:
            raise ValueError(f"method {name} is now {method.name}: {method.formerly[1]}")
    raise ValueError(f"method {name} is not one of {', '.join(method_names())}")


def check_method(name: str) -> None:
    """ValueError if there is no such method."""
    if name != "dense":
        find_method(name)


def needs_files(name: str) -> bool:
    """Whether a method reads a directory of predictors."""
    return name != "dense" and find_method(name).files != "none"


def is_thinning(name: str) -> bool:
    """Whether a method thins out inputs instead of choosing units."""
    return name != "dense" and isinstance(find_method(name), InputMethod)


def thins_attention(name: str) -> bool:
    """Whether a method thins out the inputs of attention's matrices, too."""
    return is_thinning(name) and "attention" in find_method(name).blocks


def all_statistics() -> list[Statistic]:
    """What methods need to know of a layer, each once."""
    return list({one.name: one for method in all_methods().values() for one in method.statistics}.values())


def known_statistics() -> set[str]:
    """What a layer's calibration may hold."""
    thresholds = {thresholds_name(name) for name, method in all_methods().items() if method.sets_thresholds}
    return {"densities", *(statistic.name for statistic in all_statistics())} | thresholds


def calibration_shapes(config: ModelConfig, layer: int, num_densities: int) -> dict[str, tuple[int, ...]]:
    """Of each of these, its shape in a layer."""
    found = {statistic.name: statistic.shape(config, layer) for statistic in all_statistics()}
    for method in all_methods().values():
        if method.sets_thresholds:
            found[thresholds_name(method.name)] = (method.num_thresholds(config), num_densities)
    return {"densities": (num_densities,), **found}
