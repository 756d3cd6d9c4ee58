"""RMSNorm and LayerNorm, and the residual junction `add_norm` that ends every half-block (seam 2)."""

from collections.abc import Callable
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from modules.kernels.add_norm import fused_add_norm
from modules.kernels.deferred_norm import DeferredNorm
from modules.specs import NormPlacement


class Norm(nn.Module):
    """RMSNorm (Zhang & Sennrich 2019) or LayerNorm (Ba et al. 2016) over the last dim, in the type of its input."""

    def __init__(self, size: int, *, kind: Literal["rms", "layer"], eps: float, affine: bool = True) -> None:
        super().__init__()
        self.kind, self.eps = kind, eps
        self.weight = nn.Parameter(torch.ones(size)) if affine else None
        self.bias = nn.Parameter(torch.zeros(size)) if affine and kind == "layer" else None

    def forward(self, states: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        weight = None if self.weight is None else self.weight.to(states.dtype)
        if self.kind == "layer":
            bias = None if self.bias is None else self.bias.to(states.dtype)
            return F.layer_norm(states, states.shape[-1:], weight, bias, self.eps)
        return F.rms_norm(states, states.shape[-1:], weight, self.eps)


class AddNorm(Protocol):
    """The residual junction between two half-blocks; see `add_norm`. Tensor parallelism replaces it as a whole."""

    def __call__(
        self,
        partial: Tensor,
        residual: Tensor | None,
        norm: Norm | None,
        bias: Tensor | None,
        *,
        placement: NormPlacement,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor] | tuple[DeferredNorm, Tensor]: ...


@runtime_checkable
class AddNormInPlace(AddNorm, Protocol):
    """A junction that provides the memory into which blocks write their partial sums."""

    def memory(self, num_tokens: int) -> Tensor | None:
        """Memory [num_tokens, D] for the next partial sum of so many tokens; None: any memory will do."""
        ...


def partial_memory(junction: AddNorm) -> Callable[[int], Tensor | None] | None:
    """`AddNormInPlace.memory` of a junction that has it, else None."""
    return junction.memory if isinstance(junction, AddNormInPlace) else None


def residual_dtype(dtype: torch.dtype) -> torch.dtype:
    """Type of the residual stream of a model whose weights are `dtype`: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def add_norm(
    partial: Tensor,
    residual: Tensor | None,
    norm: Norm | None,
    bias: Tensor | None = None,
    *,
    placement: NormPlacement = "pre",
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Add a half-block's output to the residual stream and normalise for the next half-block.

    Placement `pre`: `residual += partial + bias; hidden = norm(residual)`; `post` (OPT-350M):
    `hidden = residual = norm(residual + partial + bias)`. Another placement is another case here.
    `partial` [B, T, D] never includes the bias, so that ranks which each hold a part of the sum add it once.
    `residual` is None before the first half-block.
    Returns (hidden_states, residual); neither aliases the old `residual`, which a hook may have kept.

    The stream is float32 at least, and so are sums and statistics; hidden_states are rounded once, to `dtype`. In half
    precision a stream that was rounded at every half-block would make the answer depend on the order of a sum, and so
    on the number of ranks.
    """
    if partial.is_cuda and placement == "pre" and partial.dtype != torch.float64 and not torch.is_grad_enabled():
        return fused_add_norm(
            partial.contiguous(),
            residual,
            None if norm is None else norm.weight,
            None if norm is None else norm.bias,
            bias,
            kind="none" if norm is None else norm.kind,
            eps=0.0 if norm is None else norm.eps,
            out_dtype=dtype,
        )
    total = partial.to(residual_dtype(partial.dtype))
    total = total if bias is None else total + bias
    total = total if residual is None else residual + total
    normed = total if norm is None else norm(total)
    return normed.to(dtype), (total if placement == "pre" else normed)


def deferred_add_norm(
    partial: Tensor,
    residual: Tensor | None,
    norm: Norm | None,
    bias: Tensor | None,
    *,
    placement: NormPlacement = "pre",
    dtype: torch.dtype,
) -> tuple[DeferredNorm, Tensor]:
    """`add_norm` of a pre-norm decode step, partial [B, 1, D], left to the kernel that reads its result.

    The residual that is returned is written by that kernel. Only for one row; several are normed here and now.
    """
    assert placement == "pre", "see Decoder.can_fuse"
    rows = partial.flatten(0, 1)
    if len(rows) > 1:
        hidden_states, total = add_norm(rows, residual, norm, bias, dtype=dtype)
        return DeferredNorm.plain(hidden_states), total
    new_residual = torch.empty_like(rows, dtype=torch.float32)
    return (
        DeferredNorm(
            partial=rows,
            residual=residual,
            bias=bias,
            weight=None if norm is None else norm.weight,
            norm_bias=None if norm is None else norm.bias,
            kind="none" if norm is None else norm.kind,
            eps=0.0 if norm is None else norm.eps,
            dtype=dtype,
            new_residual=new_residual,
        ),
        new_residual,
    )
