"""What the fused residual junction runs: one operator for sum, residual and norm, over memory that the ranks share.

Legend: T tokens, D hidden, R rows of a rank.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from modules.normalization import Norm
from pipeline_parallel.kernels.all_reduce_norm import all_reduce_norm
from pipeline_parallel.kernels.meeting import begin
from pipeline_parallel.kernels.transport import verify_transport
from pipeline_parallel.kernels.workspace import Workspace, create_workspace, gatherer


class JunctionOperator(Protocol):
    """Sums, adds and normalises what the ranks of a group hold. All of its calls are collective."""

    rank: int
    world_size: int
    max_tokens: int
    dtype: torch.dtype
    transport: str

    def begin(self, num_tokens: int, max_programs: int | None) -> None:
        """Start a forward pass of so many tokens, with what its first call is given as `max_programs`."""
        ...

    def memory(self, num_tokens: int) -> Tensor:
        """[num_tokens, D] of `dtype`: a partial sum that the next call finds there is not copied."""
        ...

    def __call__(
        self,
        partial: Tensor,
        residual: Tensor | None,
        norm: Norm | None,
        bias: Tensor | None,
        strategy: str,
        max_programs: int | None,
    ) -> tuple[Tensor, Tensor]:
        """partial [tokens, D]; residual float32 [tokens or R, D] -> hidden [tokens, D], good until the next call, and
        the new residual. `max_programs`: beside what else runs; 0 (two-shot): none, the copy engines do it."""
        ...

    def another(self) -> JunctionOperator:
        """One more of the kind, with memory of its own, for calls that take turns with this one's."""
        ...


class SymmetricOperator:
    """The kernels, over the symmetric memory of GPUs of one host."""

    def __init__(self, workspace: Workspace, group: dist.ProcessGroup) -> None:
        self.workspace, self.group = workspace, group
        self.rank, self.world_size = workspace.rank, workspace.world_size
        self.max_tokens, self.dtype = workspace.max_tokens, workspace.dtype
        self.transport = workspace.transport

    def begin(self, num_tokens: int, max_programs: int | None) -> None:
        """See JunctionOperator."""
        begin(self.workspace, num_tokens, copies=max_programs == 0)

    def memory(self, num_tokens: int) -> Tensor:
        """See JunctionOperator."""
        return self.workspace.partial(num_tokens)

    def __call__(
        self,
        partial: Tensor,
        residual: Tensor | None,
        norm: Norm | None,
        bias: Tensor | None,
        strategy: str,
        max_programs: int | None,
    ) -> tuple[Tensor, Tensor]:
        """See JunctionOperator."""
        own, memory = None, self.memory(len(partial))
        if partial.data_ptr() != memory.data_ptr():
            if strategy == "one-shot" and partial.is_contiguous():
                own = partial
            else:
                memory.copy_(partial)
        return all_reduce_norm(
            self.workspace,
            len(partial),
            residual,
            None if norm is None else norm.weight,
            None if norm is None else norm.bias,
            bias,
            kind="none" if norm is None else norm.kind,
            eps=0.0 if norm is None else norm.eps,
            strategy=strategy,
            own=own,
            max_programs=max_programs,
        )

    def another(self) -> SymmetricOperator:
        """See JunctionOperator."""
        mine = self.workspace
        workspace = create_workspace(self.group, mine.max_tokens, mine.hidden_size, mine.dtype, mine.device)
        if mine.transport == "p2p":  # also where multicast was there, and its sums were wrong
            workspace.multicast_address = 0
        verify_transport(workspace, gatherer(self.group))
        return SymmetricOperator(workspace, self.group)
