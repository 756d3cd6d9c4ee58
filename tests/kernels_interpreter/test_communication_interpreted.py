"""The communication benchmark with the kernels themselves, two ranks as processes, under Triton's interpreter."""

import os
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from analysis.results import read_records
from pipeline_parallel.kernels import all_reduce_norm
from pipeline_parallel.mesh import ParallelMesh
from scripts.benchmark import all_reduce, communication
from scripts.benchmark.all_reduce import Bench, GpuMethods
from scripts.benchmark.communication import Options, run
from tests.pipeline_parallel.kernels.shared_ranks import SharedMemory, run_ranks

# Marks, not a skip of the module: pytest fails a run that collects nothing, and scripts/test.sh with it.
pytestmark = [
    pytest.mark.skipif(all_reduce_norm.triton is None, reason="triton is not installed"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"),
]


class SharedMethods(GpuMethods):
    """Epochs stand for signals under the interpreter, and leave their counts in the pads."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.signal_pad = torch.zeros(1)


def test_the_kernels_pass_their_checks_and_the_stress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = SharedMemory(2, 3, 32, torch.bfloat16, 4096)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(
        all_reduce.communication,
        "symmetric_tensor",
        lambda shape, dtype, device, group: (torch.zeros(shape, dtype=dtype), None),
    )
    monkeypatch.setattr(all_reduce, "num_calls", lambda point: 2)
    monkeypatch.setattr(all_reduce, "MAX_ROWS", 2)  # of the two sizes one is left where it is read
    monkeypatch.setitem(communication.NAMES, torch.bfloat16, ("nccl float32", "nccl"))  # torch's own run on GPUs only
    monkeypatch.setattr(Bench, "link_gb_per_s", lambda bench: 1.0)
    timer = all_reduce.time_function
    monkeypatch.setattr(
        all_reduce,
        "time_function",
        lambda function, sets, **named: timer(function, sets, **{**named, "num_samples": 1, "num_warmup": 1}),
    )

    def on_rank(rank: int) -> int:
        monkeypatch.setattr(all_reduce, "create_workspace", lambda *arguments: shared.workspace(rank))
        dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 2), rank=rank, world_size=2)
        mesh = ParallelMesh(tp_rank=rank, tp_size=2, device=torch.device("cpu"), tp_group=dist.group.WORLD)
        options = Options(output=tmp_path / "r.jsonl", num_tokens=(1, 3), hidden_size=(32,), num_replays=4, quiet=True)
        bench = Bench(mesh, torch.bfloat16, seed=0)
        with torch.inference_mode(), mock.patch("scripts.benchmark.all_reduce_stress.NUM_SERIES", 2):
            found = run(options, bench, SharedMethods) + run(replace(options, stress=True), bench, SharedMethods)
        dist.destroy_process_group()
        return len(found)

    assert run_ranks(2, on_rank, tmp_path) == [2 * 5 + 2, 0]  # rank 0 writes
    methods = [record["labels"]["method"] for record in read_records(tmp_path / "r.jsonl")]
    assert methods == ["one-shot", "one-shot", "two-shot", "two-shot", "auto"] * 2 + ["stress", "stress of copies"]
    shared.assert_guards_intact()
