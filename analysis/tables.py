"""Which tables there are of a set of records, and where they go: a page, or the README's snippets."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from analysis.accuracy import ACCURACY, accuracy_tables
from analysis.comparison import (
    Comparison,
    compare,
    device_of,
    group_by_task,
    latest_records,
    shared_settings,
    with_one_ceiling,
)
from analysis.drift import SECTION_TITLES as STUDY_TITLES
from analysis.drift import VERDICT_NAME, VERDICT_TITLE, study_tables, verdict
from analysis.formatting import (
    EMPTY_CELL,
    NOTHING_TO_SHOW,
    Column,
    Table,
    format_cell,
    format_number,
    format_range,
    format_ratio,
    format_share,
    format_span,
    make_table,
)
from analysis.results import Record, grouped
from analysis.rivals import EQUAL_BYTES, RIVALS, equal_bytes_tables
from analysis.speed_tables import (
    COMMUNICATION,
    DECODE,
    ENGINE_NAMES,
    KERNEL,
    communication_tables,
    decode_tables,
    engine_tables,
    is_of_engine,
    is_one_gpu_decode,
    kernel_tables,
)
from analysis.studies import STUDY_NAMES
from data.files import replace_file

MAIN = "main"
QUALITY_TITLES = {MAIN: "Quality and speed", ACCURACY: "Accuracy", EQUAL_BYTES: "At equal bytes"}
# What a first page shows.
SHORT_MAIN = ("MLP density", "method", "ratio to dense", "achieved MLP density", "MLP bytes read")
SHORT_DECODE = (
    "model", "weights", "method", "look-ahead", "stand-in rank", "MLP density", "head density", "tokens/s",
    "× our dense",
)  # fmt: skip
CAPTION_LABELS = ("window", "stride", "num_tokens", "batch_size", "dtype", "weights", "seed")


def main_tables(records: Sequence[Record]) -> list[Table]:
    """One table for each model and text of known perplexity: density × method with selection, bytes and speed."""
    tables = []
    scored = [row for row in compare(records) if row.name == "perplexity"]
    for (model, task, metric), rows in group_by_task(scored).items():
        columns, keep = _main_columns(metric, rows), ("MLP density", "method", metric)
        caption = _main_caption(rows)
        tables.append(make_table(f"{model}, {task}", rows, columns, caption, keep=keep, hide=NOTHING_TO_SHOW))
    return tables


def _main_caption(rows: Sequence[Comparison]) -> list[str]:
    """What was measured on what, of these rows."""
    parts = [shared_settings([row.labels for row in rows], CAPTION_LABELS)]
    if counts := sorted({row.num_windows for row in rows if row.num_windows}):
        parts.append(f"{format_span(counts)} windows scored")
    if any(row.ratio_interval for row in rows):
        parts.append("in brackets 95 % intervals over windows")
    if first := sorted({int(row.first_windows["num"]) for row in rows if row.first_windows}):
        parts.append(f"first windows: {format_span(first)} of them, in the same run, for older figures")
    if counts := sorted({row.quality_windows for row in rows if row.quality_windows}):
        parts.append(f"recall and precision on {format_span(counts)} windows")
    elsewhere = (
        ["generating: in the decoding that was timed"] if any(row.generating_mlp_density for row in rows) else []
    )
    elsewhere += ["on tasks: mean over the accuracy tasks"] if any(row.tasks_mlp_density for row in rows) else []
    if elsewhere:
        parts.append(", ".join(["MLP density achieved: on this text", *elsewhere]))
    labels = [row.labels for row in rows]
    if files := sorted({each["converted_from"] for each in labels if each.get("converted_from")}):
        parts.append(f"weights have the values of {', '.join(files)}")
    if counts := sorted({each["calibration_tokens"] for each in labels if each.get("calibration_tokens")}):
        parts.append(f"thresholds set, and refined predictors chosen, on {format_span(counts)} other tokens")
    return parts


def _main_columns(metric: str, rows: Sequence[Comparison]) -> list[Column[Comparison]]:
    thin = any(row.head_density < 1 for row in rows)  # attention reads less, too
    return [
        ("MLP density", lambda row: format_number(row.mlp_density)),
        ("head density", lambda row: format_number(row.head_density)),
        ("method", lambda row: row.variant),
        (metric, lambda row: format_number(row.value)),
        ("ratio to dense", lambda row: format_range(row.ratio, row.ratio_interval, format_ratio)),
        ("of the first windows", lambda row: format_number((row.first_windows or {}).get("perplexity"))),
        ("recall", lambda row: format_share(row.recall)),
        ("precision", lambda row: format_share(row.precision)),
        ("achieved MLP density", lambda row: format_share(row.achieved_mlp_density)),
        ("generating", lambda row: format_share(row.generating_mlp_density)),
        ("on tasks", lambda row: format_share(row.tasks_mlp_density)),
        ("achieved head density", lambda row: format_share(row.achieved_head_density)),
        ("MLP bytes read", lambda row: format_share(row.bytes_read_share)),
        *([("layer bytes read", lambda row: format_share(row.layer_bytes_read_share))] if thin else []),
        ("tokens/s dense", lambda row: format_number(row.dense_tokens_per_s)),
        (
            "tokens/s sparse",
            lambda row: (
                EMPTY_CELL if row.method == "dense" else format_range(row.tokens_per_s, row.speed_range, format_number)
            ),
        ),
        ("phase", lambda row: row.phase or EMPTY_CELL),
    ]


def record_tables(records: Sequence[Record], name: str) -> list[Table]:
    """One table of records of one name: a column for each label that varies, the other labels in the caption.

    Where several devices were measured, each line says which.
    """
    chosen = latest_records(records)
    label_names = list(dict.fromkeys(label for record in chosen for label in record["labels"]))
    varying = [
        label for label in label_names if len({json.dumps(record["labels"].get(label)) for record in chosen}) > 1
    ]
    columns: list[Column[Record]] = [("device", device_of)] if len(set(map(device_of, chosen))) > 1 else []
    columns += [(label, _label(label)) for label in varying]
    columns += [("metric", lambda record: record["metric"]), ("value", lambda record: format_number(record["value"]))]
    keep = [heading for heading, _ in columns]
    columns += [
        ("unit", lambda record: record["unit"] or EMPTY_CELL),
        ("baseline", lambda record: (record.get("baseline") or {}).get("name", EMPTY_CELL)),
        ("baseline value", lambda record: format_number((record.get("baseline") or {}).get("value"))),
        ("ratio", lambda record: format_ratio(record.get("ratio"))),
        ("share of ceiling", lambda record: format_share(record.get("share_of_ceiling"))),
    ]
    constant = {label: chosen[0]["labels"].get(label) for label in label_names if label not in varying}
    caption = ", ".join(f"{label} {format_cell(setting)}" for label, setting in constant.items() if setting is not None)
    return [make_table(name, chosen, columns, [caption], keep=keep)]


def _label(name: str) -> Callable[[Record], str]:
    return lambda record: format_cell(record["labels"].get(name)) or EMPTY_CELL


def environment_lines(records: Sequence[Record]) -> list[str]:
    """One line for each distinct environment, with the span of its dates."""
    dates: dict[str, list[str]] = {}
    for record in records:
        stamp = record["environment"]
        device = stamp.get("device") or "unknown device"
        if device == "cpu":
            parts = [f"{stamp.get('cpu')}, {stamp.get('num_cores')} cores"]
        else:
            parts = [f"{stamp.get('num_devices', 1)} × {device}", f"driver {stamp.get('driver')}"]
        parts += [f"{name} {stamp[name]}" for name in ("torch", "triton", "python") if stamp.get(name)]
        if stamp.get("commit"):
            parts.append(f"commit {stamp['commit'][:12]}" + (" with local changes" if stamp.get("dirty") else ""))
        dates.setdefault(", ".join(parts), []).append(str(stamp.get("date", ""))[:10])
    return [
        f"{line}; {' to '.join(dict.fromkeys([min(days), max(days)]))}" if any(days) else line
        for line, days in dates.items()
    ]


def snippet_of(record: Record) -> str:
    """Which table a record goes to."""
    if record["name"] == "perplexity":
        return MAIN
    return DECODE if is_one_gpu_decode(record) else record["name"]


def records_by_snippet(records: Sequence[Record]) -> dict[str, list[Record]]:
    """The records of each table; first the perplexities, then accuracy and what is compared at equal bytes."""
    found: dict[str, list[Record]] = {name: [] for name in QUALITY_TITLES} | grouped(records, snippet_of)
    found[EQUAL_BYTES] = found[MAIN]
    return {name: chosen for name, chosen in found.items() if chosen}


def all_tables(records: Sequence[Record]) -> dict[str, list[Table]]:
    """Tables by snippet name: `main` (perplexities), `accuracy`, `equal_bytes`, `one_gpu_decode` (a table per GPU), the
    engine's `decode` and `prefill`, those of the studies, and one for every other name of record."""
    records = with_one_ceiling(records)
    makers: dict[str, Callable[[list[Record]], list[Table]]] = {
        MAIN: lambda _: main_tables(records),  # with the speeds of the same settings
        ACCURACY: lambda _: accuracy_tables(records),  # with these and the perplexities
        EQUAL_BYTES: equal_bytes_tables,
        DECODE: decode_tables,
        KERNEL: kernel_tables,
        COMMUNICATION: communication_tables,
        **{name: partial(study_tables, name) for name in STUDY_NAMES},
    }
    tables = {}
    for snippet, chosen in records_by_snippet(records).items():
        if snippet in ENGINE_NAMES and all(map(is_of_engine, chosen)):
            tables[snippet] = engine_tables(chosen, snippet)
        else:
            tables[snippet] = makers.get(snippet, partial(record_tables, name=snippet))(chosen)
    return {snippet: found for snippet, found in tables.items() if found}


