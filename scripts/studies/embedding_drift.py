"""How far the residual stream moves from layer to layer: streaming measures over rows of states. No model runs here.

A token of a model of L layers has the states s_0 .. s_2L [D]: s_2i enters layer i (`block_input`), s_2i+1 stands after
its attention (`after_attention`), s_2i+2 after its MLP (`after_mlp`; the input of layer i+1). What is measured at
look-ahead l compares a point of layer i with the same point of layer i + l, x and y below.

    raw            cos(x, y) = x.y / (|x| |y|), per token
    centred        cos(x - mean_x, y - mean_y)
    standardised   cos((x - mean_x) / std_x, (y - mean_y) / std_y), channel by channel
    no_massive     cos(x, y) without the massive channels
    update         |s_k+1 - s_k| / |s_k|, of one half-block, per token
    CKA            linear centred kernel alignment, see below

Means, standard deviations (of the population) and massive channels are those of a state's *ordinary* tokens: those that
are not the first of their text, whose states in many models are a hundred times larger (Sun et al. 2024, "Massive
Activations in Large Language Models") and would decide them alone. They need a pass of their own over the same rows, by
sums in float64: mean = sum(x) / n, variance = sum(x^2) / n - mean^2. A channel that never moves stays out of
`standardised`. The massive channels are the 1 % (at least one) with the largest share of sum(x^2), as a mean over
states.

What is kept does not grow with the text: sums per group of rows (a window or document) and pair of layers. Groups are
what the bootstrap draws for the 95 % intervals (`data.bootstrap`).

CKA is streamed in minibatches of ordinary tokens (first ones would decide it), in the variants above but `centred`,
which it is anyway:

    K = X X^T, L = Y Y^T [n, n] of the same n rows
    HSIC1(K, L) = 1 / (n (n - 3)) sum_ij K~_ij L~_ij
    CKA = sum_b n_b HSIC1(K_b, L_b) / sqrt(sum_b n_b HSIC1(K_b, K_b) sum_b n_b HSIC1(L_b, L_b)), b over minibatches

where K~ is K U-centred: K~_ij = K_ij - sum_i K_ij / (n-2) - sum_j K_ij / (n-2) + sum_ij K_ij / ((n-1)(n-2)), 0 on the
diagonal. CKA is of Kornblith et al. 2019 ("Similarity of Neural Network Representations Revisited"); HSIC1 of Song et
al. 2012, unbiased at any n; the sum over minibatches of Nguyen et al. 2021 ("Do Wide and Deep Networks Learn the Same
Things?"). So nothing of size D x D is kept, and minibatches of any size estimate the same number.

Legend: S states (2L + 1), n rows, D hidden, G groups, U units (sets of groups), A look-aheads, K states of one chain
(even or odd ones), P pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from data.bootstrap import Resampling
from scripts.studies.measures import Measure

POINTS = ("block_input", "after_attention", "after_mlp")
VARIANTS = ("raw", "centred", "standardised", "no_massive")
TOKENS = ("all", "first", "ordinary")
MASSIVE_SHARE = 0.01
# First positions of the spans over which `per_position` tells the raw cosine.
POSITION_SPANS = (0, 1, 4, 16, 64, 256, 1024, 4096)
CKA_VARIANTS = ("raw", "standardised", "no_massive")
MAX_ROWS = 256  # of a minibatch of CKA
MIN_ROWS = 4  # HSIC1 divides by n - 3
WORKING_BYTES = 16 * 2**20  # of one copy of the states at work

AddUp = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class StateRows:
    """Some tokens' states [S, n, D] (float32 at least; a state that is not `present` holds anything), their `positions`
    in the text [n], the `groups` [n] they belong to, and the `unit`: which of the source's sets of groups that is."""

    states: Tensor
    positions: Tensor
    groups: Tensor
    unit: int


class StateSource(Protocol):
    """Yields the same rows each time it is iterated: a model run over text, or a store of its states.

    present [S]: which states it has; ordinary_weight: how many tokens an ordinary row stands for (first tokens are all
    there); a set of groups comes in one or several StateRows.
    """

    present: Sequence[bool]
    hidden_size: int
    num_groups: int
    num_units: int
    num_rows: int
    ordinary_weight: float
    device: torch.device
    dtype: torch.dtype

    def __iter__(self) -> Iterator[StateRows]: ...


