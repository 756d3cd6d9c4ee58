"""R-precision of predictors, against a few lines of numpy: token by token, its R best-scored units."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

import scripts.studies.distance_measures as distance_measures
import scripts.studies.lookahead_fits as lookahead_fits
from modules.decoder import Decoder
from scripts.studies.distance_measures import true_among_best
from tests.modules.tiny_kinds import KINDS
from tests.modules.tiny_models import tiny_decoder
from tests.scripts.studies.test_distance_study import (
    CALIBRATION,
    OPTIONS,
    TEST,
    Point,
    Seen,
    points_of,
    regression,
    watch,
)


def relu() -> Decoder:
    return tiny_decoder(KINDS["opt"], dtype=torch.float64)


def relu_with_silent_tokens() -> Decoder:
    """Only four neurons of a layer ever write, for some tokens none."""
    model = relu()
    for layer in range(3):
        up_proj = model.mlp(layer).up_proj
        up_proj.weight.data[4:] = 0.0
        up_proj.bias.data[4:] = -1.0
    return model


def silu() -> Decoder:
    return tiny_decoder(KINDS["llama"], dtype=torch.float64)


def seen(make: Callable[[], Decoder], windows: torch.Tensor) -> tuple[Seen, Seen]:
    model, inputs, sizes = make(), {}, {}
    watch(model, inputs, sizes)
    with torch.no_grad():
        model(windows)
    return inputs, sizes


def true_sets(sizes: np.ndarray, count: int) -> Iterator[set[int]]:
    for row in sizes:
        yield {int(unit) for unit in np.argsort(-row, kind="stable")[:count] if row[unit] > 0}


def shares_of_true(scores: list[np.ndarray], sizes: list[np.ndarray], count: int) -> float:
    """Of the true units of all layers and tokens, those among the token's R best-scored."""
    found, num_true = 0, 0
    for of_layer, sizes_of_layer in zip(scores, sizes, strict=True):
        for row, true in zip(of_layer, true_sets(sizes_of_layer, count), strict=True):
            found += len(true & set(np.argsort(-row, kind="stable")[: len(true)].tolist()))
            num_true += len(true)
    return found / num_true


def neurons(model: Decoder, **options: float) -> list[Point]:
    return [point for point in points_of(model, **(OPTIONS | options)) if point.block == "mlp"]


# At 0.6, 67 of 112 neurons, every token has fewer true ones; at 0.43 only some of them, and not in every chunk.
@pytest.mark.parametrize(
    ("make", "density", "fewest", "most"),
    [(relu, 0.6, 41, 67), (relu, 0.43, 41, 48), (relu_with_silent_tokens, 0.4, 0, 4)],
)
def test_r_precision_is_that_of_each_tokens_best_scored_units(
    make: Callable[[], Decoder], density: float, fewest: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fewest_sorted = []

    def note_chunk(scores: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
        fewest_sorted.append(int(true.sum(1).min()))
        return true_among_best(scores, true)

    monkeypatch.setattr(distance_measures, "true_among_best", note_chunk)
    monkeypatch.setitem(lookahead_fits.CHUNK_TOKENS, "cpu", 25)
    points = neurons(make(), mlp_density=density)
    learnt, sizes = seen(make, CALIBRATION)
    tested, true_sizes = seen(make, TEST)
    count = int(density * 112 + 0.5)
    numbers = {len(true) for layer in range(3) for true in true_sets(true_sizes["mlp", layer], count)}
    assert (min(numbers), max(numbers)) == (fewest, most)
    assert max(fewest_sorted) < count, "sorting is slow, and tells nothing new where all tokens have so many"
    for point in points:
        layers = range(point.lookahead, 3)

        def scores(lookahead: int, rank: int, rows: int, layers: range = layers) -> list[np.ndarray]:
            return [
                regression(learnt["mlp", layer - lookahead][:rows], sizes["mlp", layer][:rows], rank)(
                    tested["mlp", layer - lookahead]
                )
                for layer in layers
            ]

        true = [true_sizes["mlp", layer] for layer in layers]
        own = scores(point.lookahead, point.predictor_rank, point.calibration_tokens)
        found = point.metrics["r_precision"]
        static = found.extras["baseline"]["value"]
        assert found.value == pytest.approx(shares_of_true(own, true, count))
        assert static == pytest.approx(shares_of_true(scores(0, 0, 320), true, count))
        assert found.value < point.recall.value and static < point.recall.extras["baseline"]["value"]
        assert found.interval is not None and found.interval[0] < found.value < found.interval[1]


def test_where_every_token_has_as_many_true_units_it_is_recall_and_nothing_is_sorted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(distance_measures, "true_among_best", None)
    learnt, sizes = seen(silu, CALIBRATION)
    tested, true_sizes = seen(silu, TEST)
    for point in neurons(silu()):
        found, recall = point.metrics["r_precision"], point.recall
        assert (found.value, found.interval) == (recall.value, recall.interval)
        assert found.extras["baseline"] == recall.extras["baseline"]
        if (point.study, point.lookahead) == ("lookahead", 2):
            predict = regression(learnt["mlp", 0], sizes["mlp", 2], point.predictor_rank)
            expected = shares_of_true([predict(tested["mlp", 0])], [true_sizes["mlp", 2]], 32)
            assert found.value == pytest.approx(expected)


def test_of_equal_scores_the_lower_index_comes_first_and_rows_without_true_units_have_none() -> None:
    scores = torch.tensor([[1.0, 1.0, 2.0, 1.0], [0.0, 3.0, 3.0, 3.0], [4.0, 3.0, 2.0, 1.0], [1.0, 2.0, 3.0, 4.0]])
    true = torch.tensor([[0, 1, 0, 1], [0, 0, 1, 1], [0, 0, 0, 0], [1, 1, 1, 1]]).bool()
    assert true_among_best(scores, true).int().tolist() == [
        [0, 0, 0, 0],  # picks 2 and 0
        [0, 1, 0, 0],  # picks 1 and 2
        [0, 0, 0, 0],
        [1, 1, 1, 1],
    ]
    # Long enough for a sort that is not stable to mix them: of the first 500 of 1000 equals every other one is true.
    alike = torch.arange(1000) % 2 == 1
    assert int(true_among_best(torch.zeros(1, 1000), alike[None]).sum()) == 250
