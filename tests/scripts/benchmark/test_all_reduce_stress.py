"""The stress of the fused all-reduce without a GPU: its order of calls, and that it finds what it looks for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from analysis.results import read_records
from pipeline_parallel.kernels import copied_two_shot
from pipeline_parallel.kernels.copied_two_shot import ENTRY, EXIT
from scripts.benchmark.all_reduce import COPIES, FUSED, OURS
from scripts.benchmark.all_reduce_stress import (
    ARRIVAL,
    CALLS,
    CALLS_WITHOUT_BEGIN,
    NUM_INPUTS,
    NUM_SERIES,
    PEERS,
    RESULT,
    Series,
    Stress,
    awkward_counts,
    make_series,
    make_steps,
    reading_late,
)
from scripts.benchmark.communication import Options, run
from tests.scripts.benchmark.all_reduce_fakes import OneRank, one_rank_bench


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_series_hold_every_size_and_rank_and_are_the_same_everywhere(ranks: int) -> None:
    counts = awkward_counts(ranks)
    series = make_series(counts, OURS, ranks, seed=0)
    assert series == make_series(counts, OURS, ranks, seed=0) != make_series(counts, OURS, ranks, seed=1)
    calls = [call for each in series for call in each.calls]
    assert set(calls) == {(num_tokens, method) for num_tokens in counts for method in ("one-shot", "two-shot")}
    assert all(len(each.calls) == CALLS for each in series) and len(series) == NUM_SERIES
    assert all(first != second for first, second in zip(calls, calls[1:], strict=False))
    assert {(each.late_rank, each.late_call) for each in series} == {
        (rank, call) for rank in range(ranks) for call in range(CALLS)
    }
    assert {(each.late_rank, each.late_in) for each in series} == {
        (rank, way) for rank in range(ranks) for way in (ARRIVAL, RESULT)
    }


@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_every_rank_is_late_in_every_way_among_copies(ranks: int, begins: bool) -> None:
    series = make_series((77, 255, 1025), FUSED, ranks, seed=0, begins=begins)
    assert {(each.late_rank, each.late_in) for each in series} == {
        (rank, way) for rank in range(ranks) for way in (ARRIVAL, PEERS, RESULT)
    }
    late = [method for each in series if each.late_in == PEERS for _, method in each.calls]
    assert late.count(COPIES) >= 4
    pairs = {(one, other) for each in series for (_, one), (_, other) in zip(each.calls, each.calls[1:], strict=False)}
    assert pairs == {(one, other) for one in FUSED for other in FUSED}, "copies come before and after everything"


def test_one_count_alternates_between_the_methods_and_many_all_find_a_place() -> None:
    calls = [call for each in make_series((77,), OURS, 2, seed=0) for call in each.calls]
    assert all(first != second for first, second in zip(calls, calls[1:], strict=False))
    assert len({call for each in make_series(range(1, 101), OURS, 2, seed=0) for call in each.calls}) == 200


@pytest.mark.parametrize("begins", [True, False])
def test_series_without_begin_give_both_buffers_equal_turns(begins: bool) -> None:
    series = make_series((1, 5), OURS, 2, seed=0, begins=begins)
    assert {len(each.calls) for each in series} == {CALLS if begins else CALLS_WITHOUT_BEGIN}
    assert {each.begins for each in series} == {begins} and (CALLS % 2, CALLS_WITHOUT_BEGIN % 2) == (1, 0)
    methods = methods_of(OneRank)
    begun = []
    methods.begin = lambda: begun.append(methods.turn)
    stress = Stress(one_rank_bench(), methods, 16, series)
    stress.run(make_steps(20, len(series), seed=0), quiet=True)
    assert begun[0] == 0 and len(begun) == 1 + (len(series) + 22) * begins


def test_steps_change_series_input_and_launch() -> None:
    steps = make_steps(10_000, NUM_SERIES, seed=0)
    assert steps == make_steps(10_000, NUM_SERIES, seed=0)
    assert {step.series_idx for step in steps} == set(range(NUM_SERIES))
    assert {idx for step in steps for idx in step.inputs} == set(range(NUM_INPUTS))
    assert sum(step.replayed for step in steps) == 10_000 and len(steps) == 11_000
    assert 800 < sum(not step.replayed for step in steps[:10_000]) < 1_000  # all along, not at the end


SERIES = [
    Series(calls=((5, "one-shot"), (0, "two-shot"), (3, "two-shot")), late_rank=0, late_call=1),
    Series(calls=((1, "two-shot"), (5, "two-shot"), (1, "one-shot")), late_rank=0, late_call=0),
]


class Faulty(OneRank):
    """Goes wrong in one call, counted from 1; 0: in none. `turn_ahead`: adds up what the call before was given."""

    faulty_call = 0
    turn_ahead = 0
    factor = 1.0
    result = 0  # hidden states, 1: residual

    def read_turn(self) -> int:
        return (self.turn + self.turn_ahead) % 2

    def run(self, method: str, *arguments: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
        results = super().run(method, *arguments, **named)
        if len(self.calls) == self.faulty_call:
            results[self.result][-1, 7] *= self.factor
        return results


def stressed(methods: OneRank, num_replays: int = 20) -> None:
    bench = one_rank_bench()
    stress = Stress(bench, methods, 16, SERIES)
    methods.calls.clear()
    stress.run(make_steps(num_replays, len(SERIES), seed=0), quiet=True)


def methods_of(kind: type[OneRank]) -> Any:
    return kind(one_rank_bench().mesh, 16, 8, torch.bfloat16)


def test_what_is_right_passes() -> None:
    methods = methods_of(OneRank)
    stressed(methods)
    assert len(methods.calls) == 22 * CALLS


@pytest.mark.parametrize(("result", "factor"), [(0, 1.05), (0, float("nan")), (1, 1.001), (1, float("nan"))])
def test_one_wrong_element_of_either_result_is_found_and_named(result: int, factor: float) -> None:
    methods = methods_of(Faulty)
    methods.faulty_call, methods.factor, methods.result = 33, factor, result
    with pytest.raises(
        ValueError,
        match=r"1 calls went wrong on rank 0, the first of them .* \(call 2 of step 10, from .*\): 1 elements",
    ):
        stressed(methods)


def test_numbers_of_another_call_are_found() -> None:
    methods = methods_of(Faulty)
    methods.turn_ahead = 1
    with pytest.raises(ValueError, match="calls went wrong on rank 0, the first of them .* of step 0"):
        stressed(methods)


def test_a_signal_that_is_left_is_found() -> None:
    methods = methods_of(OneRank)
    methods.signal_pad[3] = 7
    with pytest.raises(ValueError, match="1 slots of rank 0's signal pad are not zero after all calls"):
        stressed(methods)


def test_ranks_that_differ_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(self: Any, value: Any) -> list[Any]:
        if not isinstance(value, tuple):
            return [value]
        sums = value[1].clone()
        sums[4, 1, 0] += 1
        return [value, (value[0], sums, value[2])]

    methods = methods_of(OneRank)
    monkeypatch.setattr(one_rank_bench().mesh.__class__, "gather", gather)
    with pytest.raises(ValueError, match=r"1 results of rank 1 are not those of rank 0, .* \(call 1 of step 4, from"):
        stressed(methods)


def test_copies_are_stressed_where_the_model_makes_calls_of_them(tmp_path: Any) -> None:
    options = Options(output=tmp_path / "r.jsonl", stress=True, hidden_size=(16,), num_replays=4, quiet=True)
    sizes: dict[str, set[int]] = {name: set() for name in FUSED}

    class Noting(OneRank):
        def run(self, method: str, partial: torch.Tensor, *arguments: Any, **named: Any) -> Any:
            sizes[method].add(len(partial))
            return super().run(method, partial, *arguments, **named)

    records = run(options, one_rank_bench(), Noting)
    assert [(record["value"], record["metric"], record["labels"]["method"]) for record in records] == [
        (4, "replays_without_error", label) for label in ("stress", "stress of copies")
    ]
    assert sizes["two-shot"] == sizes["one-shot"] == set(awkward_counts(1))
    assert sizes[COPIES] == {77, 255, 257, 1023, 1025}


def test_what_was_stressed_without_an_error_is_kept_if_the_copies_go_wrong(tmp_path: Any) -> None:
    class WrongCopies(OneRank):
        def run(self, method: str, *arguments: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
            hidden, residual = super().run(method, *arguments, **named)
            return (hidden * 1.05 if method == COPIES else hidden), residual

    options = Options(output=tmp_path / "r.jsonl", stress=True, num_tokens=(5,), hidden_size=(16,), num_replays=4)
    with pytest.raises(ValueError, match="the first of them copies of 5 tokens"):
        run(options, one_rank_bench(), WrongCopies)
    assert [record["labels"]["method"] for record in read_records(options.output)] == ["stress"]


def test_reading_late_comes_between_the_first_barrier_of_a_call_and_its_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[object] = []
    monkeypatch.setattr(copied_two_shot, "stream_barrier", lambda workspace, place, tag: events.append(place))
    with reading_late(lambda: events.append("pause")):
        for place in (ENTRY, EXIT):
            copied_two_shot.stream_barrier(None, place, 156)  # type: ignore[arg-type]
    copied_two_shot.stream_barrier(None, ENTRY, 156)  # type: ignore[arg-type]
    assert events == [ENTRY, "pause", EXIT, ENTRY]