class StateMoments:
    """Mean, variance and energy of every channel of every state, over ordinary tokens."""

    def __init__(self, source: StateSource) -> None:
        shape = (len(source.present), source.hidden_size)
        self.present = torch.tensor(source.present)
        self.dtype = source.dtype
        self.count = torch.zeros((), dtype=torch.float64, device=source.device)
        self.sums = torch.zeros(shape, dtype=torch.float64, device=source.device)
        self.squares = torch.zeros_like(self.sums)

    def add(self, rows: StateRows) -> None:
        """Count these rows in."""
        weight = (rows.positions > 0).double()
        self.count += weight.sum()
        for idx in self.present.nonzero().flatten().tolist():
            state = rows.states[idx].double()
            self.sums[idx] += weight @ state
            self.squares[idx] += weight @ state.square_()

    def finish(self, add_up: AddUp) -> None:
        """Add what other ranks counted, and derive `mean`, `inverse_std` [S, D] and `massive` [D] (bool)."""
        device = self.sums.device
        self.count, self.sums, self.squares = (
            add_up(part.cpu()).to(device) for part in (self.count, self.sums, self.squares)
        )
        if not self.count:
            raise ValueError("drift: every token is the first of its text; give texts of at least two tokens")
        mean = self.sums / self.count
        variance = (self.squares / self.count - mean.square()).clamp_min(0)
        # What sums in float64 leave of a constant channel is rounding, not movement.
        moves = variance > 1e-10 * self.squares / self.count
        inverse_std = torch.where(moves, variance.clamp_min(1e-300).rsqrt(), 0.0)
        energy = self.squares[self.present.to(device)]
        share = (energy / energy.sum(1, keepdim=True).clamp_min(1e-300)).mean(0)
        most = share.topk(max(1, round(MASSIVE_SHARE * len(share))))
        self.massive = torch.zeros_like(share, dtype=torch.bool).index_fill_(0, most.indices, True)
        self.massive_energy = {channel: value for channel, value in zip(*map(Tensor.tolist, most[::-1]), strict=True)}
        self.mean, self.inverse_std = mean.to(self.dtype), inverse_std.to(self.dtype)

    def transform(self, states: Tensor, idx: int | slice, variant: str) -> Tensor:
        """The states at `idx` ([n, D] of one, [K, n, D] of several) -> what the variant takes the cosine of."""
        if variant == "raw":
            return states
        if variant == "no_massive":
            return states * ~self.massive
        centred = states - self.mean[idx].unsqueeze(-2)
        return centred if variant == "centred" else centred.mul_(self.inverse_std[idx].unsqueeze(-2))


