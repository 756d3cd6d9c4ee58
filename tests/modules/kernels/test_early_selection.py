"""Early selection, in plain PyTorch and by the kernel on a GPU."""

import pytest
import torch

from tests.modules.kernels.early_selection_cases import (
    assert_as_many_groups_are_flagged_as_asked_for,
    assert_choices_hold,
)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_choices_are_made(dtype: torch.dtype, device: str) -> None:
    assert_choices_hold(dtype, device=device)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_any_scores_flag_exactly_as_many_groups_as_asked_for(dtype: torch.dtype, device: str) -> None:
    assert_as_many_groups_are_flagged_as_asked_for(dtype, device=device)
