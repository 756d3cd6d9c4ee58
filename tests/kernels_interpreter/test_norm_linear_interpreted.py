"""The kernel of the product itself, on a CPU, under Triton's interpreter (which truncates to bfloat16)."""

import os

import pytest
import torch

from modules.kernels import norm_linear
from modules.kernels.weight_tiles import Tuning
from tests.modules.kernels import norm_linear_cases as cases

pytestmark = [
    pytest.mark.skipif(norm_linear.triton is None, reason="triton is not installed"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"),
]


@pytest.fixture(autouse=True)
def no_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(norm_linear, "reference_norm_linear")


@pytest.mark.parametrize("case", cases.CASES)
def test_kernel_follows_the_equation(case: tuple[int, int, int, str, Tuning | None]) -> None:
    for dtype, out_dtype in cases.TYPES:
        truncates = dtype == torch.bfloat16
        cases.assert_product_is_right(case, dtype, out_dtype, launches=True, truncates=truncates)


def test_plain_states_are_taken_as_they_are() -> None:
    cases.assert_plain_states_are_taken_as_they_are("cpu")
