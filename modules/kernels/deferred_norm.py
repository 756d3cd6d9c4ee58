"""The residual junction left to the kernel that reads it: norm(residual + partial + bias), computed where it is used.

A decode step of one row is a chain of matrix-vector products. A kernel for the junction alone would move a few
kilobytes and cost as much as a tenth of a layer; so each product computes the junction itself (every program anew, from
the second-level cache), while its first weights are on their way, and the first program writes the new residual.

`DeferredNorm` says what is to be computed, `add_norm.normed_row` computes it inside a kernel, `DeferredNorm.normed`
outside of one. Equation, types and rounding are those of `modules.kernels.add_norm`.

Kernels of a chain are launched before the one ahead of them has ended (programmatic dependent launch, CUDA programming
guide, section 4.5). Each of their programs therefore calls `wait_for_inputs` on every path, before it writes anything
and before it reads anything but weights: then whatever came before, however far, is complete. Since it lets the next
kernel start only after its own wait, what a kernel finds when it starts is one kernel short of everything: results of
the kernel before the one ahead ("early" ones) can be read without waiting, past the L1 cache, which may hold what stood
there in the last step.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from modules.kernels.add_norm import fused_add_norm

try:
    import triton
    import triton.language as tl
except ImportError:  # published for Linux on x86-64 only; elsewhere the references serve
    triton = None


@dataclass(frozen=True, kw_only=True)
class DeferredNorm:
    """norm(residual + partial + bias) of [rows, D], to be computed by whoever reads it.

    partial [rows, D] float32, bfloat16 or float16; residual [rows, D] float32 or None; bias, weight, norm_bias [D] or
    None; kind rms, layer or none; `dtype` of the result. `new_residual` [rows, D] float32: memory for residual +
    partial + bias, which one reader must fill; None for readers that must not. `plain` makes one of states that are
    normed already.
    """

    partial: Tensor
    residual: Tensor | None = None
    bias: Tensor | None = None
    weight: Tensor | None = None
    norm_bias: Tensor | None = None
    kind: str = "none"
    eps: float = 0.0
    dtype: torch.dtype
    new_residual: Tensor | None = None

    @staticmethod
    def plain(states: Tensor) -> "DeferredNorm":
        """States [rows, D] that need no norm any more, as something that a kernel can read."""
        return DeferredNorm(partial=states, dtype=states.dtype)

    @property
    def is_plain(self) -> bool:
        """Whether `partial` already is the result."""
        unchanged = self.residual is None and self.bias is None and self.new_residual is None
        return unchanged and self.kind == "none" and self.partial.dtype == self.dtype

    def unwritten(self) -> "DeferredNorm":
        """The same, for a reader that leaves `new_residual` to another."""
        return replace(self, new_residual=None)

    def normed(self) -> Tensor:
        """[rows, D] of `dtype`, by a kernel of its own or, without a GPU, in plain PyTorch; fills `new_residual`."""
        if self.is_plain:
            return self.partial
        hidden, total = fused_add_norm(
            self.partial,
            self.residual,
            self.weight,
            self.norm_bias,
            self.bias,
            kind=self.kind,
            eps=self.eps,
            out_dtype=self.dtype,
        )
        if self.new_residual is not None:
            self.new_residual.copy_(total)
        return hidden

    def kernel_arguments(self) -> dict[str, Any]:
        """What a kernel passes on to `normed_row`, by the names it has there."""
        return {
            "partial": self.partial,
            "residual": self.residual,
            "bias": self.bias,
            "norm_weight": self.weight,
            "norm_bias": self.norm_bias,
            "new_residual": self.new_residual,
            "eps": self.eps,
            "KIND": self.kind,
            "HIDDEN_SIZE": self.partial.shape[-1],
        }


def is_interpreted(kernel: Any) -> bool:
    """Whether a kernel runs under Triton's interpreter: settled when it was decorated, not by today's environment."""
    return triton is not None and not isinstance(kernel, triton.JITFunction)


def can_launch(kernel: Any, tensor: Tensor) -> bool:
    """Whether a kernel can be launched on a tensor's device: a GPU, or the interpreter."""
    return triton is not None and (tensor.is_cuda or is_interpreted(kernel))


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; a few under the interpreter, where a program costs a Python loop."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def dependent_launch(tensor: Tensor) -> dict[str, Any]:
    """Launch options of a kernel that calls `wait_for_inputs`, for the device of `tensor`."""
    early = tensor.is_cuda and torch.cuda.get_device_capability(tensor.device) >= (9, 0)
    return {"PDL": True, "launch_pdl": True} if early else {"PDL": False}


def equal_copies(dtype: torch.dtype) -> dict[str, Any]:
    """Launch options of a kernel that compares sums with each other, or counts which are large enough, for weights of
    `dtype`. Lanes hold copies of one sum; where a product is fused with the addition of another lane's, the copies
    differ in the last bit, and what they are compared with twice no longer adds up. In half precision products are
    exact in float32, fused or not."""
    return {"enable_fp_fusion": dtype != torch.float32}


if triton is not None:

    @triton.jit
    def wait_for_inputs(PDL: tl.constexpr):  # type: ignore[no-untyped-def]
        """Wait until the kernel before this one is complete; then let the one after start, as soon as there is room."""
        if PDL:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
