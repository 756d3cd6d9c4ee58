"""The kernel of the junction itself, on a CPU, under Triton's interpreter (which truncates to bfloat16)."""

import os

import pytest
import torch

from modules.kernels import add_norm
from tests.modules.kernels import add_norm_cases as cases

# Marks, not a skip of the module: pytest fails a run that collects nothing, and scripts/test.sh with it.
pytestmark = [
    pytest.mark.skipif(add_norm.triton is None, reason="triton is not installed"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"),
]


@pytest.fixture(autouse=True)
def no_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(add_norm, "reference_add_norm")


@pytest.mark.parametrize(("size", "dtype", "kind"), cases.SHAPE_CASES)
def test_kernel_follows_the_equation_at_any_shape(size: int, dtype: torch.dtype, kind: str) -> None:
    for rows in cases.ROWS:
        inputs = cases.junction_inputs((rows, size), dtype)
        cases.assert_equation_holds(inputs, kind, dtype, bfloat16_truncates=True)


@pytest.mark.parametrize(("size", "dtype", "kind"), cases.OPTION_CASES)
def test_kernel_follows_the_equation_with_any_options(size: int, dtype: torch.dtype, kind: str) -> None:
    for present in cases.OPTION_SETS:
        inputs = cases.junction_inputs((2, 3, size), dtype, present=present)
        cases.assert_equation_holds(inputs, kind, torch.float32)


@pytest.mark.parametrize("dtype", add_norm.DTYPES)
def test_further_parts_are_added_and_the_result_goes_where_it_should(dtype: torch.dtype) -> None:
    cases.assert_further_parts_are_added(dtype, bfloat16_truncates=True)


def test_nan_stays_in_its_row() -> None:
    cases.assert_nan_stays_in_its_row("cpu")


@pytest.mark.parametrize("size", [48, 576])
def test_a_row_does_not_depend_on_the_others(size: int) -> None:
    cases.assert_rows_are_independent("cpu", size)
