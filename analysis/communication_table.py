"""All-reduce + residual + norm, for people: a line per size, ours and the others' microseconds side by side."""

from __future__ import annotations

from collections.abc import Sequence

from analysis.comparison import calls_text, latest_records
from analysis.formatting import EMPTY_CELL, Table, format_number, format_range, format_ratio, format_share
from analysis.results import Record

NAME = "communication"
SETTING = ("tp_size", "transport", "dtype", "hidden_size", "num_tokens")
CHOSEN = "auto"  # records of what `--all-reduce auto` takes; the other methods are what it has to choose from
SUFFIX = " all-reduce + fused add-norm"


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
        setting = tuple(record["labels"].get(name) for name in SETTING)
        method, baseline = record["labels"]["method"], record.get("baseline")
        if method == CHOSEN:
            chosen[setting] = record
        else:
            times.setdefault(setting, {})[method] = record["value"]
            ranges.setdefault(setting, {})[method] = record.get("range")
            ours += [] if method in ours else [method]
        if baseline is not None:
            times.setdefault(setting, {})[baseline["name"].removesuffix(SUFFIX)] = baseline["value"]
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
                *(ratio_of(found.get(method), value) for method in others),
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


def ratio_of(theirs: float | None, ours: float | None) -> str:
    """How many times as long theirs takes."""
    return EMPTY_CELL if not theirs or not ours else format_ratio(theirs / ours)
