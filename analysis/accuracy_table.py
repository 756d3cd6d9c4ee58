"""Accuracy for people: a line per density and method, a column per task, the mean and what it loses to dense."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from analysis.accuracy import AccuracyComparison, AccuracyRow, Mean, TaskColumn, compare_accuracy
from analysis.comparison import Comparison, shared_settings
from analysis.formatting import EMPTY_CELL, Table, format_number, format_range, format_ratio, format_share
from analysis.results import Record

NAME = "accuracy"
NEAR_CHANCE_MARK = "†"
DENSE_MARK = "‡"
# Where a column says nothing but this, it is left out.
NOTHING_TO_SHOW = {EMPTY_CELL, "1.0", "100.0 %", "all"}


Columns = list[tuple[str, Callable[[AccuracyRow], str]]]


def accuracy_tables(records: Sequence[Record]) -> list[Table]:
    """One table per model, and one of the members of each group of tasks."""
    tables = []
    for found in compare_accuracy(records):
        tables.append(_table(found))
        for group, members in found.groups.items():
            columns: Columns = [(_heading(column, found), _task_cell(column)) for column in members]
            title = f"{found.model}: the tasks of {group.task}, in % ± standard error"
            tables.append(_as_table(title, found.rows, [*_setting_columns(found), *columns]))
    return tables


def _table(found: AccuracyComparison) -> Table:
    columns: Columns = [
        *_setting_columns(found),
        *((_heading(column, found), _task_cell(column)) for column in found.columns),
        ("mean", lambda row: _points(row.mean)),
        ("to dense, points", lambda row: _points(row.to_dense, "+")),
    ]
    corpora = dict.fromkeys(task for row in found.rows for task in row.perplexities)
    thin = any(row.setting.head_density < 1 for row in found.rows)  # attention reads less, too
    sometimes: Columns = [
        *((f"{corpus.removeprefix('perplexity:')}, perplexity to dense", _ratio(corpus)) for corpus in corpora),
        ("achieved MLP density", _achieved(lambda cell: cell.achieved_mlp_density)),
        ("achieved head density", _achieved(lambda cell: cell.achieved_head_density)),
        ("MLP bytes read", _achieved(lambda cell: cell.bytes_read_share)),
        *((("layer bytes read", _achieved(lambda cell: cell.layer_bytes_read_share)),) if thin else ()),
        ("tokens/s", lambda row: format_number(row.setting.tokens_per_s)),
        ("speed to dense", _speedup),
        ("phase", lambda row: row.setting.phase or EMPTY_CELL),
    ]
    columns += [each for each in sometimes if not {each[1](row) for row in found.rows} <= NOTHING_TO_SHOW]
    return _as_table(f"{found.model}: accuracy in % ± standard error", found.rows, columns, _caption(found))


def _setting_columns(found: AccuracyComparison) -> Columns:
    density: Columns = [("MLP density", lambda row: format_number(row.setting.mlp_density))]
    if any(row.setting.head_density != 1 for row in found.rows):
        density.append(("head density", lambda row: format_number(row.setting.head_density)))
    return [*density, ("method", lambda row: row.setting.variant)]


def _as_table(title: str, rows: Sequence[AccuracyRow], columns: Columns, caption: str = "") -> Table:
    return Table(
        title=title,
        columns=tuple(heading for heading, _ in columns),
        rows=tuple(tuple(cell(row) for _, cell in columns) for row in rows),
        caption=caption,
    )


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


def _speedup(row: AccuracyRow) -> str:
    speed, dense = row.setting.tokens_per_s, row.setting.dense_tokens_per_s
    return EMPTY_CELL if speed is None or not dense else format_ratio(speed / dense)


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
