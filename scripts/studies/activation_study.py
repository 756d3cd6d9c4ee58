"""What the activation function does: how concentrated the neurons' outputs are, how clear-cut the sets of active ones,
and how long a set lasts.

All from dense passes over text, one layer's neurons at a time; s_j = |a_j| * ||down_j|| is what neuron j writes. The
active set of a token is its top `density` by s, less neurons that write nothing (`largest_writers`), for every
activation function alike.

- `energy_share`: share of the sum over neurons of s^2 that the top `top_share` of a token's neurons hold; mean over
  tokens, so that the few massive ones do not speak for all.
- `exact_zeros`: share of neurons with s = 0.
- `boundary_margin`: share of neurons with 0 < s and |s - t| <= 0.1 t, t the token's smallest s in the top `density`:
  those whose label a change by a tenth may turn over. None do where t = 0: what is active writes, what is not does not.
- `reuse_tokens`: share of a token's active neurons that are active at the next token of the window.
- `reuse_layers`: share of a token's active neurons that are active `lookahead` layers later, by index. Indices of
  different layers have nothing to do with each other, so more than chance would be news.

For the last two: `chance` is what sets of these sizes drawn at random share, the density of the other set. `static` is
what neurons that are often active bring about by themselves: the share of a token's active neurons that are active at
a token of another window. What reuse has above it is really a matter of time (of depth).

Legend: B, W windows, T tokens, n rows = B * T, F neurons.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from data.bootstrap import Resampling, ratio
from modules.decoder import Decoder
from modules.sparsity import num_kept
from scripts.studies.lookahead_fits import advance_observed, chunks_of, largest_writers
from scripts.studies.measures import Measure
from sparse_predictor.selection import remove_sparsity

MARGIN = 0.1


@dataclass
class LayerCounts:
    """Of one layer, by window; each chunk of text adds an entry to every list. `shares` [B, top shares] and `zeros`,
    `margins` [B] are means over tokens and neurons; `active` int64 [B, F] counts the tokens where a neuron is active;
    `again` [B] the active neurons that are active at the next token, `before` [B] those that have a next token;
    `later[lookahead]` [B] those of that many layers earlier that are active here."""

    shares: list[Tensor] = field(default_factory=list)
    zeros: list[Tensor] = field(default_factory=list)
    margins: list[Tensor] = field(default_factory=list)
    active: list[Tensor] = field(default_factory=list)
    again: list[Tensor] = field(default_factory=list)
    before: list[Tensor] = field(default_factory=list)
    later: dict[int, list[Tensor]] = field(default_factory=dict)


@torch.inference_mode()
def activation_study(
    model: Decoder,
    windows: Tensor,
    *,
    top_shares: Sequence[float] = (0.01, 0.05, 0.1, 0.2, 0.3, 0.5),
    density: float = 0.3,
    lookaheads: Sequence[int] = (1, 2, 4, 8),
    seed: int = 0,
    on_step: Callable[[int, int], object] | None = None,
) -> list[Measure]:
    """All points, over windows int64 [W, T] of real tokens, T and W at least 2. Look-aheads (of `reuse_layers`) that no
    layer has are left out. `on_step` gets (chunks of text done, chunks in all). Leaves the model dense. ValueError for
    a model that is cut, shares outside (0, 1], look-aheads below 1, too little text.
    """
    num_layers, num_neurons = model.config.num_hidden_layers, model.config.intermediate_size
    if model.links is not None or model.shards:
        raise ValueError("the activation study needs the whole model on one device; run it without tp and pp")
    if windows.shape[1] < 2:
        raise ValueError("reuse between tokens needs windows of at least 2 tokens, got 1; give longer windows")
    if min(lookaheads, default=1) < 1:
        raise ValueError(f"lookaheads {list(lookaheads)}: must be at least 1")
    top_counts = [num_kept(share, num_neurons) for share in top_shares]
    resampling = Resampling(len(windows), seed)
    lookaheads = [one for one in lookaheads if one < num_layers]
    layers = [LayerCounts(later={one: [] for one in lookaheads if one <= layer}) for layer in range(num_layers)]
    remove_sparsity(model)
    chunks = chunks_of(windows.to(model.device))
    for place, chunk in enumerate(chunks):
        stream = model.begin_stream(chunk)
        kept: dict[int, Tensor] = {}
        for layer, counts in enumerate(layers):
            model.half_block(layer, "attention")(stream)
            writes = advance_observed(model, stream, layer, "mlp")
            kept[layer] = _count(counts, writes, len(chunk), top_counts, num_kept(density, num_neurons))
            for lookahead, found in counts.later.items():
                found.append((kept[layer - lookahead] & kept[layer]).sum((1, 2)))
            kept.pop(layer - max(lookaheads, default=0), None)
        if on_step is not None:
            on_step(place + 1, len(chunks))
    points = [
        _mean_point("energy_share", [torch.cat(counts.shares)[:, i] for counts in layers], resampling, top_share=share)
        for i, share in enumerate(top_shares)
    ]
    points.append(_mean_point("exact_zeros", [torch.cat(counts.zeros) for counts in layers], resampling))
    margins = [torch.cat(counts.margins) for counts in layers]
    points.append(_mean_point("boundary_margin", margins, resampling, density=density))
    return points + _reuse_points(layers, lookaheads, resampling, windows.numel(), density)


def _count(counts: LayerCounts, writes: Tensor, num_windows: int, top_counts: Sequence[int], kept: int) -> Tensor:
    """Add one chunk's writes [n, F] to a layer's counts; its active sets, bool [B, T, F]."""
    ordered = writes.sort(dim=-1, descending=True).values
    energy = ordered.square().cumsum(-1)
    held = energy[:, [count - 1 for count in top_counts]] / energy[:, -1:].clamp_min(torch.finfo(energy.dtype).tiny)
    threshold = ordered[:, kept - 1 : kept]
    near = (writes > 0) & ((writes - threshold).abs() <= MARGIN * threshold)
    active = largest_writers(writes, kept).unflatten(0, (num_windows, -1))

    def share_by_window(mask: Tensor) -> Tensor:
        return mask.view(num_windows, -1).sum(1).double() * (num_windows / mask.numel())

    counts.shares.append(held.double().unflatten(0, (num_windows, -1)).mean(1))
    counts.zeros.append(share_by_window(writes == 0))
    counts.margins.append(share_by_window(near))
    counts.active.append(active.sum(1))
    counts.again.append((active[:, 1:] & active[:, :-1]).sum((1, 2)))
    counts.before.append(active[:, :-1].sum((1, 2)))
    return active


def _mean_point(metric: str, per_window: Sequence[Tensor], resampling: Resampling, **labels: float) -> Measure:
    """Of means [W] a layer, over windows of one length."""
    means = torch.stack(list(per_window)).double().cpu()
    value, resampled = float(means.mean()), resampling.totals(means.mean(0)) / means.shape[1]
    return Measure(
        metric=metric,
        value=value,
        interval=resampling.interval(value, resampled),
        per_layer=means.mean(1).tolist(),
        labels=dict(labels),
    )


def _reuse_points(
    layers: Sequence[LayerCounts],
    lookaheads: Sequence[int],
    resampling: Resampling,
    num_tokens: int,
    density: float,
) -> list[Measure]:
    """Reuse between tokens, and between layers at each look-ahead."""
    active = [torch.cat(counts.active).double() for counts in layers]  # [W, F]
    elsewhere = []  # how often a neuron is active in the other windows
    for counts in active:
        other_tokens = num_tokens * (len(counts) - 1) / len(counts)
        elsewhere.append((counts.sum(0) - counts) / other_tokens)

    def point(metric: str, pairs: dict[int, tuple[Tensor, Tensor, int]], **labels: float) -> Measure:
        """`pairs` by layer: reused and candidates [W], and the layer that the candidates are of."""
        reused, candidates, expected, sizes = (
            torch.stack(parts).double().cpu()
            for parts in zip(
                *(
                    (found, of, (active[source] * elsewhere[layer]).sum(1), active[source].sum(1))
                    for layer, (found, of, source) in pairs.items()
                ),
                strict=True,
            )
        )
        resampled = resampling.ratios(reused.sum(0), candidates.sum(0))
        by_frequency = resampling.ratios(expected.sum(0), sizes.sum(0))
        value, static = float(ratio(reused.sum(), candidates.sum())), float(ratio(expected.sum(), sizes.sum()))
        per_layer = dict(zip(pairs, ratio(reused.sum(1), candidates.sum(1)).tolist(), strict=True))
        others = torch.stack([active[layer].mean() for layer in pairs]) * len(active[0]) / num_tokens
        return Measure(
            metric=metric,
            value=value,
            interval=resampling.interval(value, resampled),
            per_layer=[per_layer.get(layer) for layer in range(len(layers))],
            labels={"density": density, **labels},
            extras={
                "baseline": {"name": "chance", "value": float(others.mean())},
                "static": static,
                "above_static": value - static,
                "above_static_interval": resampling.interval(value - static, resampled - by_frequency),
            },
        )

    points = [
        point(
            "reuse_tokens",
            {layer: (torch.cat(counts.again), torch.cat(counts.before), layer) for layer, counts in enumerate(layers)},
        )
    ]
    for lookahead in lookaheads:
        pairs = {
            layer: (torch.cat(counts.later[lookahead]), active[layer - lookahead].sum(1), layer - lookahead)
            for layer, counts in enumerate(layers)
            if lookahead in counts.later
        }
        points.append(point("reuse_layers", pairs, lookahead=lookahead))
    return points
