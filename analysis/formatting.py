"""A table of text in Markdown or aligned for a terminal, and numbers as people read them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TypeVar

EMPTY_CELL = "–"
# Where all heads are active throughout, their densities are not worth two columns.
NOTHING_TO_SHOW = {EMPTY_CELL, "1.0", "100.0 %"}
Row = TypeVar("Row")
Column = tuple[str, Callable[[Row], str]]  # a heading, and the cell of a row


@dataclass(frozen=True, kw_only=True)
class Table:
    """A title, column headings, and rows of text; every row has one cell a column."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""

    def to_markdown(self) -> str:
        lines = [f"**{_escape_markdown(self.title)}**", ""] if self.title else []
        lines.append("| " + " | ".join(map(_escape_markdown, self.columns)) + " |")
        lines.append("|" + "|".join("---:" if numeric else "---" for numeric in self.numeric_columns()) + "|")
        lines += ["| " + " | ".join(map(_escape_markdown, row)) + " |" for row in self.rows]
        if self.caption:
            lines += ["", _escape_markdown(self.caption)]
        return "\n".join(lines)

    def to_text(self) -> str:
        # Headings are stacked a word per line, so that the table fits a terminal.
        stacks = [column.split() for column in self.columns]
        height = max(map(len, stacks))
        headings = zip(*([""] * (height - len(stack)) + stack for stack in stacks), strict=True)
        lines_of_cells = [*headings, *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines_of_cells, strict=True)]
        numeric = self.numeric_columns()

        def line(cells: Sequence[str]) -> str:
            padded = (
                cell.rjust(width) if right else cell.ljust(width)
                for cell, width, right in zip(cells, widths, numeric, strict=True)
            )
            return "  ".join(padded).rstrip()

        lines = [self.title] if self.title else []
        lines += map(line, lines_of_cells)
        lines.insert(len(lines) - len(self.rows), "  ".join("-" * width for width in widths))
        if self.caption:
            lines.append(self.caption)
        return "\n".join(lines)

    def numeric_columns(self) -> list[bool]:
        """Per column, whether it holds numbers (and is set flush right)."""
        return [
            any(row[i] != EMPTY_CELL for row in self.rows) and all(_is_number(row[i]) for row in self.rows)
            for i in range(len(self.columns))
        ]


def make_table(
    title: str,
    rows: Sequence[Row],
    columns: Sequence[Column[Row]],
    caption: Sequence[str] = (),
    *,
    keep: Collection[str] = (),
    hide: Collection[str] = (EMPTY_CELL,),
) -> Table:
    """A line per row; the caption's parts, as far as there are any. A column with nothing but what `hide` names is left
    out, unless `keep` has its heading."""
    cells = {heading: [cell(row) for row in rows] for heading, cell in columns}
    used = [heading for heading, found in cells.items() if heading in keep or not set(found) <= {*hide}]
    lines = zip(*(cells[heading] for heading in used), strict=True)
    return Table(title=title, columns=tuple(used), rows=tuple(lines), caption="; ".join(filter(None, caption)))


def table_of(title: str, rows: Sequence[Mapping[str, str]], caption: str = "") -> list[Table]:
    """One table of rows of cells by heading, which all have the same; none where there are no rows."""
    columns: list[Column[Mapping[str, str]]] = [(name, itemgetter(name)) for name in (rows[0] if rows else ())]
    return [make_table(title, rows, columns, [caption])] if rows else []


def format_number(number: float | None) -> str:
    """Four significant digits, without exponents up to a million."""
    if number is None:
        return EMPTY_CELL
    if not math.isfinite(number):
        return "inf" if number > 0 else str(number)
    if isinstance(number, int) and abs(number) < 1e6:
        return str(number)
    if number == int(number) and abs(number) < 1000:
        return f"{number:.1f}"
    if abs(number) >= 1e6 or abs(number) < 1e-3:
        return f"{number:.3g}"
    decimals = max(0, 3 - math.floor(math.log10(abs(number))))
    text = f"{number:.{min(decimals, 4)}f}"
    return text.rstrip("0").rstrip(".") if abs(number) < 1 else text


def format_ratio(ratio: float | None) -> str:
    if ratio is None or not math.isfinite(ratio):
        return format_number(ratio)
    return f"{ratio:.3f}×" if ratio < 10 else f"{ratio:.4g}×"


def format_range(value: float | None, ends: Sequence[float] | None, number: Callable[[float], str]) -> str:
    """A number, and the lowest and highest that were seen in brackets, where there were several."""
    if value is None:
        return EMPTY_CELL
    return number(value) + (f" [{number(ends[0])}, {number(ends[1])}]" if ends else "")


def format_quotient(value: float | None, base: float | None) -> str:
    return EMPTY_CELL if not value or not base else format_ratio(value / base)


def format_span(counts: Sequence[int]) -> str:
    """Of counts the lowest and the highest."""
    return " to ".join(map(str, dict.fromkeys([min(counts), max(counts)])))


def format_share(share: float | None) -> str:
    return EMPTY_CELL if share is None or math.isnan(share) else f"{100 * share:.1f} %"


def format_cell(setting: object) -> str:
    if setting is None:
        return EMPTY_CELL
    if isinstance(setting, (int, float)) and not isinstance(setting, bool):
        return format_number(setting)
    return str(setting)


def _is_number(cell: str) -> bool:
    return (
        cell == EMPTY_CELL
        or re.fullmatch(r"[+-]?[\d.]+(e[+-]?\d+)?( %|×)?( ± [\d.]+)?( \[\S+, \S+\])?( ‡)?|inf", cell) is not None
    )


def _escape_markdown(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
