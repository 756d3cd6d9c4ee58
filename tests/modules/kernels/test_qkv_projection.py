"""Queries, keys and values: the reference on a CPU, what the kernel compiles to, and the compiled kernel on a GPU."""

import re
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from modules.kernels import qkv_projection as module
from modules.kernels.deferred_norm import DeferredNorm
from modules.kernels.qkv_projection import default_tuning, project_qkv
from modules.positions import RotaryPositions, rotary_table
from modules.specs import Rope
from tests.modules.kernels.kernel_checks import (
    DEVICES,
    DTYPES,
    NORMED,
    assert_residual_is_written,
    captured,
    compiled_ptx,
    compiles,
    deferred_states,
    normed_states,
    poisoned,
)

WEIGHTS = ("q_weight", "k_weight", "v_weight")
BIASES = ("q_bias", "k_bias", "v_bias")


@dataclass(frozen=True)
class Case:
    """Sizes, and which of the options."""

    num_rows: int
    hidden_size: int
    num_heads: int
    num_groups: int
    head_dim: int
    max_seqlen: int = 20
    kind: str = "rms"
    has_bias: bool = False
    is_rotary: bool = True
    is_selective: bool = False


SMALL_CASES = [
    Case(1, 96, 3, 3, 16),
    Case(1, 96, 6, 2, 16, is_selective=True),
    Case(1, 131, 4, 1, 10, kind="layer", has_bias=True),
    Case(2, 48, 8, 4, 8, kind="layer", has_bias=True, is_rotary=False, is_selective=True),
    Case(3, 64, 4, 2, 16, kind="none"),
    Case(5, 48, 2, 1, 16, has_bias=True, is_selective=True),
]
LARGE_CASES = [
    Case(1, 576, 9, 3, 64),
    Case(1, 3072, 24, 8, 128),
    Case(1, 3072, 24, 8, 128, is_selective=True),
    Case(1, 4096, 32, 32, 128, kind="layer", has_bias=True, is_rotary=False, is_selective=True),
    Case(2, 2560, 32, 32, 80, kind="layer", has_bias=True, is_rotary=False),
    Case(4, 3072, 24, 8, 128, is_selective=True),
    Case(8, 576, 9, 3, 64, is_selective=True),
]


