"""Queries, keys and values: the reference on a CPU, what the kernel compiles to, and the compiled kernel on a GPU."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from modules.kernels import qkv_projection
from modules.kernels.deferred_norm import DeferredNorm
from modules.kernels.qkv_projection import default_tuning, project_qkv
from modules.positions import RotaryPositions, rotary_table
from modules.specs import Rope
from tests.modules.kernels import qkv_projection_cases as cases
from tests.modules.kernels.compiled import compiles

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
SMALL = cases.SMALL_CASES[1]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", cases.SMALL_CASES)
def test_equation_holds(case: cases.Case, dtype: torch.dtype, device: str) -> None:
    cases.assert_equation_holds(case, dtype, device=device)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", cases.LARGE_CASES)
def test_kernel_follows_the_equation_at_sizes_of_models(case: cases.Case, dtype: torch.dtype) -> None:
    cases.assert_equation_holds(case, dtype, device="cuda")


def test_table_holds_what_eager_attention_rotates_by() -> None:
    cos, sin = RotaryPositions(Rope(), 16).cos_sin(torch.arange(40)[None], torch.float32)
    table = rotary_table(Rope(), 16, 40, "cpu")
    assert (table.shape, table.dtype) == ((2, 40, 8), torch.float32)
    assert torch.equal(table, torch.stack((cos[0, 0, :, :8], sin[0, 0, :, 8:])))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q_weight": torch.zeros(96, 95)}, r"q_weight \(96, 95\) is not of shape \(96, 96\)"),
        ({"q_weight": torch.zeros(80, 96)}, "5 query heads, 2 groups"),
        ({"k_weight": torch.zeros(96, 32).T}, "k_weight is not contiguous"),
        ({"v_weight": torch.zeros(32, 96, dtype=torch.bfloat16)}, "v_weight is torch.bfloat16"),
        ({"q_bias": torch.zeros(96)}, r"for all or none, not for \['q_bias'\]"),
        ({"rotary": torch.zeros(2, 20, 16)}, r"rotary \(2, 20, 16\) is not of shape \(2, 20, 8\)"),
        ({"cache_seqlens": torch.zeros(1, dtype=torch.int32)}, "cache_seqlens is torch.int32"),
        ({"active_groups": torch.ones(2, dtype=torch.bool)}, r"active_groups \(2,\) is not of shape"),
        ({"active_groups": torch.ones(1, 2)}, "active_groups is torch.float32"),
        ({"keys": torch.zeros(1, 2, 20, 16)}, "values have strides"),
        ({"keys": torch.zeros(2, 2, 20, 16)}, r"keys \(2, 2, 20, 16\): no \[1, groups"),
        ({"values": torch.zeros(1, 20, 2, 16).transpose(1, 2).half()}, "values are torch.float16, not torch.float32"),
        ({"states": DeferredNorm.plain(torch.zeros(9, 96))}, r"states \(9, 96\) of torch.float32: not \[1 to 8 rows"),
        ({"states": DeferredNorm.plain(torch.zeros(96, 1).T[:, ::2])}, "q_weight|not contiguous"),
        ({"cache_seqlens": torch.zeros(1, dtype=torch.int64, device="meta")}, "cache_seqlens is on meta, not on cpu"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        project_qkv(**{**cases.qkv_inputs(SMALL, torch.float32), **changes})


def compiled_ptx(case: cases.Case) -> str:
    """PTX for sm_90 of a bfloat16 model; aligned pointers and strides, as from torch's allocator."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    tuning = default_tuning(case.hidden_size, case.head_dim, case.num_rows, skips=case.is_selective)
    sizes = {"HIDDEN_SIZE": case.hidden_size, "BLOCK": triton.next_power_of_2(case.hidden_size)}
    groups = {"NUM_GROUPS": case.num_groups, "GROUP_BLOCK": triton.next_power_of_2(case.num_groups)}
    constants: dict[str, Any] = {**sizes, **groups, "NUM_ROWS": case.num_rows, "NUM_HEADS": case.num_heads}
    constants |= {"KIND": case.kind, "HALF": case.head_dim // 2, "PAIRS": tuning.pairs, "HOLDS": True, "PDL": True}
    constants |= dict.fromkeys((*cases.BIASES, "bias", "norm_bias", "extra_rows", "extra_output")) | {"NUM_EXTRA": 0}
    floats = ("rotary", "partial", "residual", "new_residual")
    signature = dict.fromkeys(constants, "constexpr") | dict.fromkeys(floats, "*fp32")
    signature |= {"cache_seqlens": "*i64", "active_groups": "*u8", "max_seqlen": "i32", "eps": "fp32"}
    signature |= dict.fromkeys(("row_stride", "group_stride", "position_stride"), "i32")
    if not case.is_selective:
        constants["active_groups"], signature["active_groups"] = None, "constexpr"
    kernel = qkv_projection.qkv_projection_kernel
    signature = {name: signature.get(name, "*bf16") for name in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind[0] in "*i"}
    source = ASTSource(kernel, signature, constants, aligned)
    options = {"num_warps": tuning.num_warps}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]


@compiles
@pytest.mark.parametrize("case", [cases.Case(1, 3072, 24, 8, 128), cases.Case(1, 576, 9, 3, 64, is_selective=True)])
def test_kernel_reads_16_bytes_at_a_time_before_it_waits(
    case: cases.Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    ptx = compiled_ptx(case)
    before, after = ptx.split("griddepcontrol.wait")
    tuning = default_tuning(case.hidden_size, case.head_dim, 1, skips=case.is_selective)
    # Both rows of each pair, in loads of 8 elements that make up a thread's columns.
    per_tile = 2 * tuning.pairs * (1 << (case.hidden_size - 1).bit_length()) // (8 * 32 * tuning.num_warps)
    for part, tiles in ((before, 1), (after, 2 if case.is_selective else 1)):
        widths = [width for width in re.findall(r"\bld\.global(\S*)", part) if "evict_first" in width]
        assert len(widths) == tiles * per_tile and all(width.endswith(".v4.b32") for width in widths), widths
    assert "st.global" not in before
    assert ".local" not in ptx


@pytest.mark.cuda
def test_a_captured_graph_follows_positions_and_groups() -> None:
    case = replace(cases.LARGE_CASES[2], max_seqlen=64)
    inputs = cases.qkv_inputs(case, torch.bfloat16, device="cuda")
    project_qkv(**inputs)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = project_qkv(**inputs)
    for position in (0, 31, 63):
        inputs["cache_seqlens"].fill_(position)
        inputs["active_groups"].copy_(torch.rand(1, 8, device="cuda") < 0.5)
        inputs["states"].partial.normal_()
        for name in ("keys", "values"):
            inputs[name].zero_()
        graph.replay()
        found = [captured.clone(), inputs["keys"].clone(), inputs["values"].clone()]
        for name in ("keys", "values"):
            inputs[name].zero_()
        expected = [project_qkv(**inputs), inputs["keys"], inputs["values"]]
        active = inputs["active_groups"][0].repeat_interleave(3)
        assert torch.equal(found[0][:, active], expected[0][:, active])
        assert torch.equal(found[1], expected[1]) and torch.equal(found[2], expected[2])
        assert found[1][:, :, position].any() and not found[1][:, :, position + 1 :].any()
