"""What the activation function does, against loops over tokens and neurons of a tiny model."""

from itertools import product
from typing import Any

import pytest
import torch

import scripts.studies.lookahead_fits as lookahead_fits
from data.bootstrap import Resampling
from modules.decoder import Decoder
from scripts.studies.activation_study import activation_study
from scripts.studies.measures import Measure
from tests.modules.tiny_kinds import KINDS, random_tokens
from tests.modules.tiny_models import tiny_decoder

WINDOWS = random_tokens(4, 12, seed=5)
W, T = WINDOWS.shape
SHARES = (0.01, 0.1, 0.5)
Sets = list[list[list[set[int]]]]  # by layer, window, token


def sizes_of(model: Decoder) -> torch.Tensor:
    """|a_j| * ||down_j||, [layers, W, T, F]."""
    found: list[torch.Tensor] = []
    for layer in range(3):
        norms = model.mlp(layer).down_proj.weight.norm(dim=1)
        model.mlp(layer).activations.register_forward_hook(lambda _, args, out, n=norms: found.append(out.abs() * n))
    with torch.no_grad():
        model(WINDOWS)
    return torch.stack(found)


def study(kind: str, **options: Any) -> tuple[list[Measure], torch.Tensor]:
    points = activation_study(tiny_decoder(KINDS[kind], dtype=torch.float64), WINDOWS, top_shares=SHARES, **options)
    return points, sizes_of(tiny_decoder(KINDS[kind], dtype=torch.float64))


def active_sets(sizes: torch.Tensor, count: int) -> Sets:
    def of(token: list[float]) -> set[int]:
        ranked = sorted(range(len(token)), key=lambda j: -token[j])
        return {j for j in ranked[:count] if token[j] > 0}

    return [[[of(token) for token in window] for window in layer] for layer in sizes.tolist()]


def at_other_windows(sets: list[list[set[int]]], window: int, neurons: set[int]) -> float:
    """How many of `neurons` are active at a token of another window, on average."""
    tokens = [token for other, row in enumerate(sets) if other != window for token in row]
    return sum(len(neurons & token) for token in tokens) / len(tokens)


@pytest.mark.parametrize(("kind", "density"), [("llama", 0.3), ("opt", 0.3), ("opt", 0.7)])
def test_energy_zeros_and_margin_are_counted_over_tokens_and_neurons(kind: str, density: float) -> None:
    points, sizes = study(kind, density=density)
    num_neurons = sizes.shape[-1]
    expected: dict[tuple[str, float | None], list[list[float]]] = {}
    for layer, window, token in product(range(3), range(W), range(T)):
        values = sorted(sizes[layer, window, token].tolist(), reverse=True)
        energy = [value**2 for value in values]
        threshold = values[int(density * num_neurons + 0.5) - 1]  # 0 where fewer are above zero
        numbers: dict[tuple[str, float | None], float] = {
            ("exact_zeros", None): sum(value == 0 for value in values) / num_neurons,
            ("boundary_margin", None): sum(
                value > 0 and 0.9 * threshold <= value <= 1.1 * threshold for value in values
            )
            / num_neurons,
        }
        for share in SHARES:
            count = max(1, int(share * num_neurons + 0.5))
            numbers["energy_share", share] = sum(energy[:count]) / sum(energy)
        for key, number in numbers.items():
            expected.setdefault(key, [[], [], []])[layer].append(number)
    found = {(p.metric, p.labels.get("top_share")): p for p in points if not p.metric.startswith("reuse")}
    assert set(found) == set(expected)
    for key, by_layer in expected.items():
        means = [sum(numbers) / len(numbers) for numbers in by_layer]
        assert found[key].value == pytest.approx(sum(means) / 3), key
        assert found[key].per_layer == pytest.approx(means), key
        assert found[key].interval[0] <= found[key].value <= found[key].interval[1]
    zeros = found["exact_zeros", None].value
    assert (0.3 < zeros < 0.8) if kind == "opt" else zeros == 0.0
    assert found["boundary_margin", None].labels == {"density": density}


