"""What predictors lose to distance, against regressions, sets and runs written out in a few lines."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import scripts.studies.lookahead_fits as lookahead_fits
from modules.decoder import Decoder
from modules.sparsity import BLOCKS, Block
from scripts.studies.distance_study import distance_study
from scripts.studies.measures import Measure
from sparse_predictor.low_rank import RIDGE
from tests.modules.tiny_kinds import KINDS, random_tokens
from tests.modules.tiny_models import tiny_decoder

Seen = dict[tuple[Block, int], np.ndarray]
CALIBRATION, TEST = random_tokens(16, 20, seed=3), random_tokens(6, 25, seed=4)
OPTIONS: dict[str, Any] = {
    "lookaheads": (0, 1, 2),
    "study_lookaheads": (0, 2),
    "ranks": (1, 5),
    "calibration_tokens": (170, 320),
    "mlp_density": 0.4,
}
DENSITY: dict[Block, float] = {"mlp": 0.4, "attention": 0.5}


class Point:
    """What is measured of one predictor: its labels, and its measures by metric (None: it has none such)."""

    def __init__(self, measures: list[Measure]) -> None:
        labels = measures[0].labels
        self.study, self.block, self.lookahead = labels["study"], labels["block"], labels["lookahead"]
        self.predictor_rank, self.calibration_tokens = labels["predictor_rank"], labels["calibration_tokens"]
        self.metrics = {one.metric: one for one in measures}
        self.recall, self.precision = self.metrics["recall"], self.metrics["precision"]
        self.perplexity, self.loss_rise = self.metrics.get("perplexity"), self.metrics.get("loss_rise")


def points_of(model: Decoder, calibration: torch.Tensor = CALIBRATION, **options: Any) -> list[Point]:
    by_place: dict[tuple[Any, ...], list[Measure]] = {}
    for one in distance_study(model, calibration, TEST, **options):
        names = ("study", "block", "lookahead", "predictor_rank", "calibration_tokens")
        by_place.setdefault(tuple(one.labels[name] for name in names), []).append(one)
    return [Point(measures) for measures in by_place.values()]


def watch(model: Decoder, inputs: Seen, sizes: Seen) -> None:
    """Note what every block reads, and what its units write, by rows."""
    for layer in range(3):
        mlp, attention = model.mlp(layer), model.attention(layer)
        norms = mlp.down_proj.weight.norm(dim=1)

        def note(found: Seen, place: tuple[Block, int], values: torch.Tensor) -> None:
            found[place] = values.flatten(0, 1).numpy()

        mlp.register_forward_pre_hook(lambda _, args, i=layer: note(inputs, ("mlp", i), args[0]))
        attention.register_forward_pre_hook(lambda _, args, i=layer: note(inputs, ("attention", i), args[0]))
        mlp.activations.register_forward_hook(
            lambda _, args, out, i=layer, n=norms: note(sizes, ("mlp", i), out.abs() * n)
        )
        attention.head_outputs.register_forward_hook(
            lambda _, args, out, i=layer, g=attention.num_units: note(
                sizes, ("attention", i), out.unflatten(2, (g, -1)).square().sum((3, 4)).sqrt()
            )
        )


def seen_by(kind: str, windows: torch.Tensor) -> tuple[Seen, Seen]:
    model, inputs, sizes = tiny_decoder(KINDS[kind], dtype=torch.float64), {}, {}
    watch(model, inputs, sizes)
    with torch.no_grad():
        model(windows)
    return inputs, sizes


def regression(x: np.ndarray, sizes: np.ndarray, rank: int) -> Callable[[np.ndarray], np.ndarray]:
    """Least squares on the root of relative sizes, cut to the strongest `rank` directions of what it fits."""
    y = np.sqrt(np.minimum(sizes / np.maximum(sizes.mean(1, keepdims=True), 1e-300), 12.0))
    centred, target = x - x.mean(0), y - y.mean(0)
    ridge = math.sqrt(len(x) * RIDGE * (centred**2).mean())
    augmented = np.vstack([centred, ridge * np.eye(x.shape[1])])
    full = np.linalg.lstsq(augmented, np.vstack([target, np.zeros((x.shape[1], y.shape[1]))]), rcond=None)[0]
    directions = np.linalg.svd(augmented @ full, full_matrices=False)[2][:rank]
    return lambda rows: y.mean(0) + (rows - x.mean(0)) @ full @ directions.T @ directions


def top(scores: np.ndarray, density: float) -> np.ndarray:
    count = int(density * scores.shape[1] + 0.5)
    chosen = np.zeros(scores.shape, dtype=bool)
    np.put_along_axis(chosen, np.argsort(-scores, axis=1, kind="stable")[:, :count], True, axis=1)
    return chosen


@pytest.mark.parametrize("kind", ["llama", "opt", "opt-post-norm-projected"])
def test_recalls_are_those_of_regressions_written_out(kind: str) -> None:
    points = points_of(tiny_decoder(KINDS[kind], dtype=torch.float64), **OPTIONS)
    learnt, sizes = seen_by(kind, CALIBRATION)
    tested, true_sizes = seen_by(kind, TEST)

    def found(point: Point, lookahead: int, rank: int, rows: int) -> tuple[list[int], list[int], int]:
        """Units found by layer, true units by layer, units chosen."""
        both, true, chosen = [], [], 0
        for layer in range(point.lookahead, 3):
            here, source = (point.block, layer), (point.block, layer - lookahead)
            predict = regression(learnt[source][:rows], sizes[here][:rows], rank)
            predicted = top(predict(tested[source]), DENSITY[point.block])
            truth = top(true_sizes[here], DENSITY[point.block]) & (true_sizes[here] > 0)
            both.append(int((predicted & truth).sum()))
            true.append(int(truth.sum()))
            chosen += int(predicted.sum())
        return both, true, chosen

    assert {(p.study, p.block) for p in points} == {
        (study, block) for study in ("lookahead", "rank", "calibration_tokens") for block in BLOCKS
    }
    for point in points:
        rank, rows = point.predictor_rank, point.calibration_tokens
        both, true, chosen = found(point, point.lookahead, rank, rows)
        own, _, _ = found(point, 0, rank, rows)
        static, _, _ = found(point, 0, 0, 320)
        assert point.recall.value == pytest.approx(sum(both) / sum(true))
        assert point.precision.value == pytest.approx(sum(both) / chosen)
        if point.lookahead:
            drop = (sum(own) - sum(both)) / sum(true)
            assert point.metrics["recall_drop"].value == pytest.approx(drop)
        assert point.recall.extras["baseline"] == {"name": "static", "value": pytest.approx(sum(static) / sum(true))}
        per_layer = [a / b for a, b in zip(both, true, strict=True)]
        assert point.recall.per_layer == [*[None] * point.lookahead, *map(pytest.approx, per_layer)]
        units = true_sizes[point.block, 0].shape[1]
        assert point.recall.extras["predicted_density"] == pytest.approx(chosen / (150 * units * len(true)))
        assert point.recall.extras["true_density"] == pytest.approx(sum(true) / (150 * units * len(true)))
        assert point.recall.labels["num_tokens"] == 150 and point.perplexity is None


@pytest.mark.parametrize(("block", "lookahead"), [("mlp", 0), ("mlp", 2), ("attention", 1)])
def test_perplexity_is_that_of_the_model_with_the_units_masked_by_hand(block: Block, lookahead: int) -> None:
    options = OPTIONS | {"perplexity_lookaheads": (0, lookahead), "perplexity_windows": 4}
    points = points_of(tiny_decoder(KINDS["llama"], dtype=torch.float64), **options)
    (point,) = [p for p in points if (p.study, p.block, p.lookahead) == ("lookahead", block, lookahead)]
    learnt, sizes = seen_by("llama", CALIBRATION)
    model, inputs = tiny_decoder(KINDS["llama"], dtype=torch.float64), {}

    def losses() -> torch.Tensor:
        with torch.no_grad():
            logits = model.logits(model(TEST[:4]))[:, :-1]
        return -logits.log_softmax(-1).gather(-1, TEST[:4, 1:, None]).mean((1, 2))

    dense = losses()
    watch(model, inputs, {})
    for layer in range(3):
        source = block, layer - lookahead if layer >= lookahead else layer
        predict = regression(learnt[source], sizes[block, layer], point.predictor_rank)

        def mask(_: Any, args: Any, out: torch.Tensor, source: Any = source, predict: Any = predict) -> torch.Tensor:
            chosen = torch.from_numpy(top(predict(inputs[source]), DENSITY[block])).unflatten(0, out.shape[:2])
            if block == "attention":
                chosen = chosen.repeat_interleave(3, dim=2)[..., None]  # queries of a group
            return out * chosen

        inner = model.mlp(layer).activations if block == "mlp" else model.attention(layer).head_outputs
        inner.register_forward_hook(mask)
    sparse = losses()
    assert point.perplexity is not None and point.perplexity.labels["num_tokens"] == 100
    assert point.perplexity.value == pytest.approx(math.exp(float(sparse.mean())), rel=1e-6)
    assert point.perplexity.extras["baseline"]["value"] == pytest.approx(math.exp(float(dense.mean())), rel=1e-9)
    low, high = point.perplexity.extras["ratio_interval"]
    assert low < math.exp(float((sparse - dense).mean())) < high
    if point.loss_rise is None:
        assert lookahead == 0
        return
    low, high = point.loss_rise.interval or (1.0, 0.0)
    assert low <= point.loss_rise.value <= high
    (own,) = [p for p in points if (p.study, p.block, p.lookahead) == ("lookahead", block, 0)]
    assert own.perplexity is not None
    rise = math.log(point.perplexity.value / own.perplexity.value)
    assert point.loss_rise.value == pytest.approx(rise, abs=1e-9)


def test_perplexity_is_measured_where_asked_and_the_model_left_dense() -> None:
    model, steps = tiny_decoder(KINDS["llama"]), []
    points = points_of(
        model,
        **OPTIONS,
        perplexity_lookaheads=(2,),
        on_step=lambda done, total: steps.append((done, total)),
    )
    measured = {(p.study, p.block, p.lookahead, p.predictor_rank) for p in points if p.perplexity is not None}
    # With a point, whatever has the same setting: what it is compared with, and where studies meet.
    assert {(study, lookahead, rank) for study, block, lookahead, rank in measured if block == "mlp"} == {
        *(("lookahead", lookahead, 8) for lookahead in (0, 2)),
        *(("calibration_tokens", lookahead, 8) for lookahead in (0, 2)),
    }
    assert [done for done, _ in steps] == list(range(1, len(steps) + 1)) and steps[-1][0] == steps[-1][1]
    assert model.stats is None and model.max_lookahead == 0 and not model.is_sparse
    assert not any(half_block.block.selector for half_block in model.half_blocks)


def test_chunks_of_text_and_sampled_layers_change_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_decoder(KINDS["llama"], dtype=torch.float64)
    whole = points_of(model, **OPTIONS)
    monkeypatch.setitem(lookahead_fits.CHUNK_TOKENS, "cpu", 60)
    sampled = points_of(model, **OPTIONS, layers=[2])
    assert len(sampled) == len(whole)
    for one, other in zip(whole, sampled, strict=True):
        assert one.recall.per_layer is not None
        assert other.recall.per_layer == [None, None, pytest.approx(one.recall.per_layer[2])]
        assert other.recall.value == pytest.approx(one.recall.per_layer[2])


@pytest.mark.cuda
@pytest.mark.parametrize("kind", ["llama", "opt"])
def test_a_gpu_finds_the_same_numbers(kind: str) -> None:
    options = OPTIONS | {"perplexity_lookaheads": (0, 2)}
    here = distance_study(tiny_decoder(KINDS[kind]), CALIBRATION, TEST, **options)
    there = distance_study(tiny_decoder(KINDS[kind]).to("cuda"), CALIBRATION, TEST, **options)
    for one, other in zip(here, there, strict=True):
        assert (other.metric, other.labels) == (one.metric, one.labels)
        assert other.value == pytest.approx(one.value, rel=0.05 if one.metric == "perplexity" else None, abs=0.01)


def test_activations_that_are_not_finite_are_refused() -> None:
    model = tiny_decoder(KINDS["llama"])
    model.mlp(1).up_proj.weight.data[0, 0] = math.inf
    with pytest.raises(ValueError, match="mlp of layer 1: activations that are not finite; try --dtype float32"):
        distance_study(model, CALIBRATION, TEST)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lookaheads": (1, 2)}, r"lookaheads \[1, 2\]: must hold 0"),
        ({"lookaheads": (0, -1)}, r"must hold 0.*none below it"),
        ({"study_lookaheads": (0, 3)}, r"study_lookaheads \[0, 3\]: must be among the lookaheads \[0, 1, 2\]"),
        ({"perplexity_lookaheads": (5,)}, r"perplexity_lookaheads \[5\]: must be among"),
        ({"layers": []}, r"layers \[\]: must be some of 0 to 2"),
        ({"layers": [3]}, r"layers \[3\]: must be some of 0 to 2"),
        ({"ranks": (0, 4)}, r"ranks \[0, 4\]: must be at least 1"),
        ({"calibration_tokens": (100, 321)}, r"calibration_tokens \[321\]: must lie between 1 and the 320"),
        ({"mlp_density": 0.0}, r"density must lie in \(0, 1\], got 0.0"),
        ({"perplexity_windows": 1}, r"needs at least 2 windows of text, got 1"),
    ],
)
def test_choices_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        distance_study(tiny_decoder(KINDS["llama"]), CALIBRATION, TEST, **(OPTIONS | options))
