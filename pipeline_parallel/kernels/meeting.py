"""When the ranks of a workspace have all come to the same place in their streams: a barrier as a launch of its own."""

import torch

from pipeline_parallel.kernels.workspace import Workspace

try:
    import triton
except ImportError:  # published for Linux on x86-64 only; elsewhere nothing here can run
    triton = None

if triton is not None:
    from pipeline_parallel.kernels.barrier import barrier_kernel

BEGIN_TAG = 2**31 - 1  # less 2 * T or 2 * T + 1; those of calls of T rows are 2 * T + 1 and 2 * T + 2


def meet(workspace: Workspace, tag: int) -> None:
    """Wait, on the device, until every rank has come here; what they wrote before can then be read (a collective call).

    `tag`: what is being run, the same on all ranks, not 0. Ranks that differ in it are a CUDA error, not a hang.
    """
    check_launch(1, workspace)
    with torch.cuda.device_of(workspace.hidden):
        barrier_kernel[(1,)](
            workspace.signal_pointers,
            workspace.rank,
            tag,
            WORLD_SIZE=workspace.world_size,
            SIGNALS=not is_interpreted(),
        )


def begin(workspace: Workspace, num_tokens: int = 0, *, copies: bool = False) -> None:
    """Wait until every rank has come here, on the device; the next call reads the first of the two partials.

    A collective call, with which a CUDA graph that holds all_reduce_norm begins, and so does whatever follows a replay.
    `num_tokens`, and whether calls are made of `copies`: of all that follow until the next one. Ranks that differ in
    them are a CUDA error here; among calls made of copies nothing else would tell.
    """
    meet(workspace, BEGIN_TAG - (2 * num_tokens + copies))
    workspace.turn = 0


def check_launch(programs: int, workspace: Workspace) -> None:
    """ValueError where the kernels cannot run, or not so many programs on the workspace's signal pads."""
    if triton is None:
        raise ValueError("triton is not installed: nothing can reduce through symmetric memory")
    if workspace.device.type != "cuda" and not is_interpreted():
        raise ValueError(f"the workspace is on {workspace.device}: there the kernel runs under TRITON_INTERPRET=1 only")
    workspace.check_programs(programs)


def is_interpreted() -> bool:
    """Settled when the kernels were decorated, not by today's value of the variable."""
    return not isinstance(barrier_kernel, triton.JITFunction)
