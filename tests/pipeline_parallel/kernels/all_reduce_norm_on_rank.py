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
from pipeline_parallel.kernels.workspace import NO_MULTICAST, Workspace, create_workspace
from tests.pipeline_parallel.kernels.all_reduce_norm_cases import Call, handed_over

TOKEN_COUNTS = (0, 1, 3, 77, 255, 257, 1023, 1025)
SHAPES = ((24, torch.float16), (3072, torch.bfloat16), (16384, torch.float16))


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


def mismatch(group: Any, device: torch.device, directory: Path) -> None:
    """Ranks that disagree about the number of tokens; what is expected of them is an error."""
    workspace = create_workspace(group, 8, 64, torch.bfloat16, device)
    run_call(workspace, Call(index=2, num_tokens=3 + workspace.rank, strategy="two-shot"))  # the kernel, no copies
    torch.cuda.synchronize()


def main() -> None:
    assert os.environ.get(NO_MULTICAST) == "1", f"{NO_MULTICAST}=1 must be set before any rendezvous"
    mode, directory = sys.argv[1], Path(sys.argv[2])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    group = dist.group.WORLD
    {"eager": eager, "mismatch": mismatch}[mode](group, device, directory)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
