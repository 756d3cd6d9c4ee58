"""Lines up quality records (perplexity, accuracy) with the speed records of the same settings."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any, Literal

from analysis.formatting import format_span
from analysis.results import Record, grouped
from data.files import read_json
from sparse_predictor.methods.registry import method_names

QUALITY_NAMES = ("perplexity", "accuracy")
# Labels that tables show or group by; any other one that differs is named beside the method.
SETTING_LABELS = ("model", "method", "phase")
VISIBLE_LABELS = (*SETTING_LABELS, "task", "corpus", "mlp_density", "head_density")
SAME_VALUE = 1e-3  # a share; cards and libraries round sums differently
TIMED_UNITS = ("tokens/s", "us", "ms")
MADE_FROM = ("predictors", "density_budget")
OF_THE_PREDICTORS = ("lookahead", "standin_rank")
# How a task was scored, which says nothing about the model that was scored.
CONDITION_LABELS = {
    "num_fewshot", "num_samples", "filter", "batch_size", "execution", "window", "stride", "num_tokens",
}  # fmt: skip
# Told of the rows that have no label, or only where rows would have one name.
OF_SOME_ROWS = {*CONDITION_LABELS, *OF_THE_PREDICTORS, "label", "predictors", "calibration_tokens", "converted_from"}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One quality record, unpacked; what was not recorded is None."""

    name: str
    model: str
    task: str
    metric: str
    method: str
    variant: str  # the method, and whatever else tells this row from the others of the same settings
    series: str  # the variant, but alike at every density: budgets that differ in their number only are one series
    mlp_density: float
    head_density: float
    phase: str
    date: str
    value: float
    stderr: float | None
    dense_value: float | None
    ratio: float | None
    recall: float | None
    precision: float | None
    achieved_mlp_density: float | None
    achieved_head_density: float | None
    bytes_read_share: float | None
    layer_bytes_read_share: float | None  # of attention's weights and the MLPs' together
    sparse_calls: int | None
    tokens_per_s: float | None
    dense_tokens_per_s: float | None
    ratio_interval: list[float] | None = None  # 95 %, over windows of the text
    first_windows: dict[str, float] | None = None  # their number, and perplexities of this row and of dense
    num_windows: int | None = None
    quality_windows: int | None = None  # on which recall and precision were measured
    speed_range: list[float] | None = None
    generating_mlp_density: float | None = None  # in the decoding whose speed this is
    tasks_mlp_density: float | None = None  # mean over the accuracy tasks of this setting
    layers: dict[str, dict[str, list[float | None]]] = field(default_factory=dict)  # block -> quantity -> one per layer
    labels: dict[str, Any] = field(default_factory=dict)


def latest_records(records: Iterable[Record]) -> list[Record]:
    """One record per thing that was measured: same labels, same predictors and same budget.

    What is measured in seconds differs from call to call, and is another thing on another device: all calls are merged
    (see `merge_calls`). Perplexity and accuracy do not: the newest counts (the last, without dates).
    """

    def thing(record: Record) -> str:
        baseline = (record.get("baseline") or {}).get("name")
        device = None if record["name"] in QUALITY_NAMES else device_of(record)
        return identity(record, record["name"], record["metric"], baseline, device)

    records = list(records)
    order = {id(record): place for place, record in enumerate(records)}
    found = [(newest_of(calls), calls) for calls in grouped(records, thing).values()]
    found.sort(key=lambda item: order[id(item[0])])  # as they were read
    return [merge_calls(calls) if newest["unit"] in TIMED_UNITS else newest for newest, calls in found]


def identity(record: Record, *more: object) -> str:
    """What a record was measured of, as text: its labels, its predictors and its budget."""
    labels = {name: setting for name, setting in record["labels"].items() if setting is not None}
    return json.dumps([labels, made_from(record), more], sort_keys=True)


def newest_of(records: Sequence[Record]) -> Record:
    """The last of the newest."""
    return max(reversed(records), key=_date)


