"""Attention of one token per row: the reference on a CPU, what the kernel compiles to, and the kernel on a GPU."""

import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from modules.kernels import decode_attention
from modules.kernels.decode_attention import SplitHeads, Tuning, attend, default_tuning
from modules.kernels.early_selection import EarlySelection
from tests.modules.kernels.kernel_checks import DEVICES, DTYPES, NAN, captured, compiled_ptx, compiles, poisoned


@dataclass(frozen=True)
class Case:
    """Sizes; cache_seqlens of the rows, which are positions without the new token's."""

    num_heads: int
    num_groups: int
    head_dim: int
    max_seqlen: int
    cache_seqlens: tuple[int, ...]
    is_selective: bool = False


SMALL_CASES = [
    Case(2, 2, 16, 40, (0,)),
    Case(3, 1, 16, 40, (39,)),
    Case(8, 2, 64, 130, (128,)),
    Case(8, 1, 80, 70, (32,)),
    Case(6, 3, 24, 50, (3, 50, 17), is_selective=True),
]
LARGE_CASES = [
    Case(24, 8, 128, 1024, (511,)),
    Case(24, 8, 128, 9000, (8191,), is_selective=True),
    Case(32, 32, 128, 1024, (512,)),
    Case(9, 3, 64, 512, (100, 511, 0, 63)),
    Case(32, 8, 80, 700, (1, 2, 3, 699, 700, 31, 32, 33), is_selective=True),
    Case(8, 8, 16, 100, (77,)),
]


def attention_inputs(case: Case, dtype: torch.dtype, *, device: str = "cpu") -> dict[str, Any]:
    """Arguments of attention; what lies beyond a row's length is NaN, and so are inactive groups."""
    rows = len(case.cache_seqlens)
    cache_seqlens = torch.tensor(case.cache_seqlens)
    active_groups = torch.rand(rows, case.num_groups) < 0.5
    active_groups[:, -1] = True
    unused = torch.arange(case.max_seqlen)[:, None] > cache_seqlens[:, None, None]
    unused = unused if not case.is_selective else unused | ~active_groups[:, None]
    # Positions before groups, which no cache of this repository has: strides are to be used.
    keys, values = (
        torch.randn(rows, case.max_seqlen, case.num_groups, case.head_dim)
        .masked_fill(unused[..., None], NAN)
        .to(device, dtype)
        .transpose(1, 2)
        for _ in range(2)
    )
    return {
        "queries": torch.randn(rows, case.num_heads, case.head_dim).to(device, dtype) * 2,
        "keys": keys,
        "values": values,
        "cache_seqlens": cache_seqlens.to(device),
        "active_groups": active_groups.to(device) if case.is_selective else None,
    }


def active_heads(inputs: dict[str, Any]) -> Tensor:
    """Bool [B, N]: those of which anything is promised."""
    rows, heads = inputs["queries"].shape[:2]
    active = inputs["active_groups"]
    if active is None:
        return torch.ones(rows, heads, dtype=torch.bool, device=inputs["queries"].device)
    return active.repeat_interleave(heads // active.shape[1], dim=1)


def equation(inputs: dict[str, Any]) -> Tensor:
    """[B, N, H] in float64, row by row over what is in the cache."""
    keys, values = inputs["keys"].double(), inputs["values"].double()
    lengths = (inputs["cache_seqlens"] + 1).clamp(max=keys.shape[2]).tolist()
    rows = []
    for row, length in enumerate(lengths):
        k, v = (cache[row : row + 1, :, :length] for cache in (keys, values))
        queries = inputs["queries"][row, None, :, None].double()
        rows.append(F.scaled_dot_product_attention(queries, k, v, enable_gqa=True)[0, :, 0])
    return torch.stack(rows)


def assert_equation_holds(case: Case, dtype: torch.dtype, *, device: str = "cpu", **options: Any) -> SplitHeads:
    """The combined heads; what no split has seen is marked as empty, not NaN."""
    inputs = attention_inputs(case, dtype, device=device)
    with poisoned():
        heads = attend(**inputs, **options)
    active, expected = active_heads(inputs), equation(inputs)
    combined = heads.combined(torch.float32)
    # The weights of the values are rounded to 16 bits, the result here is not.
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(combined[active].double(), expected[active], rtol=1e-5, atol=eps + 1e-5)
    outputs, maxima, sums = heads.outputs[active], heads.maxima[active], heads.sums[active]
    assert not (outputs.isnan().any() or maxima.isnan().any() or sums.isnan().any())
    is_empty = maxima == float("-inf")
    assert torch.equal(is_empty, sums == 0) and not outputs[is_empty].any()
    return heads


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", SMALL_CASES)
def test_equation_holds(case: Case, dtype: torch.dtype, device: str) -> None:
    assert_equation_holds(case, dtype, device=device)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", LARGE_CASES)
def test_kernel_follows_the_equation_at_sizes_of_models(case: Case, dtype: torch.dtype) -> None:
    assert_equation_holds(case, dtype, device="cuda")


@pytest.mark.cuda
@pytest.mark.parametrize("tuning", [Tuning(1, 64, 4), Tuning(16, 16, 1), Tuning(4, 32, 2), Tuning(32, 64, 8)])
def test_any_launch_shape_gives_the_same(tuning: Tuning) -> None:
    for length in (1, 16, 17, 500, 1023):
        case = Case(24, 8, 128, 1024, (length - 1,))
        assert_equation_holds(case, torch.bfloat16, device="cuda", tuning=tuning)


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
        attend(**{**attention_inputs(SMALL_CASES[2], torch.float32), **changes})


def attention_ptx(case: Case) -> str:
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
def test_kernel_reads_16_bytes_at_a_time_and_multiplies_on_tensor_cores() -> None:
    ptx = attention_ptx(LARGE_CASES[0])
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
    case = Case(24, 8, 128, 1024, (1023,))
    inputs = attention_inputs(case, torch.bfloat16, device="cuda")
    inputs["active_groups"] = torch.ones(1, 8, dtype=torch.bool, device="cuda")
    result, graph = captured(lambda: attend(**inputs))
    for position in (0, 100, 1023):
        inputs["cache_seqlens"].fill_(position)
        inputs["active_groups"].copy_(torch.rand(1, 8, device="cuda") < 0.5)
        for tensor in (result.outputs, result.maxima, result.sums):
            tensor.fill_(float("nan"))
        graph.replay()
        active = active_heads(inputs)
        found, expected = result.combined(torch.bfloat16), attend(**inputs).combined(torch.bfloat16)
        assert torch.equal(found[active], expected[active]) and found[~active].isnan().all()
