"""Intervals over windows: how often they hold the truth, what they keep paired, and what they leave out."""

from __future__ import annotations

import math

import pytest
import torch

from data.bootstrap import NUM_RESAMPLES, Resampling, ratio
from data.student_t import t_quantile


@pytest.mark.parametrize(
    ("probability", "degrees_of_freedom", "printed"),
    [
        (0.975, 1, 12.706), (0.975, 2, 4.303), (0.975, 3, 3.182), (0.975, 4, 2.776), (0.975, 10, 2.228),
        (0.975, 120, 1.980), (0.95, 2, 2.920), (0.995, 2, 9.925), (0.995, 5, 4.032), (0.5, 7, 0.0),
    ],
)  # fmt: skip
def test_quantiles_of_t_are_those_of_the_printed_table(
    probability: float, degrees_of_freedom: int, printed: float
) -> None:
    assert t_quantile(probability, degrees_of_freedom) == pytest.approx(printed, abs=6e-4)


@pytest.mark.parametrize(("probability", "degrees_of_freedom"), [(0.4, 2), (1.0, 2), (0.975, 0)])
def test_quantiles_that_there_are_not_are_refused(probability: float, degrees_of_freedom: int) -> None:
    with pytest.raises(ValueError, match="no t quantile at"):
        t_quantile(probability, degrees_of_freedom)


@pytest.mark.parametrize("num_windows", [2, 4, 8, 24])
def test_intervals_of_few_windows_hold_the_true_mean_as_often_as_they_say(num_windows: int) -> None:
    source = torch.Generator().manual_seed(num_windows)
    texts = torch.randn(600, num_windows, generator=source, dtype=torch.float64)
    resampling = Resampling(num_windows, seed=0)
    means = resampling.totals(texts) / num_windows
    held = 0
    for mean, resampled in zip(texts.mean(1).tolist(), means, strict=True):
        low, high = resampling.interval(mean, resampled)
        held += low <= 0 <= high
    # Plain percentiles hold it 0.48, 0.81, 0.90 and 0.93 of the time; the standard error here is 0.009.
    assert 0.925 <= held / 600 <= 0.98


def test_ends_lie_as_far_from_the_estimate_as_students_t_is_wider() -> None:
    windows = torch.tensor([1.0, 2.0, 4.0, 9.0])
    resampling = Resampling(4, seed=0)
    resampled = resampling.totals(windows) / 4
    low, high = torch.quantile(resampled, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    wider = 3.18245 / 1.95996 * math.sqrt(4 / 3)
    expected = (4 - wider * (4 - low), 4 + wider * (high - 4))
    assert resampling.interval(4.0, resampled) == pytest.approx(expected, rel=1e-4)


def test_an_interval_holds_its_estimate_where_all_draws_lie_to_one_side() -> None:
    resampled = torch.linspace(2.0, 3.0, 101, dtype=torch.float64)
    low, high = Resampling(5, seed=0).interval(1.0, resampled)
    assert low == 1.0 and high > 3.0


def test_draws_are_a_function_of_the_seed_and_differences_are_paired() -> None:
    found, true = torch.tensor([30.0, 44, 25, 38, 41, 29]), torch.tensor([60.0, 70, 50, 60, 62, 55])
    resampling = Resampling(6, seed=0)
    assert resampling.times_drawn.shape == (NUM_RESAMPLES, 6) and (resampling.times_drawn.sum(1) == 6).all()
    # A constant difference has no uncertainty when paired, whatever that of its parts.
    less = resampling.ratios(found, true) - resampling.ratios(found - 0.1 * true, true)
    assert resampling.interval(0.1, less) == pytest.approx((0.1, 0.1))
    assert torch.equal(Resampling(6, seed=0).times_drawn, resampling.times_drawn)
    assert not torch.equal(Resampling(6, seed=1).times_drawn, resampling.times_drawn)


def test_draws_that_hold_nothing_to_measure_say_nothing() -> None:
    resampling = Resampling(3, seed=0)
    numerators, denominators = torch.tensor([0.0, 1.0, 3.0]), torch.tensor([0.0, 2.0, 4.0])
    ratios = resampling.ratios(numerators, denominators)
    empty = resampling.times_drawn[:, 0] == 3
    assert empty.any() and torch.equal(ratios.isnan(), empty)
    assert resampling.interval(4 / 6, ratios) == resampling.interval(4 / 6, ratios[~empty])
    assert float(ratio(torch.tensor(0.0), torch.tensor(0.0))) == 1.0
    assert resampling.interval(1.0, resampling.ratios(torch.zeros(3), torch.zeros(3))) == (1.0, 1.0)


def test_one_window_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2 windows of text, got 1; give more text"):
        Resampling(1, seed=0)
