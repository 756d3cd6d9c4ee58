"""What a predictor loses to distance: recall, precision and perplexity against look-ahead, rank and calibration text.

The same predictor each time, fitted in closed form to a layer's units from the input `lookahead` layers earlier; only
the distance (or the rank, or the amount of text) differs. If the drift of embeddings from layer to layer were what
makes prediction hard, recall would have to fall with distance; a cosine between layers cannot show that.

Density is held exactly, for every activation function alike: the top units of each token by score are chosen
(`num_kept`), the top by |a_j| * ||down_j|| (groups of heads: output norm) are true, less those that write nothing.
So where nothing is exactly zero precision equals recall; with ReLU it falls below, as chosen units find only zeros, and
recall at so many picks favours it. R-precision favours neither way of counting: of each token only the R best-scored
units count, R its own number of true units, so that precision and recall are one number (Manning, Raghavan and Schütze
2008, Introduction to Information Retrieval, ch. 8.4; here, like recall, pooled over tokens: a token counts R times).
Chance alone reaches the density of the true set, so it is compared with the same units for every token.

Recall is measured on the dense model's states, pooled over tokens and over the layers that really look ahead (layer >=
look-ahead); perplexity in runs with the very predictors attached to all layers, where the first layers, which have
nothing that far back, read their own input. Every interval is a bootstrap over windows of test text; differences are
paired: same tokens, same layers.

Legend: W windows, T tokens, S resamples, R a token's number of true units.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from analysis.studies import DENSITY_LABELS
from data.bootstrap import Interval, Resampling, ratio
from modules.decoder import Decoder
from modules.sparsity import Block
from scripts.studies.distance_measures import (
    BlockMeasures,
    BlockPlan,
    Setting,
    amounts_of_text,
    attached_losses,
    check_choices,
    make_plan,
    measure_overlaps,
    window_losses,
)
from scripts.studies.measures import Measure
from sparse_predictor.selection import remove_sparsity

Run = tuple[Block, Setting]


@torch.inference_mode()
def distance_study(
    model: Decoder,
    calibration: Tensor,
    test: Tensor,
    *,
    lookaheads: Sequence[int] = tuple(range(9)),
    study_lookaheads: Sequence[int] | None = None,
    ranks: Sequence[int] | None = None,
    calibration_tokens: Sequence[int] | None = None,
    mlp_density: float = 0.5,
    head_density: float = 0.5,
    layers: Sequence[int] | None = None,
    perplexity_lookaheads: Sequence[int] = (),
    perplexity_windows: int | None = None,
    seed: int = 0,
    on_step: Callable[[int, int], object] | None = None,
) -> list[Measure]:
    """What is measured of each predictor of the three studies, of both kinds of block; calibration, test int64 [W, T],
    all real tokens. Shares between 0 and 1 but where another unit stands:

    - `recall`, against the same units for every token (`static`), those of the largest mean; with `predicted_density`,
      and `true_density`, the share of units that are true (below where units are exactly zero)
    - `precision`
    - `r_precision`, of neurons, likewise against the same units' order (groups of heads always write: it is recall)
    - `recall_drop`: recall on the block's own input, same tokens and layers, minus recall: above 0, distance costs
    - `perplexity`, against dense; `loss_rise`: nats per token above the run at look-ahead 0, same text

    `study_lookaheads`: where rank and amount of text are varied (None: 0 and the largest up to 4). `ranks` (None: a
    quarter to four times the automatic one; cut to what a map can have) and `calibration_tokens` (None: an eighth to
    all; whole windows) have the automatic rank and all text as the other value. `layers`: where recall is measured
    (None: all; see `spread_layers`). Perplexity is measured at `perplexity_lookaheads` with the automatic rank and all
    text, on the first `perplexity_windows` test windows, one kind of block sparse at a time; it needs predictors of all
    layers.
    Look-aheads that no measured layer has are left out. `on_step` gets (steps done, steps in all).

    Of both texts the inputs of as many layers as the largest look-ahead are kept on the device, in the model's type.
    Leaves the model dense. ValueError for a model that is cut, for choices that do not fit the model or the text (see
    `distance_measures.make_plan`), for fewer than two test windows.
    """
    config = model.config
    if model.links is not None or model.shards:
        raise ValueError("the distance study needs the whole model on one device; run it without tp and pp")
    layers = list(range(config.num_hidden_layers)) if layers is None else list(layers)
    chosen = {"study_lookaheads": study_lookaheads or (), "perplexity_lookaheads": perplexity_lookaheads}
    check_choices(config, lookaheads, chosen, layers)
    amounts = amounts_of_text(calibration_tokens, *calibration.shape)
    densities: dict[Block, float] = {"attention": head_density, "mlp": mlp_density}
    plans = [
        make_plan(
            config,
            block,
            density,
            lookaheads=lookaheads,
            study_lookaheads=study_lookaheads,
            perplexity_lookaheads=perplexity_lookaheads,
            ranks=ranks,
            amounts=amounts,
            layers=layers,
        )
        for block, density in densities.items()
    ]
    runs = [(plan, setting) for plan in plans for setting in sorted(plan.attached)]
    calibration, test = calibration.to(model.device), test.to(model.device)
    scored = test[:perplexity_windows]
    resampling, resampling_scored = Resampling(len(test), seed), Resampling(len(scored), seed)
    num_steps, num_done = 2 * config.num_hidden_layers + len(runs) + bool(runs), 0

    def advance_steps() -> None:
        nonlocal num_done
        num_done += 1
        if on_step is not None:
            on_step(num_done, num_steps)

    remove_sparsity(model)
    measures = measure_overlaps(model, calibration, test, plans, amounts, advance_steps)
    losses: dict[Run | None, Tensor] = {}  # None: dense
    if runs:
        losses[None] = window_losses(model, scored)
        advance_steps()
    for plan, setting in runs:
        predictors = measures[plan.block].predictors.pop(setting)
        losses[plan.block, setting] = attached_losses(model, plan, setting, predictors, scored)
        advance_steps()
    found: list[Measure] = []
    for plan in plans:
        for study, setting in plan.points:
            labels = {
                "study": study,
                "block": plan.block,
                "lookahead": setting.lookahead,
                "predictor_rank": setting.rank,
                "calibration_tokens": setting.calibration_tokens,
                DENSITY_LABELS[plan.block]: plan.density,
            }
            found += _recall_measures(
                {**labels, "num_tokens": test.numel()},
                plan,
                setting,
                measures[plan.block],
                resampling,
                config.num_hidden_layers,
                test.shape[1],
            )
            if (plan.block, setting) in losses:
                labels["num_tokens"] = scored.numel()
                found += _perplexity_measures(labels, plan.block, setting, losses, resampling_scored)
    return found


def _recall_measures(
    labels: dict[str, Any],
    plan: BlockPlan,
    setting: Setting,
    measured: BlockMeasures,
    resampling: Resampling,
    num_layers: int,
    window: int,
) -> Iterator[Measure]:
    """Recall and precision, over the layers that look as far ahead as the setting."""
    layers, own = plan.layers_looking_ahead(setting.lookahead), setting.without_distance

    def by_window(counts: Mapping[Any, Tensor], key: Callable[[int], Any]) -> Tensor:
        return torch.stack([counts[key(layer)] for layer in layers]).double().cpu()  # [layers, W]

    def share_of_true(counts: Mapping[tuple[Setting, int], Tensor], one: Setting) -> tuple[float, Tensor]:
        found = by_window(counts, lambda layer: (one, layer))
        return float(ratio(found.sum(), true.sum())), resampling.ratios(found.sum(0), true.sum(0))

    true = by_window(measured.true, lambda layer: layer)
    found = by_window(measured.found, lambda layer: (setting, layer))
    num_chosen = torch.full_like(true, float(plan.count * window))
    recall, resampled = share_of_true(measured.found, setting)
    per_layer = dict(zip(layers, ratio(found.sum(1), true.sum(1)).tolist(), strict=True))
    yield Measure(
        metric="recall",
        labels=labels,
        value=recall,
        interval=resampling.interval(recall, resampled),
        per_layer=[per_layer.get(layer) for layer in range(num_layers)],
        extras={
            "baseline": {"name": "static", "value": share_of_true(measured.found, plan.static)[0]},
            "predicted_density": plan.count / plan.num_units,
            "true_density": float(true.sum() / num_chosen.sum()) * plan.count / plan.num_units,
        },
    )
    precision = float(found.sum() / num_chosen.sum())
    interval = resampling.interval(precision, resampling.ratios(found.sum(0), num_chosen.sum(0)))
    yield Measure(metric="precision", labels=labels, value=precision, interval=interval)
    if plan.block == "mlp":
        at_r, draws = share_of_true(measured.found_at_r, setting)
        static = {"name": "static", "value": share_of_true(measured.found_at_r, plan.static)[0]}
        interval = resampling.interval(at_r, draws)
        yield Measure(metric="r_precision", labels=labels, value=at_r, interval=interval, extras={"baseline": static})
    if setting.lookahead:
        own_recall, own_resampled = share_of_true(measured.found, own)
        low, high = resampling.interval(recall - own_recall, resampled - own_resampled)
        yield Measure(metric="recall_drop", labels=labels, value=own_recall - recall, interval=(-high, -low))


def _perplexity_measures(
    labels: dict[str, Any],
    block: Block,
    setting: Setting,
    losses: Mapping[Run | None, Tensor],
    resampling: Resampling,
) -> Iterator[Measure]:
    """Of the run with this setting. `losses` [W]: None is dense."""
    sparse, own, dense = (losses[run] for run in ((block, setting), (block, setting.without_distance), None))

    def of_mean(per_window: Tensor) -> Interval:
        # Windows are equally long, so the mean of their means is the mean over tokens.
        return resampling.interval(float(per_window.mean()), resampling.totals(per_window / len(per_window)))

    def exponentials(interval: Interval) -> Interval:
        return math.exp(interval[0]), math.exp(interval[1])

    yield Measure(
        metric="perplexity",
        labels=labels,
        value=math.exp(float(sparse.mean())),
        interval=exponentials(of_mean(sparse)),
        extras={
            "baseline": {"name": "dense", "value": math.exp(float(dense.mean()))},
            "ratio_interval": exponentials(of_mean(sparse - dense)),
        },
    )
    if setting.lookahead:
        rise = sparse - own
        yield Measure(metric="loss_rise", labels=labels, value=float(rise.mean()), interval=of_mean(rise), unit="nats")