def quality_tables(records: Sequence[Record]) -> list[Table]:
    """What most people look for, of these records; all tables where there is nothing of it."""
    tables = all_tables(records)
    found = [table for name in QUALITY_TITLES for table in tables.get(name, ())]
    return found or [table for group in tables.values() for table in group]


def section_title(name: str) -> str:
    """The heading over the tables of one name."""
    return (QUALITY_TITLES | STUDY_TITLES).get(name, name)


def summary_markdown(records: Sequence[Record]) -> str:
    """All tables and the environments as one Markdown page."""
    parts = ["# Results"]
    if answered := verdict(records):
        parts += [f"## {VERDICT_TITLE}", answered]
    for name, tables in all_tables(records).items():
        parts.append(f"## {section_title(name)}")
        parts += [replace(table, title="" if table.title == name else table.title).to_markdown() for table in tables]
    parts += ["## Measured on", "\n".join(f"- {line}" for line in environment_lines(records))]
    return "\n\n".join(parts) + "\n"


def replace_snippets(text: str, snippets: Mapping[str, str]) -> tuple[str, list[str]]:
    """Replaces what stands between `<!-- table:NAME -->` and `<!-- /table:NAME -->`, for NAMEs in `snippets`.

    Returns the new text and the names replaced; raises ValueError for a marker that is not closed.
    """
    opened = re.findall(r"<!-- table:([\w-]+) -->", text)
    replaced = []
    for name in dict.fromkeys(opened):
        begin, end = f"<!-- table:{name} -->", f"<!-- /table:{name} -->"
        if text.count(end) != 1 or text.count(begin) != 1 or text.index(end) < text.index(begin):
            raise ValueError(f"there must be one {begin} and one {end} after it")
        if name in snippets:
            before, after = text.split(begin)[0], text.split(end)[1]
            text = f"{before}{begin}\n{snippets[name].strip()}\n{end}{after}"
            replaced.append(name)
    return text, replaced


