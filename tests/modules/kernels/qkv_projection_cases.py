"""Inputs for the projection and its equation in float64, for the reference, the interpreted and the compiled kernel."""

from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from modules.kernels.deferred_norm import DeferredNorm
from modules.kernels.qkv_projection import project_qkv

EPS = 1e-5
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
    shape = (case.num_rows, case.hidden_size)
    return {
        "states": DeferredNorm(
            partial=torch.randn(shape, device=device),
            residual=torch.randn(shape, device=device) * 3 + 1,
            bias=normal(case.hidden_size) if case.has_bias else None,
            weight=normal(case.hidden_size) + 1 if case.kind != "none" else None,
            norm_bias=normal(case.hidden_size) if case.kind == "layer" else None,
            kind=case.kind,
            eps=EPS,
            dtype=dtype,
            new_residual=torch.full(shape, float("nan"), device=device),
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


def run_poisoned(inputs: dict[str, Any], **options: Any) -> Tensor:
    """project_qkv with queries full of NaN beforehand: an element that is not written shows."""
    empty = torch.empty

    def full_of_nan(*args: Any, **kwargs: Any) -> Tensor:
        return empty(*args, **kwargs).fill_(float("nan"))

    with mock.patch.object(torch, "empty", full_of_nan):
        return project_qkv(**inputs, **options)


def assert_equation_holds(case: Case, dtype: torch.dtype, *, device: str = "cpu", **options: Any) -> None:
    """Queries, both caches (all positions of them) and the residual."""
    inputs = qkv_inputs(case, dtype, device=device)
    caches = {name: inputs[name].double() for name in ("keys", "values")}
    queries = run_poisoned(inputs, **options)
    states = inputs["states"]
    total = states.partial if states.bias is None else states.partial + states.bias.float()
    total = states.residual + total
    torch.testing.assert_close(states.new_residual, total, rtol=0, atol=0)
    hidden = total.double()
    if case.kind == "layer":
        hidden = hidden - hidden.mean(-1, keepdim=True)
    if case.kind != "none":
        hidden = hidden / (hidden.square().mean(-1, keepdim=True) + EPS).sqrt() * states.weight.double()
    hidden = hidden if states.norm_bias is None else hidden + states.norm_bias.double()

    def projected(name: str) -> Tensor:
        bias = inputs[f"{name}_bias"]
        result = hidden.to(dtype).double() @ inputs[f"{name}_weight"].double().T
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
