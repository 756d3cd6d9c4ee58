"""Scores and list in one pass: the reference on a CPU, what the kernel compiles to, and the kernel on a GPU."""

import re
from typing import Any
from unittest import mock

import pytest
import torch

from modules.feed_forward import FeedForward
from modules.kernels import select_units as module
from modules.kernels.arguments import ACTIVATION_FUNCTIONS
from modules.kernels.deferred_norm import DeferredNorm
from modules.kernels.select_units import select_units
from modules.kernels.weight_tiles import Tuning
from modules.sparsity import ActiveList, ActiveSet, SelectionContext
from modules.specs import Dense
from sparse_predictor.methods.cats import CatsSelector
from sparse_predictor.methods.learned_predictor import PredictorSelector
from sparse_predictor.predictor import Predictor
from tests.modules.kernels.kernel_checks import (
    DEVICES,
    DTYPES,
    NORMED,
    compiled_ptx,
    compiles,
    deferred_states,
    deterministic_algorithms,
    normed_states,
    poisoned,
    total_of,
)

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
            return select_units(states, weight, bias, counters=counters, **options)  # type: ignore[arg-type]
        return module.launch_select_units(states, weight, bias, counters=counters, tuning=tuning, **options)  # type: ignore[arg-type]


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


@pytest.mark.parametrize("device", DEVICES)
def test_order_is_fixed_on_demand(device: str) -> None:
    weight = torch.eye(64, device=device)
    states = DeferredNorm.plain((torch.arange(64, device=device)[None] % 3).float())
    with deterministic_algorithms():
        found = selected(states, weight, None, None, threshold=0.5, activation=None, keep_values=False)
    assert found.indices[: int(found.length)].tolist() == [unit for unit in range(64) if unit % 3]


CONTEXT: Any = mock.Mock(spec=SelectionContext, units=None)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_units_at_or_above_the_threshold_are_listed(
    device: str, dtype: torch.dtype, case: tuple[int, int, int, Tuning | None]
) -> None:
    assert_whole_scores_are_selected(case, dtype, device=device, launches=device == "cuda")


@pytest.mark.cuda
@pytest.mark.parametrize("rows", [1, 2, 8])
@pytest.mark.parametrize(("num_units", "hidden_size"), [(8192, 336), (14336, 4096), (1536, 56)])
def test_sizes_of_real_models(rows: int, num_units: int, hidden_size: int) -> None:
    assert_whole_scores_are_selected((rows, num_units, hidden_size, None), torch.bfloat16, device="cuda")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [1, 3])
def test_deferred_states_are_normed_first(device: str, rows: int) -> None:
    assert_deferred_states_are_normed_first(rows, None, device)


def assert_same_choice(found: Any, expected: ActiveSet | None) -> None:
    assert expected is not None
    assert_list_holds(found, expected.mask)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_predictor_that_selects_eagerly_chooses_the_same(dtype: torch.dtype) -> None:
    predictor = Predictor(48, 131, 24)
    for buffer in (predictor.first, predictor.second, predictor.bias):
        buffer.copy_(torch.randint(-1, 2, buffer.shape))
    predictor.score_quantiles.fill_(3.01)
    predictor.to(dtype)
    hidden = torch.randint(-1, 2, (3, 1, 48)).to(dtype)
    selector = PredictorSelector(predictor, 0.5, "threshold", 0)
    inner = DeferredNorm.plain(torch.nn.functional.linear(hidden[:, 0], predictor.first))
    found = select_units(
        inner,
        predictor.second,
        predictor.bias,
        threshold=selector.threshold,
        activation=None,
        keep_values=False,
        counters=torch.zeros(4, dtype=torch.int32),
    )
    assert_same_choice(found, selector.select(hidden, CONTEXT))


@pytest.mark.parametrize("dtype", DTYPES)
def test_cats_that_selects_eagerly_chooses_the_same(dtype: torch.dtype) -> None:
    mlp = FeedForward(Dense(intermediate_size=67, gated=True, activation="silu"), 24, 0)
    assert mlp.gate_proj is not None
    with torch.no_grad():
        mlp.gate_proj.weight.copy_(torch.randint(-1, 2, mlp.gate_proj.weight.shape))
    mlp.to(dtype).requires_grad_(False)
    hidden = torch.randint(-1, 2, (2, 1, mlp.hidden_size)).to(dtype)
    found = select_units(
        DeferredNorm.plain(hidden[:, 0]),
        mlp.gate_proj.weight,
        mlp.gate_proj.bias,
        threshold=0.3,
        activation=mlp.activation,
        keep_values=True,
        counters=torch.zeros(3, dtype=torch.int32),
    )
    expected = CatsSelector(mlp, 0.3).select(hidden, CONTEXT)
    assert_same_choice(found, expected)
    assert expected is not None and expected.gate_values is not None
    assert found.gate_values is not None and torch.equal(found.gate_values, expected.gate_values.float())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation": "tanh"}, "activation 'tanh' is not one of silu, relu, gelu or None"),
        ({"counters": torch.zeros(2, dtype=torch.int32)}, r"counters \(2,\) is not of shape \(3,\)"),
        ({"counters": torch.zeros(3, dtype=torch.int64)}, "counters is torch.int64"),
        ({"weight": torch.zeros(5, 9)}, r"weight \(5, 9\) is not of shape"),
        ({"linear_bias": torch.zeros(6)}, r"bias \(6,\) is not of shape"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"weight": torch.zeros(5, 8), "linear_bias": None, "activation": None}
    arguments |= {"counters": torch.zeros(3, dtype=torch.int32), "threshold": 0.0, "keep_values": False}
    with pytest.raises(ValueError, match=message):
        select_units(DeferredNorm.plain(torch.zeros(2, 8)), **{**arguments, **changes})


@compiles
def test_kernel_reads_16_bytes_at_a_time_and_its_first_weights_before_it_waits() -> None:
    plain = dict.fromkeys(NORMED) | {"partial": "*bf16", "eps": "fp32"}
    types = plain | {"weight": "*bf16", "linear_bias": "*bf16", "normed": None, "threshold": "fp32"}
    types |= {"counters": "*i32", "indices": "*i32", "mask": None, "gate_values": None, "num_units": "i32"}
    constants = {"NUM_ROWS": 1, "KIND": "none", "HIDDEN_SIZE": 336, "BLOCK": 512, "ROWS_BLOCK": 1, "TILE": 16}
    constants |= {"PREFETCHES": False, "SLOTS": 1, "ACTIVATION": None, "PDL": True}
    ptx = compiled_ptx(module.select_units_kernel, types, constants, num_warps=4)
    before, after = ptx.split("griddepcontrol.wait")
    widths = re.findall(r"\bld\.global\S*evict_first(\S*)", before)
    assert len(widths) == 8 and all(width.endswith(".v4.b32") for width in widths), widths
    assert not re.findall(r"\bld\.global\S*evict_first", after)  # this program has no other tile
    assert ptx.count("atom.global") == 2
    assert ".local" not in ptx
