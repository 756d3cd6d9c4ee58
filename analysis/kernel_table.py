"""Kernels of a decode step, for people: a line per shape and density, beside the library's and other people's."""

from __future__ import annotations

from collections.abc import Sequence

from analysis.ceilings import ceiling_text
from analysis.comparison import calls_text, device_of, shared_settings
from analysis.decode_table import Row, rows_of
from analysis.formatting import EMPTY_CELL, Table, format_cell, format_number, format_range, format_ratio, format_share
from analysis.results import Record

NAME = "kernel"
TITLES = {"sparse_mlp": "one MLP over its active neurons", "thinned_rows": "one matrix, inputs thinned out"}


def kernel_tables(records: Sequence[Record]) -> list[Table]:
    """One table per card and operator; `×`: how many times as long the other takes."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        groups.setdefault((device_of(record), str(record["labels"].get("operator"))), []).append(record)
    return [_table(card, operator, rows_of(chosen)) for (card, operator), chosen in groups.items()]


def _table(card: str, operator: str, rows: Sequence[Row]) -> Table:
    shapes = list(dict.fromkeys(row.labels.get("shape") for row in rows))
    names = list(dict.fromkeys(name for row in rows for name in row.beside))
    ordered = sorted(rows, key=lambda row: _reading_order(row, shapes))
    has_batches = len({row.labels.get("batch_size") for row in rows}) > 1
    merged = [row.merged for row in rows]
    return Table(
        title=f"{TITLES.get(operator, operator)}, {card}, µs",
        columns=(
            "shape",
            *(("rows",) if has_batches else ()),
            "density",
            "µs",
            "of the ceiling",
            *(column for name in names for column in (f"{name}, µs", f"× {name}")),
        ),
        rows=tuple(
            (
                format_cell(row.labels.get("shape")),
                *((format_cell(row.labels.get("batch_size")),) if has_batches else ()),
                format_cell(row.labels.get("density")),
                format_range(row.merged["value"], row.merged["range"], format_number),
                format_share(row.merged.get("share_of_ceiling")),
                *(cell for name in names for cell in _beside(row, name)),
            )
            for row in ordered
        ),
        caption="; ".join(
            filter(
                None,
                (
                    shared_settings([row.labels for row in rows], ("dtype", "weights", "batch_size")),
                    "weights cold",
                    ceiling_text(merged),
                    calls_text(merged),
                ),
            )
        ),
    )


def _reading_order(row: Row, shapes: Sequence[object]) -> tuple[float, ...]:
    labels = row.labels
    return shapes.index(labels.get("shape")), labels.get("batch_size") or 1, -(labels.get("density") or 1.0)


def _beside(row: Row, name: str) -> tuple[str, str]:
    found = row.beside.get(name)
    if found is None:
        return EMPTY_CELL, EMPTY_CELL
    return format_number(found["baseline"]["value"]), format_range(found["ratio"], found["ratio_range"], format_ratio)
