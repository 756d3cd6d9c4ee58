"""The fused residual junction without GPUs: its operator played by threads, and the models that have it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from modules.checkpoint.load import build_on_meta, checkpoint_shapes, load_weights
from modules.decoder import Decoder
from modules.families.registry import from_hf_config
from modules.normalization import Norm
from pipeline_parallel.communication import ReducingAddNorm
from pipeline_parallel.engine import parallelise
from pipeline_parallel.fused_add_norm import FusedAddNorm, SymmetricOperator
from pipeline_parallel.kernels.all_reduce_norm import owned_rows, reference_all_reduce_norm
from pipeline_parallel.mesh import ParallelMesh
from tests.modules.tiny_models import StateDict

MAX_TOKENS = 24


class ThreadOperator(SymmetricOperator):
    """The kernels' equation, over what the threads of a group exchange; remembers what it was asked for."""

    dtype = torch.float32
    max_tokens = MAX_TOKENS
    transport = "threads"

    def __init__(self, mesh: ParallelMesh, hidden_size: int) -> None:
        self.hidden_size = hidden_size
        self.group: Any = mesh.tp_group
        self.rank, self.world_size = mesh.tp_rank, mesh.tp_size
        self.mesh = mesh
        self.asked: list[Any] = []
        self.programs: list[int | None] = []
        self.begun: tuple[int, int | None] | None = None
        self.others: list[ThreadOperator] = []
        self.hidden: Tensor | None = None
        # Used alternately, as a workspace's partials are; whoever reads what nobody has written reads NaN.
        self.partials = torch.full((2, MAX_TOKENS, hidden_size), float("nan"), dtype=self.dtype)
        self.partial_idx = 0
        self.found_in_place: list[bool] = []

    def begin(self, num_tokens: int, max_programs: int | None) -> None:
        self.asked.append("begin")
        self.begun = num_tokens, max_programs
        self.partial_idx = 0

    def memory(self, num_tokens: int) -> Tensor:
        return self.partials[self.partial_idx, :num_tokens]

    def with_own_memory(self) -> "ThreadOperator":
        self.others.append(ThreadOperator(self.mesh, self.hidden_size))
        return self.others[-1]

    def __call__(
        self,
        partial: Tensor,
        residual: Tensor | None,
        norm: Norm | None,
        bias: Tensor | None,
        strategy: str,
        max_programs: int | None,
    ) -> tuple[Tensor, Tensor]:
        rows = owned_rows(len(partial), self.rank, self.world_size) if strategy == "two-shot" else range(len(partial))
        assert residual is None or residual.shape == (len(rows), partial.shape[1])
        self.asked.append((strategy, len(partial), len(rows)))
        self.programs.append(max_programs)
        memory = self.memory(len(partial))
        self.found_in_place.append(memory.data_ptr() == partial.data_ptr())
        mine = slice(rows.start, rows.stop)
        hidden, total = reference_all_reduce_norm(
            torch.stack(self.group.ranks.exchange(self.rank, partial.to(self.dtype, copy=True)))[:, mine],
            residual,
            None if norm is None else norm.weight,
            None if norm is None else norm.bias,
            bias,
            kind="none" if norm is None else norm.kind,
            eps=0.0 if norm is None else norm.eps,
        )
        memory.fill_(float("nan"))
        self.partial_idx = 1 - self.partial_idx
        if strategy == "two-shot":
            hidden = torch.cat(self.group.ranks.exchange(self.rank, hidden))
        if self.hidden is None:
            self.hidden = torch.empty(MAX_TOKENS, partial.shape[1])
        self.hidden.fill_(float("nan"))  # good until the next call, and no longer
        self.hidden[: len(hidden)] = hidden
        return self.hidden[: len(hidden)], total


def by_tokens(num_tokens: int) -> str:
    return "one-shot" if num_tokens < 6 else "two-shot"


def fuse(model: Decoder, mesh: ParallelMesh, strategy_for: Callable[[int], str]) -> ThreadOperator:
    operator = ThreadOperator(mesh, model.config.hidden_size)
    assert isinstance(model.add_norm, ReducingAddNorm)
    model.add_norm = FusedAddNorm(model.add_norm, operator, strategy_for, lambda: model.max_lookahead > 0)
    return operator


def loaded(
    hf_config: dict[str, Any], mesh: ParallelMesh, weights: dict[str, Tensor], dtype: torch.dtype = torch.float32
) -> Decoder:
    config = from_hf_config(hf_config)
    model = build_on_meta(config, lambda whole: parallelise(whole, mesh))
    source = StateDict(dict(weights), config, checkpoint_shapes(config), "tiny")
    load_weights(model, source, dtype=dtype)
    return model
