"""The oracle: the units that really contribute most, which is known only after the dense block."""

from collections.abc import Callable

from torch import Tensor

from modules.feed_forward import unit_norms
from modules.sparsity import ActiveSet, Block, SelectionContext, Selector, num_kept
from sparse_predictor.labels import contribution
from sparse_predictor.methods.registry import Setting, UnitMethod


class OracleSelector:
    """Top units by what they really contribute: |a_j| * ||down_j|| for neurons, output norm for head groups.

    The bound that Deja Vu (Liu et al. 2023, section 3.1) calls contextual sparsity: their sets too are read off a dense
    pass, by magnitude. Here neurons are weighted by what they write, and the count is fixed. It computes the dense
    block first, so it bounds accuracy and saves nothing. ReLU neurons that are exactly zero may be kept to fill the
    count; keeping them changes no output.
    """

    lookahead = 0

    def __init__(self, unit_norms: Tensor | None, density: float, num_units: int) -> None:
        self.unit_norms = unit_norms
        self.count = num_kept(density, num_units)

    def select(self, hidden_states: Tensor, context: SelectionContext) -> ActiveSet | None:
        scores = contribution(context.dense_output(), self.unit_norms, context.units)
        return ActiveSet.from_scores(scores, self.count, context.units)


def make(setting: Setting) -> Callable[[int, Block], Selector]:
    model = setting.model

    def largest(layer: int, block: Block) -> Selector:
        norms = unit_norms(model.mlp(layer)).to(model.compute_dtype) if block == "mlp" else None
        return OracleSelector(norms, setting.densities[block][layer], setting.num_units(layer, block))

    return largest


METHOD = UnitMethod(
    name="oracle",
    summary="The units whose part of the block's output is largest; a bound, since it computes the dense block first.",
    paper="Deja Vu, arXiv 2310.17157",
    order=10,
    colour="#009E73",
    marker="^",
    blocks=("attention", "mlp"),
    role="bound",
    make=make,
)
