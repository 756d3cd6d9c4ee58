"""A value that equals a threshold reaches it: in every selector, every reference and every threshold that is set."""

import pytest
import torch

from modules.kernels.deferred_norm import DeferredNorm
from modules.kernels.early_selection import EarlyUnits
from modules.kernels.select_units import select_units
from modules.linear import Linear
from modules.sparsity import SelectionContext
from modules.thinned_input import ThinnedInput
from sparse_predictor.calibration import quantiles_of, threshold_at
from sparse_predictor.methods.cats import CatsSelector
from sparse_predictor.methods.learned_predictor import PredictorSelector
from sparse_predictor.methods.registry import at_least
from sparse_predictor.predictor import Predictor
from tests.modules.tiny_kinds import KINDS
from tests.modules.tiny_models import tiny_decoder


def context() -> SelectionContext:
    return SelectionContext(
        layer_idx=0,
        block="mlp",
        phase="decode",
        positions=torch.zeros(1, 1, dtype=torch.int64),
        valid=None,
        earlier_inputs={},
        dense_output=lambda: torch.empty(0),
    )


def test_scores_at_the_threshold_are_active() -> None:
    scores = torch.tensor([[0.25, 0.5, 0.75]])
    assert at_least(scores, 0.5, None).tolist() == [[False, True, True]]
    predictor = Predictor(4, 3, 2)
    predictor.bias.copy_(scores[0])  # all other weights are zero
    for name in ("first", "second"):
        getattr(predictor, name).zero_()
    selector = PredictorSelector(predictor, 0.5, "threshold", 0)
    selector.threshold = 0.5
    found = selector.select(torch.ones(1, 1, 4), context())
    assert found is not None and found.mask.tolist() == [[False, True, True]]


def test_gates_at_the_threshold_are_active() -> None:
    model = tiny_decoder(KINDS["llama"])
    states = torch.linspace(-1, 1, 48)[None, None]
    selector = CatsSelector(model.mlp(0), 0.0)
    sizes = selector.thresholded(states, context())[0]
    selector.threshold = float(sizes.sort().values[30])
    found = selector.select(states, context())
    assert found is not None and int(found.mask.sum()) == 80 - 30


def test_the_list_of_a_decode_step_has_what_is_at_the_threshold() -> None:
    scores, counters = torch.tensor([0.25, 0.5, 0.75, 0.5]), torch.zeros(2, dtype=torch.int32)
    source = DeferredNorm.plain(torch.zeros(1, 8))
    found = select_units(
        source, torch.zeros(4, 8), scores, threshold=0.5, activation=None, keep_values=False, counters=counters
    )
    assert sorted(found.indices[: int(found.length)].tolist()) == [1, 2, 3]


def test_a_list_made_ahead_has_what_is_at_the_threshold() -> None:
    scores, counters = torch.tensor([0.25, 0.5, 0.75, 0.5]), torch.zeros(2, dtype=torch.int32)
    choice = EarlyUnits.of(torch.zeros(2), torch.zeros(4, 2), scores, 0.5, counters)
    choice.in_plain_pytorch()
    assert counters.tolist() == [3, 3] and choice.found.indices[:3].tolist() == [1, 2, 3]


def test_inputs_at_the_threshold_are_kept() -> None:
    states = torch.tensor([[[0.25, -0.5, 0.5, 0.75]]])
    for norms in (None, torch.tensor([2.0, 1.0, 1.0, 0.5])):
        part = ThinnedInput(Linear(4, 2), 0.5, None, norms)
        part(states)
        assert part.last_rows is not None and part.last_rows[0].tolist() == [4 - (norms is None) - (norms is not None)]


@pytest.mark.parametrize("density", [0.9, 0.5, 0.1])
def test_a_threshold_is_reached_by_the_share_that_was_asked_for(density: float) -> None:
    values = torch.randn(64, 131, generator=torch.Generator().manual_seed(0))
    reached = (values >= threshold_at(quantiles_of(values), density)).float().mean()
    assert float(reached) == pytest.approx(density, abs=2e-3)
    coarse = values.round()  # many ties: all who share the border are in
    threshold = threshold_at(quantiles_of(coarse), density)
    assert float((coarse >= threshold).float().mean()) >= density - 2e-3
    assert bool((torch.ones(4, 131) >= threshold_at(quantiles_of(torch.ones(4, 131)), density)).all())
