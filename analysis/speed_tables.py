"""Speeds for people: decoding in one process, the engine on several ranks, kernels, and communication.

One table per card: its clock and its memory are in every number.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from analysis.comparison import (
    calls_text,
    ceiling_text,
    device_of,
    latest_records,
    made_from,
    merge_calls,
    shared_settings,
)
from analysis.formatting import EMPTY_CELL, Table, format_cell, format_number, format_range, format_ratio, format_share
from analysis.method_styles import method_rank
from analysis.results import Record

DECODE = "one_gpu_decode"
# What decode benchmarks in one process say; those of several ranks have no such label, evaluation runs other values.
EXECUTIONS = ("graph", "eager")
NEEDED_LABELS = ("method", "mlp_density", "head_density", "batch_size")
# Told by a column of its own, or not worth one.
SHOWN_LABELS = {
    "shape",
    "model",
    "weights",
    "method",
    "label",
    "mlp_density",
    "head_density",
    "batch_size",
    "predictor_rank",
}
SHOWN_LABELS |= {"task", "window", "num_tokens", "converted_from", "calibration_tokens"}
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
    has_labels = all(labels.get(name) is not None for name in NEEDED_LABELS)
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
    rows = sorted(rows_of(records), key=lambda row: _decode_order(row.merged, models))
    labels = [row.labels for row in rows]
    names = list(dict.fromkeys(name for each in labels for name in each if name not in SHOWN_LABELS))
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
        *((f"× {name}", _ratio_to(name)) for name in _baselines(records)),
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
    return json.dumps([labels.get(name) for name in sorted({*SHOWN_LABELS, *VARYING} - {"predictors"})])


def _quality(row: Row) -> str:
    perplexity, dense = row.merged.get("perplexity"), row.merged.get("dense_perplexity")
    if not perplexity or not dense or row.labels["method"] == "dense":
        return EMPTY_CELL
    return format_range(perplexity / dense, row.merged.get("ratio_interval"), format_ratio)


def _model(record: Record) -> str:
    labels = record["labels"]
    return str(labels.get("model") or labels.get("shape") or EMPTY_CELL)


def _decode_order(record: Record, models: Sequence[str]) -> tuple[Any, ...]:
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


def _ratio_to(name: str) -> Callable[[Row], str]:
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


ENGINE_NAMES = ("decode", "prefill")
ONE_RANK, SPLIT = "one rank", ", split"
CUT = ("tp_size", "pp_size", "dp_size")
# Told by columns of their own.
ENGINE_LABELS = {"shape", "model", "batch_size", "all_reduce", "overlap_tokens", *CUT}


def is_of_engine(record: Record) -> bool:
    """Whether a record belongs in such a table: tokens per second of ranks that share a model."""
    labels = record["labels"]
    has_labels = None not in (
        labels.get("tp_size"),
        labels.get("batch_size"),
        labels.get("shape") or labels.get("model"),
    )
    return has_labels and record["name"] in ENGINE_NAMES and record["metric"] == "tokens_per_s"


def engine_tables(records: Sequence[Record], title: str) -> list[Table]:
    """One table of records of one name: tokens/s of what one rank does, then of every way; then the ratios to one rank,
    of a fused way also to NCCL's, and of a split pass to the whole one."""
    speeds: dict[tuple[object, ...], dict[str, float]] = {}
    ranges: dict[tuple[object, ...], dict[str, list[float] | None]] = {}
    ceilings: dict[tuple[object, ...], float] = {}
    newest = latest_records(records)
    ways = list(dict.fromkeys(map(way_of, newest)))
    for record in newest:
        labels, baseline = record["labels"], record.get("baseline") or {}
        setting = (labels.get("model") or labels["shape"], *(labels.get(name) for name in CUT), labels["batch_size"])
        found = speeds.setdefault(setting, {})
        found[way_of(record)] = record["value"]
        ranges.setdefault(setting, {})[way_of(record)] = record.get("range")
        if baseline.get("name") not in (None, *ways):
            found.setdefault(baseline["name"], baseline["value"])
        if record.get("share_of_ceiling") is not None:
            ceilings[setting] = max(ceilings.get(setting, 0.0), record["share_of_ceiling"])
    others = list(dict.fromkeys(name for found in speeds.values() for name in found if name not in ways))
    ratios = [(way, base) for way in ways for base in bases_of(way, others) if base in (*others, *ways)]
    models = list(dict.fromkeys(setting[0] for setting in speeds))
    order = sorted(speeds, key=lambda setting: (models.index(setting[0]), *map(str, setting[1:-1]), setting[-1]))
    labels = [record["labels"] for record in newest]
    constant = [
        name for name in labels[0] if name not in ENGINE_LABELS and len({str(each.get(name)) for each in labels}) == 1
    ]
    rows = [
        (
            str(setting[0]),
            cut_of(setting[1:-1]),
            format_cell(setting[-1]),
            *(
                format_range(speeds[setting].get(name), ranges[setting].get(name), format_number)
                for name in (*others, *ways)
            ),
            *(ratio_of(speeds[setting].get(way), speeds[setting].get(base)) for way, base in ratios),
            format_share(ceilings.get(setting)),
        )
        for setting in order
    ]
    columns = (
        "model",
        "ranks",
        "batch",
        *others,
        *ways,
        *(f"{way} × {base}" for way, base in ratios),
        "of the ceiling",
    )
    used = [i for i in range(len(columns)) if any(row[i] != EMPTY_CELL for row in rows)]
    return [
        Table(
            title=f"{title}, tokens/s",
            columns=tuple(columns[i] for i in used),
            rows=tuple(tuple(row[i] for i in used) for row in rows),
            caption="; ".join(
                text
                for text in (
                    ", ".join(f"{name.replace('_', ' ')} {format_cell(labels[0][name])}" for name in constant),
                    "the share of the ceiling is the fastest way's",
                    ceiling_text(newest),
                    calls_text(newest),
                )
                if text
            ),
        )
    ]


