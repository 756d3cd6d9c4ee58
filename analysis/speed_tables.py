"""Speeds for people: decoding in one process, the engine on several ranks, kernels, and communication.

A card's clock and memory are in every number, so decoding and kernels have a table per card.
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
    identity,
    latest_records,
    made_from,
    merge_calls,
    method_rank,
    shared_settings,
)
from analysis.formatting import (
    EMPTY_CELL,
    Column,
    Table,
    format_cell,
    format_number,
    format_quotient,
    format_range,
    format_ratio,
    format_share,
    make_table,
)
from analysis.results import Record, grouped

DECODE, KERNEL, COMMUNICATION = "one_gpu_decode", "kernel", "communication"
ENGINE_NAMES = ("decode", "prefill")
# What decode benchmarks in one process say; those of several ranks have no such label, evaluation runs other values.
EXECUTIONS = ("graph", "eager")
NEEDED_LABELS = ("method", "mlp_density", "head_density", "batch_size")
# Told by a column of its own, or not worth one.
DECODE_LABELS = {"shape", "model", "weights", "method", "label", "mlp_density", "head_density", "batch_size"}
DECODE_LABELS |= {"predictor_rank", "task", "window", "num_tokens", "converted_from", "calibration_tokens"}
VARYING = ("dtype", "density_budget", "lookahead", "standin_rank", "predictors", "execution", "seed")
HEADINGS = {"density_budget": "budget", "lookahead": "look-ahead", "standin_rank": "stand-in rank"}
ONE_RANK, SPLIT = "one rank", ", split"
CUT = ("tp_size", "pp_size", "dp_size")
ENGINE_LABELS = {"shape", "model", "batch_size", "all_reduce", "overlap_tokens", *CUT}
KERNEL_TITLES = {"sparse_mlp": "one MLP over its active neurons", "thinned_rows": "one matrix, inputs thinned out"}
LINK_SETTING = ("tp_size", "transport", "dtype", "hidden_size", "num_tokens")
CHOSEN_METHOD = "auto"  # records of what `--all-reduce auto` takes; the other methods are what it has to choose from
BASELINE_SUFFIX = " all-reduce + fused add-norm"


@dataclass(frozen=True)
class Row:
    """One setting: all its calls merged, and those that were timed beside each baseline."""

    merged: Record
    beside: dict[str, Record]

    @property
    def labels(self) -> dict[str, Any]:
        """Of the setting."""
        return dict(self.merged["labels"])


def rows_of(records: Sequence[Record]) -> list[Row]:
    """A timing is recorded once for each thing it is compared with, and counts once in what its setting reached."""

    def timing_of(call: Record) -> str:
        """What a call says of the timing itself, whatever stands beside it."""
        timing = {name: value for name, value in (call.get("timing") or {}).items() if name != "baseline_samples"}
        return json.dumps([call["value"], timing])

    rows = []
    for calls in grouped(records, identity).values():
        beside = grouped(calls, lambda call: (call.get("baseline") or {}).get("name"))
        timed = list({timing_of(call): call for call in calls}.values())
        rows.append(Row(merge_calls(timed), {name: merge_calls(theirs) for name, theirs in beside.items() if name}))
    return rows


def _ratio_to(name: str) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        found = row.beside.get(name)
        return EMPTY_CELL if found is None else format_range(found["ratio"], found["ratio_range"], format_ratio)

    return cell


def _value(row: Row) -> str:
    return format_range(row.merged["value"], row.merged["range"], format_number)


def _share_of_ceiling(row: Row) -> str:
    return format_share(row.merged.get("share_of_ceiling"))


def is_one_gpu_decode(record: Record) -> bool:
    """Whether a record belongs in the table of decoding in one process."""
    labels = record["labels"]
    has_labels = all(labels.get(name) is not None for name in NEEDED_LABELS)
    return record["name"] == "decode" and labels.get("execution") in EXECUTIONS and has_labels


def decode_tables(records: Sequence[Record]) -> list[Table]:
    """One table per card: a line per setting, its speed and its ratios to what was timed beside it."""
    return [_decode_table(card, measured) for card, measured in grouped(records, device_of).items()]


def _decode_table(card: str, records: Sequence[Record]) -> Table:
    """Models in the order of the records; dense first, then by batch size and falling density."""
    models = list(dict.fromkeys(map(_model, records)))

    def reading_order(row: Row) -> tuple[Any, ...]:
        labels = row.labels
        place = models.index(_model(row.merged)), labels["batch_size"], method_rank(labels["method"])
        return *place, -labels["mlp_density"], -labels["head_density"]

    rows = sorted(rows_of(records), key=reading_order)
    labels = [row.labels for row in rows]
    names = list(dict.fromkeys(name for each in labels for name in each if name not in DECODE_LABELS))
    constant = [name for name in names if len({json.dumps(each.get(name)) for each in labels}) == 1]
    varying = [name for name in VARYING if name in names and name not in constant]
    visible = sorted({*DECODE_LABELS, *VARYING} - {"predictors"})
    if len({json.dumps([each.get(name) for name in visible]) for each in labels}) == len(labels):
        varying = [name for name in varying if name != "predictors"]  # the folder need not tell two rows apart
    baselines = {record["baseline"]["name"] for record in records if record.get("baseline")}
    ours_first = sorted(baselines, key=lambda name: (name.startswith("Hugging"), name))
    columns: list[Column[Row]] = [
        ("model", lambda row: _model(row.merged)),
        ("weights", lambda row: row.labels.get("weights") or EMPTY_CELL),
        ("method", lambda row: ", ".join(filter(None, (row.labels["method"], row.labels.get("label"))))),
        *((HEADINGS.get(name, name.replace("_", " ")), _label(name)) for name in varying),
        ("batch", lambda row: format_cell(row.labels["batch_size"])),
        ("MLP density", lambda row: _density(row.merged, "mlp_density")),
        ("head density", lambda row: _density(row.merged, "head_density")),
        ("union", lambda row: _union(row.merged)),
        ("tokens/s", _value),
        ("GB/s", lambda row: format_number(row.merged.get("achieved_gb_per_s"))),
        ("of the ceiling", _share_of_ceiling),
        *((f"× {name}", _ratio_to(name)) for name in ours_first),
        (
            "MLP density on the text",
            lambda row: format_number((row.merged.get("text_achieved") or {}).get("mlp_density")),
        ),
        ("perplexity there", lambda row: format_number(row.merged.get("perplexity"))),
        ("to dense", _quality),
    ]
    merged = [row.merged for row in rows]
    trained = [each for each in labels if each.get("model")]
    caption = (
        constant_settings(labels[0], constant),
        ceiling_text(merged),
        calls_text(merged),
        "MLP density: while generating" if any(record.get("text_achieved") for record in merged) else "",
        shared_settings(trained, ("task", "num_tokens", "converted_from", "calibration_tokens")),
    )
    return make_table(f"decode, one {card}", rows, columns, caption)


def constant_settings(labels: dict[str, Any], names: Sequence[str]) -> str:
    """For a caption: those of the named labels that are known."""
    return ", ".join(
        f"{name.replace('_', ' ')} {format_cell(labels[name])}" for name in names if labels.get(name) is not None
    )


def _model(record: Record) -> str:
    labels = record["labels"]
    return str(labels.get("model") or labels.get("shape") or EMPTY_CELL)


def _label(name: str) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        digits = made_from(row.merged)[0] if name == "predictors" else None
        return format_cell(row.labels.get(name)) + (f" ({digits[:6]})" if digits else "")

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


def _quality(row: Row) -> str:
    perplexity, dense = row.merged.get("perplexity"), row.merged.get("dense_perplexity")
    if not perplexity or not dense or row.labels["method"] == "dense":
        return EMPTY_CELL
    return format_range(perplexity / dense, row.merged.get("ratio_interval"), format_ratio)


def kernel_tables(records: Sequence[Record]) -> list[Table]:
    """One table per card and operator, a line per shape and density; `×`: how many times as long the other takes."""
    groups = grouped(records, lambda record: (device_of(record), str(record["labels"].get("operator"))))
    return [_kernel_table(card, operator, rows_of(found)) for (card, operator), found in groups.items()]


def _kernel_table(card: str, operator: str, rows: Sequence[Row]) -> Table:
    shapes = list(dict.fromkeys(row.labels.get("shape") for row in rows))
    names = list(dict.fromkeys(name for row in rows for name in row.beside))

    def reading_order(row: Row) -> tuple[float, ...]:
        labels = row.labels
        return shapes.index(labels.get("shape")), labels.get("batch_size") or 1, -(labels.get("density") or 1.0)

    def other_time(name: str) -> Callable[[Row], str]:
        return lambda row: format_number(row.beside[name]["baseline"]["value"]) if name in row.beside else EMPTY_CELL

    columns: list[Column[Row]] = [("shape", lambda row: format_cell(row.labels.get("shape")))]
    if len({row.labels.get("batch_size") for row in rows}) > 1:
        columns.append(("rows", lambda row: format_cell(row.labels.get("batch_size"))))
    columns += [
        ("density", lambda row: format_cell(row.labels.get("density"))),
        ("µs", _value),
        ("of the ceiling", _share_of_ceiling),
        *(each for name in names for each in ((f"{name}, µs", other_time(name)), (f"× {name}", _ratio_to(name)))),
    ]
    merged = [row.merged for row in rows]
    caption = (
        shared_settings([row.labels for row in rows], ("dtype", "weights", "batch_size")),
        "weights cold",
        ceiling_text(merged),
        calls_text(merged),
    )
    title = f"{KERNEL_TITLES.get(operator, operator)}, {card}, µs"
    return make_table(title, sorted(rows, key=reading_order), columns, caption)


@dataclass(frozen=True)
class SideBySide:
    """Of one setting the numbers of every way to do it, ours and others', and the range of those that were repeated."""

    setting: tuple[Any, ...]
    values: dict[str, float]
    ranges: dict[str, list[float] | None]
    share_of_ceiling: float | None = None

    def cell(self, name: str) -> str:
        """The number of one way."""
        return format_range(self.values.get(name), self.ranges.get(name), format_number)