def qkv_inputs(case: Case, dtype: torch.dtype, *, device: str = "cpu") -> dict[str, Any]:
    """Arguments of the projection. The first row stands at 0, the last beyond the cache if it is not the only one."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape).to(dtype).to(device)

    rows = {"q": case.num_heads * case.head_dim, "k": case.num_groups * case.head_dim}
    rows["v"] = rows["k"]
    cache_seqlens = torch.arange(case.num_rows) * (case.max_seqlen - 1) // max(1, case.num_rows - 1)
    cache_seqlens[-1] += case.num_rows > 1
    halves = torch.rand(case.max_seqlen, case.head_dim // 2) * 6
    active_groups = torch.rand(case.num_rows, case.num_groups) < 0.4
    active_groups[:, case.num_groups // 2] = True
    return {
        "states": deferred_states(
            case.num_rows, case.hidden_size, dtype, kind=case.kind, device=device, options=case.has_bias
        ),
        **{name: normal(rows[name[0]], case.hidden_size) * case.hidden_size**-0.5 for name in WEIGHTS},
        **{name: normal(rows[name[0]]) if case.has_bias else None for name in BIASES},
        "rotary": torch.stack((halves.cos(), halves.sin())).to(device) if case.is_rotary else None,
        "cache_seqlens": cache_seqlens.to(device),
        # Positions before groups, which no cache of this repository has: strides are to be used.
        "keys": normal(case.num_rows, case.max_seqlen, case.num_groups, case.head_dim).transpose(1, 2),
        "values": normal(case.num_rows, case.max_seqlen, case.num_groups, case.head_dim).transpose(1, 2),
        "active_groups": active_groups.to(device) if case.is_selective else None,
    }


def assert_equation_holds(case: Case, dtype: torch.dtype, *, device: str = "cpu", **options: Any) -> None:
    """Queries, both caches (all positions of them) and the residual."""
    inputs = qkv_inputs(case, dtype, device=device)
    caches = {name: inputs[name].double() for name in ("keys", "values")}
    with poisoned():
        queries = project_qkv(**inputs, **options)
    states = inputs["states"]
    assert_residual_is_written(states)
    hidden = normed_states(states)

    def projected(name: str) -> Tensor:
        bias = inputs[f"{name}_bias"]
        result = hidden @ inputs[f"{name}_weight"].double().T
        return (result if bias is None else result + bias.double()).unflatten(-1, (-1, case.head_dim))

    def rotated(heads: Tensor) -> Tensor:
        if inputs["rotary"] is None:
            return heads
        cos, sin = inputs["rotary"].to(dtype).double()[:, inputs["cache_seqlens"].clamp(max=case.max_seqlen - 1), None]
        first, second = heads.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    for row, position in enumerate(inputs["cache_seqlens"].tolist()):
        if position < case.max_seqlen:
            caches["keys"][row, :, position] = rotated(projected("k"))[row]
            caches["values"][row, :, position] = projected("v")[row]
    # Hidden, projection, product and sum are each rounded once; the interpreter truncates to bfloat16.
    eps = torch.finfo(dtype).eps
    tolerance: dict[str, Any] = {"rtol": 2 * eps + 1e-6, "atol": 6 * eps * float(hidden.square().mean().sqrt()) + 2e-6}
    expected = rotated(projected("q"))
    assert (queries.shape, queries.dtype) == (expected.shape, dtype)
    if case.is_selective:
        active = inputs["active_groups"].any(0).repeat_interleave(case.num_heads // case.num_groups)
        queries, expected = queries[:, active], expected[:, active]
    torch.testing.assert_close(queries.double(), expected, **tolerance)
    for name, cache in caches.items():
        torch.testing.assert_close(inputs[name].double(), cache, **tolerance)


SMALL = SMALL_CASES[1]


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
        project_qkv(**{**qkv_inputs(SMALL, torch.float32), **changes})


def qkv_ptx(case: Case) -> str:
    """Of a bfloat16 model."""
    tuning = default_tuning(case.hidden_size, case.head_dim, case.num_rows, skips=case.is_selective)
    constants: dict[str, Any] = {"HIDDEN_SIZE": case.hidden_size, "BLOCK": 1 << (case.hidden_size - 1).bit_length()}
    constants |= {"NUM_GROUPS": case.num_groups, "GROUP_BLOCK": 1 << (case.num_groups - 1).bit_length()}
    constants |= {"NUM_ROWS": case.num_rows, "NUM_HEADS": case.num_heads, "NUM_EXTRA": 0, "KIND": case.kind}
    constants |= {"HALF": case.head_dim // 2, "PAIRS": tuning.pairs, "HOLDS": True, "PDL": True}
    types = NORMED | dict.fromkeys((*WEIGHTS, "queries", "keys", "values"), "*bf16") | dict.fromkeys(BIASES)
    types |= {"rotary": "*fp32", "cache_seqlens": "*i64", "active_groups": "*u8" if case.is_selective else None}
    types |= {"extra_rows": None, "extra_output": None}
    types |= dict.fromkeys(("row_stride", "group_stride", "position_stride", "max_seqlen"), "i32")
    return compiled_ptx(module.qkv_projection_kernel, types, constants, tuning.num_warps)


@compiles
@pytest.mark.parametrize("case", [Case(1, 3072, 24, 8, 128), Case(1, 576, 9, 3, 64, is_selective=True)])
def test_kernel_reads_16_bytes_at_a_time_before_it_waits(case: Case) -> None:
    ptx = qkv_ptx(case)
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
    case = replace(LARGE_CASES[2], max_seqlen=64)
    inputs = qkv_inputs(case, torch.bfloat16, device="cuda")
    result, graph = captured(lambda: project_qkv(**inputs))
    for position in (0, 31, 63):
        inputs["cache_seqlens"].fill_(position)
        inputs["active_groups"].copy_(torch.rand(1, 8, device="cuda") < 0.5)
        inputs["states"].partial.normal_()
        for name in ("keys", "values"):
            inputs[name].zero_()
        graph.replay()
        found = [result.clone(), inputs["keys"].clone(), inputs["values"].clone()]
        for name in ("keys", "values"):
            inputs[name].zero_()
        expected = [project_qkv(**inputs), inputs["keys"], inputs["values"]]
        active = inputs["active_groups"][0].repeat_interleave(3)
        assert torch.equal(found[0][:, active], expected[0][:, active])
        assert torch.equal(found[1], expected[1]) and torch.equal(found[2], expected[2])
        assert found[1][:, :, position].any() and not found[1][:, :, position + 1 :].any()
