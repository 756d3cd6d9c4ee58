"""Microseconds of all-reduce + residual add + RMSNorm, beside NCCL's and torch's all-reduce with a fused add + norm.

    python -m pipeline_parallel.torchrun --nproc-per-node 2 -m scripts.benchmark.communication --output results.jsonl

One process per GPU. Every time is one call's among several in a CUDA graph, the maximum over ranks; all methods run on
the same numbers in the same call, after each was compared with the equation in float32 and between ranks. Bytes are
those that must enter every GPU; the ceiling is what plain copies between the GPUs reach in the same call.
`--tune` instead measures which of the model's own methods is the fastest (pipeline_parallel/all_reduce_choice.py), and
`--stress` replays graphs of alternating sizes on changing input while one rank is late: first of the kernel alone, then
with every third call made of copies, as split prefills have them; a record each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from loguru import logger

from analysis.results import Record, append_record, make_record
from pipeline_parallel.all_reduce_choice import (
    METHODS,
    ChoiceTable,
    choose,
    find_choice_table,
    read_choice_tables,
    write_choice_tables,
)
from pipeline_parallel.communication import NAMES, UNFUSED
from pipeline_parallel.fused_add_norm import FEW_TOKENS
from pipeline_parallel.kernels.workspace import require_stated_multicast
from pipeline_parallel.launch import current_launch
from pipeline_parallel.mesh import ParallelMesh
from scripts.benchmark.all_reduce import COPIES, FUSED, OURS, PEER, Bench, GpuMethods, Methods, Point, transport_of
from scripts.benchmark.all_reduce_stress import Stress, awkward_counts, make_series, make_steps
from scripts.benchmark.engine import release
from scripts.benchmark.timing import Timing, check_peer_name, import_peer
from scripts.command_line import run_stage

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
    fastest = {str(point.num_tokens): model_choice(microseconds(each)) for point, each in measured.items()}
    fields: dict[str, Any] = {"transport": transport, "fastest": fastest}
    return ChoiceTable(device=setting.device, ranks=setting.ranks, hidden_size=hidden_size, **fields)


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


GRID = tuple(4**power for power in range(8))
TUNED = tuple(2**power for power in range(15))


@dataclass(frozen=True, kw_only=True)
class Options:
    """Time the fused all-reduce + add + norm on all GPUs that torchrun started."""

    output: Path
    """JSON lines; records are appended. With --tune: a choice file, whose tables of the same key are replaced."""
    tune: bool = False
    """Measure the fastest method at every token count, and write that."""
    stress: bool = False
    """Replay graphs of alternating sizes, on changing input with a straggling rank, and look at every result."""
    num_tokens: tuple[int, ...] = ()
    """Rows of a call. Default: 1, 4, 16 ... 16384; --tune: 1, 2, 4 ... 16384; --stress: awkward ones up to 1025."""
    hidden_size: tuple[int, ...] = (3072, 4096, 8192)
    """Elements of a row."""
    dtype: Literal["bfloat16", "float16"] = "bfloat16"
    """Type of what is summed and of the result; the residual is float32."""
    choices: tuple[Path, ...] = ()
    """Choice files to judge. Default: the shipped ones (pipeline_parallel/configs)."""
    num_replays: int = 10_000
    """Of each of the two parts of --stress, for each hidden size; a tenth as many more is launched call by call."""
    peer: str | None = None
    """MODULE:FUNCTION of someone else's fused operator, to time beside ours (see all_reduce.Peer)."""
    peer_name: str = "peer"
    """What records and tables call it."""
    seed: int = 0
    """Of all numbers, and of the order of --stress."""
    quiet: bool = False
    """Warnings only."""


def main(options: Options) -> list[Record]:
    """Measure. Rank 0 writes and returns the records."""
    check(options)
    launch = current_launch()
    if launch.world_size == 1 or launch.device is None or launch.device.type != "cuda":
        raise ValueError(
            "the benchmark of communication needs two processes or more with a GPU each, and here are "
            f"{launch.world_size} on a machine with {torch.cuda.device_count()} GPUs: start it with torchrun "
            "--nproc-per-node N on a machine with N GPUs"
        )
    require_stated_multicast()
    check_peer_name(options.peer, options.peer_name)
    make_peer = None if options.peer is None else import_peer(options.peer)
    mesh = ParallelMesh.from_process_group(launch.world_size, 1, launch.device)
    with torch.inference_mode():
        bench = Bench(mesh, getattr(torch, options.dtype), options.seed)
        return run(options, bench, partial(GpuMethods, make_peer=make_peer))


