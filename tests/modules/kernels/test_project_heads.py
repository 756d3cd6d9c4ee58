"""Projection of one row's heads: the reference on a CPU and the kernel on a GPU."""

from typing import Any

import pytest
import torch

from modules.kernels.decode_attention import SplitHeads
from modules.kernels.project_heads import Tuning, project_heads
from tests.modules.kernels.kernel_checks import DEVICES

# heads, groups, head_dim, splits, hidden size, active groups (None: no flags), tuning
SMALL_CASES = [
    (3, 3, 16, 5, 50, None, Tuning(4, 1)),
    (6, 3, 10, 1, 131, (0, 2), Tuning(2, 3)),
    (4, 2, 16, 16, 48, (), None),
    (4, 4, 16, 3, 768, (1, 2, 3), None),  # several chunks of columns
]


def head_inputs(
    case: tuple[Any, ...], dtype: torch.dtype, *, device: str = "cpu", poisons: bool = False
) -> dict[str, Any]:
    """Arguments of `project_heads`; the last split, if it is not the only one, is empty; inactive groups are NaN, and
    their rows of the weight if it `poisons`: a kernel does not read them."""
    num_heads, num_groups, head_dim, splits, hidden_size, active, tuning = case
    outputs, maxima = torch.randn(1, num_heads, splits, head_dim), torch.randn(1, num_heads, splits) * 4
    sums = torch.rand(1, num_heads, splits) + 0.5
    if splits > 1:
        outputs[:, :, -1], maxima[..., -1], sums[..., -1] = 0.0, float("-inf"), 0.0
    weight = torch.randn(num_heads * head_dim, hidden_size).to(dtype)
    flags = None
    if active is not None:
        flags = torch.zeros(1, num_groups, dtype=torch.bool)
        flags[0, list(active)] = True
        unused = ~flags[0].repeat_interleave(num_heads // num_groups)
        outputs[:, unused] = float("nan")
        if poisons:
            weight[unused.repeat_interleave(head_dim)] = float("nan")
        flags = flags.to(device)
    heads = SplitHeads(outputs.to(device), maxima.to(device), sums.to(device))
    return {"heads": heads, "weight": weight.to(device), "active_groups": flags, "tuning": tuning}


def assert_equation_holds(
    case: tuple[Any, ...], dtype: torch.dtype, *, device: str = "cpu", poisons: bool = False
) -> None:
    """Of active channels alone, added to what is there."""
    inputs = head_inputs(case, dtype, device=device, poisons=poisons)
    heads, flags = inputs["heads"], inputs["active_groups"]
    weights = torch.exp(heads.maxima.double() - heads.maxima.double().amax(-1, keepdim=True))
    combined = (weights[..., None] * heads.outputs.double()).sum(-2) / (weights * heads.sums.double()).sum(-1)[
        ..., None
    ]
    used = torch.ones(case[0], dtype=torch.bool, device=device)
    if flags is not None:
        used = flags[0].repeat_interleave(case[0] // case[1])
    rows = inputs["weight"].double().unflatten(0, (case[0], case[2]))[used]
    output = torch.randn(1, case[4], device=device)
    expected = output.double() + combined[:, used].flatten(1) @ rows.flatten(0, 1)
    eps = torch.finfo(dtype).eps
    result = project_heads(**inputs, output=output)
    assert result.data_ptr() == output.data_ptr()
    torch.testing.assert_close(result.double(), expected, rtol=eps + 1e-5, atol=16 * eps + 1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", SMALL_CASES)
def test_equation_holds(case: tuple[Any, ...], dtype: torch.dtype, device: str) -> None:
    assert_equation_holds(case, dtype, device=device, poisons=device == "cuda")


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
        project_heads(**{**head_inputs(SMALL_CASES[0], torch.float32), **changes})
