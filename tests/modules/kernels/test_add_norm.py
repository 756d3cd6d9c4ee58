"""The junction: its reference on a CPU, what the kernel compiles to, and the compiled kernel on a GPU."""

import re
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from modules.kernels import add_norm
from modules.kernels.add_norm import KINDS, fused_add_norm
from tests.modules.kernels.kernel_checks import (
    DEVICES,
    DTYPES,
    EPS,
    NAN,
    assert_graph_follows,
    compiled_ptx,
    compiles,
    normed,
    poisoned,
)

OPTIONS = ("residual", "weight", "norm_bias", "bias")


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
    with poisoned():
        return fused_add_norm(**inputs, **{"eps": EPS, **options})


def assert_equation_holds(
    inputs: dict[str, Any], kind: str, out_dtype: torch.dtype, *, truncates: bool = False, **options: Any
) -> None:
    """The stream bit for bit, hidden to one rounding to `out_dtype` (`truncates`: as the interpreter does bfloat16)
    plus what float32 statistics lose."""
    hidden, new_residual = run_poisoned(inputs, kind=kind, out_dtype=out_dtype, **options)
    total = inputs["partial"].float()
    for part in options.get("more", ()):
        total = total + part.float()
    total = total if inputs["bias"] is None else total + inputs["bias"].float()
    total = total if inputs["residual"] is None else inputs["residual"] + total
    assert new_residual.dtype == torch.float32
    torch.testing.assert_close(new_residual, total, rtol=0, atol=0)
    assert (hidden.dtype, hidden.shape) == (out_dtype, total.shape)
    rounding = torch.finfo(out_dtype).eps * (1 if truncates and out_dtype == torch.bfloat16 else 0.5)
    expected = normed(total, inputs["weight"], inputs["norm_bias"], kind)
    torch.testing.assert_close(hidden.double(), expected, rtol=rounding + 1e-5, atol=1e-5)


def assert_any_shape(
    size: int, dtype: torch.dtype, kind: str, rows: tuple[int, ...], device: str = "cpu", *, truncates: bool = False
) -> None:
    for num_rows in rows:
        inputs = junction_inputs((num_rows, size), dtype, device=device)
        assert_equation_holds(inputs, kind, dtype, truncates=truncates)


def assert_any_options(size: int, dtype: torch.dtype, kind: str, device: str = "cpu") -> None:
    for chosen in product((True, False), repeat=len(OPTIONS)):
        present = dict(zip(OPTIONS, chosen, strict=True))
        inputs = junction_inputs((2, 3, size), dtype, device=device, present=present)
        assert_equation_holds(inputs, kind, torch.float32)


def assert_further_parts_are_added(dtype: torch.dtype, device: str = "cpu", *, truncates: bool = False) -> None:
    """And the result goes where it should."""
    for num_more, size in ((1, 7), (3, 576)):
        around = torch.full((9, size), NAN, dtype=dtype, device=device)
        more = torch.randn(num_more, 5, size).to(device, dtype)
        inputs = junction_inputs((5, size), dtype, device=device)
        assert_equation_holds(inputs, "rms", dtype, truncates=truncates, more=more, out=around[2:7])
        assert around[[0, 1, 7, 8]].isnan().all() and not around[2:7].isnan().any()


@pytest.mark.parametrize("device", DEVICES)
def test_nan_stays_in_its_row(device: str) -> None:
    inputs = junction_inputs((3, 576), torch.float32, device=device)
    clean = run_poisoned(inputs, kind="layer", out_dtype=torch.float32)
    inputs["partial"][1, 5] = NAN
    hidden, new_residual = run_poisoned(inputs, kind="layer", out_dtype=torch.float32)
    assert hidden[1].isnan().all() and new_residual[1].isnan().sum() == 1
    for result, without in zip((hidden, new_residual), clean, strict=True):
        assert torch.equal(result[[0, 2]], without[[0, 2]])


def assert_rows_are_independent(size: int, device: str = "cpu") -> None:
    """Bit for bit: each row alone gives what it gives among many."""
    inputs = junction_inputs((9, size), torch.bfloat16, device=device)
    for kind in KINDS:
        whole = run_poisoned(inputs, kind=kind, out_dtype=torch.float32)
        for row in (0, 1, 8):
            one = {**inputs, "partial": inputs["partial"][row : row + 1], "residual": inputs["residual"][row : row + 1]}
            alone = run_poisoned(one, kind=kind, out_dtype=torch.float32)
            assert all(torch.equal(a[0], b[row]) for a, b in zip(alone, whole, strict=True)), (kind, row)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [7, 48, 576, 4096, 5120, 8192])
