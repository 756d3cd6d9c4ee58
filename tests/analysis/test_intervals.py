"""Intervals against numbers worked out by hand, and how they are printed."""

from __future__ import annotations

import math

import pytest

from analysis.intervals import Estimate, difference, mean_with_interval, rank_correlation, share_of_gain, with_interval


def estimate(value: float, low: float | None, high: float | None) -> Estimate:
    return Estimate(value=value, low=low, high=high)


def test_a_mean_of_three_has_a_t_interval_with_two_degrees_of_freedom() -> None:
    found = mean_with_interval([0.1, 0.2, 0.3])
    # Standard deviation 0.1, so 4.3027 * 0.1 / sqrt(3) = 0.24842.
    assert (found.value, found.low, found.high) == pytest.approx((0.2, 0.2 - 0.24842, 0.2 + 0.24842), abs=1e-5)


def test_one_value_has_no_interval_and_no_value_no_mean() -> None:
    assert mean_with_interval([0.3]) == estimate(0.3, None, None)
    assert mean_with_interval([0.3]).holds_zero
    with pytest.raises(ValueError, match="at least one value"):
        mean_with_interval([])


def test_the_difference_of_two_estimates_adds_their_errors_in_squares() -> None:
    found = difference(estimate(0.9, 0.87, 0.92), estimate(0.5, 0.48, 0.54))
    # 0.4 - hypot(0.03, 0.04) and 0.4 + hypot(0.02, 0.02).
    assert (found.value, found.low, found.high) == pytest.approx((0.4, 0.35, 0.4 + math.sqrt(8e-4)))
    assert difference(estimate(0.9, None, None), estimate(0.5, 0.4, 0.6)).low is None


def test_a_share_of_a_gain_comes_from_the_far_ends_of_both_intervals() -> None:
    found = share_of_gain(estimate(0.1, 0.05, 0.15), estimate(0.4, 0.2, 0.5))
    # 0.1 / 0.4, 0.05 / 0.5, 0.15 / 0.2.
    assert found == estimate(pytest.approx(0.25), pytest.approx(0.1), pytest.approx(0.75))
    # What is certainly negative is most so of the smallest gain.
    worse = share_of_gain(estimate(-0.1, -0.2, -0.05), estimate(0.4, 0.2, 0.5))
    assert worse == estimate(pytest.approx(-0.25), pytest.approx(-1.0), pytest.approx(-0.1))


def test_a_share_lies_within_its_interval_and_there_is_none_where_there_may_be_no_gain() -> None:
    assert share_of_gain(estimate(0.1, 0.05, 0.15), estimate(0.1, 0.0, 0.3)) is None
    unmeasured = share_of_gain(estimate(0.1, None, None), estimate(0.3, 0.2, 0.4))
    assert unmeasured is not None and unmeasured.high is None
    numbers = (-0.2, -0.05, 0.0, 0.1, 0.3)
    triples = [(low + 0.4 * (high - low), low, high) for low in numbers for high in numbers if low <= high]
    shares = [share_of_gain(estimate(*part), estimate(*gain)) for part in triples for gain in triples]
    found = [share for share in shares if share is not None]
    assert 20 < len(found) < len(shares)
    for share in found:
        assert share.low is not None and share.high is not None
        assert share.low - 1e-12 <= share.value <= share.high + 1e-12


def test_rank_correlation_and_its_interval() -> None:
    # Ranks 1 2 3 4 5 against 2 1 4 3 5: 1 - 6 * 4 / (5 * 24) = 0.8.
    found = rank_correlation([(1, 20), (2, 10), (3, 40), (4, 30), (9, 50)])
    half = 1.959964 * math.sqrt((1 + 0.8**2 / 2) / 2)
    expected = (0.8, math.tanh(math.atanh(0.8) - half), math.tanh(math.atanh(0.8) + half))
    assert (found.value, found.low, found.high) == pytest.approx(expected)
    # Ties share a rank: 1.5 1.5 3 4 against 1 2 3 4.
    assert rank_correlation([(1, 1), (1, 2), (2, 3), (3, 4)]).value == pytest.approx(4.5 / math.sqrt(4.5 * 5))
    assert rank_correlation([(1, 1), (1, 2), (1, 3), (1, 4)]) == estimate(0.0, -1.0, 1.0)
    with pytest.raises(ValueError, match="at least four pairs, not 3"):
        rank_correlation([(1, 1), (2, 2), (3, 3)])


def test_ends_are_rounded_outwards_to_two_digits_of_the_width() -> None:
    assert with_interval(estimate(0.1234, 0.11841, 0.12899), "points", scale=100) == "12.3 points [11.8, 12.9]"
    assert with_interval(estimate(0.1234, 0.11801, 0.12801), "points", scale=100) == "12.3 points [11.8, 12.9]"
    assert with_interval(estimate(-0.002, -0.00412, 0.00012), signed=True) == "-0.0020 [-0.0042, +0.0002]"
    assert with_interval(estimate(20.0, 19.0, 21.0)) == "20.0 [19.0, 21.0]"
    assert with_interval(estimate(0.9, 0.9, 0.9), "%", scale=100) == "90 % [90, 90]"
    assert with_interval(estimate(0.12345, None, None), "nats") == "0.1235 nats (no interval)"