@pytest.mark.parametrize(("kind", "density"), [("llama", 0.3), ("opt", 0.3), ("opt", 0.7)])
def test_reuse_and_what_it_is_compared_with_are_counted_over_sets(kind: str, density: float) -> None:
    points, sizes = study(kind, density=density)
    num_neurons = sizes.shape[-1]
    sets = active_sets(sizes, int(density * num_neurons + 0.5))
    found = {p.labels.get("lookahead", 0): p for p in points if p.metric.startswith("reuse")}
    assert set(found) == {0, 1, 2} and found[0].metric == "reuse_tokens" and found[2].metric == "reuse_layers"
    for lookahead, point in found.items():
        layers = range(lookahead, 3)
        reused, candidates, expected, sizes_of_sets = [], [], 0.0, 0
        by_window = torch.zeros(4, W, dtype=torch.float64)  # of all layers: reused, candidates, expected, sizes
        for layer in layers:
            source, target = sets[layer - lookahead], sets[layer]
            later = 0 if lookahead else 1
            pairs = [(source[w][t], target[w][t + later]) for w in range(W) for t in range(T - later)]
            reused.append(sum(len(first & second) for first, second in pairs))
            candidates.append(sum(len(first) for first, _ in pairs))
            for w, t in product(range(W), range(T)):
                elsewhere = at_other_windows(target, w, source[w][t])
                expected += elsewhere
                sizes_of_sets += len(source[w][t])
                counts = [elsewhere, len(source[w][t])]
                pair = (source[w][t], target[w][t + later]) if t + later < T else (set(), set())
                by_window[:, w] += torch.tensor([len(pair[0] & pair[1]), len(pair[0]), *counts])
        all_sizes = [len(token) for layer in layers for window in sets[layer] for token in window]
        assert point.value == pytest.approx(sum(reused) / sum(candidates))
        assert point.per_layer[:lookahead] == [None] * lookahead
        assert point.per_layer[lookahead:] == pytest.approx([a / b for a, b in zip(reused, candidates, strict=True)])
        static, above = point.extras["static"], point.extras["above_static"]
        chance = pytest.approx(sum(all_sizes) / len(all_sizes) / num_neurons)
        assert point.extras["baseline"] == {"name": "chance", "value": chance}
        assert static == pytest.approx(expected / sizes_of_sets) and above == pytest.approx(point.value - static)
        assert point.interval[0] <= point.value <= point.interval[1]
        low, high = point.extras["above_static_interval"]
        assert low <= above <= high
        resampling = Resampling(W, seed=0)
        drawn = by_window @ resampling.times_drawn.T  # paired: one draw for both
        paired = resampling.interval(above, drawn[0] / drawn[1] - drawn[2] / drawn[3])
        assert (low, high) == pytest.approx(paired)
    if (kind, density) == ("opt", 0.7):  # fewer neurons are above zero than the density asks for
        assert found[0].extras["baseline"]["value"] < 0.65


def test_chunks_of_text_change_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    model, steps = tiny_decoder(KINDS["llama"], dtype=torch.float64), []
    whole = activation_study(model, WINDOWS)
    monkeypatch.setitem(lookahead_fits.CHUNK_TOKENS, "cpu", 24)
    cut = activation_study(model, WINDOWS, on_step=lambda done, total: steps.append((done, total)))
    assert steps == [(1, 2), (2, 2)]
    for one, other in zip(whole, cut, strict=True):
        assert (one.metric, one.labels) == (other.metric, other.labels)
        assert other.value == pytest.approx(one.value) and other.interval == pytest.approx(one.interval)


@pytest.mark.parametrize(
    ("windows", "options", "message"),
    [
        (WINDOWS[:1], {}, "at least 2 windows of text, got 1"),
        (WINDOWS[:, :1], {}, "windows of at least 2 tokens, got 1"),
        (WINDOWS, {"density": 1.5}, r"density must lie in \(0, 1\], got 1.5"),
        (WINDOWS, {"top_shares": (0.0,)}, r"density must lie in \(0, 1\], got 0.0"),
        (WINDOWS, {"lookaheads": (0, 1)}, r"lookaheads \[0, 1\]: must be at least 1"),
    ],
)
def test_text_and_choices_that_do_not_fit_are_refused(
    windows: torch.Tensor, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        activation_study(tiny_decoder(KINDS["llama"]), windows, **options)
