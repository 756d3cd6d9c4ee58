"""The feed-forward block: act(gate) * up (gated) or act(up), then the neuron-major down projection.

Legend: B batch, T tokens, D hidden, F intermediate, A active neurons.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from modules.config import ModelConfig
from modules.forward_pass import ForwardPass
from modules.kernels.sparse_mlp import ACTIVATION_FUNCTIONS, sparse_mlp
from modules.projections import OutputProjection, ThinnedInput
from modules.sparsity import MAX_GATHER_ROWS, ActiveSet, Selector, UnitShard


class Mlp(nn.Module):
    """One layer's neurons. `selector` None: dense. The output bias is added by the residual junction."""

    def __init__(self, config: ModelConfig, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.num_units = config.intermediate_size
        self.units: UnitShard | None = None  # which neurons are here, where a tensor-parallel rank computes a part
        self.hidden_size = config.hidden_size
        self.activation = config.activation
        shape = (config.hidden_size, config.intermediate_size)
        self.gate_proj = nn.Linear(*shape, bias=config.mlp_bias) if config.gated_mlp else None
        self.up_proj = nn.Linear(*shape, bias=config.mlp_bias)
        self.down_proj = OutputProjection(config.intermediate_size, config.hidden_size)
        self.activations = nn.Identity()  # a named point for forward hooks: sees [B, T, F] (dense and masked runs)
        self.selector: Selector | None = None
        self.force_mask = False  # simulate every set with a mask: what the gathered path must equal

    def forward(self, hidden_states: Tensor, forward_pass: ForwardPass) -> Tensor:
        """[B, T, D] normed -> [B, T, D], the block's part of the residual sum, without bias."""
        context = forward_pass.selection_context(
            "mlp", self.layer_idx, hidden_states, lambda: self.intermediate(hidden_states), self.units
        )
        active = None if self.selector is None else self.selector.select(hidden_states, context)
        if active is None:
            forward_pass.count(context, self.num_units, "dense", None)
            return self.down_proj(self.activations(self.intermediate(hidden_states)))
        gather = hidden_states.shape[:2].numel() <= MAX_GATHER_ROWS and not self.force_mask
        forward_pass.count(context, self.num_units, "gather" if gather else "mask", active)
        output = self._gathered(hidden_states, active) if gather else self._masked(hidden_states, active)
        if active.compensation is not None:
            output = output + active.compensation.view_as(output)
        return output

    def thinned_counts(self) -> list[tuple[int, int]]:
        """Inputs (used, seen) of the gate, up and down projections; (1, 1) for one not thinned, (0, 0) for
        none. Sums over ranks are counts again."""
        return [
            (int(part.kept), int(part.seen)) if isinstance(part, ThinnedInput) else (int(part is not None),) * 2
            for part in (self.gate_proj, self.up_proj, self.down_proj)
        ]

    def weights_read(self) -> Tensor | None:
        """int64 [2, B]: weights read, and all there are, for each batch row of the last call, where inputs are thinned
        out (TEAL); None elsewhere. Sums over ranks are counts again."""
        total: Tensor | None = None
        num_neurons = self.num_units if self.units is None else self.units.num_counted
        for part, width in (
            (self.gate_proj, num_neurons),
            (self.up_proj, num_neurons),
            (self.down_proj, self.hidden_size),
        ):
            if isinstance(part, ThinnedInput) and part.last_rows is not None:
                total = part.last_rows * width if total is None else total + part.last_rows * width
        return total

    def intermediate(self, hidden_states: Tensor) -> Tensor:
        """What the down projection multiplies, every neuron: [..., D] -> [..., F]."""
        activate = ACTIVATION_FUNCTIONS[self.activation]
        if self.gate_proj is None:
            return activate(self.up_proj(hidden_states))
        return activate(self.gate_proj(hidden_states)) * self.up_proj(hidden_states)

    def _masked(self, hidden_states: Tensor, active: ActiveSet) -> Tensor:
        """The same sets by computing everything and zeroing the rest: for many rows, and as the reference."""
        activations = self.intermediate(hidden_states)
        mask = active.mask.view_as(activations)
        return self.down_proj(self.activations(activations.masked_fill(~mask, 0)))

    def _gathered(self, hidden_states: Tensor, active: ActiveSet) -> Tensor:
        rows = hidden_states.flatten(0, 1)
        gate_weight = None if self.gate_proj is None else self.gate_proj.weight
        gate_bias = None if self.gate_proj is None else self.gate_proj.bias
        output = sparse_mlp(
            rows,
            gate_weight,
            self.up_proj.weight,
            self.down_proj.weight,
            active,
            activation=self.activation,
            gate_bias=gate_bias,
            up_bias=self.up_proj.bias,
        )
        return output.view_as(hidden_states)


def mean_share(counts: Iterable[tuple[int, int]]) -> float:
    """Mean of used / seen over those that saw anything; 1.0 if none did."""
    shares = [used / seen for used, seen in counts if seen]
    return sum(shares) / len(shares) if shares else 1.0


def unit_norms(mlp: Mlp) -> Tensor:
    """||down_j||: the L2 norm of what neuron j writes when its activation is 1, float32 [F]."""
    return torch.linalg.vector_norm(mlp.down_proj.weight.float(), dim=-1)
