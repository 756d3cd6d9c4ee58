"""Calls of all_reduce_norm with inputs that every process makes for itself, and what must come out of them."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeline_parallel.kernels.all_reduce_norm import owned_rows
from pipeline_parallel.kernels.workspace import Workspace
from tests.modules.kernels.kernel_checks import EPS, normed

OPTIONS = ("residual", "weight", "norm_bias", "bias")


@dataclass(frozen=True, kw_only=True)
class Call:
    """One collective call; `index` seeds its inputs."""

    index: int
    num_tokens: int
    strategy: str
    kind: str = "rms"
    present: tuple[str, ...] = OPTIONS

    def partial(self, rank: int, hidden_size: int, dtype: torch.dtype) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * self.index + rank)
        return torch.randn(self.num_tokens, hidden_size, generator=generator).to(dtype)

    def inputs(self, hidden_size: int, dtype: torch.dtype) -> dict[str, Tensor | None]:
        """Residual of all rows, and the vectors; the same on all ranks."""
        generator = torch.Generator().manual_seed(1000 * self.index + 999)
        residual = torch.randn(self.num_tokens, hidden_size, generator=generator) * 3 + 1
        vectors = torch.randn(3, hidden_size, generator=generator).to(dtype)
        found = {"residual": residual, "weight": vectors[0] + 1, "norm_bias": vectors[1], "bias": vectors[2]}
        return {name: tensor if name in self.present else None for name, tensor in found.items()}

    @property
    def may_be_copies(self) -> bool:
        """Of every four calls the first two, where they are two-shot: each of the partials has some, and the kernel
        comes before and after."""
        return self.strategy == "two-shot" and self.index % 4 < 2

    def rows(self, rank: int, world_size: int) -> slice:
        """Those whose residual a rank keeps."""
        mine = owned_rows(self.num_tokens, rank, world_size)
        return slice(mine.start, mine.stop) if self.strategy == "two-shot" else slice(0, self.num_tokens)

    def arguments(self, rank: int, world_size: int, hidden_size: int, dtype: torch.dtype) -> dict[str, Any]:
        """What `rank` hands to all_reduce_norm besides its workspace."""
        found = self.inputs(hidden_size, dtype)
        if found["residual"] is not None:
            found["residual"] = found["residual"][self.rows(rank, world_size)]
        options = {"kind": self.kind, "eps": EPS, "strategy": self.strategy}
        return {"num_tokens": self.num_tokens, **found, **options}


def handed_over(call: Call, workspace: Workspace, partial: Tensor) -> Tensor | None:
    """`own` of a call: of every other one-shot its part, float32, with NaN where it belongs; the rest is put there."""
    place = workspace.partial(call.num_tokens)
    if call.strategy == "one-shot" and call.index // 2 % 2:
        place.fill_(float("nan"))
        return partial.float()
    place.copy_(partial)
    return None


def assert_right(
    call: Call,
    results: list[tuple[Tensor, Tensor]],
    hidden_size: int,
    dtype: torch.dtype,
    *,
    truncates: bool = False,
    rounds_sum: bool = False,
    own_first: bool = False,
) -> None:
    """Of (hidden, new_residual) of all ranks: the stream bit for bit, hidden to one rounding of the float64 equation
    (`truncates`: to twice that, as Triton's interpreter rounds to bfloat16), the same bits on all ranks. The sum over
    ranks comes out unrounded, or rounded once to `dtype`, as multimem leaves it, with `rounds_sum`. It is made in order
    of ranks; of a call made of copies (`own_first`) the part of whoever owns the row comes first."""
    world_size = len(results)
    inputs = call.inputs(hidden_size, dtype)
    partials = [call.partial(rank, hidden_size, dtype) for rank in range(world_size)]
    exact = torch.stack(partials).double().sum(0)
    total = torch.empty(call.num_tokens, hidden_size)
    for owner in range(world_size):
        rows = call.rows(owner, world_size)
        order = sorted(range(world_size), key=lambda rank: rank != owner) if own_first else range(world_size)
        total[rows] = 0.0
        for rank in order:
            total[rows] += partials[rank][rows].float()
    if rounds_sum:
        total = total.to(dtype).float()
        exact = total.double()
    for tensor in (inputs["bias"], inputs["residual"]):
        if tensor is not None:
            total, exact = tensor.float() + total, exact + tensor.double()
    expected = normed(exact, inputs["weight"], inputs["norm_bias"], call.kind)
    rounding = torch.finfo(dtype).eps * (1 if truncates else 0.5)
    for rank, (hidden, new_residual) in enumerate(results):
        place = f"{call}, rank {rank}: "
        torch.testing.assert_close(new_residual, total[call.rows(rank, world_size)], rtol=0, atol=0, msg=place.__add__)
        assert hidden.dtype == dtype
        torch.testing.assert_close(hidden.double(), expected, rtol=rounding + 1e-5, atol=2e-5, msg=place.__add__)
        assert torch.equal(hidden, results[0][0]), place
