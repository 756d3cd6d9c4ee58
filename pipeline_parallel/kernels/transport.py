"""Whether multimem may be used: only after it has agreed with peer to peer, on the very buffers, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from loguru import logger
from torch import Tensor

from pipeline_parallel.kernels.all_reduce_norm import all_reduce_norm
from pipeline_parallel.kernels.meeting import begin
from pipeline_parallel.kernels.workspace import Workspace

ROWS_A_RANK = 4


def verify_transport(workspace: Workspace, gather: Callable[[Any], list[Any]]) -> None:
    """Give up multicast in `workspace` unless its sums are right on every rank, said once (a collective call).

    `gather` returns everybody's value in order of ranks (`workspace.gatherer`). Not while a CUDA graph is captured.
    """
    if workspace.transport != "multimem":
        return
    address = workspace.multicast_address
    num_tokens = min(workspace.max_tokens, ROWS_A_RANK * workspace.world_size)
    generator = torch.Generator().manual_seed(workspace.rank)
    partial = torch.randn(num_tokens, workspace.hidden_size, generator=generator).to(workspace.dtype)
    begin(workspace)
    workspace.multicast_address = 0
    expected = sums(workspace, partial)
    workspace.multicast_address = address
    found = sums(workspace, partial)
    # Two orders of a float32 sum may round to neighbours in 16 bits; anything more is wrong.
    step = torch.finfo(workspace.dtype).eps
    wrong = [
        rank
        for rank, is_right in enumerate(gather(bool(torch.allclose(found, expected, rtol=step, atol=1e-5))))
        if not is_right
    ]
    if wrong:
        workspace.multicast_address = 0
        logger.warning(f"sums over NVLink multicast are wrong on ranks {wrong}: all ranks reduce peer to peer")


def sums(workspace: Workspace, partial: Tensor) -> Tensor:
    """float32 [T, D]: this rank's copy of the rounded sum of everybody's `partial`."""
    workspace.partial(len(partial)).copy_(partial)
    hidden, _ = all_reduce_norm(
        workspace, len(partial), None, None, None, None, kind="none", eps=0.0, strategy="two-shot"
    )
    return hidden.float()
