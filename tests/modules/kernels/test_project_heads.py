"""Projection of one row's heads: the reference on a CPU and the kernel on a GPU."""

from typing import Any

import pytest
import torch

from modules.kernels.project_heads import project_heads
from tests.modules.kernels import project_heads_cases as cases

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", cases.SMALL_CASES)
def test_equation_holds(case: tuple[Any, ...], dtype: torch.dtype, device: str) -> None:
    cases.assert_equation_holds(case, dtype, device=device, poisons=device == "cuda")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight": torch.zeros(47, 50)}, "are not one row of weight's 47 channels"),
        ({"weight": torch.zeros(48, 50, dtype=torch.float64)}, "weight is torch.float64"),
        ({"active_groups": torch.ones(1, 2, dtype=torch.bool)}, "2 groups do not divide 3 heads"),
        ({"output": torch.zeros(1, 49)}, "output .*49"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        project_heads(**{**cases.head_inputs(cases.SMALL_CASES[0], torch.float32), **changes})
