"""Early selection by the attention kernel itself, on a CPU, under Triton's interpreter."""

import os

import pytest
import torch

from modules.kernels import early_selection
from tests.modules.kernels.early_selection_cases import assert_choices_hold

# Marks, not a skip of the module: pytest fails a run that collects nothing, and scripts/test.sh with it.
pytestmark = [
    pytest.mark.skipif(early_selection.triton is None, reason="triton is not installed"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_choices_are_made(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(early_selection.EarlySelection, "in_plain_pytorch")
    assert_choices_hold(dtype)