def contradictions(records: Iterable[Record]) -> list[str]:
    """Qualities that were measured several times and did not come out alike, a sentence each: they should."""
    quality = [record for record in records if record["name"] in QUALITY_NAMES]
    told = []
    for same in grouped(
        quality, lambda record: identity(record, record["name"], record["metric"], record.get("sources") or {})
    ).values():
        values = [record["value"] for record in same]
        if max(values) - min(values) > SAME_VALUE * abs(max(values)):
            labels = same[0]["labels"]
            shown = (labels.get(name) for name in ("model", "task", "method", "mlp_density", "label"))
            told.append(
                f"{', '.join(str(each) for each in shown if each)}: {len(same)} records of one {same[0]['metric']} lie "
                f"between {min(values):.5g} and {max(values):.5g}; tables show the newest"
            )
    return told


def made_from(record: Record) -> tuple[str | None, str | None]:
    """Digits that tell these predictors and this budget from others of the same name; None where there are none."""
    sources = record.get("sources") or {}
    return sources.get("predictors"), sources.get("density_budget")


def merge_calls(calls: Sequence[Record]) -> Record:
    """One record of several calls of one benchmark on the newest of their commits: the medians of its numbers, and
    their ranges.

    `calls` is how many; `range` holds the lowest and highest repetition of all (None where only medians were kept and
    there is one), `ratio_range` the lowest and highest ratio of a call.
    """
    newest = newest_of(calls)
    calls = [call for i, call in enumerate(calls) if _code_of(call) == _code_of(newest) and call not in calls[:i]]
    samples = [one for call in calls for one in (call.get("timing") or {}).get("samples") or [call["value"]]]
    ratios = [call["ratio"] for call in calls if call.get("ratio") is not None]
    merged = {
        **newest,
        "value": median(call["value"] for call in calls),
        "calls": len(calls),
        "range": [min(samples), max(samples)] if len(samples) > 1 else None,
        "ratio": median(ratios) if ratios else None,
        "ratio_range": [min(ratios), max(ratios)] if len(ratios) > 1 else None,
    }
    if newest.get("baseline"):
        merged["baseline"] = {**newest["baseline"], "value": median(call["baseline"]["value"] for call in calls)}
    for name in ("share_of_ceiling", "achieved_gb_per_s", "achieved_gb_per_s_each"):
        if newest.get(name) is not None:
            merged[name] = median(call[name] for call in calls if call.get(name) is not None)
    return merged


def _code_of(record: Record) -> tuple[object, object]:
    """The commit, and whether it had local changes: another one may be faster or slower."""
    return record["environment"].get("commit"), record["environment"].get("dirty")


def calls_text(merged: Sequence[Record]) -> str:
    """For a caption: of how many calls the numbers are medians, and what stands in brackets."""
    counts = {record.get("calls", 1) for record in merged}
    if not any(record.get("range") for record in merged):
        return ""
    return f"medians of {format_span([*counts])} call{'' if counts == {1} else 's'} [lowest, highest]"


def device_of(record: Record) -> str:
    """The card, or the kind of CPU, that a record was measured on."""
    device = record["environment"].get("device") or "unknown device"
    return str(record["environment"].get("cpu") or device if device == "cpu" else device)


def _date(record: Record) -> str:
    return str(record["environment"].get("date") or "")


def compare(records: Sequence[Record]) -> list[Comparison]:
    """The quality records in reading order: by model, task, metric; dense first; by falling density."""
    records = latest_records(records)
    quality = [record for record in records if record["name"] in QUALITY_NAMES]
    speeds = [record for record in records if record["name"] == "decode" and record["metric"] == "tokens_per_s"]
    tasks = [record for record in quality if record["name"] == "accuracy"]
    rows = [
        _comparison(record, variant, series, _matching_speed(record, speeds), _tasks_density(record, tasks))
        for record, variant, series in _with_variants(quality)
    ]
    return sorted(rows, key=_reading_order)


def group_by_task(rows: Iterable[Comparison]) -> dict[tuple[str, str, str], list[Comparison]]:
    """Rows by (model, task, metric), in order."""
    return grouped(rows, lambda row: (row.model, row.task, row.metric))


