"""The drift study of one model as records: how far states move, what a predictor loses to it, how sparse neurons are.

Used by `drift` and, on each small model that they train, by `ablation` and `relufy`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from loguru import logger
from torch import Tensor

from analysis.results import Record, environment_stamp
from modules.decoder import Decoder
from pipeline_parallel.mesh import ParallelMesh
from scripts.command_line import progress
from scripts.studies.activation_study import activation_study
from scripts.studies.distance_measures import spread_layers
from scripts.studies.distance_study import distance_study
from scripts.studies.drift_sources import MIN_WINDOWS, WindowStates, check_calibration
from scripts.studies.embedding_drift import AddUp, CkaSums, DriftSums, StateMoments, StateRows, StateSource
from scripts.studies.measures import Measure, StudyRecords

Part = Literal["drift", "distance", "activation"]
PARTS: tuple[Part, ...] = ("drift", "distance", "activation")
PERPLEXITY_LOOKAHEADS = (0, 1, 4, 8)


@dataclass(frozen=True, kw_only=True)
class DriftSettings:
    """What to measure, and on how much; the flags of `scripts.studies.drift` of the same names."""

    parts: tuple[Part, ...] = PARTS
    """drift: how far the residual stream moves; distance: what a predictor loses to it; activation: how sparse neurons
    are by themselves."""
    max_lookahead: int = 8
    """Layers are compared with, and predicted from, those up to so many before."""
    mlp_density: float = 0.5
    """Share of neurons that predictors choose."""
    head_density: float = 0.5
    """Share of groups of heads that predictors choose."""
    activation_density: float = 0.3
    """Share of neurons that count as active where sparsity by itself is measured."""
    distance_layers: int | None = None
    """Measure recall at so many layers only, evenly spaced; all by default."""
    perplexity_lookaheads: tuple[int, ...] | None = None
    """Look-aheads at which predictors run in the model, too; by default 0, 1, 4 and 8, as far as --max-lookahead goes;
    none with 0 values."""
    perplexity_windows: int | None = None
    """Windows of the test text for that; all by default."""
    activation_windows: int | None = None
    """Windows of the test text for part activation; all by default."""

    def settings(self) -> DriftSettings:
        """Of flags that hold these among others, these."""
        return DriftSettings(**{entry.name: getattr(self, entry.name) for entry in fields(DriftSettings)})

    def check(self) -> None:
        """ValueError for what no run could follow."""
        if not self.parts or set(self.parts) - set(PARTS):
            raise ValueError(f"--parts {' '.join(self.parts) or 'none'}: choose from {', '.join(PARTS)}")
        least = {"max_lookahead": 1, "distance_layers": 1}
        least |= dict.fromkeys(("perplexity_windows", "activation_windows"), MIN_WINDOWS)
        for name, smallest in least.items():
            if (value := getattr(self, name)) is not None and value < smallest:
                raise ValueError(f"--{name.replace('_', '-')} must be at least {smallest}, got {value}")
        for lookahead in self.perplexity_lookaheads or ():
            if not 0 <= lookahead <= self.max_lookahead:
                allowed = f"between 0 and --max-lookahead {self.max_lookahead}"
                raise ValueError(f"--perplexity-lookaheads must lie {allowed}, got {lookahead}")
        for name in ("mlp_density", "head_density", "activation_density"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"--{name.replace('_', '-')} must lie in (0, 1], got {getattr(self, name)}")


def drift_records(
    model: Decoder,
    calibration: Tensor,
    test: Tensor,
    *,
    labels: Mapping[str, Any],
    name: str = "drift",
    settings: DriftSettings | None = None,
    batch_size: int = 8,
    seed: int = 0,
    mesh: ParallelMesh | None = None,
    quiet: bool = True,
) -> list[Record]:
    """Records of one model, dense; `labels` (model, dtype, seed, ...) are of every one of them.

    calibration, test int64 [W, T], all real tokens: predictors are fitted on the one (part distance; empty without it),
    everything is measured on the other. `mesh`: all its ranks call this with the same text, and get the same records;
    the parts that need the whole model on one device are then left out, and the log says so. ValueError for settings
    that do not fit.
    """
    settings = settings or DriftSettings()
    settings.check()
    mesh = mesh or ParallelMesh.single(model.device)
    study = StudyRecords(name=name, labels=labels, environment=environment_stamp(str(model.device)))
    parts = set(settings.parts)
    if "distance" in parts and mesh.world_size == 1:
        check_calibration(calibration.numel(), calibration.shape[1], model.config.hidden_size)
    if mesh.world_size > 1 and parts - {"drift"}:
        if mesh.rank == 0:
            left_out = ", ".join(sorted(parts - {"drift"}))
            logger.warning(f"--parts {left_out}: left out, since they need the whole model in one process")
        parts &= {"drift"}
    records: list[Record] = []
    if "drift" in parts:
        states = WindowStates(model, test, batch_size=batch_size, mesh=mesh)
        records += drift_measure_records(
            states, settings.max_lookahead, labels=labels, name=name, seed=seed, add_up=mesh.sum, quiet=quiet
        )
    if "distance" in parts:
        records += study.of(_distances(model, calibration, test, settings, seed=seed, quiet=quiet))
    if "activation" in parts:
        windows = test[: settings.activation_windows]
        measures = _activations(model, windows, settings, seed=seed, quiet=quiet)
        records += study.of(measures, num_tokens=windows.numel())
    return records


def drift_measure_records(
    states: StateSource,
    max_lookahead: int,
    *,
    labels: Mapping[str, Any],
    name: str = "drift",
    seed: int = 0,
    add_up: AddUp = lambda part: part,
    quiet: bool = True,
) -> list[Record]:
    """Cosines, relative updates and CKA, in two passes over the same rows: the first one takes the moments of states.

    `add_up`: adds tensors over the ranks that iterate `states` together.
    """
    lookaheads = range(1, min(max_lookahead, len(states.present) // 2) + 1)

    def rows(title: str) -> Iterator[StateRows]:
        return iter(progress(states, title, quiet=quiet, total=states.num_units, unit="set"))

    moments = StateMoments(states)
    for some in rows("means of states"):
        moments.add(some)
    moments.finish(add_up)
    sums: list[DriftSums | CkaSums] = [DriftSums(states, moments, lookaheads), CkaSums(states, moments, lookaheads)]
    for some in rows("drift"):
        for each in sums:
            each.add(some)
    for each in sums:
        each.finish(add_up)
    measures = [measure for each in sums for measure in each.measures(seed)]
    study = StudyRecords(name=name, labels=labels, environment=environment_stamp(str(states.device)))
    return study.of(measures, num_tokens=states.num_rows)


def _distances(
    model: Decoder, calibration: Tensor, test: Tensor, settings: DriftSettings, *, seed: int, quiet: bool
) -> list[Measure]:
    num_layers = model.config.num_hidden_layers
    lookaheads = range(min(settings.max_lookahead, num_layers - 1) + 1)
    layers = None if settings.distance_layers is None else spread_layers(num_layers, settings.distance_layers)
    middle = min(4, lookaheads[-1])
    wanted = PERPLEXITY_LOOKAHEADS if settings.perplexity_lookaheads is None else settings.perplexity_lookaheads
    runs = [one for one in wanted if one in lookaheads]
    if settings.perplexity_lookaheads is not None and (beyond := sorted(set(wanted) - set(runs))):
        logger.warning(
            f"--perplexity-lookaheads {' '.join(map(str, beyond))}: the model has {num_layers} layers; left out"
        )
    with progress((), "predictors at a distance", quiet=quiet, unit="step") as bar:
        return distance_study(
            model,
            calibration,
            test,
            lookaheads=lookaheads,
            study_lookaheads=sorted({0, middle}),
            mlp_density=settings.mlp_density,
            head_density=settings.head_density,
            layers=layers,
            perplexity_lookaheads=runs,
            perplexity_windows=settings.perplexity_windows,
            seed=seed,
            on_step=_mover(bar),
        )


def _activations(model: Decoder, windows: Tensor, settings: DriftSettings, *, seed: int, quiet: bool) -> list[Measure]:
    lookaheads = [one for one in (1, 2, 4, 8) if one <= settings.max_lookahead]
    with progress((), "sparsity of neurons", quiet=quiet, unit="step") as bar:
        return activation_study(
            model,
            windows,
            density=settings.activation_density,
            lookaheads=lookaheads,
            seed=seed,
            on_step=_mover(bar),
        )


def _mover(bar: Any) -> Callable[[int, int], None]:
    def move(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)

    return move
