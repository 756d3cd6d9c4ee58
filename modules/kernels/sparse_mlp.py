"""MLP over the active neurons only.

    out[r] = sum over j in active(r) of a_j(r) * down[j],
    a_j(r) = act(gate[j] . x[r] + gate_bias[j]) * (up[j] . x[r] + up_bias[j])     (gated)
    a_j(r) = act(up[j] . x[r] + up_bias[j])                                       (not gated)

x [rows, D]; gate, up, down [F, D] neuron-major; masks [rows, F]. Deja Vu (Liu et al. 2023), section 4.3: gather the
rows of active neurons, skip the rest.
"""

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional as F

from modules.sparsity import ActiveSet

ACTIVATION_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "relu": F.relu, "gelu": F.gelu}


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
        values = active.gate_values[:, union] * values
    else:
        values = activate(F.linear(x, gate[union], None if gate_bias is None else gate_bias[union])) * values
    if x.shape[0] > 1:
        values = values.masked_fill(~mask[:, union], 0)
    return values @ down[union]


def sparse_mlp(
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
    """[rows, D] -> [rows, D] in x's dtype. ValueError on shapes that do not fit."""
    if active.mask.shape != (x.shape[0], up.shape[0]):
        raise ValueError(
            f"active set {tuple(active.mask.shape)} does not fit {x.shape[0]} rows x {up.shape[0]} neurons"
        )
    return reference_sparse_mlp(x, gate, up, down, active, activation=activation, gate_bias=gate_bias, up_bias=up_bias)
