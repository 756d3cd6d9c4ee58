"""MLP over active neurons: the reference on a CPU, what the kernel compiles to, and the kernel on a GPU."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from modules.kernels import sparse_mlp as module
from modules.kernels.deferred_norm import DeferredNorm
from modules.kernels.early_selection import ExtraRows
from modules.kernels.sparse_mlp import sparse_mlp
from tests.modules.kernels import sparse_mlp_cases as cases
from tests.modules.kernels.compiled import NORMED, compiled_ptx, compiles

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", cases.SMALL_CASES)
def test_equation_holds(case: cases.Case, dtype: torch.dtype, device: str) -> None:
    cases.assert_equation_holds(case, dtype, device=device)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", cases.LARGE_CASES)
def test_kernel_follows_the_equation_at_sizes_of_models(case: cases.Case, dtype: torch.dtype) -> None:
    cases.assert_equation_holds(case, dtype, device="cuda")


@pytest.mark.cuda
def test_deterministic_sums_are_equal_bit_for_bit() -> None:
    inputs = cases.mlp_inputs(cases.LARGE_CASES[0], torch.bfloat16, device="cuda")
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (cases.run_poisoned(inputs) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(first, second) and not first.isnan().any()


LIST = cases.mlp_inputs(cases.SMALL_CASES[0], torch.float32)["active"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation": "tanh"}, "activation 'tanh' is not one of"),
        ({"states": DeferredNorm.plain(torch.zeros(9, 48))}, r"states \(9, 48\)"),
        ({"states": DeferredNorm.plain(torch.zeros(1, 47))}, r"states \(1, 47\)"),
        ({"states": DeferredNorm.plain(torch.zeros(2, 48))}, "needs a mask"),
        ({"gate": torch.zeros(36, 48)}, "gate .*36, 48"),
        ({"down": torch.zeros(37, 48, dtype=torch.float16)}, "down is torch.float16"),
        ({"down": torch.zeros(48, 37).T}, "down is not contiguous"),
        ({"up_bias": torch.zeros(36)}, "up_bias .*36"),
        ({"output": torch.zeros(1, 48, dtype=torch.float16)}, "output is torch.float16"),
        ({"active": replace(LIST, length=torch.zeros(1, dtype=torch.int64))}, "active length is torch.int64"),
        ({"active": replace(LIST, indices=LIST.indices.to("meta"))}, "active indices is on meta"),
        ({"active": replace(LIST, gate_values=torch.zeros(1, 36))}, "gate values .*36"),
        ({"extra": ExtraRows(torch.zeros(3, 47), torch.zeros(3))}, "extra rows weight .*47"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sparse_mlp(**{**cases.mlp_inputs(cases.SMALL_CASES[0], torch.float32), **changes})


@compiles
@pytest.mark.parametrize("is_early", [False, True])
def test_kernel_reads_16_bytes_at_a_time_and_early_neurons_before_it_waits(
    is_early: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = module.sparse_mlp_kernel
    types: dict[str, str | None] = NORMED | dict.fromkeys(("gate", "up", "down"), "*bf16") | {"output": "*fp32"}
    types |= {"indices": "*i32", "length": "*i32", "rows": "i32"}
    constants: dict[str, Any] = {"KIND": "rms", "HIDDEN_SIZE": 4096, "BLOCK": 4096, "ROWS": 1, "UNITS": 1, "PDL": True}
    constants |= {"NUM_UNITS": 8192, "STANDIN_RANK": 0, "NUM_EXTRA": 0, "ACTIVATION": "silu", "PARTS": False}
    constants |= {name: None for name in kernel.arg_names if name not in types and name not in constants}
    ptx = compiled_ptx(kernel, types, constants | {"EARLY": is_early}, num_warps=8)
    before, after = ptx.split("griddepcontrol.wait")[:2]
    tile = 3 * 2  # gate, up and down; loads of 8 elements that make up a thread's 16 columns
    for part, tiles in ((before, 1 if is_early else 0), (after, 1 if is_early else 2)):
        widths = [width for width in re.findall(r"\bld\.global(\S*)", part) if "evict_first" in width]
        assert len(widths) == tiles * tile and all(width.endswith(".v4.b32") for width in widths), widths
    assert "st.global" not in before and ".local" not in ptx
    added = re.findall(r"\b(?:red|atom)\.\S+", ptx)
    assert added and all(".v4.f32" in width for width in added), added
