"""Sampling: each row its own options, the right distribution, and draws that nothing but (seed, step) moves."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from modules.sampling import (
    NonFiniteLogitsError,
    SamplingParams,
    greedy,
    kept_tokens,
    mix_seed,
    sample,
    sample_on_device,
    stream_of,
    stream_uniforms,
    uniform,
)

VOCAB = 11
LOGITS = torch.log(torch.tensor([0.02, 0.3, 0.05, 0.2, 0.01, 0.15, 0.07, 0.1, 0.04, 0.05, 0.01]))


def draws(logits: torch.Tensor, params: SamplingParams, num_draws: int) -> torch.Tensor:
    """Counts [V] of the tokens drawn at steps 0 .. num_draws - 1."""
    token_ids = sample(logits.expand(num_draws, -1), [params] * num_draws, list(range(num_draws)))
    return torch.bincount(token_ids, minlength=logits.shape[-1])


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    expected = probabilities * counts.sum()
    return float(((counts - expected)[expected > 0].square() / expected[expected > 0]).sum())


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_follow_the_distribution_at_this_temperature(temperature: float) -> None:
    counts = draws(LOGITS, SamplingParams(temperature=temperature, seed=5), 20_000)
    # 10 degrees of freedom: 99.9 % of samples stay below 29.6.
    assert chi_square(counts, torch.softmax(LOGITS / temperature, 0)) < 29.6


def test_top_k_and_top_p_draw_from_the_renormalised_rest() -> None:
    top_k = draws(LOGITS, SamplingParams(temperature=1.0, top_k=3, seed=1), 20_000)
    expected = torch.tensor([0, 0.3, 0, 0.2, 0, 0.15, 0, 0, 0, 0, 0]) / 0.65
    assert set(top_k.nonzero().flatten().tolist()) == {1, 3, 5}
    assert chi_square(top_k, expected) < 13.8  # 2 degrees of freedom
    both = draws(LOGITS, SamplingParams(temperature=1.0, top_k=3, top_p=0.5, seed=1), 2_000)
    assert set(both.nonzero().flatten().tolist()) == {1, 3}, "top_p is a share of what top_k keeps"


@pytest.mark.parametrize("limits", [{}, {"top_k": 9}, {"top_p": 0.9999}, {"top_k": 3, "top_p": 0.5}])
@pytest.mark.parametrize(("min_p", "temperature"), [(0.2, 0.5), (0.2, 3.0), (1.0, 1.0)])
def test_min_p_keeps_what_hugging_face_keeps(limits: dict[str, Any], min_p: float, temperature: float) -> None:
    scores = TemperatureLogitsWarper(temperature)(None, LOGITS[None])
    warpers = [TopKLogitsWarper(limits["top_k"])] if "top_k" in limits else []
    warpers += [TopPLogitsWarper(limits["top_p"])] if "top_p" in limits else []
    for warp in [*warpers, MinPLogitsWarper(min_p)]:
        scores = warp(None, scores)
    expected = scores[0].softmax(-1)
    params = SamplingParams(temperature=temperature, min_p=min_p, seed=2, **limits)
    counts = draws(LOGITS, params, 4_000)
    assert counts[expected == 0].sum() == 0
    assert chi_square(counts, expected) < 29.6


def test_top_k_minus_one_means_all_and_one_means_greedy() -> None:
    everything = draws(LOGITS, SamplingParams(temperature=3.0, top_k=-1, top_p=1.0), 5_000)
    assert (everything > 0).all()
    assert draws(LOGITS, SamplingParams(temperature=3.0, top_k=1), 100).argmax() == 1
    assert SamplingParams(top_k=0) == SamplingParams(top_k=-1)
    assert draws(LOGITS, SamplingParams(temperature=1.0, top_k=500), 2_000).count_nonzero() > 8, "more than there are"
    assert int((draws(LOGITS, SamplingParams(temperature=1e-6), 100) > 0).sum()) == 1


def test_equally_likely_tokens_at_the_border_are_kept_by_lowest_id() -> None:
    weights = torch.tensor([[0.5, 1.0, 0.5, 0.5, 0.5]])
    values, token_ids = kept_tokens(weights, [SamplingParams(temperature=1.0, top_k=3)])
    assert token_ids[values > 0].tolist() == [1, 0, 2]
    assert greedy(torch.tensor([[1.0, 7.0, 7.0, 7.0]])).tolist() == [1]


# Not closer to 1 than the slack of the test's own sum.
TOP_P = st.one_of(st.floats(0.01, 1 - 1e-9), st.just(1.0))


@given(st.integers(1, 400), TOP_P, st.sampled_from([-1, 1, 7, 150]), st.floats(0.1, 30.0))
def test_kept_set_equals_a_full_sort(vocab_size: int, top_p: float, top_k: int, spread: float) -> None:
    weights = torch.rand(3, vocab_size, generator=torch.Generator().manual_seed(vocab_size)).pow(spread)
    weights = weights / weights.amax(-1, keepdim=True)
    values, token_ids = kept_tokens(weights, [SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p)] * 3)
    for row in range(3):
        order = sorted(range(vocab_size), key=lambda token: (-float(weights[row, token]), token))
        order = order[: vocab_size if top_k == -1 else top_k]
        total, kept, reached = math.fsum(float(weights[row, token]) for token in order), [], 0.0
        for token in order:
            if reached >= top_p * total * (1 - 1e-12) and top_p < 1.0:
                break
            kept.append(token)
            reached += float(weights[row, token])
        kept = [token for token in kept if weights[row, token] > 0]
        assert token_ids[row][values[row] > 0].tolist() == kept


def test_rows_of_a_batch_have_their_own_options_and_draws() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 500, generator=generator) * 3
    params = [
        SamplingParams(),
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=1.0, top_k=5, seed=1),
        SamplingParams(temperature=0.7, top_p=0.8, seed=2),
        SamplingParams(temperature=2.0, seed=3),
        SamplingParams(temperature=1.0, top_k=400, top_p=0.999, seed=4),
    ]
    steps = [0, 3, 1, 4, 1, 5]
    together = sample(logits, params, steps).tolist()
    alone = [int(sample(logits[row : row + 1], [params[row]], [steps[row]])) for row in range(6)]
    assert together == alone
    assert together[0] == int(logits[0].argmax())
    backwards = sample(logits.flip(0), params[::-1], steps[::-1]).tolist()
    assert backwards[::-1] == together


def test_uniform_numbers_are_uniform_and_differ_by_seed_and_step() -> None:
    numbers = torch.tensor([uniform(seed, step) for seed in range(50) for step in range(100)], dtype=torch.float64)
    assert ((numbers >= 0) & (numbers < 1)).all()
    assert len(numbers.unique()) == 5000
    bins = torch.bincount((numbers * 10).long(), minlength=10)
    assert chi_square(bins, torch.full((10,), 0.1)) < 27.9
    by_seed = numbers.view(50, 100)
    assert abs(torch.corrcoef(by_seed).fill_diagonal_(0)).max() < 0.5
    assert uniform(7, 3) == uniform(7, 3) and mix_seed(-1, 0) != mix_seed(1, 0)


def test_uniform_numbers_of_a_device_are_those_of_the_host() -> None:
    seeds = [0, 1, 7, -1, 2**62, 2**63 + 9, 2**64 - 1, 2**70 + 3]
    steps = [0, 1, 2, 63, 4095, 10**6, 5, 5]
    streams = torch.tensor([stream_of(seed) for seed in seeds])
    for shift in range(50):
        found = stream_uniforms(streams, torch.tensor(steps) + shift)
        assert found.tolist() == [uniform(seed, step + shift) for seed, step in zip(seeds, steps, strict=True)]


def drawn_on_device(
    logits: torch.Tensor, params: list[SamplingParams], steps: list[int], *, limited: bool = True
) -> list[int]:
    streams = torch.tensor([stream_of(row.seed) for row in params])
    return sample_on_device(
        logits,
        torch.tensor([row.temperature for row in params], dtype=torch.float64),
        torch.tensor([row.top_k for row in params]),
        torch.tensor([row.top_p for row in params], dtype=torch.float64),
        torch.tensor([row.min_p for row in params], dtype=torch.float64),
        stream_uniforms(streams, torch.tensor(steps)),
        limited=limited,
    ).tolist()


OPTIONS = [
    SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    for seed, temperature in enumerate([0.0, 1e-300, 1e-6, 0.7, 1.0, 30.0])
    for top_k in (-1, 1, 2, 7, 10_000)
    for top_p in (1e-9, 0.3, 0.5, 0.95, 1 - 1e-9, 1.0)
    for min_p in (0.0, 0.1)
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [1, 11, 300])
def test_the_draw_of_a_device_is_that_of_the_host(dtype: torch.dtype, vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    random = torch.randn(len(OPTIONS), vocab_size, generator=generator, dtype=torch.float64) * 4
    tied = random.round()  # few values, so that borders fall among equals
    banned = random.masked_fill(torch.rand(random.shape, generator=generator) < 0.5, -math.inf)
    banned[:, -1] = 0.5
    for kind in (random, tied, banned, torch.zeros_like(random)):
        logits, steps = kind.to(dtype), list(range(len(OPTIONS)))
        assert drawn_on_device(logits, OPTIONS, steps) == sample(logits, OPTIONS, steps).tolist()


def test_rows_without_limits_are_drawn_without_sorting(monkeypatch: pytest.MonkeyPatch) -> None:
    unlimited = [options for options in OPTIONS if not options.is_limited]
    assert {options.temperature for options in unlimited} == {options.temperature for options in OPTIONS}
    logits = torch.randn(len(unlimited), 300, generator=torch.Generator().manual_seed(5)) * 4
    steps = list(range(len(unlimited)))
    expected = drawn_on_device(logits, unlimited, steps)
    monkeypatch.setattr(torch.Tensor, "sort", None)
    assert drawn_on_device(logits, unlimited, steps, limited=False) == expected


@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_broken_logits_give_a_device_some_id_of_the_vocabulary(bad: float, limited: bool) -> None:
    logits = torch.full((len(OPTIONS), VOCAB), bad)
    drawn = drawn_on_device(logits, OPTIONS, [3] * len(OPTIONS), limited=limited)
    assert all(0 <= token_id < VOCAB for token_id in drawn)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_broken_logits_are_an_error_that_names_the_row(bad: float) -> None:
    logits = torch.zeros(3, VOCAB)
    logits[1, 4] = bad
    for params in (SamplingParams(), SamplingParams(temperature=1.0)):
        with pytest.raises(NonFiniteLogitsError, match="batch row 1 .*not finite") as error:
            sample(logits, [params] * 3, [0] * 3)
        assert error.value.rows == [1]


def test_minus_infinity_is_never_chosen_and_alone_an_error() -> None:
    logits = torch.full((1, VOCAB), -math.inf)
    with pytest.raises(NonFiniteLogitsError):
        sample(logits, [SamplingParams()], [0])
    logits[0, 3] = -50.0
    for top_k in (-1, 5):
        params = SamplingParams(temperature=5.0, top_k=top_k)
        assert set(sample(logits.expand(200, -1), [params] * 200, list(range(200))).tolist()) == {3}


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": -0.1}, {"temperature": math.nan}, {"top_k": -2}, {"top_p": 0.0}, {"top_p": 1.01}]
    + [{"min_p": -0.1}, {"min_p": 1.5}, {"repetition_penalty": 0.0}, {"no_repeat_ngram_size": -1}]
    + [{"bad_words_ids": ((),)}],
)
def test_impossible_options_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SamplingParams(**wrong)
