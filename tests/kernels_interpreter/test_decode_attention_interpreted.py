"""The kernel of attention itself, on a CPU, under Triton's interpreter."""

import os

import pytest
import torch

from modules.kernels import decode_attention
from modules.kernels.decode_attention import Tuning
from tests.modules.kernels import decode_attention_cases as cases

# Marks, not a skip of the module: pytest fails a run that collects nothing, and scripts/test.sh with it.
pytestmark = [
    pytest.mark.skipif(decode_attention.triton is None, reason="triton is not installed"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"),
]


@pytest.fixture(autouse=True)
def no_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(decode_attention, "reference_attend")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", cases.SMALL_CASES)
def test_kernel_follows_the_equation(case: cases.Case, dtype: torch.dtype) -> None:
    cases.assert_equation_holds(case, dtype)


@pytest.mark.parametrize("num_splits", [1, 5, 16])
@pytest.mark.parametrize("length", [1, 16, 17, 130])
def test_any_number_of_splits_covers_any_length(num_splits: int, length: int) -> None:
    case = cases.Case(4, 2, 16, 130, (length - 1,))
    heads = cases.assert_equation_holds(case, torch.float32, tuning=Tuning(num_splits, block=16, num_warps=1))
    assert heads.maxima.shape == (1, 4, num_splits)
    granules = -(-length // decode_attention.GRANULE)
    assert heads.maxima[0, 0].isfinite().sum() == min(granules, num_splits)