def short_tables(tables: Mapping[str, Sequence[Table]]) -> dict[str, list[Table]]:
    """For a first page: `main_short`, the methods that a user could choose, and `one_gpu_decode_short`, each sparse row
    at batch 1 with its speed beside dense's."""

    def is_usable(row: Mapping[str, str]) -> bool:
        return row["method"].partition(",")[0] in (*RIVALS, "dense", "predictor")

    def is_compared(row: Mapping[str, str]) -> bool:
        return row.get("batch", "1") == "1" and row.get("× our dense", EMPTY_CELL) != EMPTY_CELL

    found = {}
    for name, columns, keep in ((MAIN, SHORT_MAIN, is_usable), (DECODE, SHORT_DECODE, is_compared)):
        short = []
        for table in tables.get(name, ()):
            rows = [row for row in (dict(zip(table.columns, cells, strict=True)) for cells in table.rows) if keep(row)]
            used = tuple(column for column in columns if column in table.columns)
            cells = tuple(tuple(row[column] for column in used) for row in rows)
            short += [Table(title=table.title, columns=used, rows=cells)] if rows else []
        if short:
            found[f"{name}_short"] = short
    return found


def update_readmes(
    paths: Sequence[str | os.PathLike[str]], records: Sequence[Record], only: Collection[str] = ()
) -> dict[Path, list[str]]:
    """Rewrites the tables (`short_tables` among them), and the drift study's verdict (`drift_verdict`), between the
    markers of Markdown files; returns the names by file. `only`: no others than these (ValueError if one cannot be made
    of the records). ValueError too where no file has any of the markers."""
    files = [Path(path) for path in paths]
    for path in files:
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such Markdown file to write tables into")
    snippets, chosen, made = {}, records_by_snippet(records), all_tables(records)
    for name, tables in {**made, **short_tables(made)}.items():
        # Of a table's own records: another table's machine is none of its business.
        lines = environment_lines(chosen[name.removesuffix("_short")])
        measured = f"Measured on {'; '.join(lines)}."
        snippets[name] = "\n\n".join([*(table.to_markdown() for table in tables), measured])
    if answered := verdict(records):
        snippets[VERDICT_NAME] = answered
    if unknown := [name for name in only if name not in snippets]:
        raise ValueError(f"tables {', '.join(unknown)}: these records make {', '.join(snippets) or 'none'}")
    snippets = {name: snippet for name, snippet in snippets.items() if not only or name in only}
    texts = {path: replace_snippets(path.read_text(encoding="utf-8"), snippets) for path in files}
    if not any(replaced for _, replaced in texts.values()):
        markers = ", ".join(f"<!-- table:{name} -->" for name in snippets)
        have = "has" if len(files) == 1 else "have"
        raise ValueError(f"{', '.join(map(str, files))}: {have} none of the markers {markers}")
    for path, (text, replaced) in texts.items():
        if replaced:
            replace_file(path, text.encode())
    return {path: replaced for path, (_, replaced) in texts.items()}
