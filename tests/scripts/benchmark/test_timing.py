from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from scripts.benchmark.timing import measure_read_ceiling, num_cold_sets, time_function

MIB = 2**20


@pytest.fixture
def pass_time(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Stands in for work of so many seconds: moves a clock that does not move otherwise."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def advance(seconds: float) -> None:
        now[0] += seconds

    return advance


def test_a_known_duration_is_measured(pass_time: Callable[[float], None]) -> None:
    durations = iter([9.0, *range(1, 12)])  # a warm-up, then 1 to 11 seconds
    timing = time_function(lambda: pass_time(next(durations)), device="cpu", num_warmup=1, num_samples=11)
    assert (timing.p10_ms, timing.median_ms, timing.p90_ms) == pytest.approx((2000.0, 6000.0, 10000.0))
    assert timing.num_samples == 11 and not timing.uses_cuda_graph
    assert timing.achieved_gb_per_s(12e9) == pytest.approx(2.0)


def test_argument_sets_take_turns_and_a_sample_is_their_mean(pass_time: Callable[[float], None]) -> None:
    calls: list[float] = []

    def work(seconds: float) -> None:
        calls.append(seconds)
        pass_time(seconds)

    timing = time_function(work, [(1.0,), (2.0,), (6.0,)], device="cpu", num_warmup=2, num_samples=4)
    assert calls == [1.0, 2.0, 6.0] * 6
    assert timing.num_argument_sets == 3
    assert timing.median_ms == pytest.approx(3000.0)


def test_the_reducer_sees_this_ranks_samples_and_its_result_counts() -> None:
    def slowest_of_ranks(samples: list[float]) -> list[float]:
        assert len(samples) == 3
        return [max(each, 80.0) for each in samples]

    timing = time_function(lambda: None, device="cpu", num_samples=3, reduce_max=slowest_of_ranks)
    assert timing.median_ms == 80.0


def test_ceilings_are_plausible() -> None:
    assert 0.1 < measure_read_ceiling("cpu", num_bytes=16 * MIB) < 5000


def test_enough_argument_sets_to_defeat_the_cache() -> None:
    assert num_cold_sets(256 * MIB, "cpu") == 1
    assert num_cold_sets(64 * MIB, "cpu") == 4
    assert num_cold_sets(0, "cpu") == 256 * MIB


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="use_cuda_graph needs a CUDA device, not cpu"):
        time_function(lambda: None, device="cpu", use_cuda_graph=True)
    with pytest.raises(ValueError, match="at least 1 each, not 0, 3 and 30"):
        time_function(lambda: None, [], device="cpu")


@pytest.mark.cuda
@pytest.mark.parametrize("use_cuda_graph", [False, True])
def test_a_gpu_matmul_is_timed_on_the_device(use_cuda_graph: bool) -> None:
    matrices = [(torch.randn(4096, 4096, device="cuda"), torch.randn(4096, 4096, device="cuda")) for _ in range(2)]
    timing = time_function(torch.matmul, matrices, device="cuda", use_cuda_graph=use_cuda_graph)
    assert 0.1 < timing.median_ms < 100
    assert timing.uses_cuda_graph == use_cuda_graph


@pytest.mark.cuda
def test_gpu_ceilings_are_plausible() -> None:
    assert 100 < measure_read_ceiling("cuda") < 20000
