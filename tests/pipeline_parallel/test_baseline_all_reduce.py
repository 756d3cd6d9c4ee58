"""All-reduces of others, as far as a CPU goes: NCCL's name stands for the group's own, and multicast is spoken of."""

from unittest import mock

import pytest
import torch

from pipeline_parallel import baseline_all_reduce
from pipeline_parallel.baseline_all_reduce import reduce_by, require_stated_multicast
from pipeline_parallel.mesh import ParallelMesh
from tests.pipeline_parallel.thread_ranks import ThreadNetwork, on_threads


@pytest.mark.parametrize(
    ("disabled", "nvls", "message"),
    [
        (None, "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST is None: set it to 1"),
        ("yes", "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST is 'yes': set it to 1"),
        ("1", None, "forbids multicast, which NCCL uses too: set NCCL_NVLS_ENABLE=0"),
        ("1", "1", "forbids multicast, which NCCL uses too: set NCCL_NVLS_ENABLE=0"),
        ("1", "0", None),
        ("0", None, None),
    ],
)
def test_the_environment_must_say_whether_multicast_is_allowed(
    monkeypatch: pytest.MonkeyPatch, disabled: str | None, nvls: str | None, message: str | None
) -> None:
    for name, value in (("TORCH_SYMM_MEM_DISABLE_MULTICAST", disabled), ("NCCL_NVLS_ENABLE", nvls)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    if message is None:
        require_stated_multicast()
    else:
        with pytest.raises(ValueError, match=message):
            require_stated_multicast()


def test_nccls_sum_is_that_of_the_group() -> None:
    def total(mesh: ParallelMesh) -> torch.Tensor:
        assert mesh.tp_group is not None
        return reduce_by("nccl", torch.full((2, 3), 1.0 + mesh.tp_rank), mesh.tp_group)

    with mock.patch.object(baseline_all_reduce, "dist", ThreadNetwork()):
        assert [found.tolist() for found in on_threads(3, 1, total)] == [[[6.0] * 3] * 2] * 3


def test_an_unknown_all_reduce_is_refused() -> None:
    with pytest.raises(ValueError, match="all-reduce 'ring' is not one of nccl, torch one-shot, torch two-shot"):
        reduce_by("ring", torch.zeros(1), mock.Mock())
