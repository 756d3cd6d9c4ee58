"""Closed forms, losses, ranks and thresholds against few-line computations."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from modules.families.registry import from_hf_config
from sparse_predictor.calibration import quantiles_of, threshold_at
from sparse_predictor.low_rank import RIDGE, RegressionSums
from sparse_predictor.predictor import Predictor, auto_rank, auto_standin_rank
from sparse_predictor.train import LOSSES, LossTargets
from tests.modules.tiny_kinds import LLAMA, OPT


@pytest.mark.parametrize("rank", [1, 3, 6])
def test_the_fit_is_least_squares_truncated_by_the_singular_values_of_what_it_fits(rank: int) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((200, 6)) @ rng.standard_normal((6, 6)) + 3.0
    y = x @ rng.standard_normal((6, 9)) + np.sin(x[:, :1]) * 5.0 + rng.standard_normal((200, 9)) - 2.0
    sums = RegressionSums(6, 9, "cpu")
    for part in (slice(0, 50), slice(50, 200)):
        sums.add(torch.tensor(x[part]), torch.tensor(y[part]))
    fitted = sums.fit(rank)

    centred, target = x - x.mean(0), y - y.mean(0)
    ridge = RIDGE * (centred**2).mean()
    augmented = np.vstack([centred / math.sqrt(200), math.sqrt(ridge) * np.eye(6)])
    full = np.linalg.lstsq(augmented, np.vstack([target / math.sqrt(200), np.zeros((6, 9))]), rcond=None)[0]
    directions = np.linalg.svd(augmented @ full, full_matrices=False)[2][:rank]
    expected = full @ directions.T @ directions
    assert fitted.first.shape == (rank, 6) and fitted.second.shape == (9, rank)
    assert (fitted.second @ fitted.first).numpy() == pytest.approx(expected.T, abs=1e-4)
    assert fitted.bias.numpy() == pytest.approx(y.mean(0) - x.mean(0) @ expected, abs=1e-3)
    assert sums.y_variance().numpy() == pytest.approx(y.var(0), rel=1e-4)


def test_a_rank_beyond_the_inputs_is_the_full_regression() -> None:
    x, y = torch.randn(50, 4), torch.randn(50, 7)
    sums = RegressionSums(4, 7, "cpu")
    sums.add(x, y)
    assert sums.fit(16).first.shape == (4, 4)
    with pytest.raises(ValueError, match="without rows"):
        RegressionSums(4, 7, "cpu").fit(2)


def sigmoid_loss(score: float, true: bool) -> float:
    probability = 1 / (1 + math.exp(-score))
    return -math.log(probability if true else 1 - probability)


def test_losses_are_their_formulas() -> None:
    scores = torch.randn(2, 3, 5)
    true = torch.rand(2, 3, 5) < 0.5
    sizes = torch.rand(2, 3, 5) * torch.tensor([0.1, 1.0, 1.0, 1.0, 30.0])
    expected: dict[str, list[float]] = {"bce": [], "energy_bce": [], "magnitude": []}
    for layer in range(2):
        terms: dict[str, list[float]] = {name: [] for name in expected}
        for row in range(3):
            energy = [float(size) ** 2 for size in sizes[layer, row]]
            mean_size = float(sizes[layer, row].mean())
            for j in range(5):
                plain = sigmoid_loss(float(scores[layer, row, j]), bool(true[layer, row, j]))
                weight = min(20.0, 0.1 + energy[j] / (sum(energy) / 5))
                relative = min(12.0, float(sizes[layer, row, j]) / mean_size)
                terms["bce"].append(plain)
                terms["energy_bce"].append(weight * plain)
                terms["magnitude"].append((float(scores[layer, row, j]) - math.sqrt(relative)) ** 2)
        for name, values in terms.items():
            expected[name].append(sum(values) / len(values))
    for name, values in expected.items():
        assert LOSSES[name](scores, LossTargets(true, sizes)).tolist() == pytest.approx(values, rel=1e-4), name


@pytest.mark.parametrize("loss", ["energy_bce", "magnitude"])
def test_losses_on_sizes_refuse_packed_labels(loss: str) -> None:
    with pytest.raises(ValueError, match=f"--loss {loss} needs activations.*use --loss bce"):
        LOSSES[loss](torch.zeros(1, 1, 2), LossTargets(torch.ones(1, 1, 2, dtype=torch.bool), None))


SMOLLM2 = LLAMA | {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
LLAMA_8B = LLAMA | {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32}
LLAMA_8B |= {"num_key_value_heads": 8}
OPT_7B = OPT | {"hidden_size": 4096, "ffn_dim": 16384, "num_attention_heads": 32, "word_embed_proj_dim": 4096}


@pytest.mark.parametrize("hf", [SMOLLM2, LLAMA_8B, OPT_7B], ids=["smollm2-135m", "llama-3.1-8b", "opt-6.7b"])
def test_auto_ranks_stay_near_their_share_of_the_mlps_bytes(hf: dict) -> None:
    config = from_hf_config(hf)
    matrices = (3 if config.gated_mlp else 2) * config.hidden_size * config.intermediate_size
    layer = config.layers[0]
    rank = auto_rank(layer.feed_forward, config.hidden_size)
    standin_rank = auto_standin_rank(layer.feed_forward, config.hidden_size)
    assert rank % 8 == 0 and standin_rank % 8 == 0
    share = rank * (config.hidden_size + config.intermediate_size) / matrices
    assert 0.045 < share < 0.052
    assert share + standin_rank * 2 * config.hidden_size / matrices < 0.081
    assert 1 <= auto_rank(layer.attention, config.hidden_size) <= config.num_key_value_heads


def test_auto_rank_of_the_embedded_model_is_64() -> None:
    config = from_hf_config(SMOLLM2)
    assert auto_rank(config.layers[0].feed_forward, config.hidden_size) == 64


@given(st.integers(2000, 6000), st.floats(0.01, 0.99), st.integers(0, 99))
def test_a_threshold_from_quantiles_keeps_the_density_on_the_sample(count: int, density: float, seed: int) -> None:
    values = torch.randn(count, generator=torch.Generator().manual_seed(seed)).exp()
    kept = float((values >= threshold_at(quantiles_of(values), density)).float().mean())
    assert kept == pytest.approx(density, abs=0.002)


def test_density_one_leaves_nothing_out_and_others_are_refused() -> None:
    quantiles = quantiles_of(torch.randn(10))
    assert threshold_at(quantiles, 1.0) == float("-inf")
    for density in (0.0, 1.1, float("nan")):
        with pytest.raises(ValueError, match=r"\(0, 1\]"):
            threshold_at(quantiles, density)


def test_a_predictor_uses_what_belongs_to_its_density() -> None:
    predictor = Predictor(4, 6, 2, densities=(0.5, 0.3), standin_rank=3)
    predictor.thresholds.copy_(torch.tensor([1.5, 2.5]))
    predictor.score_quantiles.copy_(torch.linspace(0, 10, predictor.score_quantiles.numel()))
    assert [predictor.threshold(density) for density in (0.5, 0.3)] == [1.5, 2.5]
    assert predictor.threshold(0.4) == pytest.approx(6.0)
    assert predictor.threshold(1.0) == float("-inf")
    assert [predictor.standin_index(density) for density in (0.9, 0.45, 0.35, 0.1, 1.0)] == [0, 0, 1, 1, None]
    scores = 2 * 4 + 6 * 2 + 6
    assert predictor.num_parameters_read(0.5) == scores + 3 * 4 + 4 * 3 + 4
    assert predictor.num_parameters_read(1.0) == scores
    for tensor in (predictor.first, predictor.second, predictor.bias, predictor.standin_in, predictor.standin_out):
        tensor.normal_()
    x = torch.randn(5, 4)
    assert torch.allclose(predictor.scores(x), x @ predictor.first.T @ predictor.second.T + predictor.bias)
    standin = x @ predictor.standin_in[1].T @ predictor.standin_out[1].T + predictor.standin_bias[1]
    assert torch.allclose(predictor.standin(x, 1), standin)


def test_large_means_beside_small_variances_do_not_fail_by_rounding() -> None:
    """Eigenvalues of the covariance far below what float32 products of such rows are rounded by."""
    generator = torch.Generator().manual_seed(0)
    x = 1.5 + 0.03 * torch.randn(64, 4, generator=generator) @ torch.randn(4, 32, generator=generator)
    y = (x - 1.5) @ torch.randn(32, 5, generator=generator)
    sums = RegressionSums(32, 5, "cpu")
    sums.add(x, y)
    sums.xx -= 2e-4 * torch.eye(32, dtype=torch.float64)  # rounding in its worst direction, on any machine
    fitted = sums.fit(4)
    found = x @ fitted.first.T @ fitted.second.T + fitted.bias
    assert float((found - y).square().mean()) < 0.05 * float(y.var(0).mean())
