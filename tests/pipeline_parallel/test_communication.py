"""All-reduces of others, as far as a CPU goes: NCCL's name stands for the group's own."""

from unittest import mock

import pytest
import torch

from pipeline_parallel import communication
from pipeline_parallel.communication import reduce_by
from pipeline_parallel.mesh import ParallelMesh
from tests.pipeline_parallel.thread_ranks import ThreadNetwork, on_threads


@pytest.mark.parametrize(("name", "dtype"), [("nccl", torch.bfloat16), ("nccl float32", torch.float32)])
def test_nccls_sum_is_that_of_the_group_in_its_own_type_or_in_float32(name: str, dtype: torch.dtype) -> None:
    def total(mesh: ParallelMesh) -> torch.Tensor:
        assert mesh.tp_group is not None
        return reduce_by(name, torch.full((2, 3), 1.0 + mesh.tp_rank, dtype=torch.bfloat16), mesh.tp_group)

    with mock.patch.object(communication, "dist", ThreadNetwork()):
        for found in on_threads(3, 1, total):
            assert found.tolist() == [[6.0] * 3] * 2 and found.dtype == dtype
