"""The product of deferred states: its reference on a CPU, what the kernel compiles to, and the kernel on a GPU."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from modules.kernels import norm_linear as module
from modules.kernels.deferred_norm import DeferredNorm
from modules.kernels.norm_linear import norm_linear
from modules.kernels.weight_tiles import Tuning, tuning_of_shape
from tests.modules.kernels import norm_linear_cases as cases
from tests.modules.kernels.compiled import NORMED, compiled_ptx, compiles

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "out_dtype"), cases.TYPES)
def test_equation_holds(device: str, dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    for case in cases.CASES:
        cases.assert_product_is_right(case, dtype, out_dtype, device=device, launches=device == "cuda")


@pytest.mark.cuda
@pytest.mark.parametrize("rows", [1, 2, 8])
@pytest.mark.parametrize(("num_outputs", "hidden_size"), [(336, 3072), (32003, 4096), (8192, 336), (49152, 576)])
def test_equation_holds_at_sizes_of_real_models(rows: int, num_outputs: int, hidden_size: int) -> None:
    case = (rows, num_outputs, hidden_size, "rms", None)
    cases.assert_product_is_right(case, torch.bfloat16, torch.float32, device="cuda")


@pytest.mark.parametrize("device", DEVICES)
def test_plain_states_are_taken_as_they_are(device: str) -> None:
    cases.assert_plain_states_are_taken_as_they_are(device)


@pytest.mark.parametrize(
    ("states", "weight", "bias", "message"),
    [
        (torch.zeros(2, 48), torch.zeros(5, 47), None, r"weight \(5, 47\) is not of shape \(5, 48\)"),
        (torch.zeros(2, 48), torch.zeros(0, 48), None, r"weight \(0, 48\) has no rows"),
        (torch.zeros(2, 48), torch.zeros(48, 5).T, None, "weight is not contiguous"),
        (torch.zeros(2, 48), torch.zeros(5, 48, dtype=torch.bfloat16), None, "weight is torch.bfloat16"),
        (torch.zeros(2, 48), torch.zeros(5, 48), torch.zeros(4), r"bias \(4,\) is not of shape \(5,\)"),
        (torch.zeros(2, 48), torch.zeros(5, 48), torch.zeros(5, device="meta"), "bias is on meta, not on cpu"),
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
def test_kernel_reads_16_bytes_at_a_time_and_its_first_weights_before_it_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
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
    states = cases.deferred_states(1, 3072, torch.bfloat16, device="cuda")
    weight = torch.randn(5000, 3072, device="cuda").bfloat16()
    norm_linear(states, weight, None, out_dtype=torch.float32)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = norm_linear(states, weight, None, out_dtype=torch.float32)
    for _ in range(2):
        states.partial.normal_()
        captured.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured, norm_linear(states, weight, None, out_dtype=torch.float32))
