"""The engine's speed on several ranks, for people: a line per batch, the ways to add up ranks' parts side by side."""

from __future__ import annotations

from collections.abc import Sequence

from analysis.ceilings import ceiling_text
from analysis.comparison import calls_text, latest_records
from analysis.formatting import EMPTY_CELL, Table, format_cell, format_number, format_range, format_ratio, format_share
from analysis.results import Record

NAMES = ("decode", "prefill")
ONE_RANK, SPLIT = "one rank", ", split"
CUT = ("tp_size", "pp_size", "dp_size")
# Told by columns of their own.
SHOWN = {"shape", "model", "batch_size", "all_reduce", "overlap_tokens", *CUT}


def is_of_engine(record: Record) -> bool:
    """Whether a record belongs in such a table: tokens per second of ranks that share a model."""
    labels = record["labels"]
    has_labels = None not in (
        labels.get("tp_size"),
        labels.get("batch_size"),
        labels.get("shape") or labels.get("model"),
    )
    return has_labels and record["name"] in NAMES and record["metric"] == "tokens_per_s"


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
    constant = [name for name in labels[0] if name not in SHOWN and len({str(each.get(name)) for each in labels}) == 1]
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