class DriftSums:
    """Cosines and relative updates, summed per group of rows and kind of token (first, ordinary)."""

    def __init__(self, source: StateSource, moments: StateMoments, lookaheads: Sequence[int]) -> None:
        self.moments, self.lookaheads = moments, list(lookaheads)
        self.ordinary_weight = source.ordinary_weight
        num_states, self.num_groups = len(source.present), source.num_groups
        self.num_layers = num_states // 2
        device, wide = source.device, torch.float64
        pairs = (len(self.lookaheads), self.num_layers + 1)
        slots = 2 * source.num_groups  # group * 2 + is ordinary
        self.cosines = {
            (variant, parity): torch.zeros(slots, *pairs, dtype=wide, device=device)
            for variant in VARIANTS
            for parity in (0, 1)
        }
        self.updates = torch.zeros(slots, num_states - 1, dtype=wide, device=device)
        self.counts = torch.zeros(slots, dtype=wide, device=device)
        self.by_position = torch.zeros(2, len(POSITION_SPANS), *pairs, dtype=wide, device=device)
        self.position_counts = torch.zeros(len(POSITION_SPANS), dtype=wide, device=device)
        self._spans = torch.tensor(POSITION_SPANS, device=device)

    def add(self, rows: StateRows) -> None:
        """Count these rows in."""
        per_row = rows.states[:, 0].numel() * rows.states.element_size()
        for chunk in torch.arange(len(rows.positions)).split(max(1, WORKING_BYTES // per_row)):
            part = slice(int(chunk[0]), int(chunk[-1]) + 1)
            self._add(rows.states[:, part], rows.positions[part], rows.groups[part])

    def _add(self, states: Tensor, positions: Tensor, groups: Tensor) -> None:
        slots = 2 * groups + (positions > 0)
        spans = torch.bucketize(positions.contiguous(), self._spans, right=True) - 1
        ones = torch.ones_like(slots, dtype=torch.float64)
        self.counts.index_add_(0, slots, ones)
        self.position_counts.index_add_(0, spans, ones)
        sizes = torch.linalg.vector_norm(states, dim=-1)
        steps = torch.linalg.vector_norm(states[1:] - states[:-1], dim=-1)
        self.updates.index_add_(0, slots, _quotient(steps, sizes[:-1]).T.double())
        for parity in (0, 1):
            idx = slice(parity, None, 2)
            for variant in VARIANTS:
                cosines = self._cosines(self.moments.transform(states[idx], idx, variant))
                self.cosines[variant, parity].index_add_(0, slots, cosines)
                if variant == "raw":
                    self.by_position[parity].index_add_(0, spans, cosines)

    def _cosines(self, chain: Tensor) -> Tensor:
        """chain [K, n, D] -> cosine of state k with state k + l [n, A, L + 1] float64, 0 where there is none."""
        by_row = chain.transpose(0, 1).contiguous()
        products = torch.bmm(by_row, by_row.transpose(1, 2))
        sizes = products.diagonal(dim1=1, dim2=2).clamp_min(0).sqrt()
        cosines = _quotient(products, sizes[:, :, None] * sizes[:, None, :]).double()
        found = cosines.new_zeros(len(cosines), len(self.lookaheads), self.num_layers + 1)
        for place, lookahead in enumerate(self.lookaheads):
            if lookahead < cosines.shape[1]:
                diagonal = cosines.diagonal(lookahead, 1, 2)
                found[:, place, : diagonal.shape[1]] = diagonal
        return found

    def finish(self, add_up: AddUp) -> None:
        """Add what other ranks counted; everything is on the CPU then."""
        self.cosines = {key: add_up(sums.cpu()) for key, sums in self.cosines.items()}
        for name in ("updates", "counts", "by_position", "position_counts"):
            setattr(self, name, add_up(getattr(self, name).cpu()))

    def measures(self, seed: int) -> Iterator[Measure]:
        """Cosines by point, look-ahead, variant and kind of token, then relative updates."""
        resampling = resampling_of(self.num_groups, seed)
        present = self.moments.present
        for point in POINTS:
            parity, first = int(point == "after_attention"), int(point == "after_mlp")
            for place, lookahead in enumerate(self.lookaheads):
                num_pairs = self.num_layers - lookahead
                pairs = slice(first, first + max(0, num_pairs))
                chain = present[parity::2]
                there = chain[first:][: max(0, num_pairs)] & chain[first + lookahead :][: max(0, num_pairs)]
                for variant in VARIANTS:
                    sums = self.cosines[variant, parity][:, place, pairs]
                    labels = {"point": point, "lookahead": lookahead, "variant": variant}
                    for measure in self._by_token("cosine", labels, sums, there, resampling):
                        if variant == "raw" and measure.labels["tokens"] == "ordinary":
                            means = self._position_means(self.by_position[parity][:, place, pairs][:, there])
                            measure.extras["per_position"] = means
                        if variant == "no_massive":
                            measure.extras["massive_channels"] = self.moments.massive_energy
                        yield measure
        both = present[:-1] & present[1:]
        for point in POINTS[1:]:
            halves = slice(int(point == "after_mlp"), None, 2)
            labels = {"point": point}
            yield from self._by_token("relative_update", labels, self.updates[:, halves], both[halves], resampling)

    def _by_token(
        self, metric: str, labels: dict[str, Any], sums: Tensor, there: Tensor, resampling: Resampling | None
    ) -> Iterator[Measure]:
        """sums [2G, P] and which pairs are there [P] -> a measure a kind of token."""
        if not there.any():
            return
        for tokens in TOKENS:
            weights = torch.tensor([tokens != "ordinary", self.ordinary_weight * (tokens != "first")])
            weights = weights.double().repeat(self.num_groups)
            counts = (weights * self.counts).view(-1, 2).sum(1)
            totals = (weights[:, None] * sums[:, there]).view(self.num_groups, 2, -1).sum(1)
            if not counts.sum():
                continue
            values = totals.sum(0) / counts.sum()
            value, interval = float(values.mean()), None
            # A single group that has such tokens says nothing of others.
            if resampling is not None and int((counts > 0).sum()) > 1:
                interval = resampling.interval(value, resampling.ratios(totals.mean(1), counts))
            yield Measure(
                metric=metric,
                labels={**labels, "tokens": tokens},
                value=value,
                interval=interval,
                per_layer=spread(values, there, self.num_layers),
            )

    def _position_means(self, sums: Tensor) -> list[dict[str, Any]]:
        """sums [spans, P] -> the mean over pairs in each span of positions that occurs."""
        ends = [*POSITION_SPANS[1:], None]
        return [
            {"from": first, "below": end, "value": float(total / count), "num_rows": int(count)}
            for first, end, total, count in zip(
                POSITION_SPANS, ends, sums.mean(1), self.position_counts.tolist(), strict=True
            )
            if count
        ]


class CkaSums:
    """HSIC1 of all pairs of states, summed per unit of the source."""

    def __init__(self, source: StateSource, moments: StateMoments, lookaheads: Sequence[int]) -> None:
        self.moments, self.lookaheads, self.num_units = moments, list(lookaheads), source.num_units
        self.num_layers = len(source.present) // 2
        sizes = (self.num_layers + 1, self.num_layers)  # states of the even and of the odd chain
        self.sums = {
            (variant, parity): torch.zeros(source.num_units, size, size, dtype=torch.float64, device=source.device)
            for variant in CKA_VARIANTS
            for parity, size in enumerate(sizes)
        }

    def add(self, rows: StateRows) -> None:
        """Count these rows in; minibatches take every m-th of them, so that each mixes all of their texts."""
        ordinary = (rows.positions > 0).nonzero().flatten()
        num_batches = -(-len(ordinary) // MAX_ROWS)
        for first in range(num_batches):
            chosen = ordinary[first::num_batches]
            if len(chosen) < MIN_ROWS:
                continue
            for (variant, parity), sums in self.sums.items():
                # State by state: together they may be as much as all that the source holds.
                products = [
                    u_centred_products(self.moments.transform(rows.states[idx, chosen], idx, variant))
                    for idx in range(parity, len(rows.states), 2)
                ]
                flat = torch.stack(products).flatten(1)
                sums[rows.unit] += (flat @ flat.T).double() * len(chosen)

    def finish(self, add_up: AddUp) -> None:
        """Add what other ranks counted; everything is on the CPU then."""
        self.sums = {key: add_up(sums.cpu()) for key, sums in self.sums.items()}

    def measures(self, seed: int) -> Iterator[Measure]:
        """CKA by point, look-ahead and variant."""
        resampling = resampling_of(self.num_units, seed)
        for point in POINTS:
            parity, first = int(point == "after_attention"), int(point == "after_mlp")
            for lookahead in self.lookaheads:
                pairs = torch.arange(first, first + max(0, self.num_layers - lookahead))
                present = self.moments.present[parity::2]
                there = present[pairs] & present[pairs + lookahead]
                for variant in CKA_VARIANTS:
                    sums = self.sums[variant, parity]
                    own = sums.diagonal(dim1=1, dim2=2)
                    parts = [sums[:, pairs, pairs + lookahead], own[:, pairs], own[:, pairs + lookahead]]
                    parts = [part[:, there] for part in parts]
                    values = _alignment(*(part.sum(0) for part in parts))
                    if not len(values) or not values.isfinite().all():
                        continue  # no such pair, or a state that does not move at all
                    value, interval = float(values.mean()), None
                    if resampling is not None:
                        resampled = _alignment(*(resampling.totals(part.T) for part in parts)).mean(0)
                        interval = resampling.interval(value, resampled)
                    yield Measure(
                        metric="cka",
                        labels={"point": point, "lookahead": lookahead, "variant": variant, "tokens": "ordinary"},
                        value=value,
                        interval=interval,
                        per_layer=spread(values, there, self.num_layers),
                    )


def _quotient(numerator: Tensor, denominator: Tensor) -> Tensor:
    """0 where the denominator is."""
    return torch.where(denominator > 0, numerator / denominator.clamp_min(torch.finfo(denominator.dtype).tiny), 0.0)


def spread(values: Tensor, there: Tensor, num_layers: int) -> list[float | None]:
    """The values of the pairs that are there as one per layer."""
    numbers: Iterable[float] = iter(values.tolist())
    found: list[float | None] = [next(iter(numbers)) if here else None for here in there.tolist()]
    return found + [None] * (num_layers - len(found))


def resampling_of(num_groups: int, seed: int) -> Resampling | None:
    """None for a single group, which says nothing of others."""
    return Resampling(num_groups, seed) if num_groups > 1 else None


def u_centred_products(rows: Tensor) -> Tensor:
    """rows [n, D] -> U-centred X X^T [n, n], such that the sum of the elementwise product of two is n (n - 3) HSIC1,
    times 1 / sqrt(n (n - 3)) each."""
    n = len(rows)
    rows = rows - rows.mean(0)  # changes nothing but the rounding
    products = (rows @ rows.T).fill_diagonal_(0)
    sums = products.sum(0)
    products -= (sums[:, None] + sums[None, :]) / (n - 2)
    products += sums.sum() / ((n - 1) * (n - 2))
    return products.fill_diagonal_(0) / (n * (n - 3)) ** 0.5


def _alignment(product: Tensor, own: Tensor, other: Tensor) -> Tensor:
    return product / (own * other).sqrt()
