"""The kernel of the projection of heads itself, on a CPU, under Triton's interpreter."""

import os
from typing import Any

import pytest
import torch

from modules.kernels import project_heads
from tests.modules.kernels import project_heads_cases as cases

# Marks, not a skip of the module: pytest fails a run that collects nothing, and scripts/test.sh with it.
pytestmark = [
    pytest.mark.skipif(project_heads.triton is None, reason="triton is not installed"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"),
]


@pytest.fixture(autouse=True)
def no_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(project_heads, "reference_project_heads")


@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("case", cases.SMALL_CASES)
def test_kernel_follows_the_equation(case: tuple[Any, ...], is_deterministic: bool) -> None:
    torch.use_deterministic_algorithms(is_deterministic)
    try:
        cases.assert_equation_holds(case, torch.float32, poisons=True)
    finally:
        torch.use_deterministic_algorithms(False)
