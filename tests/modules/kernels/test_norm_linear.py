"""The product of deferred states: its reference on a CPU, what the kernel compiles to, and the kernel on a GPU."""

import re
from typing import Any

import pytest
import torch

from modules.kernels import norm_linear as module
from modules.kernels.deferred_norm import DeferredNorm
from modules.kernels.norm_linear import norm_linear
from modules.kernels.weight_tiles import Tuning, tuning_of_shape
from tests.modules.kernels.kernel_checks import (
    DEVICES,
    NORMED,
    assert_graph_follows,
    assert_residual_is_written,
    compiled_ptx,
    compiles,
    deferred_states,
    normed_states,
    poisoned,
)

Case = tuple[int, int, int, str, Tuning | None]  # rows, outputs, hidden size, kind, tuning (None: the kernel's own)
CASES: list[Case] = [
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


def assert_product_is_right(
    case: Case,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    *,
    device: str = "cpu",
    launches: bool = False,
    truncates: bool = False,
    all_options: tuple[bool, ...] = (True, False),
) -> None:
    """norm_linear, or a launch by the case's tuning, against float64; `truncates`: as the interpreter does bfloat16."""
    rows, num_outputs, hidden_size, kind, tuning = case
    for options in all_options:
        states = deferred_states(rows, hidden_size, dtype, kind=kind, device=device, options=options)
        weight = (torch.randn(num_outputs, hidden_size) / hidden_size**0.5).to(device, dtype)
        bias = torch.randn(num_outputs).to(device, dtype) if options else None
        with poisoned():
            if launches and tuning is not None:
                outputs = module.launch_norm_linear(states, weight, bias, out_dtype=out_dtype, tuning=tuning)
            else:
                outputs = norm_linear(states, weight, bias, out_dtype=out_dtype)
        assert (outputs.dtype, outputs.shape) == (out_dtype, (rows, num_outputs))
        expected = normed_states(states) @ weight.double().T
        expected = expected if bias is None else expected + bias.double()
        # An x that lies between two numbers of its type may have been rounded the other way.
        rounding = torch.finfo(dtype).eps * (4 if truncates else 1)
        torch.testing.assert_close(outputs.double(), expected, rtol=rounding + 1e-5, atol=4 * rounding + 1e-5)
        assert_residual_is_written(states)


@pytest.mark.parametrize("device", DEVICES)
def test_plain_states_are_taken_as_they_are(device: str) -> None:
    states, weight = torch.randn(2, 24).to(device), torch.randn(10, 24).to(device)
    outputs = norm_linear(DeferredNorm.plain(states), weight, None, out_dtype=torch.float32)
    torch.testing.assert_close(outputs, states @ weight.T)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "out_dtype"), TYPES)
def test_equation_holds(device: str, dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    for case in CASES:
        assert_product_is_right(case, dtype, out_dtype, device=device, launches=device == "cuda")


@pytest.mark.cuda
@pytest.mark.parametrize("rows", [1, 2, 8])
@pytest.mark.parametrize(("num_outputs", "hidden_size"), [(336, 3072), (32003, 4096), (8192, 336), (49152, 576)])
def test_equation_holds_at_sizes_of_real_models(rows: int, num_outputs: int, hidden_size: int) -> None:
    assert_product_is_right((rows, num_outputs, hidden_size, "rms", None), torch.bfloat16, torch.float32, device="cuda")


@pytest.mark.parametrize(
    ("states", "weight", "bias", "message"),
    [
        (torch.zeros(2, 48), torch.zeros(5, 47), None, r"weight \(5, 47\) is not of shape \(5, 48\)"),
        (torch.zeros(2, 48), torch.zeros(0, 48), None, r"weight \(0, 48\) has no rows"),
        (torch.zeros(2, 48), torch.zeros(48, 5).T, None, "weight is not contiguous"),
        (torch.zeros(2, 48), torch.zeros(5, 48, dtype=torch.bfloat16), None, "weight is torch.bfloat16"),
        (torch.zeros(2, 48), torch.zeros(5, 48), torch.zeros(4), r"bias \(4,\) is not of shape \(5,\)"),
        (torch.zeros(9, 48), torch.zeros(5, 48), None, r"states \(9, 48\): not 1 to 8 rows"),
        (torch.zeros(48, 2).T, torch.zeros(5, 48), None, "partial is not contiguous"),
        (torch.zeros(2, 48).double(), torch.zeros(5, 48), None, "states are torch.float64"),
    ],
)
def test_what_does_not_fit_is_refused(states: Any, weight: Any, bias: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        norm_linear(DeferredNorm.plain(states), weight, bias, out_dtype=torch.float32)


def test_an_unknown_result_type_is_refused() -> None:
    with pytest.raises(ValueError, match="out_dtype torch.int32 is not one of"):
        norm_linear(DeferredNorm.plain(torch.zeros(1, 8)), torch.zeros(5, 8), None, out_dtype=torch.int32)


def test_small_products_use_every_multiprocessor_and_large_ones_stay() -> None:
    pytest.importorskip("triton")
    assert tuning_of_shape(1, 336, 3072, 2, 132) == Tuning(1, 8, 336)
    assert tuning_of_shape(1, 8192, 336, 2, 132) == Tuning(16, 4, 512)
    assert tuning_of_shape(1, 128256, 3072, 2, 132) == Tuning(2, 4, 528)
    assert tuning_of_shape(1, 128256, 4096, 2, 132) == Tuning(4, 4, 528)


@compiles
def test_kernel_reads_16_bytes_at_a_time_and_its_first_weights_before_it_waits() -> None:
    types = NORMED | {"weight": "*bf16", "linear_bias": None, "normed": None, "outputs": "*fp32", "num_outputs": "i32"}
    constants: dict[str, Any] = {"NUM_ROWS": 1, "KIND": "rms", "HIDDEN_SIZE": 3072, "BLOCK": 4096, "PDL": True}
    constants |= {"TILE": 1, "PREFETCHES": False}
    ptx = compiled_ptx(module.norm_linear_kernel, types, constants, num_warps=8)
    widths = re.findall(r"\bld\.global(\S*)", ptx)
    assert all(width.endswith(".v4.b32") for width in widths), set(widths)
    assert ".local" not in ptx
    # One tile of one row, 16 elements a thread, 8 at a time: all of it before the kernel waits.
    assert len(re.findall(r"\bld\.global\S*evict_first", ptx[: ptx.index("griddepcontrol.wait")])) == 2
    assert ptx.count("evict_first.L2::cache_hint.v4") == 2


@pytest.mark.cuda
def test_a_captured_graph_follows_changed_inputs() -> None:
    states = deferred_states(1, 3072, torch.bfloat16, device="cuda")
    weight = torch.randn(5000, 3072, device="cuda").bfloat16()
    assert_graph_follows(
        lambda: norm_linear(states, weight, None, out_dtype=torch.float32), lambda: states.partial.normal_()
    )
