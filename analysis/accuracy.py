"""Lines up the accuracy of every setting over tasks: one row per density and method, one column per task.

A task whose dense accuracy lies less than two standard errors above chance cannot tell a good method from a bad one:
it is named, and left out of the mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean

from analysis.comparison import Comparison, compare, same_setting, setting_order, shared_settings
from analysis.formatting import (
    EMPTY_CELL,
    NOTHING_TO_SHOW,
    Column,
    Table,
    format_number,
    format_quotient,
    format_range,
    format_ratio,
    format_share,
    make_table,
)
from analysis.results import Record, grouped

ACCURACY = "accuracy"
NEAR_CHANCE_MARK = "†"
DENSE_MARK = "‡"
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
    models = grouped((cell for cell in found if cell.name == "accuracy"), lambda cell: cell.model)
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


def accuracy_tables(records: Sequence[Record]) -> list[Table]:
    """One table per model, and one of the members of each group of tasks."""
    tables = []
    for found in compare_accuracy(records):
        tables.append(_table(found))
        for group, members in found.groups.items():
            columns: list[Column[AccuracyRow]] = [(_heading(column, found), _task_cell(column)) for column in members]
            title = f"{found.model}: the tasks of {group.task}, in % ± standard error"
            tables.append(make_table(title, found.rows, [*_setting_columns(found), *columns]))
    return tables


def _table(found: AccuracyComparison) -> Table:
    columns: list[Column[AccuracyRow]] = [
        *_setting_columns(found),
        *((_heading(column, found), _task_cell(column)) for column in found.columns),
        ("mean", lambda row: _points(row.mean)),
        ("to dense, points", lambda row: _points(row.to_dense, "+")),
    ]
    corpora = dict.fromkeys(task for row in found.rows for task in row.perplexities)
    thin = any(row.setting.head_density < 1 for row in found.rows)  # attention reads less, too
    keep = [heading for heading, _ in columns]
    columns += [
        *((f"{corpus.removeprefix('perplexity:')}, perplexity to dense", _ratio(corpus)) for corpus in corpora),
        ("achieved MLP density", _achieved(lambda cell: cell.achieved_mlp_density)),
        ("achieved head density", _achieved(lambda cell: cell.achieved_head_density)),
        ("MLP bytes read", _achieved(lambda cell: cell.bytes_read_share)),
        *((("layer bytes read", _achieved(lambda cell: cell.layer_bytes_read_share)),) if thin else ()),
        ("tokens/s", lambda row: format_number(row.setting.tokens_per_s)),
        ("speed to dense", lambda row: format_quotient(row.setting.tokens_per_s, row.setting.dense_tokens_per_s)),
        ("phase", lambda row: row.setting.phase or EMPTY_CELL),
    ]
    title = f"{found.model}: accuracy in % ± standard error"
    return make_table(title, found.rows, columns, [_caption(found)], keep=keep, hide={*NOTHING_TO_SHOW, "all"})


def _setting_columns(found: AccuracyComparison) -> list[Column[AccuracyRow]]:
    density: list[Column[AccuracyRow]] = [("MLP density", lambda row: format_number(row.setting.mlp_density))]
    if any(row.setting.head_density != 1 for row in found.rows):
        density.append(("head density", lambda row: format_number(row.setting.head_density)))
    return [*density, ("method", lambda row: row.setting.variant)]


def _heading(column: TaskColumn, found: AccuracyComparison) -> str:
    """The task and its metric, and what tells it from other columns of the same task."""
    shots = f", {column.num_fewshot}-shot" if column.num_fewshot else ""
    alike = {
        other.num_samples
        for other in found.columns
        if replace(other, num_samples=None) == replace(column, num_samples=None)
    }
    samples = f", {column.num_samples} questions" if len(alike) > 1 else ""
    mark = f" {NEAR_CHANCE_MARK}" if column in found.near_chance else ""
    answers = f" ({column.filter})" if column.filter else ""
    return f"{column.task}, {column.metric}{answers}{shots}{samples}{mark}"


def _task_cell(column: TaskColumn) -> Callable[[AccuracyRow], str]:
    def text(row: AccuracyRow) -> str:
        cell = row.cells.get(column)
        if cell is None:
            return EMPTY_CELL
        mark = f" {DENSE_MARK}" if _never_sparse(cell) else ""
        if "perplexity" not in column.metric:
            return _points(Mean(value=cell.value, stderr=cell.stderr)) + mark
        return format_number(cell.value) + mark

    return text


def _never_sparse(cell: Comparison) -> bool:
    """Asked to be sparse, but no call was: the number is the dense model's."""
    return cell.sparse_calls == 0 and min(cell.mlp_density, cell.head_density) < 1


def _points(share: Mean | None, sign: str = "") -> str:
    """A share as points of a hundred, with one decimal."""
    if share is None:
        return EMPTY_CELL
    stderr = "" if share.stderr is None else f" ± {100 * share.stderr:.1f}"
    return f"{100 * share.value:{sign}.1f}{stderr}"


def _ratio(corpus: str) -> Callable[[AccuracyRow], str]:
    def text(row: AccuracyRow) -> str:
        found = row.perplexities.get(corpus)
        return EMPTY_CELL if found is None else format_range(found.ratio, found.ratio_interval, format_ratio)

    return text


def _achieved(quantity: Callable[[Comparison], float | None]) -> Callable[[AccuracyRow], str]:
    return lambda row: format_share(row.achieved(quantity))


def _caption(found: AccuracyComparison) -> str:
    counted = found.counted
    num_accuracies = sum(column.is_accuracy for column in found.columns)
    parts = []
    if counted:
        which = f"all {len(counted)}" if len(counted) == num_accuracies else f"the {len(counted)} unmarked"
        tasks = "task" if len(counted) == 1 else "tasks"
        parts.append(f"The mean is over {which} {tasks}, where a row has them all")
        if any(row.to_dense for row in found.rows):
            parts.append("The standard error of a difference takes its two sides as independent, which is too wide")
    if found.near_chance:
        reason = "dense is less than two standard errors above chance"
        parts.append(f"{NEAR_CHANCE_MARK} {reason}: the task tells nothing at this size")
    if any(column.metric == "agreement" for column in found.columns):
        parts.append("Agreement: the share of written answers that are the dense model's")
    if any(_never_sparse(cell) for row in found.rows for cell in row.cells.values()):
        parts.append(f"{DENSE_MARK} no call was sparse: this is the dense model's number")
    known = [f"{column.task} {column.num_samples}" for column in found.columns if column.num_samples is not None]
    if known:
        parts.append("Questions: " + ", ".join(dict.fromkeys(known)))
    labels = [cell.labels for row in found.rows for cell in row.cells.values()]
    shared = shared_settings(labels, ("phase", "batch_size", "dtype", "weights", "seed"))
    if shared:
        parts.append(shared[0].upper() + shared[1:])
    return ". ".join(parts) + "." if parts else ""