def way_of(record: Record) -> str:
    """NCCL, gloo or fused, and whether prefills were split; without ranks that share layers: pipeline, or one rank."""
    labels = record["labels"]
    name = {"nccl": "NCCL", "gloo": "gloo"}.get(labels.get("all_reduce", "nccl"), "fused")
    if labels["tp_size"] == 1:
        name = ONE_RANK if all(labels.get(size, 1) == 1 for size in CUT) else "pipeline"
    return name + (SPLIT if labels.get("overlap_tokens") else "")


def bases_of(way: str, others: Sequence[str]) -> list[str]:
    """What a way is compared with."""
    if way.endswith(SPLIT):
        return [way.removesuffix(SPLIT)]
    return [*others, "NCCL"] if way == "fused" else [*others]


def cut_of(sizes: Sequence[object]) -> str:
    """tp 2, pp 2 and so on; what is 1 is left out."""
    return ", ".join(f"{name[:2]} {size}" for name, size in zip(CUT, sizes, strict=True) if size != 1) or "1"


def ratio_of(value: float | None, base: float | None) -> str:
    return EMPTY_CELL if not value or not base else format_ratio(value / base)


KERNEL = "kernel"
KERNEL_TITLES = {"sparse_mlp": "one MLP over its active neurons", "thinned_rows": "one matrix, inputs thinned out"}


