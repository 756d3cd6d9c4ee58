"""What the distance study measures: which predictors, of which block, at which layers; overlaps of predicted and true
units by window, and losses of attached predictors.

Legend: B batch, W windows, T tokens, n rows, U units, R a row's own number of true units.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from modules.config import ModelConfig
from modules.decoder import Decoder
from modules.forward_pass import ResidualStream
from modules.scoring import Likelihood, Window, windows_likelihood
from modules.sparsity import ActiveSet, Block, num_kept
from scripts.studies.lookahead_fits import (
    EarlierInputs,
    RankedMap,
    Reach,
    advance_observed,
    as_predictor,
    chunks_of,
    fit_layer,
    largest_writers,
    scores_of,
    windows_at_once,
)
from sparse_predictor.methods.learned_predictor import PredictorSelector
from sparse_predictor.predictor import Predictor, auto_rank
from sparse_predictor.selection import apply_sparsity, remove_sparsity

Study = Literal["lookahead", "rank", "calibration_tokens"]
STUDY_DISTANCE = 4  # look-ahead at which rank and amount of text are varied, beside 0
RANK_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)  # of the rank that a predictor has by itself
TEXT_SHARES = (0.125, 0.25, 0.5, 1.0)  # of the calibration text


class Setting(NamedTuple):
    """One way to make a predictor for every layer."""

    lookahead: int
    rank: int
    calibration_tokens: int

    def reach(self, layer: int) -> Reach:
        """What a layer's fit learns from: the first layers have nothing that far back and read their own input."""
        return Reach(self.lookahead if layer >= self.lookahead else 0, self.calibration_tokens)

    @property
    def without_distance(self) -> "Setting":
        """The same predictor on the block's own input."""
        return self._replace(lookahead=0)


@dataclass(frozen=True, kw_only=True)
class BlockPlan:
    """The study of one kind of block. `layers`: where recall is measured; `points`: what becomes of each setting;
    `attached`: the settings that a perplexity is measured with, which need all layers."""

    block: Block
    density: float
    count: int
    num_units: int
    layers: tuple[int, ...]
    points: tuple[tuple[Study, Setting], ...]
    attached: frozenset[Setting]

    @property
    def largest_rank(self) -> int:
        """Of all settings."""
        return max(setting.rank for _, setting in self.points)

    @property
    def static(self) -> Setting:
        """The predictor of rank 0, fitted to all text: its scores are the units' means, its choice always the same."""
        return Setting(0, 0, max(setting.calibration_tokens for _, setting in self.points))

    @property
    def settings(self) -> set[Setting]:
        """Those of the points, and what they are compared with."""
        return {one for _, setting in self.points for one in (setting, setting.without_distance)} | {self.static}

    @property
    def reach_back(self) -> int:
        """How many layers back any predictor reads."""
        return max(setting.lookahead for _, setting in self.points)

    def measured_at(self, layer: int) -> set[Setting]:
        """Settings whose recall is measured at a layer: those without look-ahead, and those that really look ahead."""
        return {one for one in self.settings if one.lookahead <= layer} if layer in self.layers else set()

    def layers_looking_ahead(self, lookahead: int) -> list[int]:
        """Of `layers`, those that have a layer so far back."""
        return [layer for layer in self.layers if layer >= lookahead]

    def reaches(self, layer: int) -> set[Reach]:
        """The fits that a layer needs."""
        return {setting.reach(layer) for setting in (*self.measured_at(layer), *self.attached)}