def check(options: Options) -> None:
    """ValueError on the first flag that cannot be."""
    for name, values, step, largest in (
        ("num-tokens", options.num_tokens, 1, None),
        ("hidden-size", options.hidden_size, 8, 16384),
        ("num-replays", (options.num_replays,), 1, None),
    ):
        for value in values:
            if value < 1 or value % step or (largest is not None and value > largest):
                multiple = f"a multiple of {step} up to {largest}" if largest is not None else "at least 1"
                raise ValueError(f"--{name} must be {multiple}, got {value}")
    if len(set(options.num_tokens)) < len(options.num_tokens) or not options.hidden_size:
        raise ValueError(f"--num-tokens {options.num_tokens} repeats a count, or --hidden-size is empty")
    if options.tune and options.stress:
        raise ValueError("--tune and --stress are two runs: give one of them")
    # Not only after the measurement.
    for path in (*options.choices, *([options.output] if options.tune and options.output.exists() else [])):
        read_choice_tables(path)


def token_counts(options: Options, ranks: int) -> tuple[int, ...]:
    """Rising."""
    default = TUNED if options.tune else awkward_counts(ranks) if options.stress else GRID
    return tuple(sorted(options.num_tokens or default))


MakeMethods = Callable[[ParallelMesh, int, int, torch.dtype], Methods]


def run(options: Options, bench: Bench, make_methods: MakeMethods = GpuMethods) -> list[Record]:
    """The part of `main` for ranks that have met."""
    device = torch.cuda.get_device_name(bench.mesh.device) if bench.mesh.device.type == "cuda" else "cpu"
    link = 0.0 if options.stress else bench.link_gb_per_s()
    setting = Setting(
        device=device, ranks=bench.mesh.tp_size, dtype=options.dtype, link_gb_per_s=link, peer=options.peer_name
    )
    counts = token_counts(options, setting.ranks)
    baselines = (UNFUSED, "nccl") if options.tune else NAMES[bench.dtype]
    names = (*OURS, *baselines, *((PEER,) if options.peer is not None else ()))
    records: list[Record] = []
    for hidden_size in options.hidden_size:
        methods = make_methods(bench.mesh, hidden_size, max(1, counts[-1]), bench.dtype)
        found: Iterable[Record] = []
        if options.stress:
            found = stress_records(options, setting, bench, methods, hidden_size)
        else:
            measured = {}
            for num_tokens in counts:
                point = Point(num_tokens=num_tokens, hidden_size=hidden_size)
                measured[point] = bench.times(point, methods, names)
                logger.info(line(point, measured[point]))
            if bench.mesh.rank == 0:
                found = judge(options, setting, methods.transport, hidden_size, measured)
        for record in found:
            if bench.mesh.rank == 0:  # now, so that what went well is kept whatever becomes of what comes next
                append_record(options.output, record)
                records.append(record)
        bench.settle()  # before memory that peers reach is given back
        del methods
        release()
    return records


def judge(options: Options, setting: Setting, transport: str, hidden_size: int, measured: Measured) -> list[Record]:
    """The records of one hidden size; of --tune none, its table is written."""
    if options.tune:
        write_choice_tables(options.output, [tuned(setting, transport, hidden_size, measured)])
        for point, timings in measured.items():
            warn_of_slow_choice(point, microseconds(timings))
        return []
    table = find_choice_table(setting.device, setting.ranks, hidden_size, transport, options.choices or None)
    records = [
        record
        for point, timings in measured.items()
        for record in point_records(setting, transport, point, timings, table)
    ]
    for record in records:
        if record.get("within_tolerance") is False:
            logger.warning(slower(record))
    return records


def stress_records(
    options: Options, setting: Setting, bench: Bench, methods: Methods, hidden_size: int
) -> Iterator[Record]:
    """All replays of one hidden size, the kernel's and then those among which are copies, which only calls too large
    for one-shot are made of; ValueError on all ranks if anything was wrong. All ranks must take all of the records."""
    counts = token_counts(options, setting.ranks)
    large = tuple(count for count in counts if count > FEW_TOKENS)
    for label, names, sizes in (("stress", OURS, counts), (f"stress of {COPIES}", FUSED, large or counts)):
        for begins, num_replays in (
            (True, options.num_replays - options.num_replays // 2),
            (False, options.num_replays // 2),
        ):
            series = make_series(sizes, names, setting.ranks, options.seed, begins=begins)
            steps = make_steps(num_replays, len(series), options.seed)
            Stress(bench, methods, hidden_size, series).run(steps, quiet=options.quiet)
        logger.info(f"hidden size {hidden_size}, {label}: {options.num_replays} replays without an error, pads zero")
        labels = labels_of(setting, methods.transport, hidden_size) | {"method": label}
        yield make_record("communication", labels, "replays_without_error", options.num_replays, "")


if __name__ == "__main__":
    run_stage(main, Options, distributed=True)
