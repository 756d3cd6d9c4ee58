"""What the distance study measures: which predictors, of which block, at which layers, and what for."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from modules.config import ModelConfig
from modules.sparsity import Block, num_kept
from sparse_predictor.lookahead_fits import Reach
from sparse_predictor.predictor import auto_head_rank, auto_rank

Study = Literal["lookahead", "rank", "calibration_tokens"]
STUDIES: tuple[Study, ...] = ("lookahead", "rank", "calibration_tokens")
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
    perplexity_studies: Collection[Study],
    ranks: Sequence[int] | None,
    amounts: Sequence[int],
    layers: Sequence[int],
) -> BlockPlan:
    """The plan for one kind of block. ValueError for what it cannot be made from; see `distance_study`."""
    num_units = config.intermediate_size if block == "mlp" else config.num_key_value_heads
    base_rank = auto_rank(config) if block == "mlp" else auto_head_rank(config)
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
        if study in perplexity_studies and setting.lookahead in perplexity_lookaheads
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
    studies: Sequence[str],
    layers: Sequence[int],
) -> None:
    """ValueError unless the look-aheads hold 0 and what is `chosen` among them, and studies and layers exist."""
    if 0 not in lookaheads or min(lookaheads) < 0:
        raise ValueError(
            f"lookaheads {list(lookaheads)}: must hold 0, which the others are compared with, and none below it"
        )
    for name, values in chosen.items():
        if not set(values) <= set(lookaheads):
            raise ValueError(f"{name} {list(values)}: must be among the lookaheads {list(lookaheads)}")
    if unknown := set(studies) - set(STUDIES):
        raise ValueError(f"perplexity_studies {sorted(unknown)}: choose from {', '.join(STUDIES)}")
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
