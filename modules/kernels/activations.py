"""Activation functions of an MLP, for PyTorch and for kernels."""

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional as F

try:
    import triton
    import triton.language as tl
except ImportError:  # published for Linux on x86-64 only; elsewhere the references serve
    triton = None

ACTIVATION_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "relu": F.relu, "gelu": F.gelu}


if triton is not None:

    @triton.jit
    def activated(scores, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
        """act(scores), float32; gelu is the exact one."""
        tl.static_assert(ACTIVATION == "silu" or ACTIVATION == "relu" or ACTIVATION == "gelu")
        if ACTIVATION == "silu":
            values = scores / (1.0 + tl.exp(-scores))
        elif ACTIVATION == "relu":
            values = tl.maximum(scores, 0.0, propagate_nan=tl.PropagateNan.ALL)
        else:
            values = 0.5 * scores * (1.0 + tl.erf(scores * 0.7071067811865476))
        return values
