"""Random units: a baseline that every useful method must beat."""

from collections.abc import Callable

import torch
from torch import Tensor

from modules.sampling import as_int64, mix_seed, stream_element
from modules.sparsity import ActiveSet, Block, SelectionContext, Selector, num_kept
from sparse_predictor.methods.registry import Setting, UnitMethod

# Random numbers drawn at once: as many as fit a CPU's cache; on a GPU, a bound of what a long prefill needs.
MAX_DRAWS = {"cpu": 1 << 18, "cuda": 1 << 24}


class RandomSelector:
    """`count` random units for each token: a baseline that every useful method must beat. The draw
    depends on (seed, layer, block, position) alone, not on batching, order, device or cut; so tokens at the same
    position of two requests get the same units."""

    lookahead = 0

    def __init__(self, density: float, num_units: int, seed: int) -> None:
        self.count = num_kept(density, num_units)
        self.num_units = num_units
        self.seed = seed

    def select(self, hidden_states: Tensor, context: SelectionContext) -> ActiveSet | None:
        key = as_int64(mix_seed(self.seed, 2 * context.layer_idx + (context.block == "mlp")))
        unit_indices = torch.arange(self.num_units, device=hidden_states.device)
        num_rows = max(1, MAX_DRAWS.get(hidden_states.device.type, MAX_DRAWS["cpu"]) // self.num_units)
        masks = []
        for positions in context.positions.flatten().split(num_rows):
            draws = stream_element(stream_element(key, positions)[:, None], unit_indices)
            masks.append(ActiveSet.from_scores(draws, self.count, context.units).mask)
        return ActiveSet(torch.cat(masks))


def make(setting: Setting) -> Callable[[int, Block], Selector]:
    return lambda layer, block: RandomSelector(
        setting.densities[block][layer], setting.num_units(layer, block), setting.seed
    )


METHOD = UnitMethod(
    name="random",
    summary="As many random units for each token.",
    order=90,
    colour="#7F7F7F",
    marker="X",
    blocks=("attention", "mlp"),
    role="bound",
    make=make,
)
