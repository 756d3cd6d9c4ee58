"""Densities by layer and block under one budget of bytes: the file of `--density-budget`, and how to divide the bytes.

    {"mlp": [one density per layer], "attention": [...],                 either or both
     "matrices": {"gate_proj": [one density per layer], ...},             optional: where inputs are thinned out
     "method": "predictor", "predictors": "0123456789ab", "thresholds": [one per layer],   all three or none
     "measured": {...},                                                   optional: how it came to be
     "format_version": 1}                                                 missing from what is written by hand

`thresholds` are those of the MLPs' selectors (null: everything is active), or {"gate_proj": [one per layer], ...} of
the matrices whose inputs are thinned out, set in a run with these densities. They belong to one method and one
directory of predictors, which `predictors_id` names. Of `matrices`, `mlp` and `attention` are the means by weights.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from data.files import check_sums, read_json, write_json
from modules.sparsity import BLOCKS, Block
from sparse_predictor.store import AGAIN, Density, parse_manifest

Place = tuple[int, Block]
# Densities between two measured ones are read off the line between them, in steps of so much of a block.
STEP = 0.01
SAME_MEAN = 0.005  # budgets are written by hand, too
EXPECTED = '{"mlp": [one density per layer], "attention": [...]}, either or both'
Thresholds = list[float] | dict[str, list[float]]
THRESHOLD_KEYS = ("method", "predictors", "thresholds")
MAX_LAYERS = 2**12
FORMAT_VERSION = 1
Densities = Annotated[list[Density], Meta(min_length=1, max_length=MAX_LAYERS)]
FileThresholds = Annotated[list[float | None], Meta(max_length=MAX_LAYERS)]


@dataclass(frozen=True, kw_only=True)
class DensityBudget:
    """What a budget file says; `thresholds` None: as the method sets them itself."""

    densities: dict[Block, list[float]]
    matrices: dict[str, list[float]] | None = None
    method: str | None = None
    predictors: str | None = None
    thresholds: Thresholds | None = None
    measured: dict[str, Any] = field(default_factory=dict)

    def thresholds_for(self, method: str, predictors: Path | None) -> Thresholds | None:
        """The thresholds, if there are any; ValueError if they are another method's or other predictors'."""
        if self.thresholds is None:
            return None
        if method != self.method:
            raise ValueError(
                f"density budget: its thresholds are those of method {self.method}, not of {method}; make one for "
                "this method with scripts.budget"
            )
        if predictors is None or predictors_id(predictors) != self.predictors:
            if predictors is not None:  # changed since: then these may be the ones, and another budget would not help
                check_sums(predictors, parse_manifest(predictors).sums, AGAIN)
            raise ValueError(
                f"density budget: its thresholds belong to other predictors than {predictors}; make one for these "
                "with scripts.budget"
            )
        return self.thresholds

    def of_mlps(self, mean: float) -> list[float]:
        """The density of each MLP; ValueError if there are none, or their mean is not the one expected."""
        found = self.densities.get("mlp", [])
        if not found or not all(0.0 < density <= 1.0 for density in found):
            raise ValueError("density budget: expected one density in (0, 1] for each MLP")
        if abs(sum(found) / len(found) - mean) > SAME_MEAN:
            raise ValueError(f"density budget: its MLPs keep {sum(found) / len(found):.3g} in the mean, not {mean}")
        return found

    def write(self, path: Path) -> None:
        """As JSON, atomically."""
        values: dict[str, Any] = {str(block): found for block, found in self.densities.items()}
        values["format_version"] = FORMAT_VERSION
        if self.matrices is not None:
            values["matrices"] = self.matrices
        if self.thresholds is not None:
            finite = _each_list(self.thresholds, lambda one: [None if math.isinf(value) else value for value in one])
            values |= {"method": self.method, "predictors": self.predictors, "thresholds": finite}
        write_json(path, values | ({"measured": self.measured} if self.measured else {}), sort_keys=True)


def predictors_id(directory: Path) -> str:
    """Twelve hex digits that name what is in a directory of predictors, manifest and tensors."""
    files = sorted(path for path in directory.iterdir() if path.suffix in (".json", ".safetensors"))
    return _id_of(tuple((path, path.stat().st_size, path.stat().st_mtime_ns) for path in files))


@cache
def _id_of(files: tuple[tuple[Path, int, int], ...]) -> str:
    digest = hashlib.sha256()
    for path, size, _ in files:
        digest.update(f"/{path.name}:{size}/".encode())
        with path.open("rb") as file:
            while block := file.read(2**24):
                digest.update(block)
    return digest.hexdigest()[:12]


class _BudgetFile(msgspec.Struct, forbid_unknown_fields=True):
    """`thresholds`: a number or null per layer, or such a list per matrix."""

    mlp: Densities | None = None
    attention: Densities | None = None
    matrices: dict[str, Densities] | None = None
    method: str | None = None
    predictors: str | None = None
    thresholds: FileThresholds | dict[str, FileThresholds] | None = None
    measured: dict[str, Any] = {}
    format_version: int = FORMAT_VERSION


def read_budget(path: Path) -> DensityBudget:
    """A budget file; FileNotFoundError, or ValueError if it is not one."""
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file; scripts.budget writes one")
    try:
        found = read_json(path, _BudgetFile)
    except ValueError as problem:
        raise ValueError(f"{problem}; expected {EXPECTED}; make it again with scripts.budget") from problem
    if found.format_version != FORMAT_VERSION:
        raise ValueError(f"{path}: format version {found.format_version}, this code reads {FORMAT_VERSION}")
    densities: dict[Block, list[float]] = {
        block: values for block in BLOCKS if (values := getattr(found, block)) is not None
    }
    if not densities:
        raise ValueError(f"{path}: expected {EXPECTED}")
    count = len(densities.get("mlp", ()))
    if any(len(values) != count for values in (found.matrices or {}).values()):
        raise ValueError(f"{path}: `matrices` must have as many densities each as `mlp`, {count}")
    given = [name for name in THRESHOLD_KEYS if getattr(found, name) is not None]
    if given and len(given) < len(THRESHOLD_KEYS):
        raise ValueError(f"{path}: expected {', '.join(THRESHOLD_KEYS)} together, found only {', '.join(given)}")
    for values in found.thresholds.values() if isinstance(found.thresholds, dict) else [found.thresholds or ()]:
        if given and len(values) != count:
            raise ValueError(f"{path}: {len(values)} thresholds for {count} mlp densities")
    return DensityBudget(
        densities=densities,
        matrices=found.matrices,
        method=found.method,
        predictors=found.predictors,
        thresholds=_each_list(found.thresholds, lambda one: [-math.inf if value is None else value for value in one]),
        measured=found.measured,
    )


def _each_list(given: Any, change: Callable[[Any], Any]) -> Any:
    """A list, or each list of a dict, changed; what is no list as it is."""
    if isinstance(given, dict):
        return {name: _each_list(one, change) for name, one in given.items()}
    return change(given) if isinstance(given, list) else given


@dataclass(frozen=True)
class Curve:
    """What a block costs the model, by its density: points (density, nats per token), and bytes at density 1."""

    points: tuple[tuple[float, float], ...]
    num_bytes: float

    def hull(self) -> list[tuple[float, float]]:
        """The lower convex hull of the points and (1, 0), ascending: what mixtures of densities could reach. Noise in
        a measurement, or a step that pays only with the next, would else end the greedy search early."""
        found: list[tuple[float, float]] = []
        for point in sorted({**dict(self.points), 1.0: 0.0}.items()):
            while len(found) > 1 and _slope(found[-2], found[-1]) >= _slope(found[-1], point):
                found.pop()
            found.append(point)
        while len(found) > 1 and found[-2][1] <= found[-1][1]:  # denser and no better
            found.pop()
        return found


def _slope(left: tuple[float, float], right: tuple[float, float]) -> float:
    return (right[1] - left[1]) / (right[0] - left[0])


def allocate(curves: Mapping[Place, Curve], budget: float, steps: Mapping[Block, float]) -> dict[Place, float]:
    """Density of every block so that their bytes are `budget` and the sum of losses is least.

    Everything begins at its smallest density; the step of `steps[block]` of a density that lowers the loss most per
    byte is taken again and again. On convex curves no exchange of bytes between two blocks helps then, so the marginal
    losses per byte are equal (Fox 1966, discrete optimization via marginal analysis). The last step takes what is left,
    in blocks of fine steps. ValueError if the smallest densities cost more than the budget.
    """
    hulls = {place: curve.hull() for place, curve in curves.items()}
    found = {place: hull[0][0] for place, hull in hulls.items()}
    left = budget - sum(density * curves[place].num_bytes for place, density in found.items())
    if left < -1e-9 * budget:
        least = sum(density * curves[place].num_bytes for place, density in found.items())
        raise ValueError(f"budget of {budget:.4g} bytes: the smallest densities measured cost {least:.4g}")
    moves: list[tuple[float, Place, float]] = []  # loss per byte, where, density to add
    for place, hull in hulls.items():
        for (low, loss), (high, next_loss) in zip(hull, hull[1:], strict=False):
            count = max(1, round((high - low) / steps[place[1]]))
            gain = (loss - next_loss) / ((high - low) * curves[place].num_bytes)
            moves += [(gain, place, (high - low) / count)] * count
    # Of one block steps come in order of density, as its hull is convex and the sort is stable.
    for _, place, step in sorted(moves, key=lambda move: -move[0]):
        cost = step * curves[place].num_bytes
        if cost <= left:
            found[place], left = found[place] + step, left - cost
        elif steps[place[1]] <= STEP and left > 0:
            found[place], left = found[place] + left / curves[place].num_bytes, 0.0
    return {place: min(1.0, round(density, 9)) for place, density in found.items()}


def as_lists(densities: Mapping[Place, float], num_layers: int) -> dict[Block, list[float]]:
    """By block, a density per layer; 1.0 where none is given. Only blocks of which some layer is given."""
    blocks: Sequence[Block] = [block for block in BLOCKS if any(kind == block for _, kind in densities)]
    return {block: [densities.get((layer, block), 1.0) for layer in range(num_layers)] for block in blocks}
