"""Lines up the accuracy of every setting over tasks: one row per density and method, one column per task.

A task whose dense accuracy lies less than two standard errors above chance cannot tell a good method from a bad one:
it is named, and left out of the mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean

from analysis.comparison import Comparison, compare, same_setting, setting_order
from analysis.results import Record

# Of the metrics a task reports, the first of these is its accuracy; the others have columns of their own.
ACCURACY_METRICS = ("acc_norm", "acc", "exact_match")
OTHER_METRICS = ("agreement", "perplexity", "word_perplexity")
# What blind guessing gets: one over the number of choices, nothing where the answer is free. Tasks of the same family
# (mmlu_anatomy, arc_easy_local) count as their head; tasks that are not named here are never marked.
CHANCE = {
    "arc_easy": 0.25, "arc_challenge": 0.25, "openbookqa": 0.25, "hellaswag": 0.25, "mmlu": 0.25, "medmcqa": 0.25,
    "gpqa": 0.25, "winogrande": 0.5, "boolq": 0.5, "rte": 0.5, "lambada": 0.0, "arithmetic_words": 0.0,
}  # fmt: skip
STDERRS_ABOVE_CHANCE = 2


@dataclass(frozen=True, kw_only=True)
class TaskColumn:
    """One task under one number of examples in the prompt and of questions asked."""

    task: str
    metric: str
    num_fewshot: int | None  # None: of a group, whose tasks may differ
    num_samples: int | None
    filter: str = ""  # of written answers, where lm-eval reads them in several ways

    @property
    def is_accuracy(self) -> bool:
        return self.metric in ACCURACY_METRICS


@dataclass(frozen=True, kw_only=True)
class Mean:
    """A mean over tasks as a share; the stderr is None where a task has none."""

    value: float
    stderr: float | None


@dataclass(kw_only=True)
class AccuracyRow:
    """One setting on all tasks; `setting` is any of its cells, for what they share."""

    setting: Comparison
    cells: dict[TaskColumn, Comparison] = field(default_factory=dict)
    perplexities: dict[str, Comparison] = field(default_factory=dict)  # by task, scored under the same setting
    mean: Mean | None = None  # None unless every task that counts was run
    to_dense: Mean | None = None

    def achieved(self, quantity: Callable[[Comparison], float | None]) -> float | None:
        """The mean over tasks of what was achieved."""
        known = [value for cell in self.cells.values() if (value := quantity(cell)) is not None]
        return mean(known) if known else None


@dataclass(frozen=True, kw_only=True)
class AccuracyComparison:
    """All settings of one model."""

    model: str
    columns: tuple[TaskColumn, ...]
    groups: Mapping[TaskColumn, tuple[TaskColumn, ...]]  # the members of columns that are groups of tasks
    near_chance: frozenset[TaskColumn]
    rows: tuple[AccuracyRow, ...]

    @property
    def counted(self) -> tuple[TaskColumn, ...]:
        """The columns of the mean."""
        return _counted(self.columns, self.near_chance)


def compare_accuracy(records: Sequence[Record]) -> list[AccuracyComparison]:
    """One comparison per model; rows dense first, then by falling density and by method."""
    found = compare(records)
    models: dict[str, list[Comparison]] = {}
    for cell in found:
        if cell.name == "accuracy":
            models.setdefault(cell.model, []).append(cell)
    perplexities = [cell for cell in found if cell.name == "perplexity"]
    return [_compare_model(model, cells, perplexities) for model, cells in models.items()]


def chance_of(column: TaskColumn) -> float | None:
    """The accuracy of guessing; None for an unknown task, and for choices that are not scored as choices."""
    families = [known for known in CHANCE if column.task == known or column.task.startswith(f"{known}_")]
    if not families or not column.is_accuracy:
        return None
    chance = CHANCE[max(families, key=len)]
    return None if chance > 0 and column.metric == "exact_match" else chance


def tells_nothing(column: TaskColumn, dense: Comparison | None) -> bool:
    """Whether the dense model itself is within two standard errors of guessing, or below."""
    chance = chance_of(column)
    if chance is None or dense is None:
        return False
    margin = dense.value - chance
    return margin <= 0 or (dense.stderr is not None and margin < STDERRS_ABOVE_CHANCE * dense.stderr)


def mean_of(cells: Iterable[Comparison]) -> Mean:
    """The plain mean; tasks are independent, so its variance is the sum of theirs over the square of their number."""
    cells = list(cells)
    return Mean(value=mean(cell.value for cell in cells), stderr=_stderr_of_mean([cell.stderr for cell in cells]))


def difference_to_dense(pairs: Sequence[tuple[Comparison, Comparison]]) -> Mean:
    """Mean of a setting's accuracy minus dense's, over (setting, dense) cells of the same tasks.

    Records hold no single answers, so the stderr treats the two as independent: both answer the same questions, and
    mostly alike, so the true one is smaller.
    """
    differences = [cell.value - _dense_value(cell, dense) for cell, dense in pairs]
    stderrs = [
        None if cell.stderr is None or dense.stderr is None else math.hypot(cell.stderr, dense.stderr)
        for cell, dense in pairs
    ]
    return Mean(value=mean(differences), stderr=_stderr_of_mean(stderrs))


def _dense_value(cell: Comparison, dense: Comparison) -> float:
    """Of the cell's own baseline, where it has one."""
    return dense.value if cell.dense_value is None else cell.dense_value


