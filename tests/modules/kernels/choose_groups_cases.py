"""Head-group predictors whose scores are whole numbers, with many ties, and the choice they must give."""

import torch

from modules.kernels.choose_groups import choose_groups
from modules.kernels.deferred_norm import DeferredNorm
from tests.modules.kernels.norm_linear_cases import deferred_states, normed_states, poisoned

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


def assert_as_many_are_chosen_as_asked_for(dtype: torch.dtype, device: str) -> None:
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


def assert_deferred_states_are_normed_and_not_written(device: str) -> None:
    states = deferred_states(2, 48, torch.float32, device=device)
    first, second = torch.randn(8, 48).to(device), torch.randn(8, 8).to(device)
    active = choose_groups(states, first, second, torch.zeros(8, device=device), count=3)
    scores = normed_states(states) @ first.double().T @ second.double().T
    assert torch.equal(active.cpu(), chosen_by_hand(scores, 3))
    assert states.new_residual is not None and states.new_residual.isnan().all()


def assert_nan_takes_no_more_than_its_share(device: str) -> None:
    states = DeferredNorm.plain(torch.full((1, 16), float("nan"), device=device))
    first, second = torch.ones(4, 16, device=device), torch.ones(6, 4, device=device)
    active = choose_groups(states, first, second, torch.zeros(6, device=device), count=2)
    assert active.tolist() == [[True, True, False, False, False, False]]
