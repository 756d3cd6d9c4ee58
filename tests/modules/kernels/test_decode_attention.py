"""Attention of one token per row: the reference on a CPU, what the kernel compiles to, and the kernel on a GPU."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from modules.kernels import decode_attention
from modules.kernels.decode_attention import SplitHeads, Tuning, attend, default_tuning
from modules.kernels.early_selection import EarlySelection
from tests.modules.kernels import decode_attention_cases as cases
from tests.modules.kernels.compiled import compiled_ptx, compiles

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


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


@pytest.mark.cuda
@pytest.mark.parametrize("tuning", [Tuning(1, 64, 4), Tuning(16, 16, 1), Tuning(4, 32, 2), Tuning(32, 64, 8)])
def test_any_launch_shape_gives_the_same(tuning: Tuning) -> None:
    for length in (1, 16, 17, 500, 1023):
        case = cases.Case(24, 8, 128, 1024, (length - 1,))
        cases.assert_equation_holds(case, torch.bfloat16, device="cuda", tuning=tuning)


def test_splits_are_weighed_by_their_maxima_and_empty_ones_count_for_nothing() -> None:
    scores, values = torch.randn(2, 3, 30).double() * 4, torch.randn(30, 5).double()
    parts = []
    for begin, end in ((0, 7), (7, 30), (30, 30)):
        part = scores[..., begin:end]
        top = part.amax(-1) if end > begin else torch.full((2, 3), float("-inf"))
        weights = torch.exp(part - top[..., None])
        parts.append((weights @ values[begin:end], top, weights.sum(-1)))
    heads = SplitHeads(*(torch.stack(tensors, dim=2).float() for tensors in zip(*parts, strict=True)))
    torch.testing.assert_close(
        heads.combined(torch.float32).double(), scores.softmax(-1) @ values, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(
    ("num_rows", "num_groups", "max_seqlen"), [(1, 8, 4096), (1, 32, 2048), (8, 32, 4096), (1, 3, 33)]
)
def test_default_launch_has_at_most_four_programs_a_multiprocessor(
    num_rows: int, num_groups: int, max_seqlen: int
) -> None:
    pytest.importorskip("triton")
    splits = default_tuning(num_rows, num_groups, max_seqlen, 132).num_splits
    assert splits == 1 or num_rows * num_groups * splits <= 4 * 132
    assert splits & (splits - 1) == 0 and splits <= -(-max_seqlen // decode_attention.GRANULE)
    selecting = default_tuning(num_rows, num_groups, max_seqlen, 132, selects=True).num_splits
    assert selecting == min(splits, decode_attention.MAX_SPLITS_SELECTING)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"queries": torch.zeros(1, 8, 64, dtype=torch.float64)}, "queries .* of torch.float64"),
        ({"queries": torch.zeros(1, 7, 64)}, "7 heads do not share 2 groups"),
        ({"queries": torch.zeros(1, 34, 64)}, "34 heads do not share 2 groups, at most 16 each"),
        ({"queries": torch.zeros(1, 8, 32)}, r"queries \(1, 8, 32\) is not of shape \(1, 8, 64\)"),
        ({"queries": torch.zeros(1, 64, 8).transpose(1, 2)}, "queries is not contiguous"),
        ({"keys": torch.zeros(1, 2, 130, 64)}, "values have strides"),
        ({"keys": torch.zeros(1, 2, 64, 130).transpose(2, 3)}, "keys have strides .* in pieces"),
        ({"values": torch.zeros(1, 2, 129, 64)}, r"values \(1, 2, 129, 64\): no"),
        ({"cache_seqlens": torch.zeros(1, dtype=torch.int32)}, "cache_seqlens is torch.int32"),
        ({"active_groups": torch.ones(1, 3, dtype=torch.bool)}, r"active_groups \(1, 3\) is not of shape"),
        ({"active_groups": torch.ones(1, 2, dtype=torch.bool, device="meta")}, "active_groups is on meta"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attend(**{**cases.attention_inputs(cases.SMALL_CASES[2], torch.float32), **changes})


def attention_ptx(case: cases.Case) -> str:
    """PTX for sm_90 of a bfloat16 model; nothing is selected early."""
    import triton

    tuning = default_tuning(1, case.num_groups, case.max_seqlen, 132)
    types: dict[str, str | None] = dict.fromkeys(("queries", "keys", "values"), "*bf16")
    types |= dict.fromkeys(("outputs", "maxima", "sums"), "*fp32") | {"cache_seqlens": "*i64", "active_groups": "*u8"}
    types |= dict.fromkeys(("row_stride", "group_stride", "position_stride", "max_seqlen", "num_rows"), "i32")
    types |= {"num_groups": "i32", "scale": "fp32"}
    constants = {"HEAD_DIM": case.head_dim, "HEAD_BLOCK": max(16, triton.next_power_of_2(case.head_dim)), "PDL": True}
    constants |= {"SPLITS": tuning.num_splits, "BLOCK": tuning.block, "GRANULE": decode_attention.GRANULE}
    constants |= {"QUERIES": case.num_heads // case.num_groups, "QUERY_BLOCK": 16}
    nothing = EarlySelection().kernel_arguments()
    return compiled_ptx(decode_attention.decode_attention_kernel, types, constants | nothing, tuning.num_warps)


@compiles
def test_kernel_reads_16_bytes_at_a_time_and_multiplies_on_tensor_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    ptx = attention_ptx(cases.LARGE_CASES[0])
    before, after = ptx.split("griddepcontrol.wait")[:2]
    per_tile = 2 * (32 * 128 // (8 * 128))  # keys and values; loads of 8 elements by 128 threads
    widths = [re.findall(r"\bld\.global(\S*)", part) for part in (before, after)]
    # Length and flag, and a tile of positions that are complete, before the kernel ahead has ended.
    assert [width.endswith(".v4.b32") for width in widths[0]].count(True) == per_tile
    assert len(widths[0]) == per_tile + 2 and "st.global" not in before
    assert widths[1] and all(width.endswith(".v4.b32") for width in widths[1]), widths[1]
    assert "mma.sync" in ptx and ".local" not in ptx


@pytest.mark.cuda
def test_a_captured_graph_follows_lengths_and_groups() -> None:
    case = cases.Case(24, 8, 128, 1024, (1023,))
    inputs = cases.attention_inputs(case, torch.bfloat16, device="cuda")
    inputs["active_groups"] = torch.ones(1, 8, dtype=torch.bool, device="cuda")
    attend(**inputs)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend(**inputs)
    for position in (0, 100, 1023):
        inputs["cache_seqlens"].fill_(position)
        inputs["active_groups"].copy_(torch.rand(1, 8, device="cuda") < 0.5)
        for tensor in (captured.outputs, captured.maxima, captured.sums):
            tensor.fill_(float("nan"))
        graph.replay()
        active = cases.active_heads(inputs)
        found, expected = captured.combined(torch.bfloat16), attend(**inputs).combined(torch.bfloat16)
        assert torch.equal(found[active], expected[active]) and found[~active].isnan().all()