def test_equation_holds_at_any_shape(device: str, size: int, dtype: torch.dtype, kind: str) -> None:
    assert_any_shape(size, dtype, kind, (0, 1, 3, 77), device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_equation_holds_with_any_options(device: str, dtype: torch.dtype, kind: str) -> None:
    for size in (7, 48):
        assert_any_options(size, dtype, kind, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_further_parts_are_added_and_the_result_goes_where_it_should(device: str, dtype: torch.dtype) -> None:
    assert_further_parts_are_added(dtype, device)


@pytest.mark.cuda
@pytest.mark.parametrize("size", [7, 48, 4096, 16384])
def test_a_row_does_not_depend_on_the_others(size: int) -> None:
    assert_rows_are_independent(size, "cuda")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_results_alias_neither_inputs_nor_each_other(device: str, kind: str) -> None:
    inputs = junction_inputs((3, 48), torch.float32, device=device, present=dict.fromkeys(OPTIONS, False))
    hidden, new_residual = fused_add_norm(**inputs, kind=kind, eps=EPS, out_dtype=torch.float32)
    assert len({tensor.data_ptr() for tensor in (inputs["partial"], hidden, new_residual)}) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"partial": torch.zeros(3, 48, dtype=torch.float64)}, "partial is torch.float64"),
        ({"partial": torch.zeros(48, 3).T}, "partial is not contiguous"),
        ({"partial": torch.zeros(1, 16385)}, "no last dim of 1 to 16384"),
        ({"residual": torch.zeros(3, 48, dtype=torch.bfloat16)}, "residual is torch.bfloat16"),
        ({"residual": torch.zeros(2, 48)}, r"residual \(2, 48\) is not of shape \(3, 48\)"),
        ({"weight": torch.zeros(47)}, r"weight \(47,\) is not of shape \(48,\)"),
        ({"bias": torch.zeros(48, device="meta")}, "bias is on meta, not on cpu"),
        ({"kind": "batch"}, "kind 'batch' is not one of rms, layer, none"),
        ({"out_dtype": torch.float64}, "out_dtype torch.float64 is not one of"),
        ({"more": torch.zeros(2, 3, 47)}, r"more \(2, 3, 47\) is not of shape \(2, 3, 48\)"),
        ({"out": torch.zeros(3, 48, dtype=torch.bfloat16)}, r"out is torch.bfloat16"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    arguments = {**junction_inputs((3, 48), torch.float32), "kind": "rms", "out_dtype": torch.float32}
    with pytest.raises(ValueError, match=message):
        fused_add_norm(**{**arguments, **changes}, eps=EPS)


@compiles
@pytest.mark.parametrize(("kind", "num_more"), [("rms", 0), ("layer", 0), ("rms", 3)])
@pytest.mark.parametrize("hidden_size", [4096, 5120, 16384])
def test_kernel_moves_16_bytes_at_a_time_and_keeps_the_row_in_registers(
    hidden_size: int, kind: str, num_more: int
) -> None:
    block = 1 << (hidden_size - 1).bit_length()
    constants = {"HIDDEN_SIZE": hidden_size, "BLOCK": block, "KIND": kind, "NUM_MORE": num_more}
    types: dict[str, str | None] = dict.fromkeys(("partial", "weight", "norm_bias", "bias", "hidden", "more"), "*bf16")
    types |= {"residual": "*fp32", "new_residual": "*fp32", "more_stride": "i32", "eps": "fp32"}
    ptx = compiled_ptx(add_norm.add_norm_kernel, types, constants, add_norm.num_warps_of(block))
    accesses = re.findall(r"\b(ld|st)\.global(\S*)", ptx)
    assert {name for name, _ in accesses} == {"ld", "st"}
    assert all(width.endswith(".v4.b32") for _, width in accesses), set(accesses)
    # 16 elements a thread: two accesses for each of 4 bfloat16 operands, four for the float32 one. One pass, no more.
    assert [name for name, _ in accesses].count("ld") == (4 + num_more) * 2 + 4
    assert [name for name, _ in accesses].count("st") == 2 + 4
    assert ".local" not in ptx


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_captured_graph_follows_changed_inputs(dtype: torch.dtype) -> None:
    inputs = junction_inputs((3, 4096), dtype, device="cuda")

    def change() -> None:
        for tensor in inputs.values():
            tensor.normal_()

    assert_graph_follows(lambda: fused_add_norm(**inputs, kind="rms", eps=EPS, out_dtype=dtype), change)
