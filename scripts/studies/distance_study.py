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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from data.bootstrap import Interval, Resampling, ratio
from modules.decoder import Decoder
from modules.sparsity import Block
from scripts.studies.distance_measures import (
    BlockMeasures,
    BlockPlan,
    Setting,
    Study,
    amounts_of_text,
    attached_losses,
    check_choices,
    make_plan,
    measure_overlaps,
    window_losses,
)
from sparse_predictor.selection import remove_sparsity

Run = tuple[Block, Setting]


@dataclass(frozen=True, kw_only=True)
class DistancePoint:
    """One predictor of one kind of block, at every layer.

    `own_recall`: the same predictor on the block's own input, same tokens and layers; `recall_drop` is recall minus
    that (below 0: distance costs). `static_recall`: the same units for every token, those of the largest mean.
    `r_precision`: the share of true units among as many picks as each token has true ones, equal to recall where that
    is always `predicted_density`; `static_r_precision`: the same units' order for every token, cut at its R. What
    `per_layer_recall` does not hold (layer not sampled, or nothing that far back) is None. `true_density`: share of
    units that are true (below `predicted_density` where units are exactly zero). `loss_rise`: nats per token above the
    run at look-ahead 0, same text. None: not measured. `num_tokens`, `perplexity_tokens`: of test text.
    """

    study: Study
    block: Block
    lookahead: int
    predictor_rank: int
    calibration_tokens: int
    density: float
    num_tokens: int
    recall: float
    recall_interval: Interval
    precision: float
    precision_interval: Interval
    predicted_density: float
    true_density: float
    per_layer_recall: list[float | None]
    own_recall: float
    own_recall_interval: Interval
    recall_drop: float
    recall_drop_interval: Interval
    static_recall: float
    static_recall_interval: Interval
    r_precision: float
    r_precision_interval: Interval
    static_r_precision: float
    static_r_precision_interval: Interval
    perplexity: float | None = None
    perplexity_interval: Interval | None = None
    perplexity_tokens: int | None = None
    dense_perplexity: float | None = None
    perplexity_ratio_interval: Interval | None = None
    loss_rise: float | None = None
    loss_rise_interval: Interval | None = None


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
    perplexity_studies: Sequence[Study] = ("lookahead",),
    perplexity_windows: int | None = None,
    seed: int = 0,
    on_step: Callable[[int, int], object] | None = None,
) -> list[DistancePoint]:
    """All points of the three studies, of both kinds of block; calibration, test int64 [W, T], all real tokens.

    `study_lookaheads`: where rank and amount of text are varied (None: 0 and the largest up to 4). `ranks` (None: a
    quarter to four times the automatic one; cut to what a map can have) and `calibration_tokens` (None: an eighth to
    all; whole windows) have the automatic rank and all text as the other value. `layers`: where recall is measured
    (None: all; see `spread_layers`). Perplexity is measured at `perplexity_lookaheads` in `perplexity_studies`, on the
    first `perplexity_windows` test windows, one kind of block sparse at a time; it needs predictors of all layers.
    Look-aheads that no measured layer has are left out. `on_step` hears (steps done, steps in all).

    Of both texts the inputs of as many layers as the largest look-ahead are kept on the device, in the model's type.
    Leaves the model dense. ValueError for a model that is cut, for choices that do not fit the model or the text (see
    `distance_plan`), for fewer than two test windows.
    """
    config = model.config
    if model.links is not None or model.shards:
        raise ValueError("the distance study needs the whole model on one device; run it without tp and pp")
    layers = list(range(config.num_hidden_layers)) if layers is None else list(layers)
    chosen = {"study_lookaheads": study_lookaheads or (), "perplexity_lookaheads": perplexity_lookaheads}
    check_choices(config, lookaheads, chosen, perplexity_studies, layers)
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
            perplexity_studies=perplexity_studies,
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
    return [
        DistancePoint(
            study=study,
            block=plan.block,
            lookahead=setting.lookahead,
            predictor_rank=setting.rank,
            calibration_tokens=setting.calibration_tokens,
            density=plan.density,
            num_tokens=test.numel(),
            **_recall_fields(plan, setting, measures[plan.block], resampling, config.num_hidden_layers, test.shape[1]),
            **_perplexity_fields(plan.block, setting, losses, resampling_scored, scored.numel()),
        )
        for plan in plans
        for study, setting in plan.points
    ]


