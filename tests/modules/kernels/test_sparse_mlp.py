"""MLP over active neurons: the reference on a CPU, what the kernel compiles to, and the kernel on a GPU."""

import re
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from modules.kernels import sparse_mlp as module
from modules.kernels.arguments import ACTIVATION_FUNCTIONS
from modules.kernels.deferred_norm import DeferredNorm
from modules.kernels.early_selection import ExtraRows
from modules.kernels.sparse_mlp import Tuning, sparse_mlp
from modules.sparsity import ActiveList, StandIn
from tests.modules.kernels.kernel_checks import (
    DEVICES,
    DTYPES,
    NAN,
    NORMED,
    assert_residual_is_written,
    compiled_ptx,
    compiles,
    deferred_states,
    deterministic_algorithms,
    poisoned,
)


@dataclass(frozen=True)
class Case:
    """Sizes and options; `density` of the active neurons, None: no list."""

    rows: int
    hidden_size: int
    num_units: int
    activation: str
    is_gated: bool = False
    density: float | None = 0.5
    has_bias: bool = False
    is_early: bool = False
    knows_gates: bool = False
    standin_rank: int = 0
    num_extra: int = 0
    adds: bool = False
    tuning: Tuning | None = None


SMALL_CASES = [
    Case(1, 48, 19, "silu", is_gated=True, has_bias=True, standin_rank=5, tuning=Tuning(1, 4, 1)),
    Case(1, 100, 27, "relu", has_bias=True, is_early=True, adds=True, tuning=Tuning(2, 4, 1)),
    Case(1, 50, 23, "gelu", density=None, num_extra=15, tuning=Tuning(2, 2, 1)),
    Case(1, 33, 19, "silu", is_gated=True, density=0.0, standin_rank=7, num_extra=3, tuning=Tuning(2, 1, 1)),
    Case(1, 64, 19, "silu", is_gated=True, density=1.0, is_early=True, knows_gates=True),
    Case(3, 40, 13, "silu", is_gated=True, has_bias=True, standin_rank=5),
    Case(2, 24, 13, "relu", density=None, adds=True),
    Case(8, 40, 21, "silu", is_gated=True, knows_gates=True),
]
LARGE_CASES = [
    Case(1, 3072, 8192, "silu", is_gated=True, standin_rank=64, num_extra=336, is_early=True),
    Case(1, 3072, 8192, "silu", is_gated=True, density=None),
    Case(1, 4096, 16384, "relu", has_bias=True, density=0.1, num_extra=2000),
    Case(1, 576, 1536, "gelu", is_gated=True),
    Case(2, 3072, 8192, "silu", is_gated=True, knows_gates=True),
    Case(8, 4096, 1000, "relu", has_bias=True, standin_rank=33),
]


def mlp_inputs(case: Case, dtype: torch.dtype, *, device: str = "cpu") -> dict[str, Any]:
    """Arguments of `sparse_mlp`. The list is in random order; weights of neurons that no row has are NaN."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape).to(dtype).to(device)

    shape, matrix = (case.rows, case.hidden_size), (case.num_units, case.hidden_size)
    biases = {name: normal(case.num_units) if case.has_bias else None for name in ("gate_bias", "up_bias")}
    inputs: dict[str, Any] = {
        "states": deferred_states(case.rows, case.hidden_size, dtype, device=device),
        "gate": normal(*matrix) * case.hidden_size**-0.5 if case.is_gated else None,
        "up": normal(*matrix) * case.hidden_size**-0.5,
        "down": normal(*matrix) * case.num_units**-0.5,
        "activation": case.activation,
        "up_bias": biases["up_bias"],
        "gate_bias": biases["gate_bias"] if case.is_gated else None,
        "active": None,
        "tuning": case.tuning,
    }
    if case.density is not None:
        mask = torch.rand(case.rows, case.num_units) < case.density
        union = mask.any(0).nonzero().squeeze(-1).to(torch.int32)
        indices = torch.full((case.num_units,), -999999, dtype=torch.int32)
        indices[: len(union)] = union[torch.randperm(len(union))]
        known = torch.randn(case.rows, case.num_units).to(dtype).float() if case.knows_gates else None
        for name in ("up", "down", *(["gate"] if case.is_gated else [])):
            inputs[name][~mask.any(0).to(device)] = NAN
        inputs["active"] = ActiveList(
            indices=indices.to(device),
            length=torch.tensor([len(union)], dtype=torch.int32, device=device),
            num_active=mask.sum(1, dtype=torch.int32).to(device),
            mask=mask.to(device) if case.rows > 1 else None,
            gate_values=None if known is None else known.to(device),
            is_early=case.is_early,
        )
    if case.standin_rank:
        rank, width = case.standin_rank, case.hidden_size
        inputs["standin"] = StandIn(
            inputs=normal(rank, width) * width**-0.5, outputs=normal(rank, width), bias=normal(width)
        )
    if case.num_extra:
        output = torch.full((case.num_extra,), NAN, dtype=dtype, device=device)
        inputs["extra"] = ExtraRows(normal(case.num_extra, case.hidden_size) * case.hidden_size**-0.5, output)
    if case.adds:
        inputs["output"] = torch.randn(shape, device=device)
    return inputs


def run_poisoned(inputs: dict[str, Any]) -> Tensor:
    with poisoned():
        return sparse_mlp(**inputs)


def equation(inputs: dict[str, Any], x: Tensor) -> Tensor:
    """[rows, D] in float64, row by row over the row's own neurons."""
    active, standin, rows = inputs["active"], inputs.get("standin"), []
    for row in range(len(x)):
        units = torch.arange(len(inputs["up"]), device=x.device)
        if active is not None:
            units = active.indices[: int(active.length)].long()
            units = units if active.mask is None else units[active.mask[row, units]]
        products = {}
        for name in ("gate", "up"):
            if inputs[name] is not None:
                products[name] = inputs[name][units].double() @ x[row]
                if inputs[f"{name}_bias"] is not None:
                    products[name] += inputs[f"{name}_bias"][units].double()
        activate = ACTIVATION_FUNCTIONS[inputs["activation"]]
        if active is not None and active.gate_values is not None:
            values = active.gate_values[row, units].double() * products["up"]
        elif inputs["gate"] is not None:
            values = activate(products["gate"]) * products["up"]
        else:
            values = activate(products["up"])
        total = values @ inputs["down"][units].double()
        if standin is not None:
            total += (standin.inputs.double() @ x[row]) @ standin.outputs.double() + standin.bias.double()
        rows.append(total)
    return torch.stack(rows)


