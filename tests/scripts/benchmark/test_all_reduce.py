"""What a communication benchmark measures: a method is checked before it is timed, on every rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from scripts.benchmark import all_reduce
from scripts.benchmark.all_reduce import Point, checksum, largest_row_error, num_calls
from scripts.benchmark.timing import check_peer_name, import_peer
from tests.scripts.benchmark.all_reduce_fakes import ALL_METHODS, OneRank, milliseconds, one_rank_bench


class Spoiled(OneRank):
    """Does to the results of one method what a test asks for, and leaves its sum where its part was, as an all-reduce
    in place does."""

    def spoil(self, hidden: torch.Tensor, residual: torch.Tensor) -> None: ...

    def run(
        self, method: str, partial: torch.Tensor, *arguments: Any, **named: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        results = super().run(method, partial, *arguments, **named)
        partial.fill_(float("nan"))
        if method == "two-shot":
            self.spoil(*results)
        return results


@pytest.mark.parametrize("num_tokens", [5, 9])
def test_every_method_is_checked_and_then_timed(num_tokens: int) -> None:
    bench = one_rank_bench()
    point = Point(num_tokens=num_tokens, hidden_size=16)
    methods = Spoiled(bench.mesh, 16, 9, torch.bfloat16)
    found = bench.times(point, methods, ALL_METHODS)
    assert tuple(found) == ALL_METHODS and methods.calls[:6] == list(ALL_METHODS)
    assert all(timing.num_argument_sets == 20 and timing.median_ms > 0 for timing in found.values())
    assert num_calls(Point(num_tokens=16384, hidden_size=8192)) == 4


def test_a_peer_is_imported_or_refused_in_one_line() -> None:
    assert import_peer("scripts.benchmark.all_reduce:checksum") is checksum
    for place in ("nowhere.to_be_found:make", "scripts.benchmark.all_reduce:missing", "torch", ":"):
        with pytest.raises(ValueError, match=f"--peer {place}: give MODULE:FUNCTION that can be imported"):
            import_peer(place)
    check_peer_name(None, "")
    with pytest.raises(ValueError, match="--peer-name ' ': give the name that tables call --peer by"):
        check_peer_name("module:function", " ")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda hidden, residual: hidden[4].zero_(), "a row of rank 0's hidden states is off by 1.0"),
        (lambda hidden, residual: hidden[:, 3].mul_(1.02), "a row of rank 0's hidden states is off by 0.0"),
        (lambda hidden, residual: hidden[0, 0].fill_(float("nan")), "a row of rank 0's hidden states is off by nan"),
        (lambda hidden, residual: residual[0].mul_(1.001), "a row of rank 0's residual is off by 0.001"),
    ],
)
def test_a_wrong_method_is_not_timed(spoil: Any, message: str) -> None:
    bench = one_rank_bench()
    methods = Spoiled(bench.mesh, 16, 8, torch.bfloat16)
    methods.spoil = spoil  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=f"two-shot at 5 x 16: {message}.*; it is not timed"):
        bench.times(Point(num_tokens=5, hidden_size=16), methods, ALL_METHODS)
    assert methods.calls == ["one-shot", "two-shot"]


def test_ranks_that_differ_in_a_bit_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = one_rank_bench()

    def gather(self: Any, value: Any) -> list[Any]:
        return [value, (value[0], [value[1][0] + 1, value[1][1]])] if isinstance(value, tuple) else [value]

    monkeypatch.setattr(bench.mesh.__class__, "gather", gather)
    with pytest.raises(ValueError, match="one-shot at 5 x 16: the ranks' hidden states differ; it is not timed"):
        bench.times(Point(num_tokens=5, hidden_size=16), OneRank(bench.mesh, 16, 8, torch.bfloat16), ALL_METHODS)


def test_the_link_is_as_fast_as_the_fastest_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = one_rank_bench()
    mesh = replace(bench.mesh, tp_group=mock.Mock())
    monkeypatch.setattr(bench, "mesh", mesh)
    copies = {"slow": lambda: 4.0, "fast": lambda: 0.5}
    monkeypatch.setattr(all_reduce.communication, "link_copies", lambda *arguments: copies)
    monkeypatch.setattr(bench, "time", lambda copy, num_calls, use_cuda_graph: milliseconds(copy()))
    assert bench.link_gb_per_s(2 * 10**6) == pytest.approx(4.0)  # 2 MB in half a millisecond


def test_a_checksum_tells_bits_rows_and_columns_apart() -> None:
    hidden = torch.randn(7, 16).to(torch.bfloat16)
    flipped = hidden.clone()
    flipped.view(torch.int16)[3, 5] ^= 1
    others = [flipped, hidden.roll(1, 0), hidden.roll(1, 1), -hidden]
    assert all(checksum(hidden).ne(checksum(other)).any() for other in others)
    assert checksum(hidden).equal(checksum(hidden.clone())) and checksum(hidden[:0]).tolist() == [0, 0]


def test_the_worst_row_counts() -> None:
    expected = torch.ones(1000, 8)
    found = expected.clone()
    found[-1] = 0
    assert largest_row_error(found, expected) == 1.0
    assert largest_row_error(found[:0], expected[:0]) == 0.0
