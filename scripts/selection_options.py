"""The sparsity flags that stages share: one way to be sparse, or every method at every density."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from modules.decoder import Decoder
from modules.sparsity import SparsityStats
from sparse_predictor.selection import Method, Selection, SparsePhases, attach_selection, remove_sparsity


@dataclass(frozen=True, kw_only=True)
class SelectionOptions:
    """How much of the model a token computes."""

    method: Method = "dense"
    """Who chooses the active units."""
    predictors: Path | None = None
    """Directory written by scripts.train; also holds the calibration of static, cats, teal(-all) and wina-unrotated."""
    mlp_density: float = 0.5
    """Share of MLP neurons kept, in (0, 1]; of teal, teal-all and wina-unrotated: of the inputs of matrices."""
    head_density: float = 1.0
    """Share of key-value groups of heads kept, in (0, 1]."""
    sparse_phases: SparsePhases = "decode"
    """decode: the prompt stays dense. all: every token selects for itself (griffin: its prompt is always dense)."""
    density_budget: Path | None = None
    """JSON file with one density a layer, instead of the uniform ones (see scripts.budget)."""

    def selection(self, *, seed: int) -> Selection:
        """As a value for `attach_selection`."""
        return Selection(
            method=self.method,
            predictors=self.predictors,
            mlp_density=self.mlp_density,
            head_density=self.head_density,
            sparse_phases=self.sparse_phases,
            density_budget=self.density_budget,
            seed=seed,
        )

    def attach(self, model: Decoder, *, seed: int) -> SparsityStats:
        """Make `model` sparse; ValueError or FileNotFoundError names what is missing or does not fit."""
        return attach_selection(model, self.selection(seed=seed))


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """Several ways to be sparse, each beside dense."""

    method: tuple[Method, ...] = ("dense",)
    """One or several: dense predictor oracle static random cats teal teal-all wina-unrotated griffin."""
    predictors: Path | None = None
    """Directory written by scripts.train."""
    mlp_density: tuple[float, ...] = (0.5,)
    """One or several; every method is run at each."""
    head_density: float = 1.0
    """Share of key-value groups of heads kept."""
    density_budget: Path | None = None
    """JSON file with one density a layer (see scripts.budget)."""
    sparse_phases: SparsePhases = "all"
    """all: each scored token selects for itself, as when decoded. decode leaves scoring dense."""
    label: str | None = None
    """What tables call these runs, beside the method: say it where predictors of two kinds are compared."""
    resume: bool = False
    """Keep the records that the output already holds, and do the other runs."""

    def selections(self, *, seed: int) -> list[Selection]:
        """Every sparse method at every density, checked as far as that goes without a model."""
        if not self.method or not self.mlp_density:
            raise ValueError("--method and --mlp-density: give at least one each")
        if self.density_budget is not None and len(self.mlp_density) > 1:
            raise ValueError("--density-budget sets the densities; give one --mlp-density at most beside it")
        selections = [
            Selection(
                method=method,
                predictors=self.predictors,
                mlp_density=density,
                head_density=self.head_density,
                sparse_phases=self.sparse_phases,
                density_budget=self.density_budget,
                seed=seed,
            )
            for method in self.method
            if method != "dense"
            for density in self.mlp_density
        ]
        for selection in selections:
            selection.check()
        return selections


def attach_each(model: Decoder, selections: Sequence[Selection]) -> None:
    """Attach each once before anything is measured, so that what does not fit fails in seconds, not after a run."""
    for selection in selections:
        attach_selection(model, selection)
    remove_sparsity(model)
