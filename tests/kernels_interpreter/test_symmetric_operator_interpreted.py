"""The fused junction in a decoder with the kernels themselves, whole passes and split ones: two ranks as processes,
under Triton's interpreter."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pipeline_parallel import fused_add_norm, overlap
from pipeline_parallel.communication import ReducingAddNorm
from pipeline_parallel.fused_add_norm import FusedAddNorm, SymmetricOperator
from pipeline_parallel.kernels import all_reduce_norm
from pipeline_parallel.kernels.workspace import STREAM_BARRIERS
from pipeline_parallel.mesh import ParallelMesh
from pipeline_parallel.overlap import Overlap, split_prefills
from tests.modules.tiny_kinds import KINDS, random_tokens
from tests.modules.tiny_models import tiny_hf_model
from tests.pipeline_parallel.kernels.shared_ranks import SharedMemory, run_ranks
from tests.pipeline_parallel.thread_operator import by_tokens, loaded

pytestmark = [
    pytest.mark.skipif(all_reduce_norm.triton is None, reason="triton is not installed"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"),
]


@pytest.mark.parametrize("kind", ["llama-biases", "opt"])
def test_states_are_those_of_the_unfused_junction(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hf_config = KINDS[kind] | {"num_hidden_layers": 1}
    weights = tiny_hf_model(hf_config).state_dict()
    memories = [SharedMemory(2, 12, 48, torch.bfloat16, pad_bytes=4 * 2 * (12 + STREAM_BARRIERS)) for _ in range(2)]
    tokens, lengths = random_tokens(3, 5), torch.tensor([4, 1, 3])
    real = torch.arange(4) < lengths[:, None]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(overlap, "STEP", 3)

    def on_rank(rank: int) -> list[list[Tensor]]:
        dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 2), rank=rank, world_size=2)
        mesh = ParallelMesh(tp_rank=rank, tp_size=2, device=torch.device("cpu"), tp_group=dist.group.WORLD)
        model = loaded(hf_config, mesh, weights, torch.bfloat16)
        monkeypatch.setattr(fused_add_norm, "create_workspace", lambda *arguments: memories[1].workspace(rank))

        def states() -> list[Tensor]:
            cache = model.new_cache(3, 8)
            found = [model(tokens[:, :4], cache=cache, num_tokens=lengths)[real]]
            return [*found, model(tokens[:, 4:], cache=cache, phase="decode").clone()]

        with torch.inference_mode():
            unfused = model.add_norm
            assert isinstance(unfused, ReducingAddNorm)
            found = [states()]
            operator = SymmetricOperator(memories[0].workspace(rank), dist.group.WORLD)
            model.add_norm = FusedAddNorm(unfused, operator, by_tokens, lambda: False)
            found.append(states())
            split_prefills(model, 12, ())
            found.append(states())
            assert isinstance(model.prefill_driver, Overlap) and model.prefill_driver.num_split == 1
        dist.destroy_process_group()
        return found

    first, second = run_ranks(2, on_rank, tmp_path)
    for ours, theirs in zip(first, second, strict=True):
        assert all(map(torch.equal, ours, theirs)), "the ranks differ"
    unfused, *others = first
    for found in others:
        for ours, theirs in zip(found, unfused, strict=True):
            # Partial sums are rounded to bfloat16 once more.
            torch.testing.assert_close(ours.float(), theirs.float(), rtol=2**-6, atol=0.05)
    for memory in memories:
        memory.assert_guards_intact()
