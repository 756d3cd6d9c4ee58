"""Two-shot of all_reduce_norm with copies between the ranks instead of loads and stores by multiprocessors.

    staged[peer] <- partial_peer[my rows]            each peer's part of my rows, by the copy engines
    hidden[my rows], new_residual <- add_norm(partial[my rows] + staged, ...)     one ordinary kernel, on this GPU alone
    hidden_peer[my rows] <- hidden[my rows]          to each peer, by the copy engines

with a barrier before the first copy and one after the last. Copies and barriers (stream_meeting.py) take no
multiprocessor and wait for none, so what runs beside them keeps its own (as decomposed all-gathers do in torch's
asynchronous tensor parallelism); alone, a call is slower than the one kernel, which moves and computes at once. The sum
starts with this rank's own part, the others follow in order of ranks; hidden is computed once and has the same bits
everywhere.
"""

import torch
from torch import Tensor

from modules.kernels.add_norm import fused_add_norm
from pipeline_parallel.kernels.stream_meeting import ENTRY, EXIT, meet_in_stream
from pipeline_parallel.kernels.workspace import Workspace


def copied_two_shot(
    workspace: Workspace,
    num_tokens: int,
    rows: range,
    residual: Tensor | None,
    weight: Tensor | None,
    norm_bias: Tensor | None,
    bias: Tensor | None,
    *,
    kind: str,
    eps: float,
) -> Tensor:
    """This rank's rows of the new residual; the result is in `workspace.hidden` (see `all_reduce_norm`, which checks
    the arguments and lets the partials take turns). A CUDA graph can hold it."""
    peers = [peer for peer in range(workspace.world_size) if peer != workspace.rank]
    mine = slice(rows.start, rows.stop)
    tag = 2 * num_tokens + 2
    meet_in_stream(workspace, ENTRY, tag)
    staged = torch.empty(len(peers), len(rows), workspace.hidden_size, dtype=workspace.dtype, device=workspace.device)
    for place, peer in enumerate(peers):
        staged[place].copy_(workspace.partial_of(peer, num_tokens)[mine])
    hidden, new_residual = fused_add_norm(
        workspace.partial(num_tokens)[mine],
        residual,
        weight,
        norm_bias,
        bias,
        kind=kind,
        eps=eps,
        out_dtype=workspace.dtype,
        more=staged,
        out=workspace.hidden[mine],
    )
    for peer in peers:
        workspace.hidden_of(peer)[mine].copy_(hidden)
    meet_in_stream(workspace, EXIT, tag)
    return new_residual
