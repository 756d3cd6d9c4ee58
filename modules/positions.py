"""Rotary position embedding (Su et al. 2021), with linear and Llama-3 frequency scaling."""

import math

import torch
from torch import Tensor

from modules.specs import Rope


def rotary_frequencies(rope: Rope, head_dim: int, device: torch.device | str = "cpu") -> Tensor:
    """Angular frequency of each pair of head dims, radians per position: float32 [head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    scaling = rope.scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    # Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between interpolated.
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / scaling.factor)


RotaryKey = tuple[Rope, int]  # of rotations, and the head_dim that they are made for


class RotaryPositions:
    """Cosines and sines for given positions; frequencies are kept per device, never part of a checkpoint."""

    def __init__(self, rope: Rope, head_dim: int) -> None:
        self.rope, self.head_dim = rope, head_dim
        self._frequencies: dict[torch.device, Tensor] = {}
        self._table: Tensor | None = None

    def cos_sin(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """positions [B, T] -> cos, sin [B, 1, T, head_dim] in `dtype` (angles in float32, as trained).

        The first half of the sines is negative, as `apply_rotary` needs them.
        """
        if positions.device not in self._frequencies:
            self._frequencies[positions.device] = rotary_frequencies(self.rope, self.head_dim, positions.device)
        angles = positions[:, None, :, None].float() * self._frequencies[positions.device]
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)

    def table(self, num_positions: int, device: torch.device) -> Tensor:
        """`rotary_table`, kept until another is asked for: each call of `generate` may have another length, and tables
        of all lengths together would fill the memory."""
        table = self._table
        if table is None or table.shape[1] != num_positions or table.device != device:
            table = self._table = rotary_table(self.rope, self.head_dim, num_positions, device)
        return table


def rotary_table(rope: Rope, head_dim: int, num_positions: int, device: torch.device | str) -> Tensor:
    """Cosines and sines of all positions, for kernels that look them up: float32 [2, num_positions, head_dim / 2]."""
    positions = torch.arange(num_positions, dtype=torch.float32, device=device)
    angles = positions[:, None] * rotary_frequencies(rope, head_dim, device)
    return torch.stack((angles.cos(), angles.sin()))


def apply_rotary(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [B, heads, T, head_dim] by `cos_sin` [B, 1, T, head_dim]; halves are paired (Hugging Face layout)."""
    # (first, second) -> (first * cos - second * sin, second * cos + first * sin), in as few kernels as can be.
    return torch.addcmul(states * cos, states.roll(states.shape[-1] // 2, -1), sin)
