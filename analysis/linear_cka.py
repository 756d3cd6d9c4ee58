"""Linear centred kernel alignment between the states of layers, streamed in minibatches.

    K = X X^T, L = Y Y^T [n, n] of the same n rows
    HSIC1(K, L) = 1 / (n (n - 3)) sum_ij K~_ij L~_ij
    CKA = sum_b n_b HSIC1(K_b, L_b) / sqrt(sum_b n_b HSIC1(K_b, K_b) sum_b n_b HSIC1(L_b, L_b)), b over minibatches

where K~ is K U-centred: K~_ij = K_ij - sum_i K_ij / (n-2) - sum_j K_ij / (n-2) + sum_ij K_ij / ((n-1)(n-2)), 0 on the
diagonal. CKA is of Kornblith et al. 2019 ("Similarity of Neural Network Representations Revisited"); HSIC1 of Song et
al. 2012, unbiased at any n; the sum over minibatches of Nguyen et al. 2021 ("Do Wide and Deep Networks Learn the Same
Things?"). So nothing of size D x D is kept, and minibatches of any size estimate the same number.

Of ordinary tokens only: the first ones of texts are so large that they would decide it. Variants as in
`analysis.embedding_drift`, without `centred`, which CKA is anyway.

Legend: n rows, D hidden, K states of one chain, U units (sets of windows or documents: resampling draws them).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from analysis.embedding_drift import POINTS, AddUp, Measure, StateMoments, StateRows, StateSource, resampling_of, spread

CKA_VARIANTS = ("raw", "standardised", "no_massive")
MAX_ROWS = 256  # of a minibatch
MIN_ROWS = 4  # HSIC1 divides by n - 3


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
