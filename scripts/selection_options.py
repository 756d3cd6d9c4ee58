"""The sparsity flags that stages share: one way to be sparse, or every method at every density."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from loguru import logger

from modules.decoder import Decoder
from modules.sparsity import Block, SparsityStats, num_kept
from pipeline_parallel.launch import current_launch
from sparse_predictor.budgets import SAME_MEAN, read_budget
from sparse_predictor.methods.registry import SparsePhases, thins_attention
from sparse_predictor.selection import MethodName, Selection, attach_selection, remove_sparsity

MLP_DENSITY, HEAD_DENSITY = 0.5, 1.0  # where no flag and no budget says


@dataclass(frozen=True, kw_only=True)
class SelectionOptions:
    """How much of the model a token computes."""

    method: MethodName = "dense"
    """Who chooses the active units."""
    predictors: Path | None = None
    """Directory written by scripts.train; also holds the calibration of methods that are not trained."""
    mlp_density: float | None = None
    """Share of MLP neurons kept, in (0, 1], 0.5 by default; of methods that thin out inputs: of these."""
    head_density: float | None = None
    """Share of key-value groups of heads kept, in (0, 1]; all by default."""
    sparse_phases: SparsePhases = "decode"
    """decode: the prompt stays dense. all: every token selects for itself (griffin: its prompt is always dense)."""
    density_budget: Path | None = None
    """JSON file with one density per layer, instead of the uniform ones (see scripts.budget)."""

    def selection(self, *, seed: int) -> Selection:
        """As a value for `attach_selection`; ValueError if a density and the budget contradict each other."""
        check_budget(self.density_budget, self.mlp_density, self.head_density)
        return Selection(
            method=self.method,
            predictors=self.predictors,
            mlp_density=MLP_DENSITY if self.mlp_density is None else self.mlp_density,
            head_density=HEAD_DENSITY if self.head_density is None else self.head_density,
            sparse_phases=self.sparse_phases,
            density_budget=self.density_budget,
            seed=seed,
        )

    def attach(self, model: Decoder, *, seed: int) -> SparsityStats:
        """Make `model` sparse; ValueError or FileNotFoundError names what is missing or does not fit."""
        selection = self.selection(seed=seed)
        stats = attach_selection(model, selection)
        warn_of_rounding(model, [selection])
        return stats


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """Several ways to be sparse, each beside dense."""

    method: tuple[MethodName, ...] = ("dense",)
    """One or several."""
    predictors: Path | None = None
    """Directory written by scripts.train."""
    mlp_density: tuple[float, ...] | None = None
    """One or several, 0.5 by default; every method is run at each."""
    head_density: float | None = None
    """Share of key-value groups of heads kept; all by default."""
    density_budget: Path | None = None
    """JSON file with one density per layer (see scripts.budget)."""
    sparse_phases: SparsePhases = "all"
    """all: each scored token selects for itself, as when decoded. decode leaves scoring dense."""
    label: str | None = None
    """What tables call these runs, beside the method: say it where predictors of two kinds are compared."""
    resume: bool = False
    """Keep the records that the output already holds, and do the other runs."""

    def selections(self, *, seed: int) -> list[Selection]:
        """Every sparse method at every density, checked as far as that goes without a model."""
        given = self.mlp_density
        if not self.method or given == ():
            raise ValueError("--method and --mlp-density: give at least one each")
        if self.density_budget is not None and given is not None and len(given) > 1:
            raise ValueError("--density-budget sets the densities; give one --mlp-density at most beside it")
        check_budget(self.density_budget, given[0] if given else None, self.head_density)
        selections = [
            Selection(
                method=method,
                predictors=self.predictors,
                mlp_density=density,
                head_density=HEAD_DENSITY if self.head_density is None else self.head_density,
                sparse_phases=self.sparse_phases,
                density_budget=self.density_budget,
                seed=seed,
            )
            for method in self.method
            for density in given or (MLP_DENSITY,)
        ]
        for selection in selections:  # of dense, too: what is wrong with a flag is wrong if it is not used
            selection.check()
        return [selection for selection in selections if selection.method != "dense"]


def attach_each(model: Decoder, selections: Sequence[Selection]) -> None:
    """Attach each once before anything is measured, so that what does not fit fails in seconds, not after a run."""
    for selection in selections:
        attach_selection(model, selection)
    remove_sparsity(model)
    warn_of_rounding(model, selections)


def check_budget(path: Path | None, mlp_density: float | None, head_density: float | None) -> None:
    """ValueError if a density that the user gave is not the mean of the budget's own, which would be used instead."""
    if path is None:
        return
    budget = read_budget(path)
    asked: dict[Block, tuple[str, float | None]] = {"mlp": ("mlp", mlp_density), "attention": ("head", head_density)}
    for block, (flag, density) in asked.items():
        found = budget.densities.get(block)
        if found and density is not None and not abs(mean(found) - density) <= SAME_MEAN:
            raise ValueError(
                f"--{flag}-density {density} contradicts --density-budget {path}, which keeps {mean(found):.3g} in the "
                f"mean: leave out --{flag}-density, or give another budget"
            )


def warn_of_rounding(model: Decoder, selections: Sequence[Selection]) -> None:
    """A warning, before anything is run, where so few groups of heads cannot be kept at the density asked for."""
    groups = [layer.attention.num_units for layer in model.config.layers]
    of_layers = " or ".join(map(str, sorted(set(groups))))
    found: dict[str, None] = {}
    for selection in selections:
        asked = selection.densities(len(groups))["attention"]
        if selection.method == "dense" or thins_attention(selection.method):
            continue
        used = [num_kept(density, number) / number for density, number in zip(asked, groups, strict=True)]
        if abs(mean(used) - mean(asked)) > SAME_MEAN:
            found[
                f"--head-density: {mean(asked):.3g} of {of_layers} key-value groups is not a whole number of them, so "
                f"{mean(used):.3g} are kept"
            ] = None
    for message in found if current_launch().rank == 0 else ():
        logger.warning(message)
