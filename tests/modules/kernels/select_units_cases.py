"""Scores that are whole numbers, so that no order of summing changes them, and the list they must give."""

import torch

from modules.kernels import select_units
from modules.kernels.arguments import ACTIVATION_FUNCTIONS
from modules.kernels.deferred_norm import DeferredNorm
from modules.kernels.weight_tiles import Tuning
from modules.sparsity import ActiveList
from tests.modules.kernels.norm_linear_cases import deferred_states, normed_states, poisoned, total_of

# rows, units, hidden size, tuning (None: the kernel's own)
CASES: list[tuple[int, int, int, Tuning | None]] = [
    (1, 131, 40, None),
    (1, 131, 33, Tuning(8, 2, 3)),  # several tiles a program
    (1, 20, 24, Tuning(16, 1, 8)),  # fewer tiles than programs
    (3, 67, 24, None),
    (3, 67, 24, Tuning(4, 1, 3, prefetches=True, max_registers=128)),
]
# activation, threshold: scores are whole, so 3 is met exactly, and 3.001 is 3 in half precision
RULES = [(None, 3.0), (None, 3.001), (None, float("-inf")), (None, 1e9), ("relu", 2.0), ("silu", 0.25), ("gelu", 0.25)]


def selected(
    states: DeferredNorm, weight: torch.Tensor, bias: torch.Tensor | None, tuning: Tuning | None, **options: object
) -> ActiveList:
    """The list, in memory that was full of rubbish."""
    rows = states.partial.shape[0]
    counters = torch.zeros(1 + rows, dtype=torch.int32, device=weight.device)
    with poisoned():
        if tuning is None:
            return select_units.select_units(states, weight, bias, counters=counters, **options)  # type: ignore[arg-type]
        return select_units.launch_select_units(states, weight, bias, counters=counters, tuning=tuning, **options)  # type: ignore[arg-type]


def assert_list_holds(found: ActiveList, mask: torch.Tensor) -> None:
    """Every unit of the union once, the counts of each row, and which row has which."""
    union = mask.any(0).nonzero().flatten().to(torch.int32)
    assert found.indices.shape == mask.shape[1:] and found.length.tolist() == [union.shape[0]]
    assert torch.equal(found.indices[: union.shape[0]].sort().values, union)
    assert found.num_active.tolist() == mask.sum(-1).tolist()
    if len(mask) == 1:
        assert found.mask is None
    else:
        assert found.mask is not None and torch.equal(found.mask, mask)


def assert_whole_scores_are_selected(
    case: tuple[int, int, int, Tuning | None],
    dtype: torch.dtype,
    *,
    device: str = "cpu",
    launches: bool = False,
    rules: list[tuple[str | None, float]] = RULES,
) -> None:
    rows, num_units, hidden_size, tuning = case
    states = torch.randint(-2, 3, (rows, hidden_size)).to(device, dtype)
    weight = torch.randint(-1, 2, (num_units, hidden_size)).to(device, dtype)
    bias = torch.randint(-2, 3, (num_units,)).to(device, dtype)
    for activation, threshold in rules:
        values = (states.double() @ weight.double().T + bias.double()).to(dtype)
        if activation is not None:
            values = ACTIVATION_FUNCTIONS[activation](values)
        mask = (values if activation is None else values.abs()) >= threshold
        keep_values = activation is not None
        found = selected(
            DeferredNorm.plain(states),
            weight,
            bias,
            tuning if launches else None,
            threshold=threshold,
            activation=activation,
            keep_values=keep_values,
        )
        assert_list_holds(found, mask)
        assert (found.gate_values is not None) == keep_values
        if found.gate_values is not None:
            assert found.gate_values.dtype == torch.float32
            rounding = 2 * torch.finfo(dtype).eps
            torch.testing.assert_close(
                found.gate_values[mask], values[mask].float(), rtol=rounding + 1e-5, atol=rounding + 1e-6
            )


def assert_deferred_states_are_normed_first(rows: int, tuning: Tuning | None, device: str = "cpu") -> None:
    """In float32, where only scores within rounding of the threshold may go either way; there are none here."""
    states = deferred_states(rows, 40, torch.float32, device=device)
    weight = torch.randn(50, 40).to(device) / 6
    values = torch.nn.functional.silu(normed_states(states) @ weight.double().T)
    ordered = values.abs().flatten().sort().values
    middle = ordered.numel() // 2
    gaps = ordered[middle : middle + 8].diff()
    place = middle + int(gaps.argmax())
    threshold = float(ordered[place] + ordered[place + 1]) / 2
    found = selected(states, weight, None, tuning, threshold=threshold, activation="silu", keep_values=True)
    mask = values.abs() >= threshold
    assert_list_holds(found, mask)
    assert found.gate_values is not None and states.new_residual is not None
    torch.testing.assert_close(found.gate_values[mask].double(), values[mask], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(states.new_residual, total_of(states), rtol=0, atol=0)


def assert_order_is_fixed_on_demand(device: str) -> None:
    weight = torch.eye(64, device=device)
    states = DeferredNorm.plain((torch.arange(64, device=device)[None] % 3).float())
    torch.use_deterministic_algorithms(True)
    try:
        found = selected(states, weight, None, None, threshold=0.5, activation=None, keep_values=False)
    finally:
        torch.use_deterministic_algorithms(False)
    assert found.indices[: int(found.length)].tolist() == [unit for unit in range(64) if unit % 3]
