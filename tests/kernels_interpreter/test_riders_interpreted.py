"""Choices that ride with attention, by the kernel itself, on a CPU, under Triton's interpreter."""

import os

import pytest
import torch

from modules.kernels import riders
from tests.modules.kernels.riders_cases import assert_choices_hold

# Marks, not a skip of the module: pytest fails a run that collects nothing, and scripts/test.sh with it.
pytestmark = [
    pytest.mark.skipif(riders.triton is None, reason="triton is not installed"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_requests_are_served(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(riders.Requests, "in_plain_pytorch")
    assert_choices_hold(dtype)
