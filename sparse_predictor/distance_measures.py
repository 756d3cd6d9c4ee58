"""What the distance study counts: overlaps of predicted and true units by window, and losses of attached predictors.

Legend: B batch, W windows, T tokens, n rows, U units, R a row's own number of true units.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from modules.decoder import Decoder
from modules.scoring import Likelihood, Window, windows_likelihood
from modules.sparsity import ActiveSet, Block
from sparse_predictor.contributions import advance_observed, largest_writers
from sparse_predictor.distance_plan import BlockPlan, Setting
from sparse_predictor.lookahead_fits import (
    EarlierInputs,
    RankedMap,
    Reach,
    as_predictor,
    chunks_of,
    fit_layer,
    scores_of,
    windows_at_once,
)
from sparse_predictor.predictor import Predictor
from sparse_predictor.selection import apply_sparsity, remove_sparsity
from sparse_predictor.selectors import PredictorSelector
from sparse_predictor.streams import Stream, advance, begin_stream


@dataclass
class BlockMeasures:
    """Of one kind of block: true units by layer, and how many of them each setting chose (`found_at_r`: among each
    token's R best, see `true_among_best`), counts [W]; the predictors that are to be attached, by setting and layer."""

    true: dict[int, Tensor] = field(default_factory=dict)
    found: dict[tuple[Setting, int], Tensor] = field(default_factory=dict)
    found_at_r: dict[tuple[Setting, int], Tensor] = field(default_factory=dict)
    predictors: dict[Setting, dict[int, Predictor]] = field(default_factory=dict)


def measure_overlaps(
    model: Decoder,
    calibration: Tensor,
    test: Tensor,
    plans: Sequence[BlockPlan],
    amounts: Collection[int],
    on_block: Callable[[], object],
) -> dict[Block, BlockMeasures]:
    """Fit and test all predictors of the plans in one pass over both texts [W, T], layer after layer."""
    boundaries = [amount // calibration.shape[1] for amount in amounts]
    learning = [begin_stream(model, chunk) for chunk in chunks_of(calibration, boundaries)]
    testing = [begin_stream(model, chunk) for chunk in chunks_of(test)]
    measures = {plan.block: BlockMeasures() for plan in plans}
    kept = {plan.block: (EarlierInputs(plan.reach_back), EarlierInputs(plan.reach_back)) for plan in plans}
    for layer in range(model.config.num_hidden_layers):
        for plan in plans:
            (learnt, tested), measured = kept[plan.block], measures[plan.block]
            learnt.keep(layer, learning)
            tested.keep(layer, testing)
            fits = fit_layer(
                model,
                learning,
                layer,
                plan.block,
                learnt,
                plan.reaches(layer),
                amounts=amounts,
                rank=plan.largest_rank,
            )
            _test_layer(model, testing, layer, plan, tested, fits, measured)
            for setting in plan.attached:
                predictor = as_predictor(fits[setting.reach(layer)].at(setting.rank), model.dtype)
                measured.predictors.setdefault(setting, {})[layer] = predictor
            on_block()
    return measures


def _test_layer(
    model: Decoder,
    streams: Sequence[Stream],
    layer: int,
    plan: BlockPlan,
    inputs: EarlierInputs,
    fits: Mapping[Reach, RankedMap],
    measured: BlockMeasures,
) -> None:
    """Take the streams of test text past a block, and count what each fit finds of its units."""
    maps = {setting: fits[setting.reach(layer)].at(setting.rank) for setting in plan.measured_at(layer)}
    true_counts: list[Tensor] = []
    found_counts: dict[Setting, list[Tensor]] = {setting: [] for setting in maps}
    counts_at_r: dict[Setting, list[Tensor]] = {setting: [] for setting in maps}
    for place, stream in enumerate(streams):
        if not maps:
            advance(model, stream, layer, plan.block)
            continue
        num_windows = len(stream.hidden_states)
        true = largest_writers(advance_observed(model, stream, layer, plan.block), plan.count)
        true_counts.append(_by_window(true, num_windows))
        # Then the R best are those that are chosen anyway, and nothing needs to be sorted.
        is_full = bool((true.sum(1) == plan.count).all())
        for setting, fitted in maps.items():
            scores = scores_of(fitted, inputs.chunks[layer - setting.lookahead][place])
            chosen = ActiveSet.from_scores(scores, plan.count).mask
            found_counts[setting].append(_by_window(chosen & true, num_windows))
            counts_at_r[setting].append(
                found_counts[setting][-1] if is_full else _by_window(true_among_best(scores, true), num_windows)
            )
    if maps:
        measured.true[layer] = torch.cat(true_counts)
        measured.found |= {(setting, layer): torch.cat(counts) for setting, counts in found_counts.items()}
        measured.found_at_r |= {(setting, layer): torch.cat(counts) for setting, counts in counts_at_r.items()}


def true_among_best(scores: Tensor, true: Tensor) -> Tensor:
    """Which of each row's R best-scored units are true: scores [n, U], true bool [n, U] -> bool [n, U], best first.

    Of equal scores the unit of the lower index comes first. A row with nothing true has nothing set. Their share of
    the true units is R-precision (Manning, Raghavan and Schütze 2008, Introduction to Information Retrieval, ch. 8.4).
    """
    best_first = scores.sort(dim=1, descending=True, stable=True).indices
    places = torch.arange(scores.shape[1], device=scores.device)
    return true.gather(1, best_first) & (places < true.sum(1, keepdim=True))


def _by_window(mask: Tensor, num_windows: int) -> Tensor:
    """bool [B * T, U] -> how many are set in each window, int64 [B]."""
    return mask.view(num_windows, -1).sum(1)


def attached_losses(
    model: Decoder, plan: BlockPlan, setting: Setting, predictors: Mapping[int, Predictor], windows: Tensor
) -> Tensor:
    """As `window_losses`, with all layers' predictors of one setting attached; leaves the model dense."""
    apply_sparsity(
        model,
        {
            (layer, plan.block): PredictorSelector(predictor, plan.density, "topk", setting.reach(layer).lookahead)
            for layer, predictor in predictors.items()
        },
    )
    try:
        return window_losses(model, windows)
    finally:
        remove_sparsity(model)


def window_losses(model: Decoder, windows: Tensor) -> Tensor:
    """Mean negative log-likelihood of each window's tokens but the first: float64 [W], nats per token."""
    losses: list[float] = []

    def hear(_window: Window, found: Likelihood) -> None:
        losses.append(found.nll_sum / found.num_tokens)

    pieces = [Window(token_ids, 1) for token_ids in windows.tolist()]
    windows_likelihood(model, pieces, batch_size=windows_at_once(windows), on_window=hear)
    return torch.tensor(losses, dtype=torch.float64)
