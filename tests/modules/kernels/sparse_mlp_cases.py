"""Inputs for the MLP over active neurons and its equation in float64, for the reference and the kernel."""

from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from modules.kernels.arguments import ACTIVATION_FUNCTIONS
from modules.kernels.deferred_norm import DeferredNorm
from modules.kernels.early_selection import ExtraRows
from modules.kernels.sparse_mlp import Tuning, sparse_mlp
from modules.sparsity import ActiveList, StandIn

NAN = float("nan")
EPS = 1e-5


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
    Case(1, 48, 37, "silu", is_gated=True, has_bias=True, standin_rank=5, tuning=Tuning(1, 4, 2)),
    Case(1, 100, 37, "relu", has_bias=True, is_early=True, adds=True, tuning=Tuning(2, 4, 2)),
    Case(1, 50, 23, "gelu", density=None, num_extra=15, tuning=Tuning(2, 2, 1)),
    Case(1, 33, 19, "silu", is_gated=True, density=0.0, standin_rank=7, num_extra=3, tuning=Tuning(2, 1, 1)),
    Case(1, 64, 19, "silu", is_gated=True, density=1.0, is_early=True, knows_gates=True),
    Case(3, 48, 37, "silu", is_gated=True, has_bias=True, standin_rank=5),
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
    states = DeferredNorm(
        partial=torch.randn(shape, device=device),
        residual=torch.randn(shape, device=device) * 2,
        weight=normal(case.hidden_size) + 1,
        bias=normal(case.hidden_size),
        kind="rms",
        eps=EPS,
        dtype=dtype,
        new_residual=torch.full(shape, NAN, device=device),
    )
    biases = {name: normal(case.num_units) if case.has_bias else None for name in ("gate_bias", "up_bias")}
    inputs: dict[str, Any] = {
        "states": states,
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
    """sparse_mlp with fresh memory full of NaN: what is not written shows."""
    new_empty = Tensor.new_empty

    def full_of_nan(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        memory = new_empty(tensor, *args, **kwargs)
        return memory.fill_(NAN) if memory.is_floating_point() else memory

    with mock.patch.object(Tensor, "new_empty", full_of_nan):
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
    total = states.residual + (states.partial + states.bias.float())
    torch.testing.assert_close(states.new_residual, total, rtol=1e-6, atol=1e-6)
    x = replace(states, new_residual=None).normed().double()  # rounded to the type, as the kernel does
    eps = torch.finfo(dtype).eps
    tolerance: dict[str, Any] = {"rtol": 4 * eps + 1e-5, "atol": 8 * eps + 1e-5}
    torch.testing.assert_close(result.double(), before + equation(inputs, x), **tolerance)
    if case.num_extra:
        extra = inputs["extra"]
        torch.testing.assert_close(extra.output.double(), extra.weight.double() @ x[0], **tolerance)
