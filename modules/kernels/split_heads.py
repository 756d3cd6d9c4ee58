"""Attention heads whose splits are still to be combined, and attention in plain PyTorch (see decode_attention)."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SplitHeads:
    """Heads before their splits are combined: outputs float32 [B, N, P, H], not yet divided by sums [B, N, P], both
    relative to exp(maxima) [B, N, P]. An empty split has a maximum of -inf, and zeros."""

    outputs: Tensor
    maxima: Tensor
    sums: Tensor

    def combined(self, dtype: torch.dtype) -> Tensor:
        """[B, N, H]."""
        weights = torch.exp(self.maxima - self.maxima.amax(-1, keepdim=True))
        total = (weights * self.sums).sum(-1, keepdim=True)
        return ((weights[..., None] * self.outputs).sum(-2) / total).to(dtype)


def reference_attend(queries: Tensor, keys: Tensor, values: Tensor, cache_seqlens: Tensor) -> SplitHeads:
    """Plain PyTorch, all positions at once in one split; float32."""
    num_rows, num_groups, max_seqlen, head_dim = keys.shape
    grouped = queries.float().view(num_rows, num_groups, -1, head_dim)
    scores = grouped @ keys.float().transpose(-1, -2) * head_dim**-0.5
    beyond = torch.arange(max_seqlen, device=keys.device) > cache_seqlens[:, None]
    scores = scores.masked_fill(beyond[:, None, None], float("-inf"))
    maxima = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - maxima)
    # What lies beyond the length may be anything, and 0 * NaN is NaN.
    outputs = weights @ values.float().masked_fill(beyond[:, None, :, None], 0.0)
    outputs, maxima = outputs.flatten(1, 2)[:, :, None], maxima.flatten(1, 2)
    return SplitHeads(outputs, maxima, weights.sum(-1, keepdim=True).flatten(1, 2))
