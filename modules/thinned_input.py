"""Input thinning (TEAL, WINA): the small entries of a matrix's input are dropped, and their weights are not read.

The Python code of a captured decode step runs only once, so it cannot count what each replay does. Each `ThinnedInput`
therefore keeps the number of entries that it used in a tensor on the device, and `StepCounts` puts it into the step's
message.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from modules.kernels.deferred_norm import DeferredNorm
from modules.kernels.thinned_rows import Activations, kept_entries, thinned_rows
from modules.linear import Linear
from modules.sparsity import Count


class ThinnedInput(nn.Module):
    """A projection that drops the small entries of its input first (TEAL), so that their weights need not be read.

    It wraps a `Linear`, which is not changed (`projection`). `density` is the share of entries that `threshold` is
    meant to keep. With `input_norms` [in_features], an entry's magnitude times its norm is compared (WINA).

    `kept` of `seen` entries were used. Both count rows without padding, and the inputs in `counted` (bool
    [in_features]; None: all). `last_rows` [2, B]: these two numbers per batch row, in the last call; None if it was
    not thinned out. In a decode step that may be a graph (see `in_step`) neither is updated; `kept_in_step` [B] is set
    instead. `input_major` [M, in, out]: the weights for the kernels, of all M matrices with this input; None: no
    kernels.
    """

    def __init__(
        self,
        projection: Linear,
        threshold: float,
        counted: Tensor | None = None,
        input_norms: Tensor | None = None,
        density: float = 1.0,
    ) -> None:
        super().__init__()
        self.projection = projection
        self.threshold = threshold
        self.density = density
        self.counted = counted
        self.input_norms = input_norms
        self.num_counted = projection.in_features if counted is None else int(counted.sum())
        self.enabled = True
        self.valid: Tensor | None = None  # bool [B, T]: rows that are no padding, and count; None: all
        self.kept = Count()
        self.seen = Count()
        self.extra_weights = 0  # read for every token that is thinned out, whatever entries it keeps
        self.extra = Count()  # of these
        self.last_rows: Tensor | None = None
        self.in_step = False
        self.kept_in_step: Tensor | None = None
        self.input_major: Tensor | None = None

    @property
    def bias(self) -> Tensor | None:
        """Of the projection, as what follows."""
        return self.projection.bias

    @property
    def compute_dtype(self) -> torch.dtype:
        """See Linear."""
        return self.projection.compute_dtype

    @property
    def has_kernels(self) -> bool:
        """See Linear."""
        return self.projection.has_kernels

    @property
    def num_bytes(self) -> int:
        """See Linear."""
        return self.projection.num_bytes

    def rows(self, indices: Tensor) -> Tensor:
        """See Linear."""
        return self.projection.rows(indices)

    def dequantised(self) -> Tensor:
        """See Linear."""
        return self.projection.dequantised()

    def compared(self, states: Tensor) -> Tensor:
        """What the threshold is compared with: the sizes of an input's entries [..., in]."""
        return (states if self.input_norms is None else states * self.input_norms).abs()

    def count_from(self, counts: tuple[Count, Count, Count] | None = None) -> tuple[Count, Count, Count]:
        """Go on from these counts of `kept`, `seen` and `extra`, or from zero; returns what was counted so far."""
        before = self.kept, self.seen, self.extra
        self.kept, self.seen, self.extra = (Count(), Count(), Count()) if counts is None else counts
        return before

    def forward(self, states: Tensor) -> Tensor:
        """As the wrapped projection, on the input's entries with magnitude >= threshold."""
        if not self.enabled:  # the run has these tokens, too, as it has those of a selector that leaves them dense
            self.last_rows = None
            tokens = states.shape[:-1].numel() if self.valid is None else self.valid.sum()
            self.kept.add(tokens * self.num_counted)
            self.seen.add(tokens * self.num_counted)
            return self.projection(states)
        mask = kept_entries(self.compared(states), self.threshold)
        kept = mask if self.counted is None else mask & self.counted
        kept = kept if self.valid is None else kept & self.valid[..., None]
        if self.in_step:
            self.kept_in_step = kept.sum((-1, -2))
        else:
            seen = kept.new_ones(kept.shape[:-1]) if self.valid is None else self.valid
            self.last_rows = torch.stack((kept.sum((-1, -2)), seen.sum(-1) * self.num_counted))
            self.kept.add(self.last_rows[0].sum())
            self.seen.add(self.last_rows[1].sum())
            if self.extra_weights:
                self.extra.add(seen.sum() * self.extra_weights)
        return self.product(states, mask)

    def product(self, states: Tensor, mask: Tensor) -> Tensor:
        """What becomes of an input [..., in] of which the entries in `mask` are large: [..., out]."""
        return self.projection(states.masked_fill(~mask, 0))