def kernel_tables(records: Sequence[Record]) -> list[Table]:
    """One table per card and operator; `×`: how many times as long the other takes."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        groups.setdefault((device_of(record), str(record["labels"].get("operator"))), []).append(record)
    return [_kernel_table(card, operator, rows_of(chosen)) for (card, operator), chosen in groups.items()]


def _kernel_table(card: str, operator: str, rows: Sequence[Row]) -> Table:
    shapes = list(dict.fromkeys(row.labels.get("shape") for row in rows))
    names = list(dict.fromkeys(name for row in rows for name in row.beside))
    ordered = sorted(rows, key=lambda row: _kernel_order(row, shapes))
    has_batches = len({row.labels.get("batch_size") for row in rows}) > 1
    merged = [row.merged for row in rows]
    return Table(
        title=f"{KERNEL_TITLES.get(operator, operator)}, {card}, µs",
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


def _kernel_order(row: Row, shapes: Sequence[object]) -> tuple[float, ...]:
    labels = row.labels
    return shapes.index(labels.get("shape")), labels.get("batch_size") or 1, -(labels.get("density") or 1.0)


def _beside(row: Row, name: str) -> tuple[str, str]:
    found = row.beside.get(name)
    if found is None:
        return EMPTY_CELL, EMPTY_CELL
    return format_number(found["baseline"]["value"]), format_range(found["ratio"], found["ratio_range"], format_ratio)


COMMUNICATION = "communication"
LINK_SETTING = ("tp_size", "transport", "dtype", "hidden_size", "num_tokens")
CHOSEN_METHOD = "auto"  # records of what `--all-reduce auto` takes; the other methods are what it has to choose from
BASELINE_SUFFIX = " all-reduce + fused add-norm"


def communication_tables(records: Sequence[Record]) -> list[Table]:
    """One table of all sizes; ratios are the others' time over that of the method that is chosen there. Of a stress
    test there is nothing to show."""
    times: dict[tuple[object, ...], dict[str, float]] = {}
    ranges: dict[tuple[object, ...], dict[str, list[float] | None]] = {}
    records = latest_records(records)
    chosen: dict[tuple[object, ...], Record] = {}
    ours: list[str] = []
    for record in records:
        if record["metric"] != "us" or record["labels"].get("method") is None:
            continue
        setting = tuple(record["labels"].get(name) for name in LINK_SETTING)
        method, baseline = record["labels"]["method"], record.get("baseline")
        if method == CHOSEN_METHOD:
            chosen[setting] = record
        else:
            times.setdefault(setting, {})[method] = record["value"]
            ranges.setdefault(setting, {})[method] = record.get("range")
            ours += [] if method in ours else [method]
        if baseline is not None:
            times.setdefault(setting, {})[baseline["name"].removesuffix(BASELINE_SUFFIX)] = baseline["value"]
    if not times:
        return []
    methods = list(dict.fromkeys(method for found in times.values() for method in found))
    others = [method for method in methods if method not in ours]
    rows = []
    for setting in sorted(times, key=str_last):
        ranks, transport, dtype, hidden_size, num_tokens = setting
        found, taken = times[setting], chosen.get(setting)
        value = None if taken is None else taken["value"]
        rows.append(
            (
                f"{ranks}, {transport}",
                str(hidden_size),
                str(num_tokens),
                *(
                    format_range(found.get(method), ranges.get(setting, {}).get(method), format_number)
                    for method in (*ours, *others)
                ),
                *(time_ratio(found.get(method), value) for method in others),
                EMPTY_CELL if taken is None else format_share(taken.get("share_of_ceiling")),
            )
        )
    types = sorted({str(setting[2]) for setting in times})
    return [
        Table(
            title="All-reduce + residual + RMSNorm, µs",
            columns=(
                "ranks",
                "hidden size",
                "tokens",
                *ours,
                *others,
                *(f"× {method}" for method in others),
                "of the link",
            ),
            rows=tuple(rows),
            caption="; ".join(
                text
                for text in (
                    ", ".join(types),
                    "the last columns are of what --all-reduce auto takes there",
                    calls_text([record for record in records if record["metric"] == "us"]),
                )
                if text
            ),
        )
    ]


def str_last(setting: tuple[object, ...]) -> tuple[tuple[int, str], ...]:
    """Numbers by size, before names."""
    return tuple((value, "") if isinstance(value, int) else (2**31, str(value)) for value in setting)


def time_ratio(theirs: float | None, ours: float | None) -> str:
    """How many times as long theirs takes."""
    return EMPTY_CELL if not theirs or not ours else format_ratio(theirs / ours)
