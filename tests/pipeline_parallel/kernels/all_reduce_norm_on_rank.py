"""One rank of the all-reduce on GPUs, started by test_all_reduce_norm_on_gpus.py: MODE DIRECTORY, under torchrun's
variables."""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline_parallel.kernels.all_reduce_norm import STRATEGIES, all_reduce_norm
from pipeline_parallel.kernels.barrier import begin
from pipeline_parallel.kernels.workspace import NO_MULTICAST, Workspace, create_workspace
from tests.pipeline_parallel.kernels.all_reduce_norm_cases import Call, handed_over

TOKEN_COUNTS = (0, 1, 3, 77, 255, 257, 1023, 1025)
SHAPES = ((24, torch.float16), (3072, torch.bfloat16), (16384, torch.float16))
GRAPH_SHAPE = (4096, torch.bfloat16)
GRAPH_COUNTS = (1, 77, 257)
GRAPH_STRATEGIES = ("one-shot", "two-shot", "one-shot", "two-shot")  # the second of copies, the third from `own`
NUM_REPLAYS = 300


def all_calls() -> list[Call]:
    """Back to back, large and small by turns."""
    counts = [count for pair in zip(TOKEN_COUNTS, reversed(TOKEN_COUNTS), strict=True) for count in pair]
    pairs = [(count, strategy) for strategy in STRATEGIES for count in counts]
    kinds = ("rms", "layer", "none")
    return [
        Call(index=index, num_tokens=count, strategy=strategy, kind=kinds[index % 3])
        for index, (count, strategy) in enumerate(pairs)
    ]


def run_call(workspace: Workspace, call: Call, *, late: bool = False) -> tuple[Tensor, Tensor]:
    """Put this rank's inputs where they belong, and run; `late`: after the GPU has been busy for a while."""
    size, dtype, device = workspace.hidden_size, workspace.dtype, workspace.device
    arguments = call.arguments(workspace.rank, workspace.world_size, size, dtype)
    moved: dict[str, Any] = {
        name: one.to(device) if isinstance(one, Tensor) else one for name, one in arguments.items()
    }
    partial = call.partial(workspace.rank, size, dtype).to(device)
    if late:
        torch.cuda._sleep(2_000_000)
    own = handed_over(call, workspace, partial)
    programs = 0 if call.may_be_copies else None
    hidden, new_residual = all_reduce_norm(workspace, **moved, own=own, max_programs=programs)
    return hidden.clone(), new_residual


def eager(group: Any, device: torch.device, directory: Path) -> None:
    """Every call at every shape, the last rank late now and then; results to files."""
    for size, dtype in SHAPES:
        workspace = create_workspace(group, max(TOKEN_COUNTS), size, dtype, device)
        assert workspace.transport == "p2p"
        is_slow = workspace.rank == workspace.world_size - 1
        results = [run_call(workspace, call, late=is_slow and call.index % 3 == 0) for call in all_calls()]
        torch.cuda.synchronize()
        assert not workspace.signal_pad.any(), "the signal pad is not zero again"
        torch.save([(a.cpu(), b.cpu()) for a, b in results], directory / f"{size}.{workspace.rank}.pt")


def graphs(group: Any, device: torch.device, directory: Path) -> None:
    """Graphs of several counts, replayed by turns with changing inputs, with eager calls in between."""
    size, dtype = GRAPH_SHAPE
    workspace = create_workspace(group, max(GRAPH_COUNTS), size, dtype, device)
    captured: dict[int, tuple[torch.cuda.CUDAGraph, list[Tensor], list[Tensor]]] = {}
    for count in GRAPH_COUNTS:
        calls = [
            Call(index=4 * count + position, num_tokens=count, strategy=strategy)
            for position, strategy in enumerate(GRAPH_STRATEGIES)
        ]
        for call in calls:
            run_call(workspace, call)  # compiles
        given = [torch.empty(count, size, dtype=dtype, device=device) for _ in calls]
        torch.cuda.synchronize()
        graph, results = torch.cuda.CUDAGraph(), []
        with torch.cuda.graph(graph):
            begin(workspace)
            for position, (call, partial) in enumerate(zip(calls, given, strict=True)):
                options: dict[str, Any] = {"kind": "rms", "eps": 1e-5, "strategy": call.strategy}
                options["max_programs"] = 0 if call.may_be_copies else None
                if position == 2:
                    options["own"] = partial
                else:
                    workspace.partial(count).copy_(partial)
                results.append(all_reduce_norm(workspace, count, None, None, None, None, **options)[0].clone())
        captured[count] = (graph, given, results)
    wrong = torch.zeros((), dtype=torch.bool, device=device)
    for replay in range(NUM_REPLAYS):
        count = GRAPH_COUNTS[replay % 3]
        graph, given, results = captured[count]
        generator = torch.Generator(device).manual_seed(replay)
        shape = (len(given), workspace.world_size, count, size)
        everybody = torch.randn(shape, device=device, generator=generator).to(dtype)
        for position, partial in enumerate(given):
            partial.copy_(everybody[position, workspace.rank])
        if workspace.rank == replay % workspace.world_size:
            torch.cuda._sleep(100_000)
        graph.replay()
        for position, result in enumerate(results):
            total = everybody[position].float().sum(0)
            expected = torch.nn.functional.rms_norm(total, (size,), eps=1e-5)
            wrong |= ~torch.isclose(result.float(), expected, rtol=2**-7, atol=1e-3).all()
        if replay % 10 == 0:
            begin(workspace)
            run_call(workspace, Call(index=replay, num_tokens=3, strategy="one-shot"))
    torch.cuda.synchronize()
    assert not wrong, "a replay's result is wrong"
    assert not workspace.signal_pad.any(), "the signal pad is not zero again"


def mismatch(group: Any, device: torch.device, directory: Path) -> None:
    """Ranks that disagree about the number of tokens; what is expected of them is an error."""
    workspace = create_workspace(group, 8, 64, torch.bfloat16, device)
    run_call(workspace, Call(index=2, num_tokens=3 + workspace.rank, strategy="two-shot"))  # the kernel, no copies
    torch.cuda.synchronize()


def main() -> None:
    assert os.environ.get(NO_MULTICAST) == "1", f"{NO_MULTICAST}=1 must be set before ranks meet"
    mode, directory = sys.argv[1], Path(sys.argv[2])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    group = dist.group.WORLD
    {"eager": eager, "graphs": graphs, "mismatch": mismatch}[mode](group, device, directory)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