def _recall_fields(
    plan: BlockPlan,
    setting: Setting,
    measured: BlockMeasures,
    resampling: Resampling,
    num_layers: int,
    window: int,
) -> dict[str, Any]:
    """What a point says of recall and precision, over the layers that look as far ahead as the setting."""
    layers = plan.layers_looking_ahead(setting.lookahead)

    def by_window(counts: Mapping[Any, Tensor], key: Callable[[int], Any]) -> Tensor:
        return torch.stack([counts[key(layer)] for layer in layers]).double().cpu()  # [layers, W]

    def by_setting(counts: Mapping[tuple[Setting, int], Tensor]) -> dict[Setting, Tensor]:
        return {
            one: by_window(counts, lambda layer, one=one: (one, layer))  # type: ignore[misc]
            for one in {setting, setting.without_distance, plan.static}
        }

    def share_of_true(counts: Tensor) -> tuple[float, Tensor]:
        return float(ratio(counts.sum(), true.sum())), resampling.ratios(counts.sum(0), true.sum(0))

    true = by_window(measured.true, lambda layer: layer)
    found, found_at_r = by_setting(measured.found), by_setting(measured.found_at_r)
    recalls = {one: share_of_true(counts) for one, counts in found.items()}
    recall = {one: share for one, (share, _) in recalls.items()}
    resampled = {one: draws for one, (_, draws) in recalls.items()}
    r_precision, static_r_precision = (share_of_true(found_at_r[one]) for one in (setting, plan.static))
    num_chosen = torch.full_like(true, float(plan.count * window))
    precision = float(found[setting].sum() / num_chosen.sum())
    own = setting.without_distance
    recall_drop = recall[setting] - recall[own]
    per_layer = dict(zip(layers, ratio(found[setting].sum(1), true.sum(1)).tolist(), strict=True))
    return {
        "recall": recall[setting],
        "recall_interval": resampling.interval(recall[setting], resampled[setting]),
        "precision": precision,
        "precision_interval": resampling.interval(
            precision, resampling.ratios(found[setting].sum(0), num_chosen.sum(0))
        ),
        "predicted_density": plan.count / plan.num_units,
        "true_density": float(true.sum() / num_chosen.sum()) * plan.count / plan.num_units,
        "per_layer_recall": [per_layer.get(layer) for layer in range(num_layers)],
        "own_recall": recall[own],
        "own_recall_interval": resampling.interval(recall[own], resampled[own]),
        "recall_drop": recall_drop,
        "recall_drop_interval": resampling.interval(recall_drop, resampled[setting] - resampled[own]),
        "static_recall": recall[plan.static],
        "static_recall_interval": resampling.interval(recall[plan.static], resampled[plan.static]),
        "r_precision": r_precision[0],
        "r_precision_interval": resampling.interval(*r_precision),
        "static_r_precision": static_r_precision[0],
        "static_r_precision_interval": resampling.interval(*static_r_precision),
    }


def _perplexity_fields(
    block: Block, setting: Setting, losses: Mapping[Run | None, Tensor], resampling: Resampling, num_tokens: int
) -> dict[str, Any]:
    """What a point says of perplexity; nothing if no run was made with its setting. `losses` [W]: None is dense."""
    if (block, setting) not in losses:
        return {}
    sparse, own, dense = (losses[run] for run in ((block, setting), (block, setting.without_distance), None))

    def of_mean(per_window: Tensor) -> Interval:
        # Windows are equally long, so the mean of their means is the mean over tokens.
        return resampling.interval(float(per_window.mean()), resampling.totals(per_window / len(per_window)))

    def exponentials(interval: Interval) -> Interval:
        return math.exp(interval[0]), math.exp(interval[1])

    return {
        "perplexity": math.exp(float(sparse.mean())),
        "perplexity_interval": exponentials(of_mean(sparse)),
        "perplexity_tokens": num_tokens,
        "dense_perplexity": math.exp(float(dense.mean())),
        "perplexity_ratio_interval": exponentials(of_mean(sparse - dense)),
        "loss_rise": float((sparse - own).mean()),
        "loss_rise_interval": of_mean(sparse - own),
    }
