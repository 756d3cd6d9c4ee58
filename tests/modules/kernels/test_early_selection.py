"""Early selection, in plain PyTorch and by the kernel on a GPU."""

import pytest
import torch

from modules.kernels.decode_attention import attend
from modules.kernels.early_selection import EarlyGroups, EarlySelection, EarlyUnits
from tests.modules.kernels.kernel_checks import DEVICES, DTYPES, NAN
from tests.modules.kernels.test_decode_attention import SMALL_CASES, attention_inputs


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_choices_are_made(dtype: torch.dtype, device: str) -> None:
    """A threshold that only rounding to the type makes equal to a score; NaN; equal scores of groups."""
    threshold = 0.3
    bias = torch.randn(77).to(dtype)
    bias[:3] = torch.tensor([threshold, NAN, threshold + 0.01]).to(dtype)
    second = torch.randn(77, 5).to(dtype)
    second[:3] = 0
    inner = torch.randn(5).to(dtype)
    counters = torch.zeros(2, dtype=torch.int32, device=device)
    units = EarlyUnits.of(inner.to(device), second.to(device), bias.to(device), threshold, counters)
    scores = torch.tensor([NAN, 1.0, 2.0, 1.0, 1.0, -1.0]).to(dtype)
    groups = EarlyGroups.of(inner.to(device), torch.zeros(6, 5, dtype=dtype, device=device), scores.to(device), 3)
    selection = EarlySelection()
    assert selection.add(units) and selection.add(groups) and not selection.add(units)
    case = SMALL_CASES[0]
    attend(**attention_inputs(case, dtype, device=device), early=selection)
    exact = second.double() @ inner.double() + bias.double()
    reached = exact.to(dtype) >= torch.tensor(threshold, dtype=dtype)
    found = units.found.indices[: int(counters[0])].sort().values.cpu()
    assert torch.equal(found.long(), reached.nonzero().squeeze(-1)) and counters[0] == counters[1]
    assert 0 in found and 1 not in found and 2 in found
    assert groups.flags[0].tolist() == [True, True, True, False, False, False]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_scores_flag_exactly_as_many_groups_as_asked_for(dtype: torch.dtype, device: str) -> None:
    """Of scores that are not whole numbers, whose sums depend on how they are rounded."""
    second, bias = torch.randn(32, 32).to(device, dtype), torch.randn(32).to(device, dtype)
    inputs = attention_inputs(SMALL_CASES[0], dtype, device=device)
    for _ in range(10):
        choice, selection = EarlyGroups.of(torch.randn(32).to(device, dtype), second, bias, 16), EarlySelection()
        selection.add(choice)
        attend(**inputs, early=selection)
        assert choice.flags.sum() == 16
        scores = second.float() @ choice.inner.float() + bias.float()
        least, most = scores[choice.flags[0]].min(), scores[~choice.flags[0]].max()
        assert least >= most - {torch.float32: 1e-4, torch.float16: 0.1, torch.bfloat16: 1.0}[dtype]
