"""R-Sparse, one ratio for all matrices: large entries are multiplied with the weights, others with a low-rank copy."""

from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from modules.linear import Linear
from modules.sparsity import BLOCKS
from modules.thinned_input import ThinnedInput
from sparse_predictor.calibration import threshold_at
from sparse_predictor.methods.registry import InputMethod, Setting
from sparse_predictor.methods.wina import WEIGHTED
from sparse_predictor.thinning import Thin, matrices_of, norms_of_inputs

NAME = "r-sparse-uniform"
SPARSE_RATIO = 0.95  # of what is read, the share of exact weights: the paper's for a uniform ratio

# Factors of a projection by their rank, with the version of the weights that they are of: finding them takes longer
# than attaching, which happens several times per run.
_FACTORS: WeakKeyDictionary[Linear, dict[int, tuple[list[int], Tensor, Tensor]]] = WeakKeyDictionary()


class RankAwareInput(ThinnedInput):
    """x W = (x * mask) W + (x * ~mask) U V: large entries use the weights, the others a copy of rank R, U [in, R] and
    V [R, out]. An entry counts by |x_i| * ||W[:, i]||, as in the authors' code."""

    def __init__(self, projection: Linear, threshold: float, input_norms: Tensor, density: float, rank: int) -> None:
        super().__init__(projection, threshold, None, input_norms, density)
        self.first, self.second = low_rank_factors(projection, rank)
        self.extra_weights = self.first.numel() + self.second.numel()

    def product(self, states: Tensor, mask: Tensor) -> Tensor:
        """[..., in], which entries are large -> [..., out]."""
        exact = super().product(states, mask)
        if not self.extra_weights:
            return exact
        return exact + ((states.masked_fill(mask, 0) @ self.first) @ self.second).to(exact.dtype)


def low_rank_factors(projection: Linear, rank: int) -> tuple[Tensor, Tensor]:
    """The best approximation of a matrix by rank R (Eckart and Young 1936), in its compute type: [in, R], [R, out]."""
    known, parameters = _FACTORS.setdefault(projection, {}), list(projection.parameters())
    version = [parameter._version for parameter in parameters]  # of whatever tensors the format has
    if rank not in known or known[rank][0] != version or known[rank][1].device != parameters[0].device:
        matrix = projection.dequantised().detach().double()
        matrix = matrix if projection.rows_are == "inputs" else matrix.t()
        # Projected onto its strongest directions, found on the shorter side.
        if matrix.shape[0] <= matrix.shape[1]:
            first = torch.linalg.eigh(matrix @ matrix.t()).eigenvectors[:, matrix.shape[0] - rank :]
            second = first.t() @ matrix
        else:
            second = torch.linalg.eigh(matrix.t() @ matrix).eigenvectors[:, matrix.shape[1] - rank :].t()
            first = matrix @ second.t()
        dtype = projection.compute_dtype
        known[rank] = version, first.to(dtype).contiguous(), second.to(dtype).contiguous()
    return known[rank][1:]


def r_sparse(setting: Setting, sparse_ratio: float = SPARSE_RATIO) -> Thin:
    """R-Sparse (Zhang et al. 2025, Rank-Aware Activation Sparsity, section 3): at density d, a share ratio * d of the
    entries of each input use the exact weights, by one threshold per layer and matrix (a quantile of calibration
    text); the others a low-rank copy that takes the rest of the bytes, (1 - ratio) * d of the matrix.

    Differs: `sparse_ratio` is the same for all matrices, hence the name r-sparse-uniform: 0.95, which the paper found
    best of uniform ones; its own recipe is an evolutionary search of a ratio and a density per matrix. At density 1
    everything is exact. The copy is of the whole matrix, which no tensor-parallel rank has: that is refused.
    """
    model = setting.model

    def thin(layer: int, name: str, projection: Linear, density: float, counted: Tensor | None) -> ThinnedInput:
        quantiles = setting.statistics(layer).require(WEIGHTED.name, NAME)[matrices_of(model.config).index(name)]
        norms = norms_of_inputs(model, layer, name).to(device=model.device, dtype=model.compute_dtype)
        kept, rank = 1.0, 0
        if density < 1.0:
            size, sides = projection.num_rows * projection.width, projection.num_rows + projection.width
            kept, rank = sparse_ratio * density, int((1.0 - sparse_ratio) * density * size / sides)
        return RankAwareInput(projection, threshold_at(quantiles, kept), norms, kept, rank)

    return thin


METHOD = InputMethod(
    name=NAME,
    summary="The large entries of each input through the weights, the rest through a low-rank copy of them.",
    paper="R-Sparse, arXiv 2504.19449",
    order=65,
    colour="#117733",
    marker="8",
    blocks=BLOCKS,
    files="calibration",
    statistics=(WEIGHTED,),
    needs_whole_matrices=True,
    make=r_sparse,
)
