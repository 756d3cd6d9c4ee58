"""The compiled all-reduce on GPUs of one host, peer to peer, a process a GPU. (Replays of graphs among eager calls are
the stress of `scripts.benchmark.communication`; see its tests.)"""

from pathlib import Path

import pytest
import torch

from pipeline_parallel.kernels.workspace import NO_MULTICAST
from tests.pipeline_parallel.kernels import all_reduce_norm_on_rank as ranks
from tests.pipeline_parallel.kernels.all_reduce_norm_cases import assert_right
from tests.pipeline_parallel.launching import Ended, start_ranks, wait_all

pytestmark = pytest.mark.multi_gpu
WORLD_SIZES = (2, 4, 8)


def run_ranks(world_size: int, mode: str, directory: Path) -> list[Ended]:
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} GPUs, has {torch.cuda.device_count()}")
    started = start_ranks([ranks.__file__, mode, str(directory)], world_size, {NO_MULTICAST: "1"})
    return wait_all(started, timeout_s=240.0)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_equation_holds_for_alternating_sizes_with_a_late_rank(world_size: int, tmp_path: Path) -> None:
    ended = run_ranks(world_size, "eager", tmp_path)
    assert all(one.exit_code == 0 for one in ended), ended
    for size, dtype in ranks.SHAPES:
        found = [torch.load(tmp_path / f"{size}.{rank}.pt") for rank in range(world_size)]
        for call, results in zip(ranks.all_calls(), zip(*found, strict=True), strict=True):
            assert_right(call, list(results), size, dtype, own_first=call.may_be_copies)


def test_ranks_that_disagree_fail_instead_of_hanging(tmp_path: Path) -> None:
    ended = run_ranks(2, "mismatch", tmp_path)
    # Whoever launches next is told: torch, or Triton.
    said = ("CUDA error", "Triton Error [CUDA]")
    assert all(one.exit_code != 0 and any(text in one.stderr for text in said) for one in ended), ended
