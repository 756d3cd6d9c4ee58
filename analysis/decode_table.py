"""Decoding in one process, for people: a line a setting, with its speed and its ratios to what was timed beside it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from analysis.comparison import device_of, latest_records, method_rank
from analysis.formatting import EMPTY_CELL, Table, format_cell, format_number, format_ratio, format_share
from analysis.results import Record

NAME = "one_gpu_decode"
# What decode benchmarks in one process say; those of several ranks have no such label, evaluation runs other values.
EXECUTIONS = ("graph", "eager")
# Told by a column of its own.
SHOWN = {"shape", "model", "weights", "method", "mlp_density", "head_density", "batch_size"}
Row = list[Record]  # records of one setting, which differ in their baselines


def is_one_gpu_decode(record: Record) -> bool:
    """Whether a record belongs in this table."""
    return record["name"] == "decode" and record["labels"].get("execution") in EXECUTIONS


def decode_tables(records: Sequence[Record]) -> list[Table]:
    """One table a card: its clock and its memory are in every number."""
    cards: dict[str, list[Record]] = {}
    for record in records:
        cards.setdefault(device_of(record), []).append(record)
    return [_table_of_card(card, measured) for card, measured in cards.items()]


def _table_of_card(card: str, records: Sequence[Record]) -> Table:
    """Models in the order of the records; dense first, then by batch size and falling density."""
    settings: dict[str, Row] = {}
    for record in latest_records(records):
        settings.setdefault(json.dumps(record["labels"], sort_keys=True), []).append(record)
    rows = {setting: _newest_timing(row) for setting, row in settings.items()}
    models = list(dict.fromkeys(_model(record) for record in records))
    ordered = sorted(rows.values(), key=lambda row: _reading_order(row[0], models))
    labels = [row[0]["labels"] for row in ordered]
    names = list(dict.fromkeys(name for each in labels for name in each if name not in SHOWN))
    constant = [name for name in names if len({json.dumps(each.get(name)) for each in labels}) == 1]
    # Sizes of predictors go with the model, so they are worth no column; the records have them.
    varying = [name for name in names if name not in constant and name in ("dtype", "lookahead", "execution", "seed")]
    columns: list[tuple[str, Callable[[Row], str]]] = [
        ("model", lambda row: _model(row[0])),
        ("weights", lambda row: row[0]["labels"].get("weights", EMPTY_CELL)),
        ("method", lambda row: row[0]["labels"]["method"]),
        *((name.replace("_", " "), _label(name)) for name in varying),
        ("batch", lambda row: format_cell(row[0]["labels"]["batch_size"])),
        ("MLP density", lambda row: _density(row[0], "mlp_density")),
        ("head density", lambda row: _density(row[0], "head_density")),
        ("union", lambda row: _union(row[0])),
        ("tokens/s", lambda row: format_number(row[0]["value"])),
        ("GB/s", lambda row: format_number(row[0].get("achieved_gb_per_s"))),
        ("of the ceiling", lambda row: format_share(row[0].get("share_of_ceiling"))),
        *((f"× {name}", _ratio(name)) for name in _baselines(records)),
        ("perplexity", lambda row: format_number(row[0].get("perplexity"))),
        ("dense perplexity", lambda row: format_number(row[0].get("dense_perplexity"))),
    ]
    used = [(name, cell) for name, cell in columns if any(cell(row) != EMPTY_CELL for row in ordered)]
    return Table(
        title=f"decode, one {card}",
        columns=tuple(name for name, _ in used),
        rows=tuple(tuple(cell(row) for _, cell in used) for row in ordered),
        caption=", ".join(f"{name.replace('_', ' ')} {format_cell(labels[0][name])}" for name in constant),
    )


def _newest_timing(row: Row) -> Row:
    """One timing is recorded once for each thing it is compared with; ratios of an older timing are not of this one."""
    newest = max(row, key=lambda record: str(record["environment"].get("date") or ""))
    return [record for record in row if record["value"] == newest["value"]]


def _model(record: Record) -> str:
    labels = record["labels"]
    return str(labels.get("model") or labels.get("shape") or EMPTY_CELL)


def _reading_order(record: Record, models: Sequence[str]) -> tuple[Any, ...]:
    labels = record["labels"]
    densities = -labels["mlp_density"], -labels["head_density"]
    return models.index(_model(record)), labels["batch_size"], method_rank(labels["method"]), *densities


def _baselines(records: Sequence[Record]) -> list[str]:
    """Our own first, then Hugging Face's."""
    names = {record["baseline"]["name"] for record in records if record.get("baseline")}
    return sorted(names, key=lambda name: (name.startswith("Hugging"), name))


def _label(name: str) -> Callable[[Row], str]:
    return lambda row: format_cell(row[0]["labels"].get(name))


def _ratio(name: str) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        ratios = [record["ratio"] for record in row if (record.get("baseline") or {}).get("name") == name]
        return format_ratio(ratios[0] if ratios else None)

    return cell


def _density(record: Record, name: str) -> str:
    """As achieved, where that is not just what was asked for."""
    asked = record["labels"].get(name, 1.0)
    reached = (record.get("achieved") or {}).get(name, asked)
    return f"{reached:.3f}" if round(reached, 3) != asked else format_number(float(asked))


def _union(record: Record) -> str:
    """Of the MLPs of a batch; one row is its own union."""
    if record["labels"]["batch_size"] == 1 or record["labels"]["method"] == "dense":
        return EMPTY_CELL
    return format_number((record.get("achieved") or {}).get("union_mlp_density"))
