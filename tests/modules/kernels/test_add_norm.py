"""The junction: its reference on a CPU, what the kernel compiles to, and the compiled kernel on a GPU."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from modules.kernels import add_norm
from modules.kernels.add_norm import KINDS, fused_add_norm
from modules.kernels.arguments import DTYPES
from tests.modules.kernels import add_norm_cases as cases
from tests.modules.kernels.compiled import compiles

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("size", "dtype", "kind"), cases.SHAPE_CASES)
def test_equation_holds_at_any_shape(device: str, size: int, dtype: torch.dtype, kind: str) -> None:
    for rows in cases.ROWS:
        cases.assert_equation_holds(cases.junction_inputs((rows, size), dtype, device=device), kind, dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("size", "dtype", "kind"), cases.OPTION_CASES)
def test_equation_holds_with_any_options(device: str, size: int, dtype: torch.dtype, kind: str) -> None:
    for present in cases.OPTION_SETS:
        inputs = cases.junction_inputs((2, 3, size), dtype, device=device, present=present)
        cases.assert_equation_holds(inputs, kind, torch.float32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_further_parts_are_added_and_the_result_goes_where_it_should(device: str, dtype: torch.dtype) -> None:
    cases.assert_further_parts_are_added(dtype, device=device)


@pytest.mark.parametrize("device", DEVICES)
def test_nan_stays_in_its_row(device: str) -> None:
    cases.assert_nan_stays_in_its_row(device)


@pytest.mark.cuda
@pytest.mark.parametrize("size", [7, 48, 4096, 16384])
def test_a_row_does_not_depend_on_the_others(size: int) -> None:
    cases.assert_rows_are_independent("cuda", size)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_results_alias_neither_inputs_nor_each_other(device: str, kind: str) -> None:
    inputs = cases.junction_inputs((3, 48), torch.float32, device=device, present=dict.fromkeys(cases.OPTIONS, False))
    hidden, new_residual = fused_add_norm(**inputs, kind=kind, eps=cases.EPS, out_dtype=torch.float32)
    assert len({tensor.data_ptr() for tensor in (inputs["partial"], hidden, new_residual)}) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"partial": torch.zeros(3, 48, dtype=torch.float64)}, "partial is torch.float64"),
        ({"partial": torch.zeros(48, 3).T}, "partial is not contiguous"),
        ({"partial": torch.zeros(1, 16385)}, "no last dim of 1 to 16384"),
        ({"residual": torch.zeros(3, 48, dtype=torch.bfloat16)}, "residual is torch.bfloat16"),
        ({"residual": torch.zeros(2, 48)}, r"residual \(2, 48\) does not fit partial \(3, 48\)"),
        ({"residual": torch.zeros(48, 3).T}, "residual is not contiguous"),
        ({"weight": torch.zeros(47)}, r"weight \(47,\) does not fit"),
        ({"norm_bias": torch.zeros(48, dtype=torch.int32)}, "norm_bias is torch.int32"),
        ({"bias": torch.zeros(48, device="meta")}, "bias is on meta, partial on cpu"),
        ({"kind": "batch"}, "kind 'batch' is not one of rms, layer, none"),
        ({"out_dtype": torch.float64}, "out_dtype torch.float64 is not one of"),
        ({"more": torch.zeros(2, 3, 47)}, r"more is torch.float32 \(2, 3, 47\), not torch.float32 \(2, 3, 48\)"),
        ({"more": torch.zeros(2, 3, 48, dtype=torch.bfloat16)}, r"more is torch.bfloat16 \(2, 3, 48\), not"),
        ({"more": torch.zeros(2, 48, 3).mT}, "more is not contiguous on cpu"),
        ({"out": torch.zeros(3, 48, dtype=torch.bfloat16)}, r"out is torch.bfloat16 \(3, 48\), not torch.float32"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    arguments = {**cases.junction_inputs((3, 48), torch.float32), "kind": "rms", "out_dtype": torch.float32}
    with pytest.raises(ValueError, match=message):
        fused_add_norm(**{**arguments, **changes}, eps=cases.EPS)


def compiled_ptx(hidden_size: int, kind: str, num_more: int) -> str:
    """PTX for sm_90 of bfloat16 in and out, with every argument; aligned pointers, as from torch's allocator."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    block = triton.next_power_of_2(hidden_size)
    constants = {"HIDDEN_SIZE": hidden_size, "BLOCK": block, "KIND": kind, "NUM_MORE": num_more}
    pointers = dict.fromkeys(("partial", "residual", "weight", "norm_bias", "bias", "hidden"), "*bf16")
    signature = {**pointers, "residual": "*fp32", "new_residual": "*fp32", "more": "*bf16", "more_stride": "i32"}
    signature |= {"eps": "fp32"}
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(9)}
    source = ASTSource(add_norm.add_norm_kernel, signature | dict.fromkeys(constants, "constexpr"), constants, aligned)
    options = {"num_warps": add_norm.num_warps_of(block)}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]


@compiles
@pytest.mark.parametrize(("kind", "num_more"), [("rms", 0), ("layer", 0), ("rms", 3)])
@pytest.mark.parametrize("hidden_size", [4096, 5120, 16384])
def test_kernel_moves_16_bytes_at_a_time_and_keeps_the_row_in_registers(
    hidden_size: int, kind: str, num_more: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    ptx = compiled_ptx(hidden_size, kind, num_more)
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
    inputs = cases.junction_inputs((3, 4096), dtype, device="cuda")
    options: dict[str, Any] = {"kind": "rms", "eps": cases.EPS, "out_dtype": dtype}
    fused_add_norm(**inputs, **options)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = fused_add_norm(**inputs, **options)
    for _ in range(2):
        for name, tensor in cases.junction_inputs((3, 4096), dtype, device="cuda").items():
            inputs[name].copy_(tensor)
        for result in captured:
            result.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        for result, expected in zip(captured, fused_add_norm(**inputs, **options), strict=True):
            assert torch.equal(result, expected)
