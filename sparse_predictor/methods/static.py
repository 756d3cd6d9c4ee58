"""Static sparsity: the same units for every token."""

from collections.abc import Callable

import torch
from torch import Tensor

from modules.decode_step import Choice
from modules.kernels.deferred_norm import DeferredNorm
from modules.sparsity import ActiveList, ActiveSet, Block, SelectionContext, Selector, num_kept
from sparse_predictor.calibration import Statistic
from sparse_predictor.methods.registry import Setting, UnitMethod

# Share of training tokens in which a unit is active; counted by `sparse_predictor.train.unit_frequency`.
FREQUENCIES: dict[Block, Statistic] = {
    "mlp": Statistic(name="neuron_frequency", width=lambda config, layer: config.layers[layer].of("mlp").num_units),
    "attention": Statistic(
        name="group_frequency", width=lambda config, layer: config.layers[layer].of("attention").num_units
    ),
}


class StaticSelector:
    """The same units for every token (those most often active on calibration text): `mask` bool, over all units.

    Static sparsity by calibration, what Deja Vu (Liu et al. 2023, section 1 and figure 1) sets contextual sparsity
    against; pruning by how often a unit is active as in Hu et al. 2016 (Network Trimming, section 3), not retrained.
    """

    lookahead = 0

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask
        self._listed: dict[tuple[int, torch.device], ActiveList | ActiveSet] = {}  # by number of rows, and where

    def select(self, hidden_states: Tensor, context: SelectionContext) -> ActiveSet | None:
        rows = hidden_states.shape[0] * hidden_states.shape[1]
        mask = self.mask.to(hidden_states.device)
        return ActiveSet((mask if context.units is None else context.units.columns(mask)).expand(rows, -1))

    def select_in_step(self, source: DeferredNorm, context: SelectionContext, counters: Tensor) -> Choice:
        """See `StepSelector`: the list is made once."""
        place = rows, device = len(source.partial), source.partial.device
        if place not in self._listed:
            chosen = ActiveSet(self.mask.to(device).expand(rows, -1), is_early=True)
            self._listed[place] = chosen if context.block == "attention" else chosen.listed()
        return self._listed[place]


def make(setting: Setting) -> Callable[[int, Block], Selector]:
    def most_frequent(layer: int, block: Block) -> Selector:
        frequency = setting.statistics(layer).require(FREQUENCIES[block].name, "static")
        kept = frequency.topk(num_kept(setting.densities[block][layer], setting.num_units(layer, block))).indices
        mask = torch.zeros_like(frequency, dtype=torch.bool).scatter_(0, kept, True)
        return StaticSelector(mask.to(setting.model.device))

    return most_frequent


METHOD = UnitMethod(
    name="static",
    summary="The same units for every token, those most often active on calibration text.",
    paper="Network Trimming, arXiv 1607.03250",
    order=80,
    colour="#E69F00",
    marker="v",
    blocks=("attention", "mlp"),
    role="baseline",
    files="calibration",
    statistics=tuple(FREQUENCIES.values()),
    make=make,
)