def path_without_a_choice(parts: Sequence[tuple[ThinnedInput, int]]) -> str:
    """How a block that chooses no units runs, for statistics: with inputs thinned out as a mask would, or dense."""
    return "mask" if any(part.enabled for part, _ in parts) else "dense"


def weights_read(parts: Sequence[tuple[ThinnedInput, int]]) -> Tensor | None:
    """Weights read, and weights in all, per batch row of a block's last call: int64 [2, B]; None if nothing was
    thinned out. `parts`: the block's thinned inputs, each with its weights per entry. Ranks' results can be added."""
    total: Tensor | None = None
    for part, width in parts:
        if part.last_rows is not None:
            read = part.last_rows * width
            read[0] += part.last_rows[1] // part.num_counted * part.extra_weights
            total = read if total is None else total + read
    return total


@contextmanager
def in_step(parts: Sequence[tuple[ThinnedInput, int]]) -> Iterator[None]:
    """Context of a decode step that runs without `Decoder.forward`: inputs are thinned out, every token is real, and
    the numbers of entries kept are put into `kept_in_step` instead of being counted."""
    for part, _ in parts:
        part.enabled, part.in_step, part.valid = True, True, None
    try:
        yield
    finally:
        for part, _ in parts:
            part.in_step, part.kept_in_step = False, None


def lay_out_for_kernels(parts: Sequence[ThinnedInput]) -> int:
    """Make the input-major copies of gate (if there is one) and up that `thinned_mlp` reads; returns their bytes.
    `parts`: gate, up and down projection, all with thinned inputs."""
    # The down projection is input-major as it is.
    weights = torch.stack([part.dequantised().detach().t() for part in parts[:-1]])
    parts[-2].input_major = weights
    parts[-1].input_major = parts[-1].dequantised().detach()[None]
    return weights.numel() * weights.itemsize


def thinned_mlp(
    parts: Sequence[ThinnedInput],
    states: DeferredNorm,
    *,
    activation: str,
    sums: Tensor,
    counters: Tensor,
    output: Tensor,
) -> None:
    """[1, D] still to be normed -> output [1, D] float32, in two kernels: gate and up, then down. `sums` [M, F] and
    `counters` [M + 1] are zeros as of `DecodeStep.thinned_sums`."""
    up, down = parts[-2:]
    assert up.input_major is not None and down.input_major is not None
    first = parts[:-1]  # gate and up read one input, each with its own threshold
    thinned_rows(
        states, up.input_major, thresholds=[part.threshold for part in first], counters=counters[:-1], output=sums
    )
    activations = Activations(
        gate=None if len(first) == 1 else sums[0],
        up=sums[-1],
        gate_bias=None if len(first) == 1 else first[0].bias,
        up_bias=up.bias,
        activation=activation,
        dtype=states.dtype,
    )
    thinned_rows(activations, down.input_major, thresholds=[down.threshold], counters=counters[-1:], output=output)
    for place, part in enumerate(parts):
        part.kept_in_step = counters[place : place + 1]