def method_rank(method: str) -> int:
    """Its place in tables and plots; what is not known comes last."""
    return method_names().index(method) if method in method_names() else len(method_names())


def setting_order(row: Comparison) -> tuple[Any, ...]:
    """Dense first, then by falling density and by method."""
    is_dense = row.method == "dense"
    densities = -row.mlp_density, -row.head_density
    return (not is_dense, *densities, method_rank(row.method), row.variant, row.phase)


def _reading_order(row: Comparison) -> tuple[Any, ...]:
    return (row.model, row.task, row.metric, *setting_order(row))


def _with_variants(records: Sequence[Record]) -> list[tuple[Record, str, str]]:
    """Each record with the names of its variant and of its series.

    A label is always told: without it, its row would pass for the default. What else was run is told alike at every
    density and on every task, unless a label says it; which predictors, and how a perplexity was scored, only where two
    rows of a table would have one name.
    """

    def place(record: Record, labels: Sequence[str]) -> tuple[Any, ...]:
        return (record["name"], *(record["labels"].get(label) for label in labels))

    told: dict[int, list[str]] = {}
    for group in grouped(records, lambda record: place(record, SETTING_LABELS)).values():
        unlabelled = [record for record in group if record["labels"].get("label") is None]
        shared = [name for name in _differing(group) if name not in OF_SOME_ROWS]
        bare = [name for name in _differing(unlabelled) if name in OF_THE_PREDICTORS]
        for record in group:
            labels = record["labels"]
            label = labels.get("label")
            names = [*shared, *(bare if label is None else [])]
            found = [_told(name, labels[name]) for name in names if labels.get(name) is not None]
            told[id(record)] = [*([] if label is None else [str(label)]), *found]
    for key, ambiguous in (("labels", _differing), ("sources", lambda group: MADE_FROM)):
        cells = grouped(records, lambda one: (*place(one, VISIBLE_LABELS), one["metric"], *told[id(one)]))
        for cell in cells.values():
            for record in cell if len(cell) > 1 else ():
                known = record.get(key) or {}
                names = [name for name in ambiguous(cell) if known.get(name) is not None]
                names = [name for name in names if record["name"] == "perplexity" or name not in CONDITION_LABELS]
                told[id(record)] += [_told(name, known[name]) for name in names]
    named = []
    for record in records:
        variant = ", ".join([str(record["labels"].get("method", "dense")), *dict.fromkeys(told[id(record)])])
        named.append((record, variant, _without_density(variant, record["labels"].get("mlp_density"))))
    return named


def _without_density(variant: str, density: float | None) -> str:
    """A variant's name without the density that its budget or its predictors are named after: budget_cats_0.5. Other
    numbers of a folder's name (run 2, seed 10) tell one series from another."""

    def shorter(found: re.Match[str]) -> str:
        return found[1] if density is not None and float(found[2]) == density else found[0]

    return re.sub(r"((?:budget|predictors) [^,]*?)[-_ ]*(\d+(?:\.\d+)?)(?=,|$)", shorter, variant)


def _told(name: str, setting: Any) -> str:
    """In a few words, what a label says."""
    if name == "standin_rank":
        return f"stand-in rank {setting}" if setting else "no stand-in"
    if name == "density_budget":
        return f"budget {str(setting).removeprefix('budget_')}"  # budget_cats_0.5, as recipes name their files
    return f"{'look-ahead' if name == 'lookahead' else name.replace('_', ' ')} {setting}"


def _differing(group: Sequence[Record]) -> list[str]:
    names = sorted({label for record in group for label in record["labels"]} - set(VISIBLE_LABELS))
    return [name for name in names if len({json.dumps(record["labels"].get(name)) for record in group}) > 1]


