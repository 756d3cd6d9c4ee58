"""States whose norm is still to be computed, and what a product of them must be, for all kernels that read such."""

from typing import Any
from unittest import mock

import torch
from torch import Tensor

from modules.kernels import norm_linear
from modules.kernels.deferred_norm import DeferredNorm
from modules.kernels.weight_tiles import Tuning

EPS = 1e-5
# rows, outputs, hidden size, kind, tuning (None: the kernel's own)
CASES: list[tuple[int, int, int, str, Tuning | None]] = [
    (1, 131, 96, "rms", None),
    (1, 131, 96, "layer", Tuning(8, 4, 3)),  # several tiles a program
    (1, 5, 576, "rms", None),
    (1, 1, 7, "none", None),
    (1, 70, 50, "none", Tuning(16, 1, 64)),  # fewer tiles than programs
    (3, 67, 96, "rms", Tuning(8, 4, 3, prefetches=True)),
    (3, 20, 96, "layer", None),
    (8, 40, 50, "rms", Tuning(8, 4, 2, prefetches=True, max_registers=128)),
]
TYPES = [(torch.float32, torch.float32), (torch.float16, torch.float32), (torch.bfloat16, torch.bfloat16)]


def deferred_states(
    rows: int, hidden_size: int, dtype: torch.dtype, *, kind: str = "rms", device: str = "cpu", options: bool = True
) -> DeferredNorm:
    """A junction with everything (`options`: also with both biases), its `new_residual` full of NaN."""
    size = (hidden_size,)

    def made(shape: tuple[int, ...], of: torch.dtype) -> Tensor:
        return torch.randn(shape).to(device, of)

    return DeferredNorm(
        partial=made((rows, hidden_size), torch.float32),
        residual=made((rows, hidden_size), torch.float32) * 3 + 1,
        bias=made(size, dtype) if options else None,
        weight=made(size, dtype) + 1 if kind != "none" else None,
        norm_bias=made(size, dtype) if options and kind != "none" else None,
        kind=kind,
        eps=EPS,
        dtype=dtype,
        new_residual=torch.full((rows, hidden_size), float("nan"), device=device),
    )


def total_of(states: DeferredNorm) -> Tensor:
    """The new residual, summed in the kernel's order: float32 [rows, D]."""
    total = states.partial.float()
    total = total if states.bias is None else total + states.bias.float()
    return total if states.residual is None else states.residual + total


def normed_states(states: DeferredNorm) -> Tensor:
    """x in float64, rounded to its type on the way."""
    total = total_of(states).double()
    if states.kind == "layer":
        total = total - total.mean(-1, keepdim=True)
    if states.kind != "none":
        total = total / (total.square().mean(-1, keepdim=True) + states.eps).sqrt()
    total = total if states.weight is None else total * states.weight.double()
    total = total if states.norm_bias is None else total + states.norm_bias.double()
    return total.to(states.dtype).double()


def poisoned() -> Any:
    """While it lasts, fresh memory is full of NaN, or of -1: an element that is not written shows."""
    empty = torch.empty

    def full(*args: Any, **kwargs: Any) -> Tensor:
        made = empty(*args, **kwargs)
        return made.fill_(float("nan") if made.is_floating_point() else -1)

    return mock.patch.object(torch, "empty", full)


def assert_product_is_right(
    case: tuple[int, int, int, str, Tuning | None],
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    *,
    device: str = "cpu",
    launches: bool = False,
    truncates: bool = False,
) -> None:
    """norm_linear, or a launch by the case's tuning, against float64; `truncates`: as the interpreter does bfloat16."""
    rows, num_outputs, hidden_size, kind, tuning = case
    for options in (True, False):
        states = deferred_states(rows, hidden_size, dtype, kind=kind, device=device, options=options)
        weight = (torch.randn(num_outputs, hidden_size) / hidden_size**0.5).to(device, dtype)
        bias = torch.randn(num_outputs).to(device, dtype) if options else None
        with poisoned():
            if launches and tuning is not None:
                outputs = norm_linear.launch_norm_linear(states, weight, bias, out_dtype=out_dtype, tuning=tuning)
            else:
                outputs = norm_linear.norm_linear(states, weight, bias, out_dtype=out_dtype)
        assert (outputs.dtype, outputs.shape) == (out_dtype, (rows, num_outputs))
        expected = normed_states(states) @ weight.double().T
        expected = expected if bias is None else expected + bias.double()
        # An x that lies between two numbers of its type may have been rounded the other way.
        rounding = torch.finfo(dtype).eps * (4 if truncates else 1)
        torch.testing.assert_close(outputs.double(), expected, rtol=rounding + 1e-5, atol=4 * rounding + 1e-5)
        assert states.new_residual is not None
        torch.testing.assert_close(states.new_residual, total_of(states), rtol=0, atol=0)


def assert_plain_states_are_taken_as_they_are(device: str) -> None:
    states, weight = torch.randn(2, 24).to(device), torch.randn(10, 24).to(device)
    outputs = norm_linear.norm_linear(DeferredNorm.plain(states), weight, None, out_dtype=torch.float32)
    torch.testing.assert_close(outputs, states @ weight.T)
