"""The sparsity flags that every stage which runs a model shares."""

from dataclasses import dataclass
from pathlib import Path

from modules.decoder import Decoder
from modules.sparsity import SparsityStats
from sparse_predictor.selection import Method, Selection, SparsePhases, attach_selection


@dataclass(frozen=True, kw_only=True)
class SelectionOptions:
    """How much of the model a token computes."""

    method: Method = "dense"
    """Who chooses the active units."""
    predictors: Path | None = None
    """Directory written by scripts.train; also holds the calibration of static, cats, teal, teal-all and wina."""
    mlp_density: float = 0.5
    """Share of MLP neurons kept, in (0, 1]; of teal, teal-all and wina: of the inputs of matrices."""
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
