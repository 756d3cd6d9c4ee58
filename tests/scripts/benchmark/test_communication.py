"""The communication benchmark without a GPU: sizes, verdicts, tables and records; what is wrong is not timed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from loguru import logger

from analysis.results import read_records
from pipeline_parallel.all_reduce_choice import ChoiceTable, read_choice_tables, write_choice_tables
from pipeline_parallel.launch import Launch
from scripts.benchmark import communication
from scripts.benchmark.all_reduce import Point
from scripts.benchmark.communication import (
    Options,
    Setting,
    check,
    link_bytes,
    main,
    model_choice,
    point_records,
    run,
    token_counts,
)
from scripts.benchmark.timing import Timing
from tests.pipeline_parallel.launching import start_torchrun, wait_all
from tests.scripts.benchmark.all_reduce_fakes import ALL_METHODS, FirstOfTwoRanks, OneRank, milliseconds

SETTING = Setting(device="GPU A", ranks=2, dtype="bfloat16", link_gb_per_s=400.0)
POINT = Point(num_tokens=64, hidden_size=4096)
TIMES = dict(zip(ALL_METHODS, (5.0, 10.0, 11.0, 9.0, 8.0, 12.0), strict=True))


def timings(**others: float) -> dict[str, Timing]:
    return {name: milliseconds(value / 1e3) for name, value in (TIMES | others).items()}


def table(*fastest_at: tuple[int, Any]) -> ChoiceTable:
    fastest = {str(count): name for count, name in fastest_at}
    return ChoiceTable(device="cpu", ranks=2, hidden_size=16, transport="p2p", fastest=fastest)


@pytest.fixture
def options(tmp_path: Path) -> Options:
    return Options(output=tmp_path / "r.jsonl", num_tokens=(1, 5), hidden_size=(16, 24), quiet=True)


def test_the_grids_are_those_that_were_asked_for(options: Options) -> None:
    default = Options(output=options.output)
    assert default.hidden_size == (3072, 4096, 8192)
    assert token_counts(default, 2) == (1, 4, 16, 64, 256, 1024, 4096, 16384)
    assert token_counts(replace(default, tune=True), 2) == tuple(2**power for power in range(15))
    assert token_counts(replace(default, stress=True), 4) == (0, 1, 3, 5, 77, 255, 257, 1023, 1025)
    assert token_counts(replace(default, num_tokens=(9, 3)), 2) == (3, 9)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_tokens": (1, 0)}, "--num-tokens must be at least 1, got 0"),
        ({"num_tokens": (4, 4)}, r"--num-tokens \(4, 4\) repeats a count"),
        ({"hidden_size": (4100,)}, "--hidden-size must be a multiple of 8 up to 16384, got 4100"),
        ({"hidden_size": (16392,)}, "--hidden-size must be a multiple of 8 up to 16384, got 16392"),
        ({"hidden_size": ()}, "--hidden-size is empty"),
        ({"num_replays": 0}, "--num-replays must be at least 1, got 0"),
        ({"tune": True, "stress": True}, "--tune and --stress are two runs"),
    ],
)
def test_flags_that_cannot_be_are_refused(options: Options, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(replace(options, **wrong))


def test_a_choice_file_that_is_wrong_is_found_before_anything_is_measured(options: Options) -> None:
    options.output.write_text("{}")
    check(options)  # records: no choice file
    for wrong in (replace(options, tune=True), replace(options, choices=(options.output,))):
        with pytest.raises(ValueError, match=r"r\.jsonl: object missing required field `choices`"):
            check(wrong)


@pytest.mark.parametrize("launch", [Launch(), Launch(world_size=2, device=torch.device("cpu"))])
def test_without_gpus_it_says_so(options: Options, launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(communication, "current_launch", lambda: launch)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match=f"here are {launch.world_size} on a machine with 0 GPUs"):
        main(options)


def test_multicast_must_be_spoken_of_before_ranks_meet(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = Launch(world_size=2, device=torch.device("cuda", 0))
    monkeypatch.setattr(communication, "current_launch", lambda: launch)
    monkeypatch.delenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", raising=False)
    with pytest.raises(ValueError, match="TORCH_SYMM_MEM_DISABLE_MULTICAST is None: set it to 1"):
        main(options)


@pytest.mark.parametrize(
    ("method", "transport", "ranks", "partials"),
    [
        ("one-shot", "p2p", 4, 3),
        ("one-shot", "multimem", 4, 3),
        ("two-shot", "p2p", 2, 1),
        ("two-shot", "p2p", 4, 1.5),
        ("two-shot", "multimem", 4, 1.25),
        ("nccl", "multimem", 4, 1.5),
        ("nccl float32", "multimem", 4, 3),
        ("torch one-shot", "multimem", 4, 3),
        ("torch two-shot", "p2p", 4, 1.5),
    ],
)
def test_bytes_over_the_link(method: str, transport: str, ranks: int, partials: float) -> None:
    assert link_bytes(method, transport, ranks, 1000) == partials * 1000


def test_records_stand_beside_every_baseline_and_the_choice_beside_the_best() -> None:
    records = point_records(SETTING, "p2p", POINT, timings(), table((64, "one-shot")))
    assert [(record["labels"]["method"], record["baseline"]["name"].split(" all-")[0]) for record in records] == [
        (method, baseline)
        for method in ("one-shot", "two-shot")
        for baseline in ("nccl float32", "nccl", "torch one-shot", "torch two-shot")
    ] + [("auto", "torch one-shot")]
    first, auto = records[1], records[-1]
    assert (first["metric"], first["unit"]) == ("us", "us")
    assert first["value"] == pytest.approx(5.0) and first["ratio"] == pytest.approx(9 / 5)
    assert first["bytes_per_call"] == 64 * 4096 * 2
    assert first["share_of_ceiling"] == pytest.approx(64 * 4096 * 2 / 5e-6 / 1e9 / 400)
    assert first["labels"] == {
        "tp_size": 2,
        "hidden_size": 4096,
        "dtype": "bfloat16",
        "transport": "p2p",
        "method": "one-shot",
        "num_tokens": 64,
    }
    assert auto["chosen"] == "one-shot" and auto["within_tolerance"] is True
    assert auto["ratio"] == pytest.approx(8 / 5)


@pytest.mark.parametrize(("chosen_us", "within"), [(8.0, True), (8.23, True), (8.25, False)])
def test_the_choice_may_be_three_percent_slower_than_the_best_baseline(chosen_us: float, within: bool) -> None:
    found = point_records(SETTING, "p2p", POINT, timings(**{"two-shot": chosen_us}), table((1, "two-shot")))[-1]
    assert found["within_tolerance"] is within


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    heard: list[str] = []
    sink = logger.add(heard.append, level="WARNING", format="{message}")
    yield heard
    logger.remove(sink)


def test_float16_stands_beside_nccl_alone(options: Options) -> None:
    def times(point: Point, names: Sequence[str]) -> dict[str, Timing]:
        assert tuple(names) == ("one-shot", "two-shot", "nccl float32", "nccl")
        return {name: timing for name, timing in timings().items() if name in names}

    bench = FirstOfTwoRanks(times)
    bench.dtype = torch.float16
    records = run(replace(options, dtype="float16", num_tokens=(1,), hidden_size=(16,)), bench, OneRank)
    assert {record["baseline"]["name"] for record in records} == {
        "nccl float32 all-reduce + fused add-norm",
        "nccl all-reduce + fused add-norm",
    }


def test_where_nothing_was_measured_the_models_nccl_is_judged() -> None:
    auto = point_records(SETTING, "p2p", POINT, timings(), None)[-1]
    assert auto["chosen"] == "nccl" and auto["within_tolerance"] is False and auto["ratio"] == pytest.approx(8 / 11)
    assert auto["bytes_per_call"] == 64 * 4096 * 4, "it adds up in float32"


def test_a_peer_is_one_more_baseline() -> None:
    found = point_records(replace(SETTING, peer="kraken"), "p2p", POINT, timings(peer=7.0), None)
    assert [record["ratio"] for record in found if record["baseline"]["name"] == "kraken"] == [
        pytest.approx(ratio) for ratio in (7 / 5, 7 / 10, 7 / 11)
    ]


def test_what_is_measured_is_written_and_a_slow_choice_is_said(
    options: Options, tmp_path: Path, warnings: list[str]
) -> None:
    write_choice_tables(tmp_path / "choices.json", [table((1, "one-shot"), (5, "two-shot"))])
    records = run(
        replace(options, hidden_size=(16,), choices=(tmp_path / "choices.json",)),
        FirstOfTwoRanks(lambda point, names: timings()),
        OneRank,
    )
    assert records == read_records(options.output) and len(records) == 2 * 9
    assert [record["chosen"] for record in records if "chosen" in record] == ["one-shot", "two-shot"]
    assert warnings == [
        "5 x 16: auto takes two-shot, 10.0 us, 25 % slower than torch one-shot all-reduce + fused add-norm, 8.0 us "
        "(at most 3 %)\n"
    ]


def test_tuning_writes_the_fastest_that_the_model_can_do_and_names_what_is_faster_still(
    options: Options, warnings: list[str]
) -> None:
    def times(point: Point, names: Sequence[str]) -> dict[str, Timing]:
        assert tuple(names) == ("one-shot", "two-shot", "nccl float32", "nccl")
        found = timings(**{"one-shot": 5.0 * point.num_tokens, "two-shot": 9.0, "nccl": 8.0})
        return {name: found[name] for name in names}

    assert run(replace(options, tune=True), FirstOfTwoRanks(times), OneRank) == []
    assert warnings == [f"5 x {size}: the model's fastest takes 9.0 us, nccl 8.0 us\n" for size in (16, 24)]
    assert model_choice({"one-shot": 3.0, "two-shot": 2.0, "nccl float32": 1.0, "nccl": 0.5}) == "nccl"
    assert [(found.key, found.fastest) for found in read_choice_tables(options.output)] == [
        (("cpu", 2, size, "p2p"), {"1": "one-shot", "5": "two-shot"}) for size in (16, 24)
    ]


@pytest.mark.multi_gpu
@pytest.mark.parametrize("flags", [[], ["--tune"], ["--stress", "--num-replays", "300"]])
def test_two_gpus_measure_and_agree(tmp_path: Path, flags: list[str]) -> None:
    output = tmp_path / "out"
    sizes = [] if "--stress" in flags else ["--num-tokens", "1", "77"]
    arguments = ["--output", str(output), "--hidden-size", "4096", *sizes, *flags]
    environment = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0"}
    (ended,) = wait_all(
        [start_torchrun(["-m", "scripts.benchmark.communication", *arguments], 2, environment)], timeout_s=180
    )
    assert ended.exit_code == 0, ended.stderr
    if "--tune" in flags:
        assert list(read_choice_tables(output)[0].fastest) == ["1", "77"]
    else:
        records = read_records(output)
        assert len(records) == (2 if "--stress" in flags else 2 * 9)
        assert all(record["value"] > 0 for record in records)
