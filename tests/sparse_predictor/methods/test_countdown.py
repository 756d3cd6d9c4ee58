"""M-CountDown against a mask simulation in float64, and what it reads."""

import pytest
import torch
from torch import Tensor

from sparse_predictor.cost import achieved, weights_by_density
from sparse_predictor.selection import attach_selection, remove_sparsity
from tests.modules.tiny_kinds import KINDS, random_tokens
from tests.modules.tiny_models import tiny_decoder
from tests.sparse_predictor.test_selection import assert_same_sparse_run, quantile, simulate
from tests.sparse_predictor.tiny_stages import Trained, selection


@pytest.mark.parametrize("batch", [1, 8])
def test_it_keeps_the_neurons_whose_up_projection_is_large(trained: Trained, batch: int) -> None:
    model, directory = tiny_decoder(KINDS["llama"], dtype=torch.float64), trained()

    def keep(layer: int, inputs: dict[int, Tensor], activations: Tensor) -> Tensor:
        up = inputs[layer] @ model.mlp(layer).up_proj.weight.T
        return up.abs() >= quantile(directory, f"{layer}.up_quantiles", 0.4)

    expected = simulate(model, keep, batch)
    assert_same_sparse_run(model, selection("m-countdown", directory, 0.4), batch, expected)


def test_bytes_are_the_whole_up_projection_and_of_the_others_what_is_active(trained: Trained) -> None:
    model, chosen = tiny_decoder(KINDS["llama"]), selection("m-countdown", trained(), 0.3)
    stats = attach_selection(model, chosen)
    with torch.no_grad():
        model(random_tokens(2, 30))
    found = achieved(model, chosen, stats)
    remove_sparsity(model)
    assert 0.25 < found["mlp_density"] < 0.35, "thresholds of the sparse run keep about what they should"
    assert found["bytes_read_share"] == pytest.approx((1 + 2 * found["mlp_density"]) / 3)
    assert found["head_density"] == 1.0
    assert weights_by_density(model.config, "m-countdown", "mlp") == 2 * 48 * 80, "what a budget divides"
