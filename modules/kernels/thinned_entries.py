"""The entries of a vector that nobody has computed yet, each by whoever needs it: for products that drop small ones.

A junction's entries need the statistics of its whole row, which every program computes anew; after that an entry is
computed from what lies at its own place. Equation and rounding of a junction are those of `normed_row`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from modules.kernels.activations import ACTIVATION_FUNCTIONS

try:
    import triton
    import triton.language as tl
except ImportError:  # published for Linux on x86-64 only; elsewhere the references serve
    triton = None


@dataclass(frozen=True, kw_only=True)
class Activations:
    """act(gate) * up, or act(up) without a gate, to be computed by whoever reads it: float32 sums gate, up [F] and
    biases [F] or None; sum, activation and product are rounded to `dtype` one by one."""

    gate: Tensor | None
    up: Tensor
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    activation: str
    dtype: torch.dtype

    def computed(self) -> Tensor:
        """[F] of `dtype`, in plain PyTorch."""

        def rounded(sums: Tensor, bias: Tensor | None) -> Tensor:
            return (sums if bias is None else sums + bias.float()).to(self.dtype)

        activate, up = ACTIVATION_FUNCTIONS[self.activation], rounded(self.up, self.up_bias)
        return activate(up) if self.gate is None else activate(rounded(self.gate, self.gate_bias)) * up


def kept_entries(values: Tensor, threshold: float) -> Tensor:
    """Which entries are not dropped: bool, of the shape of `values`; the threshold is rounded to their type."""
    # An exact zero (ReLU) is skipped for free, also where the threshold itself is zero.
    return (values.abs() >= threshold) & ((values != 0) | (threshold == float("-inf")))


if triton is not None:
    from modules.kernels.activations import activated

    @triton.jit
    def row_statistics(  # type: ignore[no-untyped-def]
        partial, residual, bias, new_residual, eps, writes,
        KIND: tl.constexpr, HIDDEN_SIZE: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """Mean (0 for other norms than layer) and inverse deviation of a junction's row; see normed_row."""
        columns = tl.arange(0, BLOCK)
        inside = columns < HIDDEN_SIZE
        total = tl.load(partial + columns, mask=inside, other=0.0).to(tl.float32)
        if bias is not None:
            total += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
        if residual is not None:
            total = tl.load(residual + columns, mask=inside, other=0.0) + total
        if new_residual is not None:
            tl.store(new_residual + columns, total, mask=inside & writes)
        mean = 0.0
        if KIND == "layer":
            mean = tl.sum(total, axis=0) / HIDDEN_SIZE
            total = tl.where(inside, total - mean, 0.0)
        return mean, tl.rsqrt(tl.sum(total * total, axis=0) / HIDDEN_SIZE + eps)

    @triton.jit
    def entry_parts(  # type: ignore[no-untyped-def]
        partial, residual, bias, norm_weight, norm_bias, gate_sums, up_sums, gate_bias, up_bias, places, real
    ):
        """What entries are made of, float32: sum, scale and shift of a junction, or up, gate and nothing."""
        scale = tl.full(places.shape, 1.0, tl.float32)
        shift = tl.zeros(places.shape, tl.float32)
        if up_sums is not None:
            total = tl.load(up_sums + places, mask=real, other=0.0)
            if up_bias is not None:
                total += tl.load(up_bias + places, mask=real, other=0.0).to(tl.float32)
            if gate_sums is not None:
                scale = tl.load(gate_sums + places, mask=real, other=0.0)
            if gate_bias is not None:
                scale += tl.load(gate_bias + places, mask=real, other=0.0).to(tl.float32)
        else:
            total = tl.load(partial + places, mask=real, other=0.0).to(tl.float32)
            if bias is not None:
                total += tl.load(bias + places, mask=real, other=0.0).to(tl.float32)
            if residual is not None:
                total = tl.load(residual + places, mask=real, other=0.0) + total
            if norm_weight is not None:
                scale = tl.load(norm_weight + places, mask=real, other=0.0).to(tl.float32)
            if norm_bias is not None:
                shift = tl.load(norm_bias + places, mask=real, other=0.0).to(tl.float32)
        return total, scale, shift

    @triton.jit
    def finished_entries(  # type: ignore[no-untyped-def]
        total, scale, shift, mean, inverse, gate_sums, up_sums, threshold, real, like,
        KIND: tl.constexpr, ACTIVATION: tl.constexpr,
    ):  # fmt: skip
        """The entries, rounded to the type of `like` and widened again, and which of them are kept."""
        if up_sums is not None:
            values = total.to(like.dtype.element_ty).to(tl.float32)
            if gate_sums is not None:
                gates = activated(scale.to(like.dtype.element_ty).to(tl.float32), ACTIVATION)
                values *= gates.to(like.dtype.element_ty).to(tl.float32)
            else:
                values = activated(values, ACTIVATION)
        else:
            values = total
            if KIND != "none":
                values = (values - mean) * inverse
            values = values * scale + shift
        values = values.to(like.dtype.element_ty).to(tl.float32)
        sizes = tl.where(values != 0.0, tl.abs(values), -3.0e38)  # a zero reaches -inf alone
        kept = real & (sizes >= threshold)
        return tl.where(kept, values, 0.0), kept
