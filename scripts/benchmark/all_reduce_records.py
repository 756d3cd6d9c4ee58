"""What times of all-reduce + add + norm come to: bytes over the link, the choice that the model makes, records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loguru import logger

from analysis.results import Record, make_record
from pipeline_parallel.all_reduce_choice import METHODS, ChoiceTable, choose
from pipeline_parallel.communication import UNFUSED
from scripts.benchmark.all_reduce_bench import OURS, PEER, Point, transport_of
from scripts.benchmark.timing import Timing

TOLERANCE = 1.03  # the choice is never slower than the best baseline by more
Measured = Mapping[Point, Mapping[str, Timing]]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is the same for all measurements of a call."""

    device: str
    """As torch names it."""
    ranks: int
    dtype: str
    link_gb_per_s: float
    """What plain copies between GPUs reach here in each direction, both at once."""
    peer: str = PEER
    """What records call someone else's operator."""


def labels_of(setting: Setting, transport: str, hidden_size: int) -> dict[str, Any]:
    """Of every record."""
    return {
        "tp_size": setting.ranks,
        "hidden_size": hidden_size,
        "dtype": setting.dtype,
        "transport": transport,
    }


def microseconds(timings: Mapping[str, Timing]) -> dict[str, float]:
    """Medians by method."""
    return {name: timing.median_ms * 1e3 for name, timing in timings.items()}


def line(point: Point, timings: Mapping[str, Timing]) -> str:
    """For people who watch."""
    return f"{point}: " + ", ".join(f"{name} {value:.1f} us" for name, value in microseconds(timings).items())


def tuned(setting: Setting, transport: str, hidden_size: int, measured: Measured) -> ChoiceTable:
    """The fastest method at every point, in rising token counts."""
    return ChoiceTable(
        device=setting.device,
        ranks=setting.ranks,
        hidden_size=hidden_size,
        transport=transport,
        fastest=tuple((point.num_tokens, model_choice(microseconds(each))) for point, each in measured.items()),
    )


def timed_as(method: str) -> str:
    """Which time is that of a method of the choice tables."""
    return UNFUSED if method == "nccl" else method


def model_choice(times: Mapping[str, float]) -> str:
    """The fastest of what the model can do; NCCL in its own type is no such thing, since its sums are rounded."""
    return fastest({method: times[timed_as(method)] for method in METHODS}, METHODS)


def warn_of_slow_choice(point: Point, times: Mapping[str, float]) -> None:
    """Say that the model's fastest is slower than a baseline, which it cannot take."""
    best = fastest(times, [name for name in times if name not in OURS])
    chosen = times[timed_as(model_choice(times))]
    if chosen > TOLERANCE * times[best]:
        logger.warning(f"{point}: the model's fastest takes {chosen:.1f} us, {best} {times[best]:.1f} us")


def fastest(times: Mapping[str, float], names: Sequence[str]) -> str:
    """Of equally fast ones the first of `names`."""
    return min(names, key=lambda name: times[name])


def link_bytes(method: str, transport: str, ranks: int, partial_bytes: int) -> float:
    """Bytes over the link that must enter or leave each GPU, whichever are more, for a partial of `partial_bytes`.

    Two-shot, and NCCL at best: each rank takes its share from every other, and gives the result of its share to them.
    One-shot: each takes everything from every other. A switch that adds up (multimem) asks all ranks for all rows, and
    hands each rank's share of the result to all, itself included.
    """
    two_shot = "one-shot" not in method
    partial_bytes = 2 * partial_bytes if method == UNFUSED else partial_bytes
    if transport_of(method, transport) == "multimem":
        return (1 + 1 / ranks) * partial_bytes
    return (2 * (ranks - 1) / ranks if two_shot else ranks - 1) * partial_bytes


def point_records(
    setting: Setting, transport: str, point: Point, timings: Mapping[str, Timing], table: ChoiceTable | None
) -> list[Record]:
    """Ours beside every baseline, and what `auto` takes (NCCL where nothing was measured) beside the best baseline."""
    times = microseconds(timings)
    chosen = "nccl" if table is None else choose(table, point.num_tokens)
    baselines = [name for name in times if name not in OURS]
    best = fastest(times, baselines)
    rows: list[tuple[str, str, str, dict[str, Any]]] = [(name, name, other, {}) for name in OURS for other in baselines]
    timed = timed_as(chosen)
    verdict = {"chosen": chosen, "within_tolerance": times[timed] <= TOLERANCE * times[best]}
    rows.append(("auto", timed, best, verdict))
    records = []
    for label, method, baseline, extras in rows:
        num_bytes = link_bytes(method, transport, setting.ranks, point.numel * 2)
        achieved = timings[method].achieved_gb_per_s(num_bytes)
        labels = labels_of(setting, transport, point.hidden_size)
        records.append(
            make_record(
                "communication",
                {**labels, "method": label, "num_tokens": point.num_tokens},
                "us",
                times[method],
                "us",
                baseline={"name": baseline_name(baseline, setting.peer), "value": times[baseline]},
                ratio=times[baseline] / times[method],
                share_of_ceiling=achieved / setting.link_gb_per_s,
                bytes_per_call=num_bytes,
                achieved_gb_per_s=achieved,
                ceiling_gb_per_s=setting.link_gb_per_s,
                timing=timings[method].as_record_extra(),
                **extras,
            )
        )
    return records


def baseline_name(method: str, peer: str) -> str:
    """As records have it."""
    return peer if method == PEER else f"{method} all-reduce + fused add-norm"


def slower(record: Record) -> str:
    """What to say of a choice beyond the tolerance."""
    labels, baseline = record["labels"], record["baseline"]
    return (
        f"{labels['num_tokens']} x {labels['hidden_size']}: auto takes {record['chosen']}, {record['value']:.1f} us, "
        f"{100 / record['ratio'] - 100:.0f} % slower than {baseline['name']}, {baseline['value']:.1f} us "
        f"(at most {100 * TOLERANCE - 100:.0f} %)"
    )
