"""Inputs for the junction and its equation in float64, for the reference, the interpreted and the compiled kernel."""

from itertools import product
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from modules.kernels.add_norm import KINDS, fused_add_norm
from modules.kernels.arguments import DTYPES

SIZES = (7, 48, 576, 4096, 5120, 8192)
ROWS = (0, 1, 3, 77)
EPS = 1e-5
OPTIONS = ("residual", "weight", "norm_bias", "bias")
SHAPE_CASES = list(product(SIZES, DTYPES, ("rms", "layer")))
OPTION_CASES = list(product((7, 48), DTYPES, KINDS))
OPTION_SETS = [dict(zip(OPTIONS, present, strict=True)) for present in product((True, False), repeat=len(OPTIONS))]


def junction_inputs(
    shape: tuple[int, ...], dtype: torch.dtype, *, device: str = "cpu", present: dict[str, bool] | None = None
) -> dict[str, Any]:
    """Arguments of the junction, with a mean well away from 0; those that `present` denies are None."""
    size = shape[-1:]
    tensors = {
        "partial": torch.randn(shape).to(dtype),
        "residual": torch.randn(shape) * 3 + 1,
        "weight": (torch.randn(size) + 1).to(dtype),
        "norm_bias": torch.randn(size).to(dtype),
        "bias": torch.randn(size).to(dtype),
    }
    return {name: tensor.to(device) if (present or {}).get(name, True) else None for name, tensor in tensors.items()}


def run_poisoned(inputs: dict[str, Any], **options: Any) -> tuple[Tensor, Tensor]:
    """fused_add_norm with outputs full of NaN beforehand: an element that is not written shows."""
    empty_like = torch.empty_like

    def full_of_nan(*args: Any, **kwargs: Any) -> Tensor:
        return empty_like(*args, **kwargs).fill_(float("nan"))

    with mock.patch.object(torch, "empty_like", full_of_nan):
        return fused_add_norm(**inputs, **{"eps": EPS, **options})


def equation(new_residual: Tensor, weight: Tensor | None, norm_bias: Tensor | None, kind: str) -> Tensor:
    """hidden in float64."""
    states = new_residual.double()
    if kind == "none":
        return states
    if kind == "layer":
        states = states - states.mean(-1, keepdim=True)
    states = states / (states.square().mean(-1, keepdim=True) + EPS).sqrt()
    states = states if weight is None else states * weight.double()
    return states if norm_bias is None else states + norm_bias.double()


def assert_equation_holds(
    inputs: dict[str, Any], kind: str, out_dtype: torch.dtype, *, bfloat16_truncates: bool = False
) -> None:
    """The stream bit for bit, hidden to one rounding to `out_dtype` plus what float32 statistics lose."""
    hidden, new_residual = run_poisoned(inputs, kind=kind, out_dtype=out_dtype)
    total = inputs["partial"].float()
    total = total if inputs["bias"] is None else total + inputs["bias"].float()
    total = total if inputs["residual"] is None else inputs["residual"] + total
    assert new_residual.dtype == torch.float32
    torch.testing.assert_close(new_residual, total, rtol=0, atol=0)
    assert (hidden.dtype, hidden.shape) == (out_dtype, total.shape)
    whole_step = bfloat16_truncates and out_dtype == torch.bfloat16
    rounding = torch.finfo(out_dtype).eps * (1 if whole_step else 0.5)
    expected = equation(total, inputs["weight"], inputs["norm_bias"], kind)
    torch.testing.assert_close(hidden.double(), expected, rtol=rounding + 1e-5, atol=1e-5)


def assert_further_parts_are_added(
    dtype: torch.dtype, *, device: str = "cpu", bfloat16_truncates: bool = False
) -> None:
    for num_more, size in ((1, 7), (3, 576)):
        inputs = junction_inputs((5, size), dtype, device=device)
        more = torch.randn(num_more, 5, size).to(device, dtype)
        around = torch.full((9, size), float("nan"), dtype=dtype, device=device)
        options: dict[str, Any] = {"kind": "rms", "eps": EPS, "out_dtype": dtype, "more": more, "out": around[2:7]}
        hidden, new_residual = fused_add_norm(**inputs, **options)
        assert hidden.data_ptr() == around[2:7].data_ptr() and around[[0, 1, 7, 8]].isnan().all()
        total = inputs["partial"].float()
        for part in more:
            total = total + part.float()
        total = inputs["residual"] + (total + inputs["bias"].float())
        torch.testing.assert_close(new_residual, total, rtol=0, atol=0)
        rounding = torch.finfo(dtype).eps * (1 if bfloat16_truncates and dtype == torch.bfloat16 else 0.5)
        expected = equation(total, inputs["weight"], inputs["norm_bias"], "rms")
        torch.testing.assert_close(hidden.double(), expected, rtol=rounding + 1e-5, atol=1e-5)


def assert_nan_stays_in_its_row(device: str) -> None:
    inputs = junction_inputs((3, 576), torch.float32, device=device)
    clean = run_poisoned(inputs, kind="layer", out_dtype=torch.float32)
    inputs["partial"][1, 5] = float("nan")
    hidden, new_residual = run_poisoned(inputs, kind="layer", out_dtype=torch.float32)
    assert hidden[1].isnan().all() and new_residual[1].isnan().sum() == 1
    for result, without in zip((hidden, new_residual), clean, strict=True):
        assert torch.equal(result[[0, 2]], without[[0, 2]])


def assert_rows_are_independent(device: str, size: int) -> None:
    """Bit for bit: each row alone gives what it gives among many."""
    inputs = junction_inputs((9, size), torch.bfloat16, device=device)
    for kind in KINDS:
        whole = run_poisoned(inputs, kind=kind, out_dtype=torch.float32)
        for row in (0, 1, 8):
            one = {**inputs, "partial": inputs["partial"][row : row + 1], "residual": inputs["residual"][row : row + 1]}
            alone = run_poisoned(one, kind=kind, out_dtype=torch.float32)
            assert all(torch.equal(a[0], b[row]) for a, b in zip(alone, whole, strict=True)), (kind, row)