def is_of_engine(record: Record) -> bool:
    """Whether a record is of tokens per second of ranks that share a model."""
    labels = record["labels"]
    has_labels = (
        all(labels.get(name) is not None for name in ("tp_size", "batch_size")) and _model(record) != EMPTY_CELL
    )
    return has_labels and record["name"] in ENGINE_NAMES and record["metric"] == "tokens_per_s"


def engine_tables(records: Sequence[Record], title: str) -> list[Table]:
    """One table of records of one name: tokens/s of what one rank does, then of every way; then the ratios to one rank,
    of a fused way also to NCCL's, and of a split pass to the whole one."""
    newest = latest_records(records)
    ways = list(dict.fromkeys(map(way_of, newest)))
    rows = []
    for setting, found in grouped(newest, _engine_setting).items():
        values = {way_of(record): record["value"] for record in found}
        for baseline in filter(None, (record.get("baseline") for record in found)):
            values.setdefault(baseline["name"], baseline["value"])
        ranges = {way_of(record): record.get("range") for record in found}
        shares = [record["share_of_ceiling"] for record in found if record.get("share_of_ceiling") is not None]
        rows.append(SideBySide(setting, values, ranges, max(shares, default=None)))
    others = list(dict.fromkeys(name for row in rows for name in row.values if name not in ways))
    bases = [(way, base) for way in ways for base in bases_of(way, others) if base in (*others, *ways)]
    models = list(dict.fromkeys(row.setting[0] for row in rows))
    rows.sort(key=lambda row: (models.index(row.setting[0]), *map(str, row.setting[1:-1]), row.setting[-1]))
    columns: list[Column[SideBySide]] = [
        ("model", lambda row: str(row.setting[0])),
        ("ranks", lambda row: cut_of(row.setting[1:-1])),
        ("batch", lambda row: format_cell(row.setting[-1])),
        *((name, _cell_of(name)) for name in (*others, *ways)),
        *((f"{way} × {base}", _quotient_of(way, base)) for way, base in bases),
        ("of the ceiling", lambda row: format_share(row.share_of_ceiling)),
    ]
    labels = [record["labels"] for record in newest]
    names = [name for name in labels[0] if name not in ENGINE_LABELS]
    caption = (
        constant_settings(labels[0], [name for name in names if len({str(each.get(name)) for each in labels}) == 1]),
        "the share of the ceiling is the fastest way's",
        ceiling_text(newest),
        calls_text(newest),
    )
    return [make_table(f"{title}, tokens/s", rows, columns, caption)]


