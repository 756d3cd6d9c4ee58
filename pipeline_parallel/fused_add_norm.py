"""The residual junction of a tensor-parallel group in one operator: sum over the ranks, residual, norm.

`FusedAddNorm` stands in for `ReducingAddNorm`. Where rows are owned (two-shot, see kernels/all_reduce_norm.py), a rank
keeps only its own rows of the residual between half-blocks, [R, D] instead of [B, T, D]; which rows those are follows
from the number of tokens alone, so it does not change within a forward pass, and a pipeline stage hands its rows to the
same rank of the next one. Hooks on the residual need all rows: collecting and the drift study keep `ReducingAddNorm`.

Partial sums travel in the type of the weights, half of what `ReducingAddNorm` sends: each is rounded once more.

Legend: B batch, T tokens, D hidden, R rows of a rank.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from loguru import logger
from torch import Tensor

from modules.decoder import Decoder
from modules.normalization import Norm
from modules.specs import NormPlacement
from pipeline_parallel.all_reduce_choice import METHODS, TRANSPORTS, ChoiceTable, choose, find_choice_table
from pipeline_parallel.communication import ReducingAddNorm
from pipeline_parallel.kernels.all_reduce_norm import all_reduce_norm, owned_rows, verify_transport
from pipeline_parallel.kernels.barrier import begin
from pipeline_parallel.kernels.workspace import (
    DTYPES,
    HIDDEN_SIZE_STEP,
    MAX_HIDDEN_SIZE,
    MAX_RANKS,
    Workspace,
    create_workspace,
    gatherer,
    why_multicast_is_unclear,
)
from pipeline_parallel.mesh import ParallelMesh

AllReduce = Literal["auto", "fused", "nccl"]
MAX_NUMBERS = 2**26  # of hidden states in a workspace, which holds three times as many: 402 MB in half precision
FEW_TOKENS = 64  # where nothing was measured: up to here one-shot, beyond it two-shot
StrategyFor = Callable[[int], str]  # of a number of tokens: "one-shot", "two-shot" or "nccl"


class SymmetricOperator:
    """The kernels, over the symmetric memory of GPUs of one host: sum the partials of a group's ranks, add, normalise.
    All of its calls are collective."""

    def __init__(self, workspace: Workspace, group: dist.ProcessGroup) -> None:
        self.workspace, self.group = workspace, group
        self.rank, self.world_size = workspace.rank, workspace.world_size
        self.max_tokens, self.dtype = workspace.max_tokens, workspace.dtype
        self.transport = workspace.transport

    def begin(self, num_tokens: int, max_programs: int | None) -> None:
        """Start a forward pass of so many tokens, with what its first call is given as `max_programs`."""
        begin(self.workspace, num_tokens, copies=max_programs == 0)

    def memory(self, num_tokens: int) -> Tensor:
        """[num_tokens, D] of `dtype`: a partial sum that the next call finds there is not copied."""
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
        """partial [tokens, D]; residual float32 [tokens or R, D] -> hidden [tokens, D], good until the next call, and
        the new residual. `max_programs`: while something else runs; 0 (two-shot): none, the copy engines do it."""
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

    def with_own_memory(self) -> SymmetricOperator:
        """One more of the kind, with a workspace of its own, for calls between those of this one."""
        mine = self.workspace
        workspace = create_workspace(self.group, mine.max_tokens, mine.hidden_size, mine.dtype, mine.device)
        if mine.transport == "p2p":  # also where multicast was there, and its sums were wrong
            workspace.multicast_address = 0
        verify_transport(workspace, gatherer(self.group))
        return SymmetricOperator(workspace, self.group)


@dataclass(eq=False)
class FusedAddNorm:
    """The residual junction through an operator where it is the fastest, else as `ReducingAddNorm`.

    A pass begins with the operator's `begin` where it begins with embeddings. Later stages hold whole layers, so an
    even number of junctions, after which the workspace's two partials have been used equally often.
    """

    unfused: ReducingAddNorm
    operator: SymmetricOperator
    strategy_for: StrategyFor
    keeps_states: Callable[[], bool]
    """Whether later layers look back at hidden states, which the operator would overwrite."""
    max_programs: int | None = None
    """Those of the operator, which leave the rest of the device to what runs at the same time."""

    def for_half(self, operator: SymmetricOperator) -> FusedAddNorm:
        """For half of a split pass: rows always have owners, so that none is added up twice, and copies can do it."""

        def strategy_for(num_tokens: int) -> str:
            return "nccl" if self.strategy_for(num_tokens) == "nccl" else "two-shot"

        return FusedAddNorm(self.unfused, operator, strategy_for, self.keeps_states)

    def __call__(
        self,
        partial: Tensor,
        residual: Tensor | None,
        norm: Norm | None,
        bias: Tensor | None,
        *,
        placement: NormPlacement,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        """As `ReducingAddNorm`, but for the shape of the residual (see `residual_shape`)."""
        shape = partial.shape
        strategy = self._strategy(shape)
        if strategy == "nccl":
            return self.unfused(partial, residual, norm, bias, placement=placement, dtype=dtype)
        assert placement == "pre" and dtype == self.operator.dtype, "see why_not_fused"
        if residual is None:
            self.operator.begin(_num_tokens(shape), self.max_programs)
        else:
            residual = residual.view(-1, shape[-1])
        hidden, residual = self.operator(partial.flatten(0, -2), residual, norm, bias, strategy, self.max_programs)
        hidden = hidden.clone() if self.keeps_states() else hidden
        return hidden.view(shape), residual.view(self.residual_shape(shape))

    def memory(self, num_tokens: int) -> Tensor | None:
        """See modules.normalization.AddNormInPlace."""
        return None if self._strategy((num_tokens, 0)) == "nccl" else self.operator.memory(num_tokens)

    def residual_shape(self, shape: torch.Size | tuple[int, ...]) -> tuple[int, ...]:
        """Of the residual between half-blocks of hidden states [..., D] of this shape."""
        if self._strategy(shape) != "two-shot":
            return tuple(shape)
        rows = owned_rows(_num_tokens(shape), self.operator.rank, self.operator.world_size)
        return len(rows), shape[-1]

    def _strategy(self, shape: torch.Size | tuple[int, ...]) -> str:
        num_tokens = _num_tokens(shape)
        return self.strategy_for(num_tokens) if num_tokens <= self.operator.max_tokens else "nccl"


def _num_tokens(shape: torch.Size | tuple[int, ...]) -> int:
    return torch.Size(shape[:-1]).numel()


def choose_all_reduce(model: Decoder, mesh: ParallelMesh, choice: AllReduce) -> None:
    """Give a loaded model the junction that `--all-reduce` asks for (a collective call).

    nccl: as it is. auto: per number of tokens what was measured as the fastest, NCCL's where nothing was. fused: never
    NCCL's while the tokens fit the workspace; ValueError where that cannot be.
    """
    if choice == "nccl" or mesh.tp_size == 1:
        return
    assert mesh.tp_group is not None and isinstance(model.add_norm, ReducingAddNorm)
    hidden_size, workspace, table = model.config.hidden_size, None, None
    problem = why_not_fused(model, mesh)
    device = "" if problem else torch.cuda.get_device_name(mesh.device)
    tables = {} if problem else measured_tables(device, mesh.tp_size, hidden_size)
    # All ranks of all stages must decide alike, before their first collective call and in what they hand on.
    same = len(set(mesh.gather((problem, device, repr(tables))))) == 1
    if problem is None and not same:
        problem = "the ranks differ in their GPUs, their hosts or the tables that they know"
    if problem is None and (tables or choice == "fused"):
        workspace = create_workspace(
            mesh.tp_group, MAX_NUMBERS // hidden_size, hidden_size, model.compute_dtype, mesh.device
        )
        verify_transport(workspace, gatherer(mesh.tp_group))
        if len(set(mesh.gather(workspace.transport))) > 1:
            problem = "some groups of ranks have NVLink multicast, and others do not"
        table = tables.get(workspace.transport)
    if problem is None and table is None and choice == "auto":
        problem = "nothing was measured for these GPUs (scripts.benchmark.communication --tune measures)"
    if problem is not None and choice == "fused":
        raise ValueError(f"--all-reduce fused: {problem}")
    if problem is not None or workspace is None:
        logger.info(f"--all-reduce auto: {describe_all_reduce(model)}, since {problem}")
        return
    strategy_for = strategy_of(table, may_be_nccl=choice == "auto")
    model.add_norm = FusedAddNorm(
        model.add_norm, SymmetricOperator(workspace, mesh.tp_group), strategy_for, lambda: model.max_lookahead > 0
    )
    logger.info(f"--all-reduce {choice}: fused, {workspace.transport}")


def describe_all_reduce(model: Decoder) -> str:
    """How the parts of a layer are summed, for records: "none", "nccl" (on CPUs "gloo"), or the methods of the fused
    junction and their transport, "one-shot/two-shot p2p"."""
    junction = model.add_norm
    if isinstance(junction, ReducingAddNorm):
        return "nccl" if model.device.type == "cuda" else "gloo"
    if not isinstance(junction, FusedAddNorm):
        return "none"
    counts = [2**power for power in range(junction.operator.max_tokens.bit_length())]
    used = {junction.strategy_for(num_tokens) for num_tokens in counts}
    return f"{'/'.join(method for method in METHODS if method in used)} {junction.operator.transport}"


def measured_tables(device: str, ranks: int, hidden_size: int) -> dict[str, ChoiceTable]:
    """By transport, what was measured on such devices."""
    found = {transport: find_choice_table(device, ranks, hidden_size, transport) for transport in TRANSPORTS}
    return {transport: table for transport, table in found.items() if table is not None}


def why_not_fused(model: Decoder, mesh: ParallelMesh) -> str | None:
    """Why a model cannot use the fused junction; None: it can (a collective call of the tensor-parallel group)."""
    hidden_size = model.config.hidden_size
    if mesh.device.type != "cuda":
        return f"the fused kernel needs GPUs that share memory, and the model is on {mesh.device.type}"
    if not model.config.pre_norm:
        return "the fused kernel takes pre-norm models"
    if model.compute_dtype not in DTYPES:
        return f"the fused kernel takes bfloat16 and float16, and the weights are {model.compute_dtype}"
    if mesh.tp_size > MAX_RANKS or hidden_size > MAX_HIDDEN_SIZE or hidden_size % HIDDEN_SIZE_STEP:
        return (
            f"the fused kernel takes up to {MAX_RANKS} ranks, and hidden sizes that are multiples of "
            f"{HIDDEN_SIZE_STEP} up to {MAX_HIDDEN_SIZE}, not {mesh.tp_size} ranks of {hidden_size}"
        )
    assert mesh.tp_group is not None
    said = gatherer(mesh.tp_group)((socket.gethostname(), why_multicast_is_unclear()))
    hosts = [host for host, _ in said]
    if len(set(hosts)) > 1:
        return f"the ranks of a layer are on several hosts: {', '.join(hosts)}"
    return next((unclear for _, unclear in said if unclear is not None), None)


def strategy_of(table: ChoiceTable | None, *, may_be_nccl: bool) -> StrategyFor:
    """By the table, or without one by size; the fused ones only, unless it `may_be_nccl`."""

    def by_size(num_tokens: int) -> str:
        return "one-shot" if num_tokens <= FEW_TOKENS else "two-shot"

    def strategy(num_tokens: int) -> str:
        method = "nccl" if table is None else choose(table, num_tokens)
        return by_size(num_tokens) if method == "nccl" and not may_be_nccl else method

    return strategy
