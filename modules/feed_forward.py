"""The feed-forward block: act(gate) * up (gated) or act(up), then the neuron-major down projection.

Legend: B batch, T tokens, D hidden, F intermediate, A active neurons.
"""

import torch
from torch import Tensor, nn

from modules.forward_pass import ForwardPass
from modules.kernels.arguments import ACTIVATION_FUNCTIONS
from modules.kernels.deferred_norm import DeferredNorm
from modules.kernels.sparse_mlp import mlp_of_rows, of_standin, sparse_mlp, union_of
from modules.linear import Linear
from modules.shards import Shard
from modules.sparsity import MAX_GATHER_ROWS, ActiveSet, Selector, Units, UnitShard
from modules.specs import Dense
from modules.thinned_input import ThinnedInput, path_without_a_choice, thinned_mlp

# So many rows read all weights faster through the kernel than through the library (scripts.benchmark.kernels).
MAX_FUSED_DENSE_ROWS = 1
# Of more rows the union of what they keep is most of the weights, and the library's product with a mask is faster: 8
# rows of a 3B at density 0.25 read 90 % of the neurons, at 0.42 of the dense speed (decode_h200.jsonl).
MAX_FUSED_SPARSE_ROWS = 4


class FeedForward(nn.Module):
    """One layer's neurons. `selector` None: dense. The output bias is added by the residual junction."""

    def __init__(self, spec: Dense, hidden_size: int, layer_idx: int) -> None:
        super().__init__()
        self.spec, self.hidden_size, self.layer_idx = spec, hidden_size, layer_idx
        self.units = Units("neurons", spec.intermediate_size)
        self.num_units = spec.intermediate_size  # here, with padding
        self.unit_shard: UnitShard | None = None  # which neurons are here, where a tensor-parallel rank computes a part
        self.activation = spec.activation
        shape = (hidden_size, spec.intermediate_size)
        self.gate_proj = Linear(*shape, bias=spec.bias) if spec.gated else None
        self.up_proj = Linear(*shape, bias=spec.bias)
        self.down_proj = Linear(spec.intermediate_size, hidden_size, rows_are="inputs")
        self.activations = nn.Identity()  # a named point for forward hooks: sees [B, T, F] (dense and masked runs)
        self.selector: Selector | None = None
        self.force_mask = False  # simulate every set with a mask: what the gathered path must equal

    def forward(self, hidden_states: Tensor | DeferredNorm, forward_pass: ForwardPass) -> Tensor:
        """[B, T, D] normed -> [B, T, D], the block's part of the residual sum, without bias."""
        if isinstance(hidden_states, DeferredNorm):
            return self.step(hidden_states, forward_pass)
        context = forward_pass.selection_context(
            "mlp", self.layer_idx, hidden_states, lambda: self.intermediate(hidden_states), self.unit_shard
        )
        active = None if self.selector is None else self.selector.select(hidden_states, context)
        if active is None:
            forward_pass.count(context, self.num_units, path_without_a_choice(self.thinned_parts()), None)
            return forward_pass.partial(self.down_proj, self.activations(self.intermediate(hidden_states)))
        gather = hidden_states.shape[:2].numel() <= MAX_GATHER_ROWS and not self.force_mask
        forward_pass.count(context, self.num_units, "gather" if gather else "mask", active)
        output = self._gathered(hidden_states, active) if gather else self._masked(hidden_states, active)
        if active.compensation is not None:
            output = output + active.compensation.view_as(output)
        return output

    def step(self, states: DeferredNorm, forward_pass: ForwardPass) -> Tensor:
        """A decode step: [B, D] still to be normed -> [B, 1, D]. One kernel, for what is active or for everything."""
        fused = forward_pass.fused
        assert fused is not None

        def activations() -> Tensor:
            return self.intermediate(states.normed()[:, None])

        context = forward_pass.step_context("mlp", self.layer_idx, activations)
        active = fused.select(states, context)
        if isinstance(active, ActiveSet):
            active = active.listed()
        masks, thins = active is not None and len(states.partial) > MAX_FUSED_SPARSE_ROWS, self._thins_in_step(states)
        if masks or (active is None and not thins):
            execution = "mask" if masks else path_without_a_choice(self.thinned_parts())
        else:
            execution = "gather"
        forward_pass.count(context, self.num_units, execution, active)
        if thins:
            sums, counters = fused.thinned_sums(self.layer_idx)
            output, parts = fused.sums("mlp", self.layer_idx), [part for part, _ in self.thinned_parts()]
            thinned_mlp(parts, states, activation=self.activation, sums=sums, counters=counters, output=output)
            return output[:, None]
        down = self.down_proj
        if active is not None and masks:
            assert active.mask is not None, "a list of several rows says which row has which"
            output = down(activations().masked_fill(~active.mask[:, None], 0))
            if active.standin is not None:
                output = output + of_standin(states.normed(), active.standin)[:, None]
            return output if active.compensation is None else output + active.compensation[:, None]
        if isinstance(down, ThinnedInput) or (active is None and len(states.partial) > MAX_FUSED_DENSE_ROWS):
            return forward_pass.partial(down, activations())
        output = sparse_mlp(
            states,
            None if self.gate_proj is None else self.gate_proj.kernel_argument(),
            self.up_proj.kernel_argument(),
            down.kernel_argument(),
            active,
            activation=self.activation,
            gate_bias=None if self.gate_proj is None else self.gate_proj.bias,
            up_bias=self.up_proj.bias,
            standin=None if active is None else active.standin,
            extra=fused.extra_rows("mlp", self.layer_idx, states.dtype),
            output=fused.sums("mlp", self.layer_idx),
        )
        if active is not None and active.compensation is not None:
            output = output + active.compensation
        return output[:, None]

    def can_fuse(self) -> bool:
        """Whether a decode step of it runs in kernels: of formats that have them, and where inputs are thinned out by
        magnitude alone (`thinned_rows` reads no `input_norms`, and runs no subclass's own sum)."""
        parts = [part for part in (self.gate_proj, self.up_proj, self.down_proj) if part is not None]
        by_magnitude = all(type(part) is ThinnedInput and part.input_norms is None for part, _ in self.thinned_parts())
        return by_magnitude and all(part.has_kernels for part in parts)

    def _thins_in_step(self, states: DeferredNorm) -> bool:
        """Whether `thinned_mlp` computes this: one row, in a step, laid out for it."""
        down = self.down_proj
        laid_out = isinstance(down, ThinnedInput) and down.in_step and down.input_major is not None
        return laid_out and len(states.partial) == 1

    def bytes_read(self, density: float) -> float:
        """Bytes of the weights here that a token reads if this share of the neurons is active."""
        return density * sum(
            part.num_bytes for part in (self.gate_proj, self.up_proj, self.down_proj) if part is not None
        )

    def cut(self, start: int, stop: int, num_units: int) -> dict[str, Shard]:
        """Cut a block on `meta` to the neurons [start, stop), padded to so many. Returns, by name, which part of the
        full parameter each one then is."""
        shard, shards = Shard.of_rows(start, stop, num_units, self.units.number), dict[str, Shard]()
        for name in ("gate_proj", "up_proj", "down_proj"):
            if (part := getattr(self, name)) is not None:
                shards |= {f"{name}.{kind}": piece for kind, piece in part.cut(shard).items()}
        self.num_units = num_units
        return shards

    def thinned_parts(self) -> list[tuple[ThinnedInput, int]]:
        """Those of gate, up and down projection whose inputs are thinned out, and the weights an entry stands for."""
        num_neurons = self.num_units if self.unit_shard is None else self.unit_shard.num_counted
        found: list[tuple[ThinnedInput, int]] = []
        for part, width in (
            (self.gate_proj, num_neurons),
            (self.up_proj, num_neurons),
            (self.down_proj, self.hidden_size),
        ):
            if isinstance(part, ThinnedInput):
                found.append((part, width))
        return found

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
        states, gate = hidden_states.flatten(0, 1), self.gate_proj
        if active.mask.shape != (len(states), self.num_units):
            raise ValueError(
                f"active set {tuple(active.mask.shape)} does not fit {len(states)} rows x {self.num_units} neurons"
            )
        union = union_of(active)
        output = mlp_of_rows(
            states,
            None if gate is None or active.gate_values is not None else gate.rows(union),
            self.up_proj.rows(union),
            self.down_proj.rows(union),
            active,
            union,
            activation=self.activation,
            gate_bias=None if gate is None else gate.bias,
            up_bias=self.up_proj.bias,
        )
        return output.view_as(hidden_states)


def unit_norms(mlp: FeedForward) -> Tensor:
    """||down_j||: the L2 norm of what neuron j writes when its activation is 1, float32 [F]."""
    return torch.linalg.vector_norm(mlp.down_proj.dequantised().float(), dim=-1)
