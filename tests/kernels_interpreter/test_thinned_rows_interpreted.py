"""The kernel of thinned products itself, on a CPU, under Triton's interpreter (which truncates to bfloat16)."""

import os

import pytest
import torch

from modules.kernels import thinned_rows
from modules.kernels.sparse_mlp import Tuning
from tests.modules.kernels import thinned_rows_cases as cases

pytestmark = [
    pytest.mark.skipif(thinned_rows.triton is None, reason="triton is not installed"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"),
]


@pytest.fixture(autouse=True)
def no_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(thinned_rows, "reference_thinned_rows")


@pytest.mark.parametrize("case", cases.CASES)
def test_kernel_follows_the_equation(case: tuple[int, int, int, str, bool, Tuning]) -> None:
    for dtype in cases.DTYPES:
        cases.assert_product_is_right(case, dtype, launches=True, truncates=dtype == torch.bfloat16)


def test_borders_are_drawn_as_by_comparison() -> None:
    cases.assert_borders_are_drawn_as_by_comparison("cpu")


def test_parts_add_up_alike() -> None:
    cases.assert_parts_add_up_alike("cpu")