def _stderr_of_mean(stderrs: Sequence[float | None]) -> float | None:
    known = [stderr for stderr in stderrs if stderr is not None]
    return math.hypot(*known) / len(known) if known and len(known) == len(stderrs) else None


def _compare_model(model: str, cells: Sequence[Comparison], perplexities: Sequence[Comparison]) -> AccuracyComparison:
    known = _columns(cells)
    groups = {column: members for column in known if column.is_accuracy and (members := _members(column, known))}
    columns = tuple(column for column in known if not any(column in _members(group, known) for group in known))
    rows: dict[tuple[object, ...], AccuracyRow] = {}
    # Of a cell measured at several batch sizes the newest counts.
    for cell in cells:
        key = (cell.variant, cell.mlp_density, cell.head_density, cell.phase)
        row = rows.setdefault(key, AccuracyRow(setting=cell))
        column = _column_of(cell)
        if column in known and (column not in row.cells or row.cells[column].date <= cell.date):
            row.cells[column] = cell
    for row in rows.values():
        for cell in sorted(perplexities, key=lambda cell: cell.date):
            if cell.phase == row.setting.phase and same_setting(row.setting.labels, cell.labels):
                row.perplexities[cell.task] = cell
    dense = {column: _dense_cells(rows.values(), column) for column in columns}
    near_chance = frozenset(column for column in columns if tells_nothing(column, next(iter(dense[column]), None)))
    counted = _counted(columns, near_chance)
    for row in rows.values():
        if not counted or not all(column in row.cells for column in counted):
            continue
        row.mean = mean_of(row.cells[column] for column in counted)
        if row.setting.method != "dense" and all(dense[column] for column in counted):
            pairs = [(row.cells[column], _baseline(row.cells[column], dense[column])) for column in counted]
            row.to_dense = difference_to_dense(pairs)
    ordered = sorted(rows.values(), key=lambda row: setting_order(row.setting))
    return AccuracyComparison(model=model, columns=columns, groups=groups, near_chance=near_chance, rows=tuple(ordered))


def _counted(columns: Iterable[TaskColumn], near_chance: frozenset[TaskColumn]) -> tuple[TaskColumn, ...]:
    return tuple(column for column in columns if column.is_accuracy and column not in near_chance)


def _column_of(cell: Comparison) -> TaskColumn:
    return TaskColumn(
        task=cell.task,
        metric=cell.metric,
        num_fewshot=cell.labels.get("num_fewshot"),
        num_samples=cell.labels.get("num_samples"),
        filter=str(cell.labels.get("filter") or ""),
    )


def _columns(cells: Iterable[Comparison]) -> tuple[TaskColumn, ...]:
    """Each task's accuracy and, beside it, its other metrics; in the order of names, however they were run."""
    found: dict[TaskColumn, set[TaskColumn]] = {}
    for cell in cells:
        column = _column_of(cell)
        found.setdefault(replace(column, metric="", filter=""), set()).add(column)
    chosen: list[TaskColumn] = []
    for reported in found.values():
        accuracies = [column for column in reported if column.is_accuracy]
        # Of several ways to read an answer the strict one.
        chosen += sorted(accuracies, key=_preference)[:1]
        chosen += [column for metric in OTHER_METRICS for column in reported if column.metric == metric]
    return tuple(sorted(chosen, key=lambda column: (column.task, column.num_fewshot or 0, column.num_samples or 0)))


def _preference(column: TaskColumn) -> tuple[int, bool, bool, str]:
    metric = ACCURACY_METRICS.index(column.metric)
    return metric, column.filter != "", column.filter != "strict-match", column.filter


def _members(group: TaskColumn, columns: Iterable[TaskColumn]) -> tuple[TaskColumn, ...]:
    """The tasks whose questions together are those of a group: it has counted them already."""
    members = tuple(
        column
        for column in columns
        if column.task.startswith(f"{group.task}_")
        and (column.metric, column.filter) == (group.metric, group.filter)
        and group.num_fewshot in (None, column.num_fewshot)
    )
    questions = sum(column.num_samples or 0 for column in members)
    return members if len(members) > 1 and questions == group.num_samples else ()


def _dense_cells(rows: Iterable[AccuracyRow], column: TaskColumn) -> list[Comparison]:
    return [row.cells[column] for row in rows if row.setting.method == "dense" and column in row.cells]


def _baseline(cell: Comparison, dense: Sequence[Comparison]) -> Comparison:
    """The dense cell that this one was compared with: there are several where dense ran in several precisions."""
    return next((each for each in dense if each.value == cell.dense_value), dense[0])
