"""Lines up quality records (perplexity, accuracy) with the speed records of the same settings."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from analysis.results import Record

QUALITY_NAMES = ("perplexity", "accuracy")
METHOD_ORDER = ("dense", "oracle", "predictor", "cats", "teal", "static", "random")
# Labels that the main table shows or groups by; any other one that differs is named beside the method.
VISIBLE_LABELS = ("model", "task", "corpus", "method", "mlp_density", "head_density", "phase")


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One quality record, unpacked; what was not recorded is None."""

    model: str
    task: str
    metric: str
    method: str
    variant: str  # the method, and whatever else tells this row from the others of the same settings
    mlp_density: float
    head_density: float
    phase: str
    value: float
    ratio: float | None
    recall: float | None
    precision: float | None
    achieved_mlp_density: float | None
    achieved_head_density: float | None
    bytes_read_share: float | None
    tokens_per_s: float | None
    dense_tokens_per_s: float | None
    layers: dict[str, dict[str, list[float]]] = field(default_factory=dict)  # block -> quantity -> one a layer
    labels: dict[str, Any] = field(default_factory=dict)


def latest_records(records: Iterable[Record]) -> list[Record]:
    """Of records that measure the same thing under the same labels, the last; a run may be repeated."""
    latest: dict[str, Record] = {}
    for record in records:
        baseline = (record.get("baseline") or {}).get("name")
        key = json.dumps([record["name"], record["metric"], baseline, record["labels"]], sort_keys=True)
        latest.pop(key, None)
        latest[key] = record
    return list(latest.values())


def compare(records: Sequence[Record]) -> list[Comparison]:
    """The quality records in reading order: by model, task, metric; dense first; by falling density."""
    records = latest_records(records)
    quality = [record for record in records if record["name"] in QUALITY_NAMES]
    speeds = [record for record in records if record["name"] == "decode" and record["metric"] == "tokens_per_s"]
    rows = [_comparison(record, variant, speeds) for record, variant in _with_variants(quality)]
    return sorted(rows, key=_reading_order)


def group_by_task(rows: Iterable[Comparison]) -> dict[tuple[str, str, str], list[Comparison]]:
    """Rows by (model, task, metric), in order."""
    groups: dict[tuple[str, str, str], list[Comparison]] = {}
    for row in rows:
        groups.setdefault((row.model, row.task, row.metric), []).append(row)
    return groups


def method_rank(method: str) -> int:
    return METHOD_ORDER.index(method) if method in METHOD_ORDER else len(METHOD_ORDER)


def _reading_order(row: Comparison) -> tuple[Any, ...]:
    is_dense = row.method == "dense"
    return (
        row.model,
        row.task,
        row.metric,
        not is_dense,
        -row.mlp_density,
        -row.head_density,
        method_rank(row.method),
        row.variant,
        row.phase,
    )


def _with_variants(records: Sequence[Record]) -> list[tuple[Record, str]]:
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        key = (record["metric"], *(record["labels"].get(label) for label in VISIBLE_LABELS))
        groups.setdefault(key, []).append(record)
    named = []
    for group in groups.values():
        names = sorted({label for record in group for label in record["labels"]} - set(VISIBLE_LABELS))
        differing = [name for name in names if len({json.dumps(record["labels"].get(name)) for record in group}) > 1]
        for record in group:
            labels = record["labels"]
            settings = [f"{name} {labels[name]}" for name in differing if labels.get(name) is not None]
            named.append((record, ", ".join([str(labels.get("method", "dense")), *settings])))
    return named


def _comparison(record: Record, variant: str, speeds: Sequence[Record]) -> Comparison:
    labels = record["labels"]
    achieved = record.get("achieved") or {}
    quality = record.get("quality") or {}
    method = str(labels.get("method", "dense"))
    speed = _matching_speed(record, speeds)
    dense_speed = None if speed is None else (speed.get("baseline") or {}).get("value")
    if speed is not None and method == "dense":
        dense_speed = speed["value"]
    return Comparison(
        model=str(labels.get("model", "")),
        task=str(labels.get("task") or labels.get("corpus") or record["name"]),
        metric=record["metric"],
        method=method,
        variant=variant,
        mlp_density=_density(labels, "mlp_density"),
        head_density=_density(labels, "head_density"),
        phase=str(labels.get("phase") or ""),
        value=record["value"],
        ratio=1.0 if method == "dense" else record.get("ratio"),
        recall=quality.get("recall"),
        precision=quality.get("precision"),
        achieved_mlp_density=achieved.get("mlp_density"),
        achieved_head_density=achieved.get("head_density"),
        bytes_read_share=achieved.get("bytes_read_share"),
        tokens_per_s=None if speed is None else speed["value"],
        dense_tokens_per_s=dense_speed,
        layers=_layers(achieved, quality),
        labels=dict(labels),
    )


def _layers(achieved: dict[str, Any], quality: dict[str, Any]) -> dict[str, dict[str, list[float]]]:
    layers: dict[str, dict[str, list[float]]] = {}
    for block, densities in (achieved.get("per_layer") or {}).items():
        layers.setdefault(block, {})["density"] = densities
    for block, quantities in (quality.get("per_layer") or {}).items():
        layers.setdefault(block, {}).update(quantities or {})
    return {block: {name: each for name, each in found.items() if each} for block, found in layers.items()}


def _density(labels: dict[str, Any], name: str) -> float:
    density = labels.get(name)
    return 1.0 if density is None else float(density)


def _matching_speed(record: Record, speeds: Sequence[Record]) -> Record | None:
    """The decode record of the same model, method and densities that shares most of the other labels."""
    labels = record["labels"]
    candidates = [
        speed
        for speed in speeds
        if all(speed["labels"].get(name) == labels.get(name) for name in ("model", "method"))
        and all(_density(speed["labels"], name) == _density(labels, name) for name in ("mlp_density", "head_density"))
    ]
    if not candidates:
        return None

    def likeness(speed: Record) -> tuple[int, int]:
        shared = sum(labels.get(name) == setting for name, setting in speed["labels"].items())
        return (shared, int(speed["labels"].get("batch_size") == 1))

    return max(candidates, key=likeness)