def assert_equation_holds(case: Case, dtype: torch.dtype, *, device: str = "cpu") -> None:
    """The output, what it is added to, the residual, and the product of extra rows."""
    inputs = mlp_inputs(case, dtype, device=device)
    before = inputs["output"].double() if case.adds else 0.0
    result = run_poisoned(inputs)
    assert result.dtype == torch.float32 and (not case.adds or result.data_ptr() == inputs["output"].data_ptr())
    states = inputs["states"]
    assert_residual_is_written(states)
    x = replace(states, new_residual=None).normed().double()  # rounded to the type, as the kernel does
    eps = torch.finfo(dtype).eps
    tolerance: dict[str, Any] = {"rtol": 4 * eps + 1e-5, "atol": 8 * eps + 1e-5}
    torch.testing.assert_close(result.double(), before + equation(inputs, x), **tolerance)
    if case.num_extra:
        extra = inputs["extra"]
        torch.testing.assert_close(extra.output.double(), extra.weight.double() @ x[0], **tolerance)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", SMALL_CASES)
def test_equation_holds(case: Case, dtype: torch.dtype, device: str) -> None:
    assert_equation_holds(case, dtype, device=device)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", LARGE_CASES)
def test_kernel_follows_the_equation_at_sizes_of_models(case: Case, dtype: torch.dtype) -> None:
    assert_equation_holds(case, dtype, device="cuda")


@pytest.mark.cuda
def test_deterministic_sums_are_equal_bit_for_bit() -> None:
    inputs = mlp_inputs(LARGE_CASES[0], torch.bfloat16, device="cuda")
    with deterministic_algorithms():
        first, second = (run_poisoned(inputs) for _ in range(2))
    assert torch.equal(first, second) and not first.isnan().any()


LIST = mlp_inputs(SMALL_CASES[0], torch.float32)["active"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation": "tanh"}, "activation 'tanh' is not one of"),
        ({"states": DeferredNorm.plain(torch.zeros(9, 48))}, r"states \(9, 48\)"),
        ({"states": DeferredNorm.plain(torch.zeros(1, 47))}, r"states \(1, 47\)"),
        ({"states": DeferredNorm.plain(torch.zeros(2, 48))}, "needs a mask"),
        ({"gate": torch.zeros(18, 48)}, "gate .*18, 48"),
        ({"down": torch.zeros(19, 48, dtype=torch.float16)}, "down is torch.float16"),
        ({"down": torch.zeros(48, 19).T}, "down is not contiguous"),
        ({"up_bias": torch.zeros(18)}, "up_bias .*18"),
        ({"output": torch.zeros(1, 48, dtype=torch.float16)}, "output is torch.float16"),
        ({"active": replace(LIST, length=torch.zeros(1, dtype=torch.int64))}, "active length is torch.int64"),
        ({"active": replace(LIST, indices=LIST.indices.to("meta"))}, "active indices is on meta"),
        ({"active": replace(LIST, gate_values=torch.zeros(1, 18))}, "gate values .*18"),
        ({"extra": ExtraRows(torch.zeros(3, 47), torch.zeros(3))}, "extra rows weight .*47"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sparse_mlp(**{**mlp_inputs(SMALL_CASES[0], torch.float32), **changes})


@compiles
@pytest.mark.parametrize("is_early", [False, True])
def test_kernel_reads_16_bytes_at_a_time_and_early_neurons_before_it_waits(is_early: bool) -> None:
    kernel = module.sparse_mlp_kernel
    types: dict[str, str | None] = NORMED | dict.fromkeys(("gate", "up", "down"), "*bf16") | {"output": "*fp32"}
    types |= {"indices": "*i32", "length": "*i32", "rows": "i32"}
    constants: dict[str, Any] = {"KIND": "rms", "HIDDEN_SIZE": 4096, "BLOCK": 4096, "ROWS": 1, "UNITS": 1, "PDL": True}
    constants |= {"NUM_UNITS": 8192, "STANDIN_RANK": 0, "NUM_EXTRA": 0, "ACTIVATION": "silu", "PARTS": False}
    constants |= {name: None for name in kernel.arg_names if name not in types and name not in constants}
    ptx = compiled_ptx(kernel, types, constants | {"EARLY": is_early}, num_warps=8)
    before, after = ptx.split("griddepcontrol.wait")[:2]
    tile = 3 * 2  # gate, up and down; loads of 8 elements that make up a thread's 16 columns
    for part, tiles in ((before, 1 if is_early else 0), (after, 1 if is_early else 2)):
        widths = [width for width in re.findall(r"\bld\.global(\S*)", part) if "evict_first" in width]
        assert len(widths) == tiles * tile and all(width.endswith(".v4.b32") for width in widths), widths
    assert "st.global" not in before and ".local" not in ptx
    added = re.findall(r"\b(?:red|atom)\.\S+", ptx)
    assert added and all(".v4.f32" in width for width in added), added
