"""Inputs for attention of one token per row and its equation in float64, for the reference and the kernel."""

from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

from modules.kernels.decode_attention import SplitHeads, attend

NAN = float("nan")


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


def run_poisoned(inputs: dict[str, Any], **options: Any) -> SplitHeads:
    """Attend with results full of NaN beforehand: an element that is not written shows."""
    empty = torch.empty

    def full_of_nan(*args: Any, **kwargs: Any) -> Tensor:
        return empty(*args, **kwargs).fill_(NAN)

    with mock.patch.object(torch, "empty", full_of_nan):
        return attend(**inputs, **options)


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
    heads = run_poisoned(inputs, **options)
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
