"""How splits are tuned, without GPUs: what is tried, what is kept, and the file it is written to."""

from pathlib import Path

import pytest
import torch

from pipeline_parallel.all_reduce_choice import SplitPoint, read_split_points, write_split_points
from scripts.benchmark.prefill import OFFSETS, PROGRAMS, Options, best_split, even_split, main, problem_of


def cost(point: SplitPoint) -> float:
    """Least at 16 and 64 programs and 256 tokens more in the first half."""
    return abs(point.attention_programs - 16) + abs(point.mlp_programs - 64) + abs(point.offset - 256)


def test_each_value_is_tuned_at_the_best_of_the_others() -> None:
    tried: list[SplitPoint] = []

    def time(point: SplitPoint) -> float:
        tried.append(point)
        return cost(point)

    best = SplitPoint(num_tokens=2048, attention_programs=16, mlp_programs=64, offset=256)
    assert best_split(2048, time, has_programs=True) == (best, 0.0)
    assert len(tried) == 1 + 2 * (len(PROGRAMS) - 1) + len(OFFSETS) - 1 and len(set(tried)) == len(tried)


def test_nccls_junction_has_no_programs_and_no_half_is_empty() -> None:
    tried: list[SplitPoint] = []

    def time(point: SplitPoint) -> float:
        tried.append(point)
        return 1.0

    assert best_split(1024, time, has_programs=False) == (even_split(1024), 1.0)
    assert [point.offset for point in tried] == [0, -256, 256]


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    points = [even_split(1024), SplitPoint(num_tokens=4096, attention_programs=8, mlp_programs=16, offset=-256)]
    path = tmp_path / "splits" / "GPU-2x4096.json"
    write_split_points(path, points)
    assert read_split_points(path) == points
    with pytest.raises(ValueError, match="there is no token count"):
        write_split_points(path, [])
    assert read_split_points(path) == points


def test_split_states_may_differ_as_rounding_does_and_no_more() -> None:
    whole, noise = torch.randn(2, 8, 16), torch.randn(2, 8, 16)

    def off(share: float) -> torch.Tensor:
        return whole + share * noise * whole.norm() / noise.norm()

    exact, inexact = whole[:, :6], off(0.03)[:, :6]
    assert problem_of(off(0.019), whole, exact) is None and problem_of(off(0.05), whole, inexact) is None
    for found, shorter in ((off(0.021), exact), (off(0.5), inexact), (whole * float("nan"), inexact)):
        assert "off the whole ones" in (problem_of(found, whole, shorter) or "")
    assert "off the whole ones" in (problem_of(off(0.05), whole, inexact * float("nan")) or "")
    assert "rounding explains 0.1" in (problem_of(off(0.11), whole, off(0.4)[:, :6]) or "")


def test_one_rank_has_nothing_to_tune(tmp_path: Path) -> None:
    options = Options(output=tmp_path / "s.json", shape="tiny", device="cpu", tune_splits=True, quiet=True)
    with pytest.raises(ValueError, match="--tune-splits needs ranks that share all layers, not --tp-size 1"):
        main(options)