def spread_layers(num_layers: int, count: int) -> list[int]:
    """`count` layers evenly spread over a model, its last one among them; all if there are no more."""
    if count < 1:
        raise ValueError(f"the number of layers to sample must be at least 1, got {count}")
    count = min(count, num_layers)
    return [(place + 1) * num_layers // count - 1 for place in range(count)]


def make_plan(
    config: ModelConfig,
    block: Block,
    density: float,
    *,
    lookaheads: Sequence[int],
    study_lookaheads: Sequence[int] | None,
    perplexity_lookaheads: Sequence[int],
    ranks: Sequence[int] | None,
    amounts: Sequence[int],
    layers: Sequence[int],
) -> BlockPlan:
    """The plan for one kind of block. ValueError for what it cannot be made from; see `distance_study`."""
    spec = config.layers[0].of(block)
    num_units, base_rank = spec.num_units, auto_rank(spec, config.hidden_size)
    if ranks is None:
        ranks = [max(1, int(base_rank * factor + 0.5)) for factor in RANK_FACTORS]
    if min(ranks, default=1) < 1:
        raise ValueError(f"ranks {list(ranks)}: must be at least 1")
    widest = min(config.hidden_size, num_units)  # a linear map of higher rank is the same map
    most = max(amounts)
    reachable = [one for one in lookaheads if any(layer >= one for layer in layers)]
    if study_lookaheads is None:
        study_lookaheads = sorted({0, max((one for one in reachable if one <= STUDY_DISTANCE), default=0)})
    distances = [one for one in study_lookaheads if one in reachable]
    points: list[tuple[Study, Setting]] = [
        ("lookahead", Setting(one, min(base_rank, widest), most)) for one in reachable
    ]
    points += [
        ("rank", Setting(one, rank, most))
        for rank in sorted({min(rank, widest) for rank in ranks})
        for one in distances
    ]
    points += [
        ("calibration_tokens", Setting(one, min(base_rank, widest), amount)) for amount in amounts for one in distances
    ]
    attached = {
        one
        for study, setting in points
        if study == "lookahead" and setting.lookahead in perplexity_lookaheads
        for one in (setting, setting.without_distance)
    }
    return BlockPlan(
        block=block,
        density=density,
        count=num_kept(density, num_units),
        num_units=num_units,
        layers=tuple(sorted(set(layers))),
        points=tuple(points),
        attached=frozenset(attached),
    )


def check_choices(
    config: ModelConfig,
    lookaheads: Sequence[int],
    chosen: Mapping[str, Sequence[int]],
    layers: Sequence[int],
) -> None:
    """ValueError unless the look-aheads hold 0 and what is `chosen` among them, and the layers exist."""
    if 0 not in lookaheads or min(lookaheads) < 0:
        raise ValueError(
            f"lookaheads {list(lookaheads)}: must hold 0, which the others are compared with, and none below it"
        )
    for name, values in chosen.items():
        if not set(values) <= set(lookaheads):
            raise ValueError(f"{name} {list(values)}: must be among the lookaheads {list(lookaheads)}")
    if not layers or not 0 <= min(layers) <= max(layers) < config.num_hidden_layers:
        raise ValueError(f"layers {list(layers)}: must be some of 0 to {config.num_hidden_layers - 1}")


def amounts_of_text(calibration_tokens: Sequence[int] | None, num_windows: int, window: int) -> list[int]:
    """Amounts of calibration text in tokens, ascending, each rounded down to whole windows and at least one; None:
    shares of it all (`TEXT_SHARES`). The whole text is always among them. ValueError for more than there is."""
    available = num_windows * window
    if calibration_tokens is None:
        calibration_tokens = [int(share * available) for share in TEXT_SHARES]
    wrong = [amount for amount in calibration_tokens if not 1 <= amount <= available]
    if wrong:
        raise ValueError(f"calibration_tokens {wrong}: must lie between 1 and the {available} tokens there are")
    return sorted({max(1, amount // window) * window for amount in calibration_tokens} | {available})


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
    learning = [model.begin_stream(chunk) for chunk in chunks_of(calibration, boundaries)]
    testing = [model.begin_stream(chunk) for chunk in chunks_of(test)]
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
                predictor = as_predictor(fits[setting.reach(layer)].at(setting.rank), model.compute_dtype)
                measured.predictors.setdefault(setting, {})[layer] = predictor
            on_block()
    return measures


def _test_layer(
    model: Decoder,
    streams: Sequence[ResidualStream],
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
            model.half_block(layer, plan.block)(stream)
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
