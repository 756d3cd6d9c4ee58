"""The MLP over active neurons in plain PyTorch, and what its kernel demands of its arguments (see sparse_mlp)."""

import torch
from torch import Tensor
from torch.nn import functional as F

from modules.kernels.activations import ACTIVATION_FUNCTIONS
from modules.kernels.arguments import DTYPES, MAX_ROWS, Expected, check_tensors
from modules.kernels.deferred_norm import DeferredNorm
from modules.kernels.riders import Rider
from modules.sparsity import ActiveList, ActiveSet, StandIn


def reference_sparse_mlp(
    x: Tensor,
    gate: Tensor | None,
    up: Tensor,
    down: Tensor,
    active: ActiveSet,
    *,
    activation: str,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
) -> Tensor:
    """Plain PyTorch: gathers the union of the rows' active neurons once, then zeroes what a row does not use.

    With everything active the operands and shapes are those of the dense block, so the result is equal bit for bit.
    """
    mask = active.mask
    union = mask.any(0).nonzero().squeeze(-1)
    activate = ACTIVATION_FUNCTIONS[activation]
    values = F.linear(x, up[union], None if up_bias is None else up_bias[union])
    if gate is None:
        values = activate(values)
    elif active.gate_values is not None:
        values = active.gate_values[:, union].to(values.dtype) * values
    else:
        values = activate(F.linear(x, gate[union], None if gate_bias is None else gate_bias[union])) * values
    if x.shape[0] > 1:
        values = values.masked_fill(~mask[:, union], 0)
    return values @ down[union]


def mlp_in_plain_pytorch(
    states: DeferredNorm,
    gate: Tensor | None,
    up: Tensor,
    down: Tensor,
    active: ActiveList | None,
    activation: str,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    standin: StandIn | None,
) -> Tensor:
    x = states.normed()
    mask = torch.ones(x.shape[0], up.shape[0], dtype=torch.bool, device=x.device)
    gate_values = None
    if active is not None:
        listed = torch.zeros(up.shape[0], dtype=torch.bool, device=x.device)
        listed[active.indices[: int(active.length)].long()] = True
        mask = mask & listed if active.mask is None else active.mask & listed
        gate_values = active.gate_values
    chosen = ActiveSet(mask, gate_values=gate_values)
    result = reference_sparse_mlp(
        x, gate, up, down, chosen, activation=activation, gate_bias=gate_bias, up_bias=up_bias
    ).float()
    if standin is None:
        return result
    return result + of_standin(x, standin).float()


def of_standin(x: Tensor, standin: StandIn) -> Tensor:
    """What a stand-in adds for x [rows, D]: [rows, D]."""
    return F.linear(F.linear(x, standin.inputs), standin.outputs.t(), standin.bias)


def check_mlp(
    states: DeferredNorm,
    gate: Tensor | None,
    up: Tensor,
    down: Tensor,
    active: ActiveList | None,
    activation: str,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    standin: StandIn | None,
    rider: Rider | None,
    output: Tensor | None,
) -> None:
    """ValueError on the first argument that does not fit `up`."""
    if activation not in ACTIVATION_FUNCTIONS:
        raise ValueError(f"activation {activation!r} is not one of {', '.join(ACTIVATION_FUNCTIONS)}")
    num_units, hidden_size = up.shape
    rows = states.partial.shape[0]
    if states.partial.shape[1:] != (hidden_size,) or not 1 <= rows <= MAX_ROWS:
        raise ValueError(f"states {tuple(states.partial.shape)} are not 1 to {MAX_ROWS} rows of {hidden_size}")
    own = (up.dtype,)
    expected: dict[str, Expected] = {
        "gate": (gate, (num_units, hidden_size), own),
        "up": (up, (num_units, hidden_size), DTYPES),
        "down": (down, (num_units, hidden_size), own),
        "gate_bias": (gate_bias, (num_units,), DTYPES),
        "up_bias": (up_bias, (num_units,), DTYPES),
        "output": (output, (rows, hidden_size), (torch.float32,)),
    }
    if standin is not None:
        rank = standin.inputs.shape[0]
        expected["standin inputs"] = (standin.inputs, (rank, hidden_size), own)
        expected["standin outputs"] = (standin.outputs, (rank, hidden_size), own)
        expected["standin bias"] = (standin.bias, (hidden_size,), DTYPES)
    if active is not None:
        expected["active indices"] = (active.indices, (num_units,), (torch.int32,))
        expected["active length"] = (active.length, (1,), (torch.int32,))
        expected["active mask"] = (active.mask, (rows, num_units), (torch.bool,))
        expected["gate values"] = (active.gate_values, (rows, num_units), (torch.float32,))
        if active.mask is None and rows > 1:
            raise ValueError(f"an active list of {rows} rows needs a mask: which row computes which unit")
    check_tensors(expected, up.device)
    if rider is not None:
        rider.check(rows, hidden_size, up.dtype)