def _engine_setting(record: Record) -> tuple[Any, ...]:
    labels = record["labels"]
    return (_model(record), *(labels.get(name) for name in CUT), labels["batch_size"])


def _cell_of(name: str) -> Callable[[SideBySide], str]:
    return lambda row: row.cell(name)


def _quotient_of(name: str, base: str) -> Callable[[SideBySide], str]:
    return lambda row: format_quotient(row.values.get(name), row.values.get(base))


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


def communication_tables(records: Sequence[Record]) -> list[Table]:
    """All-reduce + residual + norm: one table of all sizes; ratios are the others' time over that of the method that is
    chosen there. Of a stress test there is nothing to show."""
    records = [record for record in latest_records(records) if record["metric"] == "us"]
    rows: list[SideBySide] = []
    ours: dict[str, None] = {}
    with_method = [record for record in records if record["labels"].get("method") is not None]
    for setting, found in grouped(with_method, _link_setting).items():
        methods = {record["labels"]["method"]: record for record in found}
        chosen = methods.pop(CHOSEN_METHOD, None)
        ours |= dict.fromkeys(methods)
        values: dict[str, float] = {}
        for record in found:
            method, baseline = record["labels"]["method"], record.get("baseline")
            values |= {method: record["value"]}
            values |= {baseline["name"].removesuffix(BASELINE_SUFFIX): baseline["value"]} if baseline else {}
        ranges = {method: record.get("range") for method, record in methods.items()}
        rows.append(SideBySide(setting, values, ranges, (chosen or {}).get("share_of_ceiling")))
    if not rows:
        return []
    rows.sort(key=lambda row: [(size, "") if isinstance(size, int) else (2**31, str(size)) for size in row.setting])
    names = list(dict.fromkeys(name for row in rows for name in row.values if name != CHOSEN_METHOD))
    others = [name for name in names if name not in ours]
    columns: list[Column[SideBySide]] = [
        ("ranks", lambda row: f"{row.setting[0]}, {row.setting[1]}"),
        ("hidden size", lambda row: str(row.setting[3])),
        ("tokens", lambda row: str(row.setting[4])),
        *((name, _cell_of(name)) for name in (*ours, *others)),
        *((f"× {name}", _quotient_of(name, CHOSEN_METHOD)) for name in others),
        ("of the link", lambda row: format_share(row.share_of_ceiling)),
    ]
    types = sorted({str(row.setting[2]) for row in rows})
    caption = (", ".join(types), "the last columns are of what --all-reduce auto takes there", calls_text(records))
    return [make_table("All-reduce + residual + RMSNorm, µs", rows, columns, caption)]


def _link_setting(record: Record) -> tuple[Any, ...]:
    return tuple(record["labels"].get(name) for name in LINK_SETTING)
