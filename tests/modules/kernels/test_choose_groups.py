"""The choice of head groups: the reference on a CPU, what the kernel compiles to, and the kernel on a GPU."""

import re
from typing import Any

import pytest
import torch

from modules.kernels import choose_groups as module
from modules.kernels.choose_groups import choose_groups
from modules.kernels.deferred_norm import DeferredNorm, equal_copies
from tests.modules.kernels.kernel_checks import (
    DEVICES,
    DTYPES,
    NORMED,
    compiled_ptx,
    compiles,
    deferred_states,
    normed_states,
    poisoned,
)

# rows, rank, groups, hidden size
CASES = [(1, 8, 8, 48), (3, 3, 3, 50), (2, 37, 40, 33), (8, 1, 1, 7)]


def chosen_by_hand(scores: torch.Tensor, count: int) -> torch.Tensor:
    """bool [rows, G] in plain Python: larger scores first, of equals the lower index."""
    mask = torch.zeros(scores.shape, dtype=torch.bool)
    for row, values in enumerate(scores.tolist()):
        order = sorted(range(len(values)), key=lambda group: (-values[group], group))
        mask[row, order[:count]] = True
    return mask


def assert_whole_scores_are_chosen(
    case: tuple[int, int, int, int], dtype: torch.dtype, counts: list[int], device: str = "cpu"
) -> None:
    rows, rank, groups, hidden_size = case
    states = torch.randint(-1, 2, (rows, hidden_size)).to(dtype)
    first, second = torch.randint(-1, 2, (rank, hidden_size)).to(dtype), torch.randint(-1, 2, (groups, rank)).to(dtype)
    bias = torch.randint(-1, 2, (groups,)).to(dtype)
    scores = (states.double() @ first.double().T) @ second.double().T + bias.double()
    arguments = [tensor.to(device) for tensor in (first, second, bias)]
    for count in counts:
        with poisoned():
            active = choose_groups(DeferredNorm.plain(states.to(device)), *arguments, count=count)
        assert active.dtype == torch.bool
        assert torch.equal(active.cpu(), chosen_by_hand(scores, count))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_scores_give_exactly_as_many_groups_as_asked_for(dtype: torch.dtype, device: str) -> None:
    """Of scores that are not whole numbers, whose sums depend on how they are rounded."""
    first, second = torch.randn(32, 64).to(device, dtype), torch.randn(32, 32).to(device, dtype)
    bias = torch.randn(32).to(device, dtype)
    for _ in range(10):
        states = torch.randn(8, 64).to(device, dtype)
        active = choose_groups(DeferredNorm.plain(states), first, second, bias, count=16)
        assert active.sum(-1).tolist() == [16] * 8
        # The last one in and the first one out may change places by rounding.
        scores = (states.float() @ first.float().T).to(dtype).float() @ second.float().T + bias.float()
        least = scores.masked_fill(~active, float("inf")).amin(-1)
        most = scores.masked_fill(active, float("-inf")).amax(-1)
        assert (least >= most - {torch.float32: 1e-4, torch.float16: 0.1, torch.bfloat16: 1.0}[dtype]).all()


@pytest.mark.parametrize("device", DEVICES)
def test_deferred_states_are_normed_and_not_written(device: str) -> None:
    states = deferred_states(2, 48, torch.float32, device=device)
    first, second = torch.randn(8, 48).to(device), torch.randn(8, 8).to(device)
    active = choose_groups(states, first, second, torch.zeros(8, device=device), count=3)
    scores = normed_states(states) @ first.double().T @ second.double().T
    assert torch.equal(active.cpu(), chosen_by_hand(scores, 3))
    assert states.new_residual is not None and states.new_residual.isnan().all()


@pytest.mark.parametrize("device", DEVICES)
def test_nan_takes_no_more_than_its_share(device: str) -> None:
    states = DeferredNorm.plain(torch.full((1, 16), float("nan"), device=device))
    first, second = torch.ones(4, 16, device=device), torch.ones(6, 4, device=device)
    active = choose_groups(states, first, second, torch.zeros(6, device=device), count=2)
    assert active.tolist() == [[True, True, False, False, False, False]]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_the_largest_scores_are_chosen(device: str, dtype: torch.dtype, case: tuple[int, int, int, int]) -> None:
    assert_whole_scores_are_chosen(case, dtype, sorted({1, (case[2] + 1) // 2, case[2]}), device)


@pytest.mark.cuda
@pytest.mark.parametrize("case", [(8, 8, 8, 3072), (1, 32, 32, 4096), (2, 64, 64, 8192)])
def test_sizes_of_real_models(case: tuple[int, int, int, int]) -> None:
    assert_whole_scores_are_chosen(case, torch.float32, [1, 5], "cuda")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"second": torch.zeros(6, 5)}, r"second \(6, 5\) is not of shape \(6, 4\)"),
        ({"second": torch.zeros(6, 4).half()}, "second is torch.float16"),
        ({"score_bias": torch.zeros(65)}, "4 ranks and 65 groups; at most 64 and 64"),
        ({"first": torch.zeros(65, 16)}, "65 ranks and 6 groups"),
        ({"count": 7}, "count 7 is not 1 to 6"),
        ({"count": 0}, "count 0 is not 1 to 6"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"first": torch.zeros(4, 16), "second": torch.zeros(6, 4), "score_bias": torch.zeros(6)}
    with pytest.raises(ValueError, match=message):
        choose_groups(DeferredNorm.plain(torch.zeros(2, 16)), **{**arguments, "count": 2, **changes})


@compiles
def test_all_of_the_first_matrix_is_on_its_way_before_the_kernel_waits() -> None:
    types = NORMED | {"first": "*bf16", "second": "*bf16", "score_bias": "*bf16", "active": "*i1", "new_residual": None}
    constants = {"COUNT": 3, "NUM_GROUPS": 8, "GROUPS_BLOCK": 8, "RANK": 8, "TILE": module.tile_of(8, 4096)}
    constants |= {"KIND": "rms", "HIDDEN_SIZE": 3072, "BLOCK": 4096, "PDL": True}
    ptx = compiled_ptx(module.choose_groups_kernel, types, constants, num_warps=module.NUM_WARPS)
    before, after = ptx.split("griddepcontrol.wait")
    widths = re.findall(r"\bld\.global\S*evict_first(\S*)", before)
    assert len(widths) == 8 and all(width.endswith(".v4.b32") for width in widths), widths
    assert not re.findall(r"\bld\.global\S*evict_first", after)
    assert ".local" not in ptx


@compiles
def test_float32_products_are_not_fused_with_the_addition_of_another_lanes() -> None:
    types = NORMED | {"first": "*fp32", "second": "*fp32", "score_bias": "*fp32", "active": "*i1", "new_residual": None}
    constants = {"COUNT": 16, "NUM_GROUPS": 32, "GROUPS_BLOCK": 32, "RANK": 32, "TILE": 4}
    constants |= {"KIND": "rms", "HIDDEN_SIZE": 64, "BLOCK": 64, "PDL": True}
    kernel = module.choose_groups_kernel
    assert "fma.rn.f32" in compiled_ptx(kernel, types, constants, 4)
    assert "fma" not in compiled_ptx(kernel, types, constants, 4, **equal_copies(torch.float32))
    assert equal_copies(torch.bfloat16) == {"enable_fp_fusion": True}
