"""Decoding in one process, for people: a line per setting, its speed and its ratios to what was timed beside it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from analysis.ceilings import ceiling_text
from analysis.comparison import calls_text, device_of, made_from, merge_calls, method_rank, shared_settings
from analysis.formatting import EMPTY_CELL, Table, format_cell, format_number, format_range, format_ratio, format_share
from analysis.results import Record

NAME = "one_gpu_decode"
# What decode benchmarks in one process say; those of several ranks have no such label, evaluation runs other values.
EXECUTIONS = ("graph", "eager")
NEEDED = ("method", "mlp_density", "head_density", "batch_size")
# Told by a column of its own, or not worth one.
SHOWN = {"shape", "model", "weights", "method", "label", "mlp_density", "head_density", "batch_size", "predictor_rank"}
SHOWN |= {"task", "window", "num_tokens", "converted_from", "calibration_tokens"}
VARYING = ("dtype", "density_budget", "lookahead", "standin_rank", "predictors", "execution", "seed")
HEADINGS = {"density_budget": "budget", "lookahead": "look-ahead", "standin_rank": "stand-in rank"}


@dataclass(frozen=True)
class Row:
    """One setting: all its calls merged, and those that were timed beside each baseline."""

    merged: Record
    beside: dict[str, Record]

    @property
    def labels(self) -> dict[str, Any]:
        """Of the setting."""
        return dict(self.merged["labels"])


def is_one_gpu_decode(record: Record) -> bool:
    """Whether a record belongs in this table."""
    labels = record["labels"]
    has_labels = all(labels.get(name) is not None for name in NEEDED)
    return record["name"] == "decode" and labels.get("execution") in EXECUTIONS and has_labels


def decode_tables(records: Sequence[Record]) -> list[Table]:
    """One table per card: its clock and its memory are in every number."""
    cards: dict[str, list[Record]] = {}
    for record in records:
        cards.setdefault(device_of(record), []).append(record)
    return [_table_of_card(card, measured) for card, measured in cards.items()]


def _table_of_card(card: str, records: Sequence[Record]) -> Table:
    """Models in the order of the records; dense first, then by batch size and falling density."""
    models = list(dict.fromkeys(_model(record) for record in records))
    rows = sorted(rows_of(records), key=lambda row: _reading_order(row.merged, models))
    labels = [row.labels for row in rows]
    names = list(dict.fromkeys(name for each in labels for name in each if name not in SHOWN))
    constant = [name for name in names if len({json.dumps(each.get(name)) for each in labels}) == 1]
    varying = [name for name in VARYING if name in names and name not in constant]
    if len({_visible(each) for each in labels}) == len(labels):  # the folder need not tell two rows apart
        varying = [name for name in varying if name != "predictors"]
    columns: list[tuple[str, Callable[[Row], str]]] = [
        ("model", lambda row: _model(row.merged)),
        ("weights", lambda row: row.labels.get("weights") or EMPTY_CELL),
        ("method", _method),
        *((HEADINGS.get(name, name.replace("_", " ")), _label(name)) for name in varying),
        ("batch", lambda row: format_cell(row.labels["batch_size"])),
        ("MLP density", lambda row: _density(row.merged, "mlp_density")),
        ("head density", lambda row: _density(row.merged, "head_density")),
        ("union", lambda row: _union(row.merged)),
        ("tokens/s", lambda row: format_range(row.merged["value"], row.merged["range"], format_number)),
        ("GB/s", lambda row: format_number(row.merged.get("achieved_gb_per_s"))),
        ("of the ceiling", lambda row: format_share(row.merged.get("share_of_ceiling"))),
        *((f"× {name}", _ratio(name)) for name in _baselines(records)),
        (
            "MLP density on the text",
            lambda row: format_number((row.merged.get("text_achieved") or {}).get("mlp_density")),
        ),
        ("perplexity there", lambda row: format_number(row.merged.get("perplexity"))),
        ("to dense", _quality),
    ]
    used = [(name, cell) for name, cell in columns if any(cell(row) != EMPTY_CELL for row in rows)]
    merged = [row.merged for row in rows]
    trained = [each for each in labels if each.get("model")]
    parts = [
        ", ".join(
            f"{name.replace('_', ' ')} {format_cell(labels[0][name])}"
            for name in constant
            if labels[0].get(name) is not None
        ),
        ceiling_text(merged),
        calls_text(merged),
        "MLP density: while generating" if any(row.merged.get("text_achieved") for row in rows) else "",
        shared_settings(trained, ("task", "num_tokens", "converted_from", "calibration_tokens")),
    ]
    return Table(
        title=f"decode, one {card}",
        columns=tuple(name for name, _ in used),
        rows=tuple(tuple(cell(row) for _, cell in used) for row in rows),
        caption="; ".join(filter(None, parts)),
    )


def rows_of(records: Sequence[Record]) -> list[Row]:
    """A timing is recorded once for each thing it is compared with, and counts once in what its setting reached."""
    settings: dict[str, list[Record]] = {}
    for record in records:
        labels = {name: setting for name, setting in record["labels"].items() if setting is not None}
        calls = settings.setdefault(json.dumps([labels, *made_from(record)], sort_keys=True), [])
        calls += [] if record in calls else [record]
    rows = []
    for calls in settings.values():
        beside: dict[str, list[Record]] = {}
        for call in calls:
            beside.setdefault((call.get("baseline") or {}).get("name", ""), []).append(call)
        timed = list({json.dumps([call["value"], _own_timing(call)]): call for call in calls}.values())
        rows.append(Row(merge_calls(timed), {name: merge_calls(theirs) for name, theirs in beside.items() if name}))
    return rows


def _own_timing(call: Record) -> dict[str, Any]:
    """What a call says of the timing itself, whatever stands beside it."""
    return {name: value for name, value in (call.get("timing") or {}).items() if name != "baseline_samples"}


def _method(row: Row) -> str:
    label = row.labels.get("label")
    return row.labels["method"] + ("" if label is None else f", {label}")


def _visible(labels: dict[str, Any]) -> str:
    return json.dumps([labels.get(name) for name in sorted({*SHOWN, *VARYING} - {"predictors"})])


def _quality(row: Row) -> str:
    perplexity, dense = row.merged.get("perplexity"), row.merged.get("dense_perplexity")
    if not perplexity or not dense or row.labels["method"] == "dense":
        return EMPTY_CELL
    return format_range(perplexity / dense, row.merged.get("ratio_interval"), format_ratio)


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
    def cell(row: Row) -> str:
        digits = made_from(row.merged)[0] if name == "predictors" else None
        return format_cell(row.labels.get(name)) + (f" ({digits[:6]})" if digits else "")

    return cell


def _ratio(name: str) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        compared = row.beside.get(name)
        return (
            EMPTY_CELL if compared is None else format_range(compared["ratio"], compared["ratio_range"], format_ratio)
        )

    return cell


def _density(record: Record, name: str) -> str:
    """As achieved, where that is not just what was asked for."""
    asked = record["labels"].get(name, 1.0)
    reached = (record.get("achieved") or {}).get(name)
    reached = asked if reached is None else reached
    return f"{reached:.3f}" if round(reached, 3) != asked else format_number(float(asked))


def _union(record: Record) -> str:
    """Of the MLPs of a batch; one row is its own union."""
    if record["labels"]["batch_size"] == 1 or record["labels"]["method"] == "dense":
        return EMPTY_CELL
    return format_number((record.get("achieved") or {}).get("union_mlp_density"))