def _comparison(
    record: Record, variant: str, series: str, speed: Record | None, tasks_mlp_density: float | None
) -> Comparison:
    labels = record["labels"]
    achieved = record.get("achieved") or {}
    quality = record.get("quality") or {}
    method = str(labels.get("method", "dense"))
    dense_speed = None if speed is None else (speed.get("baseline") or {}).get("value")
    if speed is not None and method == "dense":
        dense_speed = speed["value"]
    return Comparison(
        name=record["name"],
        model=str(labels.get("model", "")),
        task=str(labels.get("task") or labels.get("corpus") or record["name"]),
        metric=record["metric"],
        method=method,
        variant=variant,
        series=series,
        mlp_density=_density(labels, "mlp_density"),
        head_density=_density(labels, "head_density"),
        phase=str(labels.get("phase") or ""),
        date=_date(record),
        value=record["value"],
        stderr=record.get("stderr"),
        dense_value=record["value"] if method == "dense" else (record.get("baseline") or {}).get("value"),
        ratio=1.0 if method == "dense" else record.get("ratio"),
        recall=quality.get("recall"),
        precision=quality.get("precision"),
        achieved_mlp_density=achieved.get("mlp_density"),
        achieved_head_density=achieved.get("head_density"),
        bytes_read_share=achieved.get("bytes_read_share"),
        layer_bytes_read_share=achieved.get("layer_bytes_share"),
        sparse_calls=achieved.get("sparse_calls"),
        tokens_per_s=None if speed is None else speed["value"],
        dense_tokens_per_s=dense_speed,
        ratio_interval=None if method == "dense" else record.get("ratio_interval"),
        first_windows=record.get("first_windows"),
        num_windows=len(record["windows"]["nll"]) if record.get("windows") else None,
        quality_windows=quality.get("windows"),
        speed_range=None if speed is None else speed.get("range"),
        generating_mlp_density=None if speed is None else (speed.get("achieved") or {}).get("mlp_density"),
        tasks_mlp_density=tasks_mlp_density,
        layers=_layers(achieved, quality),
        labels=dict(labels),
    )


def _layers(achieved: dict[str, Any], quality: dict[str, Any]) -> dict[str, dict[str, list[float | None]]]:
    layers: dict[str, dict[str, list[float | None]]] = {}
    for block, densities in (achieved.get("per_layer") or {}).items():
        layers.setdefault(block, {})["density"] = densities
    for block, quantities in (quality.get("per_layer") or {}).items():
        densities = layers.setdefault(block, {}).get("density") or []
        layers[block] |= {name: _in_place(each, densities) for name, each in (quantities or {}).items()}
    return {block: {name: each for name, each in found.items() if each} for block, found in layers.items()}


def _in_place(shares: list[float | None], densities: list[float | None]) -> list[float | None]:
    """Quality is known of the layers that select; put in the places of those, where others stay dense."""
    selecting = [layer for layer, density in enumerate(densities) if density != 1]
    if not shares or len(shares) != len(selecting):
        return shares
    known = dict(zip(selecting, shares, strict=True))
    return [known.get(layer) for layer in range(len(densities))]


def _density(labels: Mapping[str, Any], name: str) -> float:
    density = labels.get(name)
    return 1.0 if density is None else float(density)


def _matching_speed(record: Record, speeds: Sequence[Record]) -> Record | None:
    """The decode record of the same setting and machine that shares most of the other labels.

    A speed from another card, another checkout or another precision is not the speed of this row.
    """
    labels, machine = record["labels"], _machine(record)
    candidates = [
        speed
        for speed in speeds
        if same_setting(labels, speed["labels"]) and same_selection(record, speed) and _machine(speed) == machine
    ]
    if not candidates:
        return None

    def likeness(speed: Record) -> tuple[int, int]:
        shared = sum(labels.get(name) == setting for name, setting in speed["labels"].items())
        return (shared, int(speed["labels"].get("batch_size") == 1))

    return max(candidates, key=likeness)


def _tasks_density(record: Record, tasks: Sequence[Record]) -> float | None:
    """Of a perplexity: what the same setting computed on the accuracy tasks, where it was run on any."""
    if record["name"] != "perplexity" or record["labels"].get("method") == "dense":
        return None
    densities = {
        str(task["labels"].get("task")): task["achieved"]["mlp_density"]
        for task in tasks
        if task.get("achieved") and same_setting(record["labels"], task["labels"]) and same_selection(record, task)
    }
    return mean(densities.values()) if densities else None


