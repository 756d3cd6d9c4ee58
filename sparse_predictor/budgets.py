"""Densities by layer and block under one budget of bytes: the file of `--density-budget`, and how to divide the bytes.

    {"mlp": [one density per layer], "attention": [...],                 either or both
     "matrices": {"gate_proj": [one density per layer], ...},             optional: where inputs are thinned out
     "method": "predictor", "predictors": "0123456789ab", "thresholds": [one per layer],   all three or none
     "measured": {...}}                                                   optional: how it came to be

`thresholds` are those of the MLPs' selectors (null: everything is active), or {"gate_proj": [one per layer], ...} of
the matrices whose inputs are thinned out, set in a run with these densities. They belong to one method and one
directory of predictors, which `predictors_id` names. Of `matrices`, `mlp` and `attention` are the means by weights.
"""

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from data.files import write_json
from modules.sparsity import BLOCKS, Block

Place = tuple[int, Block]
# Densities between two measured ones are read off the line between them, in steps of so much of a block.
STEP = 0.01
SAME_MEAN = 0.005  # budgets are written by hand, too
EXPECTED = '{"mlp": [one density a layer], "attention": [...]}, either or both'
Thresholds = list[float] | dict[str, list[float]]
THRESHOLD_KEYS = {"method", "predictors", "thresholds"}


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


def read_budget(path: Path) -> DensityBudget:
    """A budget file; ValueError if it is not one."""
    try:
        values = json.loads(path.read_text())
    except ValueError as problem:
        raise ValueError(f"{path}: not JSON ({problem})") from problem
    if not isinstance(values, dict) or set(values) - {*BLOCKS, *THRESHOLD_KEYS, "matrices", "measured"}:
        raise ValueError(f"{path}: expected {EXPECTED}")
    densities: dict[Block, list[float]] = {block: values[block] for block in BLOCKS if block in values}
    if not densities or not all(_are_numbers(found) for found in densities.values()):
        raise ValueError(f"{path}: expected {EXPECTED}")
    measured = values.get("measured", {})
    if not isinstance(measured, dict):
        raise ValueError(f"{path}: `measured` must be an object")
    count, matrices = len(densities.get("mlp", ())), values.get("matrices")
    if matrices is not None and not (isinstance(matrices, dict) and all(map(_are_numbers, matrices.values()))):
        raise ValueError(f"{path}: `matrices` must be lists of densities by name")
    if any(len(found) != count for found in (matrices or {}).values()):
        raise ValueError(f"{path}: `matrices` must have as many densities each as `mlp`, {count}")
    if not THRESHOLD_KEYS & set(values):
        return DensityBudget(densities=densities, matrices=matrices, measured=measured)
    thresholds = values.get("thresholds")
    if isinstance(thresholds, list | dict):
        thresholds = _each_list(thresholds, lambda one: [-math.inf if value is None else value for value in one])
    lists: list[Any] = list(thresholds.values()) if isinstance(thresholds, dict) else [thresholds]
    names = [values.get(name) for name in ("method", "predictors")]
    if not lists or not all(isinstance(name, str) for name in names) or not all(map(_are_numbers, lists)):
        raise ValueError(f"{path}: expected method, predictors and thresholds (a number or null per layer) together")
    for found in lists:
        if len(found) != count:
            raise ValueError(f"{path}: {len(found)} thresholds for {count} mlp densities")
    return DensityBudget(
        densities=densities,
        matrices=matrices,
        method=names[0],
        predictors=names[1],
        thresholds=thresholds,
        measured=measured,
    )


def _each_list(given: Any, change: Callable[[Any], Any]) -> Any:
    """A list, or each list of a dict, changed; what is no list as it is."""
    if isinstance(given, dict):
        return {name: _each_list(one, change) for name, one in given.items()}
    return change(given) if isinstance(given, list) else given


def _are_numbers(values: object) -> bool:
    return isinstance(values, list) and all(type(value) in (int, float) for value in values)


@dataclass(frozen=True)
class Curve:
    """What a block costs the model, by its density: points (density, nats a token), and bytes at density 1."""

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
    """By block, a density a layer; 1.0 where none is given. Only blocks of which some layer is given."""
    blocks: Sequence[Block] = [block for block in BLOCKS if any(kind == block for _, kind in densities)]
    return {block: [densities.get((layer, block), 1.0) for layer in range(num_layers)] for block in blocks}
