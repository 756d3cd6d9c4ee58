"""Products of thinned vectors, for the kernel's tests on a GPU and under the interpreter and its reference's."""

import torch
from torch import Tensor

from modules.kernels.arguments import ACTIVATION_FUNCTIONS
from modules.kernels.deferred_norm import DeferredNorm
from modules.kernels.sparse_mlp import Tuning
from modules.kernels.thinned_rows import TUNING, Activations, kept_entries, thinned_rows
from tests.modules.kernels.norm_linear_cases import deferred_states, normed_states, poisoned, total_of

# inputs, outputs, matrices, kind of norm or activation, options (biases, a gate), tuning
CASES: list[tuple[int, int, int, str, bool, Tuning]] = [
    (96, 131, 2, "rms", True, TUNING),
    (50, 300, 1, "layer", True, Tuning(2, 1, 2)),  # blocks of 256 columns, several tiles a program
    (7, 5, 2, "none", False, TUNING),
    (131, 96, 1, "silu", True, TUNING),
    (64, 24, 1, "relu", False, Tuning(1, 1, 2)),
    (33, 520, 1, "gelu", True, Tuning(16, 1, 1)),  # more blocks of columns than programs
]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def made_values(
    num_inputs: int, kind: str, options: bool, dtype: torch.dtype, device: str
) -> tuple[DeferredNorm | Activations, Tensor]:
    """Values that nobody has computed, and what they are, in float64."""
    if kind in ("rms", "layer", "none"):
        states = deferred_states(1, num_inputs, dtype, kind=kind, device=device, options=options)
        return states, normed_states(states)[0]
    up, gate = torch.randn(2, num_inputs).to(device)
    up_bias, gate_bias = torch.randn(2, num_inputs).to(device, dtype)
    activate = ACTIVATION_FUNCTIONS[kind]
    if not options:
        values = activate(up.to(dtype).double()).to(dtype)
        return Activations(gate=None, up=up, activation=kind, dtype=dtype), values.double()
    gates = activate((gate + gate_bias.float()).to(dtype).double()).to(dtype)
    values = (gates.double() * (up + up_bias.float()).to(dtype).double()).to(dtype).double()
    return Activations(gate=gate, up=up, gate_bias=gate_bias, up_bias=up_bias, activation=kind, dtype=dtype), values


def threshold_in_a_gap(values: Tensor) -> float:
    """Between two magnitudes that are farther apart than others, so that a rounding does not decide."""
    sizes = values.abs().sort().values
    middle = sizes[len(sizes) // 4 : len(sizes) * 3 // 4 + 1]
    widest = int((middle[1:] / middle[:-1].clamp(min=1e-3)).argmax())
    return float(middle[widest] + middle[widest + 1]) / 2


def assert_product_is_right(
    case: tuple[int, int, int, str, bool, Tuning],
    dtype: torch.dtype,
    *,
    device: str = "cpu",
    launches: bool = False,
    truncates: bool = False,
) -> None:
    """thinned_rows against the equation in float64; `launches`: it is the kernel, which reads no row that is dropped;
    `truncates`: as the interpreter does bfloat16."""
    num_inputs, num_outputs, num_matrices, kind, options, tuning = case
    torch.manual_seed(num_inputs)
    values, expected_values = made_values(num_inputs, kind, options, dtype, device)
    weight = (torch.randn(num_matrices, num_inputs, num_outputs) / num_inputs**0.5).to(device, dtype)
    between = float(torch.tensor(threshold_in_a_gap(expected_values), dtype=dtype))
    for pair in ((between, between), (float("-inf"), between), (between, 1e4), (1e4, float("-inf"))):
        thresholds = pair[:num_matrices]
        kept = torch.stack([expected_values.abs() >= threshold for threshold in thresholds])
        for row, threshold in enumerate(thresholds):
            if kind == "relu" and threshold > float("-inf"):
                kept[row] &= expected_values != 0
        poisoned_weight = weight.masked_fill(~kept[:, :, None], float("nan"))
        counters = torch.full((num_matrices,), 5, dtype=torch.int32, device=device)
        output = torch.full((num_matrices, num_outputs), 2.0, device=device)
        with poisoned():
            found = thinned_rows(
                values,
                poisoned_weight if launches else weight,
                thresholds=thresholds,
                counters=counters,
                output=output,
                tuning=tuning,
            )
        expected = torch.einsum("mj,mjw->mw", expected_values.masked_fill(~kept, 0), weight.double()) + 2
        rounding = torch.finfo(dtype).eps * (4 if truncates else 1)
        torch.testing.assert_close(found.double(), expected, rtol=rounding + 1e-5, atol=4 * rounding + 1e-5)
        assert found is output and counters.tolist() == (5 + kept.sum(1)).tolist()
        if isinstance(values, DeferredNorm) and values.new_residual is not None:
            torch.testing.assert_close(values.new_residual, total_of(values), rtol=0, atol=0)


def assert_borders_are_drawn_as_by_comparison(device: str) -> None:
    """Entries at the threshold, which is rounded to their type, zeros and what is no number."""
    values = torch.tensor([1.0, -1.0, 0.99609375, 1.0078125, 0.0, -0.0, float("nan"), 0.25]).to(device, torch.bfloat16)
    identity = torch.eye(len(values), dtype=torch.bfloat16, device=device)[None]
    for threshold, kept in ((1.001, [0, 1, 3]), (0.0, [0, 1, 2, 3, 7]), (float("-inf"), [0, 1, 2, 3, 4, 5, 7])):
        counter = torch.zeros(1, dtype=torch.int32, device=device)
        found = thinned_rows(DeferredNorm.plain(values[None]), identity, thresholds=[threshold], counters=counter)
        expected = torch.zeros(len(values), device=device)
        expected[kept] = values[kept].float()
        assert torch.equal(found[0], expected) and int(counter) == len(kept)
        assert kept_entries(values, threshold).nonzero().flatten().tolist() == kept


def assert_parts_add_up_alike(device: str) -> None:
    """Deterministic sums: close to the others, equal bit for bit each time."""
    values, _ = made_values(96, "rms", True, torch.float32, device)
    weight = torch.randn(2, 96, 131).to(device)
    counters = torch.zeros(3, 2, dtype=torch.int32, device=device)
    expected = thinned_rows(values, weight, thresholds=[0.5, 0.9], counters=counters[0])
    torch.use_deterministic_algorithms(True)
    try:
        found = thinned_rows(values, weight, thresholds=[0.5, 0.9], counters=counters[1])
        added = thinned_rows(
            values, weight, thresholds=[0.5, 0.9], counters=counters[2], output=torch.zeros_like(expected)
        )
    finally:
        torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(found, expected)
    assert torch.equal(found, added) and bool((counters == counters[0]).all()) and counters[0, 0] > counters[0, 1]
