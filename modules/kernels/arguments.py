"""What kernels demand of their arguments, and the activation functions among these."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

try:
    import triton
    import triton.language as tl
except ImportError:  # published for Linux on x86-64 only; elsewhere the references serve
    triton = None

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FLAGS = (torch.bool, torch.uint8)
MAX_HIDDEN_SIZE = 16384
MAX_ROWS = 8  # of a decode step
MAX_QUERIES_PER_GROUP = 16
ACTIVATION_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "relu": F.relu, "gelu": F.gelu}
Expected = tuple[Tensor | None, tuple[int, ...], tuple[torch.dtype, ...]]  # tensor, its shape, the types it may have


def check_tensors(expected: Mapping[str, Expected], device: torch.device) -> None:
    """ValueError on the first tensor that is not contiguous, or not of its shape, a type of its own, or the device."""
    for name, (tensor, shape, dtypes) in expected.items():
        if tensor is None:
            continue
        if tensor.shape != shape:
            raise ValueError(f"{name} {tuple(tensor.shape)} is not of shape {shape}")
        if tensor.dtype not in dtypes:
            raise ValueError(f"{name} is {tensor.dtype}, not one of {dtypes}")
        if tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}, not on {device}")
        if not tensor.is_contiguous():
            raise ValueError(f"{name} is not contiguous: strides {tensor.stride()}")


def check_cache(keys: Tensor, values: Tensor, num_rows: int, dtype: torch.dtype) -> None:
    """ValueError unless both are [num_rows, G, S, H] with heads contiguous, alike, and of the type."""
    for name, cache in (("keys", keys), ("values", values)):
        if cache.dim() != 4 or len(cache) != num_rows or cache.numel() == 0 or cache.shape != keys.shape:
            raise ValueError(
                f"{name} {tuple(cache.shape)}: no [{num_rows}, groups, positions, head_dim] alike for both"
            )
        if cache.stride(-1) != 1 or cache.stride() != keys.stride():
            raise ValueError(f"{name} have strides {cache.stride()}: not keys' {keys.stride()}, or heads in pieces")
        if cache.dtype != dtype:
            raise ValueError(f"{name} are {cache.dtype}, not {dtype}")
        if cache.device != keys.device:
            raise ValueError(f"{name} are on {cache.device}, keys on {keys.device}")


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
