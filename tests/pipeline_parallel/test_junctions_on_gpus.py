"""The fused junction and split prefills in a decoder, on GPUs of one host, a process a GPU."""

import pytest
import torch

from pipeline_parallel.kernels.workspace import NCCL_MULTICAST, NO_MULTICAST
from tests.pipeline_parallel import junctions_on_rank
from tests.pipeline_parallel.launching import start_ranks, wait_all

pytestmark = pytest.mark.multi_gpu


@pytest.mark.parametrize("world_size", [2, 4])
def test_junctions_and_split_prefills_give_the_same_states(world_size: int) -> None:
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} GPUs, has {torch.cuda.device_count()}")
    environment = {NO_MULTICAST: "1", NCCL_MULTICAST: "0"}
    ended = wait_all(start_ranks([junctions_on_rank.__file__], world_size, environment), timeout_s=300.0)
    assert all(one.exit_code == 0 for one in ended), ended