def same_selection(quality: Record, speed: Record) -> bool:
    """Whether two records were made with the same checkpoint, predictors, budget and phase, where both say so: a speed
    of other predictors is not the speed of this row."""
    ours, theirs = quality.get("sources"), speed.get("sources")
    if ours is None or theirs is None:
        return True
    names = ("checkpoint", "predictors", "density_budget")
    same_phase = quality["labels"].get("phase") == speed["labels"].get("phase")
    return same_phase and all(ours.get(name) == theirs.get(name) for name in names)


def same_setting(labels: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    """Whether two records are of one model, method and densities, with nothing else known to differ.

    Phases are left out: speed is measured while decoding, quality while scoring.
    """
    if any(_density(labels, name) != _density(others, name) for name in ("mlp_density", "head_density")):
        return False
    names = (labels.keys() & others.keys()) | {"model", "method", "label", "density_budget"}
    names -= {*CONDITION_LABELS, "phase", "task", "corpus", "mlp_density", "head_density"}
    return all(labels.get(name) == others.get(name) for name in names)


def shared_settings(labels: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    """Those of the named labels that are the same wherever they are known, as text for a caption."""
    shared = []
    for name in names:
        settings = {json.dumps(each[name]) for each in labels if each.get(name) is not None}
        if len(settings) == 1:
            shared.append(f"{name.replace('_', ' ')} {json.loads(settings.pop())}")
    return ", ".join(shared)


def _machine(record: Record) -> str:
    """The environment without its date, as text."""
    return json.dumps({**record["environment"], "date": None}, sort_keys=True)


CEILINGS_FILE = Path(__file__).parent / "results" / "ceilings.json"
Kind = Literal["read_gb_per_s", "matmul_tflops"]
# What a record measured of the card, and what it is a ceiling of. Of a link between cards there is another.
MEASURED_CEILINGS: dict[str, tuple[str, Kind]] = {
    "ceiling_gb_per_s": ("achieved_gb_per_s", "read_gb_per_s"),
    "ceiling_gb_per_s_each": ("achieved_gb_per_s_each", "read_gb_per_s"),
    "ceiling_tflops_each": ("tflops_each", "matmul_tflops"),
}
OF_LINKS = "communication"

Ceilings = dict[str, dict[Kind, float]]


def ceilings_of(records: Iterable[Record]) -> Ceilings:
    """The highest of each kind by device: of the file and of these records."""
    found: Ceilings = {device: dict(known) for device, known in read_json(CEILINGS_FILE, Ceilings).items()}
    for record in records:
        known = found.setdefault(device_of(record), {})
        for name, (_, kind) in MEASURED_CEILINGS.items():
            if record.get(name) and record["name"] != OF_LINKS:
                known[kind] = max(known.get(kind, 0.0), record[name])
    return found


def with_one_ceiling(records: Sequence[Record]) -> list[Record]:
    """The records, each share of a ceiling taken anew from the one of its card."""
    ceilings = ceilings_of(records)
    return [_of_the_card(record, ceilings) for record in records]


def _of_the_card(record: Record, ceilings: Ceilings) -> Record:
    if record.get("share_of_ceiling") is None or record["name"] == OF_LINKS:
        return record
    for name, (achieved, kind) in MEASURED_CEILINGS.items():
        if record.get(name) and record.get(achieved):
            ceiling = ceilings[device_of(record)][kind]
            return {**record, name: ceiling, "share_of_ceiling": record[achieved] / ceiling}
    return record


def ceiling_text(records: Sequence[Record]) -> str:
    """For a caption: the ceilings that the shares of these records are of."""
    found: dict[str, None] = {}
    for record in records:
        for name, (_, kind) in MEASURED_CEILINGS.items():
            if record.get("share_of_ceiling") is not None and record.get(name):
                unit = "GB/s read" if kind == "read_gb_per_s" else "TFLOP/s"
                found[f"{record[name]:.0f} {unit}"] = None
    return f"ceiling {' and '.join(found)}, the highest seen on this card" if found else ""
