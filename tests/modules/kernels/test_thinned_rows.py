"""Products of thinned vectors: the reference on a CPU, what the kernel compiles to, and the kernel on a GPU."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from modules.kernels import thinned_rows as module
from modules.kernels.arguments import ACTIVATION_FUNCTIONS
from modules.kernels.deferred_norm import DeferredNorm
from modules.kernels.sparse_mlp import Tuning
from modules.kernels.thinned_rows import TUNING, Activations, kept_entries, thinned_rows
from tests.modules.kernels.kernel_checks import (
    DEVICES,
    DTYPES,
    NORMED,
    captured,
    compiled_ptx,
    compiles,
    deferred_states,
    deterministic_algorithms,
    normed_states,
    poisoned,
    total_of,
)

# inputs, outputs, matrices, kind of norm or activation, options (biases, a gate), tuning
CASES: list[tuple[int, int, int, str, bool, Tuning]] = [
    (96, 131, 2, "rms", True, TUNING),
    (50, 300, 1, "layer", True, Tuning(2, 1, 2)),  # blocks of 256 columns, several tiles a program
    (7, 5, 2, "none", False, TUNING),
    (131, 96, 1, "silu", True, TUNING),
    (64, 24, 1, "relu", False, Tuning(1, 1, 2)),
    (33, 520, 1, "gelu", True, Tuning(16, 1, 1)),  # more blocks of columns than programs
]


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
    num_pairs: int = 4,
) -> None:
    """thinned_rows against the equation in float64; `launches`: it is the kernel, which reads no row that is dropped;
    `truncates`: as the interpreter does bfloat16."""
    num_inputs, num_outputs, num_matrices, kind, options, tuning = case
    torch.manual_seed(num_inputs)
    values, expected_values = made_values(num_inputs, kind, options, dtype, device)
    weight = (torch.randn(num_matrices, num_inputs, num_outputs) / num_inputs**0.5).to(device, dtype)
    between = float(torch.tensor(threshold_in_a_gap(expected_values), dtype=dtype))
    pairs = [(between, between), (float("-inf"), between), (between, 1e4), (1e4, float("-inf"))]
    for pair in pairs[:num_pairs]:
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


@pytest.mark.parametrize("device", DEVICES)
def test_borders_are_drawn_as_by_comparison(device: str) -> None:
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
    with deterministic_algorithms():
        found = thinned_rows(values, weight, thresholds=[0.5, 0.9], counters=counters[1])
        added = thinned_rows(
            values, weight, thresholds=[0.5, 0.9], counters=counters[2], output=torch.zeros_like(expected)
        )
    torch.testing.assert_close(found, expected)
    assert torch.equal(found, added) and bool((counters == counters[0]).all()) and counters[0, 0] > counters[0, 1]


SUMS: dict[str, str | None] = dict.fromkeys(("gate_sums", "up_sums", "gate_bias", "up_bias"))
OUTPUTS: dict[str, str | None] = {
    "weight": "*bf16",
    "output": "*fp32",
    "counters": "*i32",
    "list_units": "*i32",
    "list_values": "*fp32",
    "first_threshold": "fp32",
    "second_threshold": "fp32",
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_equation_holds(device: str, dtype: torch.dtype) -> None:
    for case in CASES:
        assert_product_is_right(case, dtype, device=device, launches=device == "cuda")


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("num_inputs", "num_outputs", "num_matrices", "kind"),
    [
        (3072, 8192, 2, "rms"),
        (8192, 3072, 1, "relu"),
        (4096, 14336, 2, "rms"),
        (14336, 4096, 1, "relu"),
        (576, 1536, 2, "rms"),
    ],
)
def test_equation_holds_at_sizes_of_real_models(
    num_inputs: int, num_outputs: int, num_matrices: int, kind: str
) -> None:
    case = (num_inputs, num_outputs, num_matrices, kind, False, TUNING)
    assert_product_is_right(case, torch.float16, device="cuda", launches=True)


@pytest.mark.cuda
def test_parts_add_up_alike() -> None:
    assert_parts_add_up_alike("cuda")


def activations(**changes: Any) -> Activations:
    fitting = {"gate": None, "up": torch.zeros(48), "activation": "silu", "dtype": torch.float32}
    return Activations(**fitting | changes)


PLAIN = DeferredNorm.plain(torch.zeros(1, 48))


@pytest.mark.parametrize(
    ("values", "weight", "changes", "message"),
    [
        (PLAIN, torch.zeros(48, 5), {}, r"weight \(48, 5\) is not \[matrices, inputs, outputs\]"),
        (PLAIN, torch.zeros(1, 5, 48).transpose(1, 2), {}, "weight is not contiguous"),
        (PLAIN, torch.zeros(1, 48, 5).bfloat16(), {}, "values are torch.float32, the weights torch.bfloat16"),
        (PLAIN, torch.zeros(1, 47, 5), {}, r"states \(1, 48\) is not of shape \(1, 47\)"),
        (
            DeferredNorm.plain(torch.zeros(2, 48)),
            torch.zeros(1, 48, 5),
            {},
            r"states \(2, 48\) is not of shape \(1, 48\)",
        ),
        (PLAIN, torch.zeros(1, 48, 5), {"counters": torch.zeros(1)}, "counters is torch.float32"),
        (PLAIN, torch.zeros(1, 48, 5), {"output": torch.zeros(1, 4)}, r"output \(1, 4\) is not of shape \(1, 5\)"),
        (PLAIN, torch.zeros(3, 48, 5), {}, "weight: 3 matrices, where the kernel has thresholds for 1 or 2"),
        (PLAIN, torch.zeros(1, 48, 5), {"thresholds": [0.5, 0.5]}, "2 thresholds for 1 matrices"),
        (activations(activation="tanh"), torch.zeros(1, 48, 5), {}, "activation 'tanh' is not one of"),
        (activations(gate=torch.zeros(47)), torch.zeros(1, 48, 5), {}, r"gate \(47,\) is not of shape \(48,\)"),
        (activations(up=torch.zeros(48).half()), torch.zeros(1, 48, 5), {}, "up is torch.float16"),
    ],
)
def test_what_does_not_fit_is_refused(values: Any, weight: Any, changes: dict[str, Any], message: str) -> None:
    arguments = {"thresholds": [0.5], "counters": torch.zeros(1, dtype=torch.int32), **changes}
    with pytest.raises(ValueError, match=message):
        thinned_rows(values, weight, **arguments)


def compiled(types: dict[str, str | None], num_inputs: int, width: int, num_matrices: int, **constants: Any) -> str:
    block = TUNING.num_warps * 256
    column_blocks = -(-width // block)
    shape = {"HIDDEN_SIZE": num_inputs, "WIDTH": width, "BLOCK": block, "COLUMN_BLOCKS": column_blocks}
    shape |= {"JOBS": column_blocks * num_matrices, "UNITS": TUNING.units, "OWN_BLOCK": 128, "INPUT_BLOCK": 4096}
    return compiled_ptx(
        module.thinned_rows_kernel, types | OUTPUTS, shape | {"PARTS": False, "PDL": True} | constants, TUNING.num_warps
    )


@compiles
def test_kernel_reads_rows_16_bytes_at_a_time_and_waits_before_it_reads() -> None:
    normed: dict[str, str | None] = {**NORMED}
    junction = compiled(normed | SUMS, 3072, 8192, 2, KIND="rms", ACTIVATION="none")
    nothing: dict[str, str | None] = {**dict.fromkeys(NORMED), "eps": "fp32"}
    sums: dict[str, str | None] = {**SUMS, "gate_sums": "*fp32", "up_sums": "*fp32"}
    for ptx in (junction, compiled(nothing | sums, 8192, 3072, 1, KIND="none", ACTIVATION="silu")):
        assert ".local" not in ptx and "griddepcontrol.wait" in ptx
        assert "ld.global" not in ptx[: ptx.index("griddepcontrol.wait")]
        loop = ptx[ptx.index("$L__BB0_2:") : ptx.index("$L__BB0_3:")]
        # Of a row 16 bytes a thread; then 8 units and 8 values of the list, and no thread waits for another.
        assert len(re.findall(r"ld\.global\.L1::evict_first\S*\.v4\.b32", loop)) == TUNING.units
        assert len(re.findall(r"ld\.global\.v4\.b32", loop)) == TUNING.units // 2
        assert loop.count("ld.global") == TUNING.units * 3 // 2 and "bar.sync" not in loop
        assert len(re.findall(r"relaxed\.add\.v4\.f32", ptx)) == 2


@pytest.mark.cuda
def test_a_captured_graph_follows_changed_inputs() -> None:
    states = deferred_states(1, 3072, torch.bfloat16, device="cuda")
    weight = torch.randn(2, 3072, 1000, device="cuda").bfloat16()
    counters = torch.zeros(2, dtype=torch.int32, device="cuda")
    options: dict[str, Any] = {"thresholds": [0.5, 0.7], "tuning": Tuning(units=8, num_warps=4, programs_per_sm=2)}
    result, graph = captured(lambda: thinned_rows(states, weight, counters=counters, **options))
    for _ in range(2):
        states.partial.normal_()
        counters.zero_()
        graph.replay()
        num_kept, again = counters.tolist(), torch.zeros_like(counters)
        expected = thinned_rows(states, weight, counters=again, **options)
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-3)
        assert num_kept == again.tolist() and num_kept[0] > num_kept[1] > 0
