"""RMSNorm and LayerNorm, and the residual junction `add_norm` that ends every half-block (seam 2)."""

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from modules.config import ModelConfig


class Norm(nn.Module):
    """RMSNorm (Zhang & Sennrich 2019) or LayerNorm (Ba et al. 2016) over the last dim.

    Statistics are taken in float32 (float64 for float64 states) and the result has the input's dtype.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.kind = config.norm
        self.eps = config.norm_eps
        size = (config.hidden_size,)
        self.weight = nn.Parameter(torch.ones(size)) if config.norm_affine else None
        self.bias = nn.Parameter(torch.zeros(size)) if config.norm_affine and self.kind == "layer" else None

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        if self.kind == "layer":
            return F.layer_norm(hidden_states, hidden_states.shape[-1:], self.weight, self.bias, self.eps)
        wide = hidden_states.to(torch.promote_types(hidden_states.dtype, torch.float32))
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        normed = normed.to(hidden_states.dtype)
        return normed if self.weight is None else self.weight * normed


class AddNorm(Protocol):
    """The residual junction: what stands between two half-blocks, replaced as a whole by tensor parallelism."""

    def __call__(
        self, partial: Tensor, residual: Tensor | None, norm: Norm | None, bias: Tensor | None, *, pre_norm: bool
    ) -> tuple[Tensor, Tensor]: ...


def add_norm(
    partial: Tensor, residual: Tensor | None, norm: Norm | None, bias: Tensor | None = None, *, pre_norm: bool = True
) -> tuple[Tensor, Tensor]:
    """Add a half-block's output to the residual stream and normalise for the next half-block.

    Pre-norm: `residual += partial + bias; hidden = norm(residual)`. Post-norm (OPT-350M):
    `hidden = residual = norm(residual + partial + bias)`. `partial` [B, T, D] never includes the bias, so that
    ranks which each hold a part of the sum add it once. `residual` is None before the first half-block.
    Returns (hidden_states, residual), neither of which aliases an input that a hook may have kept.
    """
    total = partial if bias is None else partial + bias
    total = total if residual is None else residual + total
    hidden_states = total if norm is None else norm(total)
    return hidden_states, (total if pre_norm else hidden_states)
