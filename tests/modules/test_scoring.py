"""Log-probabilities and perplexity: aligned, complete, and independent of batches and chunks."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import modules.scoring
from modules.decoder import Decoder
from modules.scoring import Likelihood, check_window, score_tokens, score_windows, token_logprobs, windows_likelihood
from tests.modules.tiny_kinds import LLAMA, OPT, random_tokens
from tests.modules.tiny_models import tiny_decoder, tiny_hf_model


@pytest.fixture(scope="module")
def model() -> Decoder:
    return tiny_decoder(LLAMA)


def reference_logprobs(model: Decoder, token_ids: list[int]) -> torch.Tensor:
    logits = model.logits(model(torch.tensor([token_ids])))[0]
    return torch.stack([logits[i - 1].log_softmax(-1)[token_ids[i]] for i in range(1, len(token_ids))])


def test_logprob_i_is_the_log_softmax_of_the_logits_before_it(model: Decoder) -> None:
    token_ids = random_tokens(1, 20)
    (found,) = token_logprobs(model, token_ids)
    assert found.dtype == torch.float32 and found.shape == (19,)
    torch.testing.assert_close(found, reference_logprobs(model, token_ids[0].tolist()), rtol=0, atol=1e-5)


def test_ragged_batches_score_as_each_sequence_alone(model: Decoder) -> None:
    rows = random_tokens(6, 40).tolist()
    sequences = [row[:length] for row, length in zip(rows, [40, 1, 2, 17, 33, 5], strict=True)]
    for batch_size in (1, 4, 8):
        together = token_logprobs(model, sequences, batch_size=batch_size)
        assert [len(scores) for scores in together] == [39, 0, 1, 16, 32, 4]
        for sequence, scores in zip(sequences, together, strict=True):
            if len(sequence) > 1:
                torch.testing.assert_close(scores, reference_logprobs(model, sequence), rtol=0, atol=1e-4)


def test_logits_are_made_in_chunks_that_change_nothing(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    token_ids = random_tokens(3, 30)
    whole = token_logprobs(model, token_ids)
    monkeypatch.setattr(modules.scoring, "_LOGITS_AT_ONCE", 7 * 131)
    sizes = []
    logits = model.logits

    def counting_logits(states: torch.Tensor) -> torch.Tensor:
        sizes.append(states.shape[0])
        return logits(states)

    monkeypatch.setattr(model, "logits", counting_logits)
    chunked = token_logprobs(model, token_ids)
    assert max(sizes) == 7 and sum(sizes) == 87
    torch.testing.assert_close(chunked, whole, rtol=0, atol=1e-5)


def test_greedy_flags_mark_the_models_first_choice(model: Decoder) -> None:
    token_ids = random_tokens(1, 12)[0].tolist()
    logits = model.logits(model(torch.tensor([token_ids])))[0]
    token_ids[6] = int(logits[5].argmax())
    logits = model.logits(model(torch.tensor([token_ids])))[0]
    expected = [int(logits[i - 1].argmax()) == token_ids[i] for i in range(1, 12)]
    assert expected[5] and not all(expected)
    assert score_tokens(model, [token_ids])[0].greedy.tolist() == expected


@pytest.mark.parametrize(
    ("sequence", "message"),
    [([5] * 65, "sequence 1: 65 tokens do not fit the model's context of 64"), ([5, 131], "token id 131 lies outside")],
)
def test_sequences_that_cannot_be_scored_are_named(model: Decoder, sequence: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        token_logprobs(model, [[1, 2], sequence])


def test_broken_activations_are_an_error_and_not_a_score() -> None:
    model = tiny_decoder(LLAMA)
    with torch.no_grad():
        model.mlp(1).down_proj.weight[3, 4] = math.nan
    with pytest.raises(ValueError, match="sequence 0: .*not finite"):
        token_logprobs(model, random_tokens(1, 5))


@given(st.integers(0, 60), st.integers(2, 20), st.data())
def test_strided_windows_score_every_token_after_the_first_once(length: int, window: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, window - 1))
    text = list(range(length))
    scored: list[int] = []
    for piece in score_windows(text, window, stride):
        assert len(piece.token_ids) <= window and 1 <= piece.num_context < len(piece.token_ids)
        assert piece.token_ids == text[piece.token_ids[0] : piece.token_ids[0] + len(piece.token_ids)]
        if scored:
            assert piece.num_context >= window - stride
        scored += piece.token_ids[piece.num_context :]
    assert scored == text[1:]


@given(st.integers(0, 60), st.integers(2, 20))
def test_windows_without_overlap_leave_out_the_first_token_of_each(length: int, window: int) -> None:
    scored = [token for piece in score_windows(list(range(length)), window) for token in piece.token_ids[1:]]
    assert scored == [token for token in range(length) if token % window]


@pytest.mark.parametrize(("window", "stride"), [(1, 1), (8, 0), (8, 9)])
def test_impossible_windows_are_refused(window: int, stride: int) -> None:
    with pytest.raises(ValueError, match="window must be at least 2 and stride lie in"):
        list(score_windows([1, 2, 3], window, stride))


@pytest.mark.parametrize("hf_config", [LLAMA, OPT], ids=["llama", "opt"])
def test_perplexity_is_hugging_faces_loss(hf_config: dict[str, object]) -> None:
    text = random_tokens(1, 100)[0].tolist()
    hf_model, model = tiny_hf_model(hf_config), tiny_decoder(hf_config)
    total, count = 0.0, 0
    for start in range(0, 100, 32):
        ids = torch.tensor([text[start : start + 32]])
        total += float(hf_model(ids, labels=ids).loss) * (ids.shape[1] - 1)
        count += ids.shape[1] - 1
    for batch_size in (1, 3):
        found = windows_likelihood(model, score_windows(text, 32), batch_size=batch_size)
        assert found.num_tokens == count
        assert math.isclose(found.nll_sum, total, rel_tol=1e-5)
    # With a stride: as Hugging Face's guide does it, labels masked for what an earlier window has scored.
    total = 0.0
    for start in (0, 20, 40, 60, 80):
        ids = torch.tensor([text[start : start + 32]])
        labels = ids.clone()
        labels[0, : 12 if start else 0] = -100
        num_scored = int((labels[0, 1:] != -100).sum())
        total += float(hf_model(ids, labels=labels).loss) * num_scored
    strided = windows_likelihood(model, score_windows(text, 32, 20))
    assert strided.num_tokens == 99
    assert math.isclose(strided.nll_sum, total, rel_tol=1e-5)


def test_each_window_is_reported_and_one_beyond_the_context_refused(model: Decoder) -> None:
    text = random_tokens(1, 100)[0].tolist()
    heard: list[Likelihood] = []
    windows = score_windows(text[:48], 16)
    found = windows_likelihood(model, windows, batch_size=2, on_window=lambda _, part: heard.append(part))
    assert [part.num_tokens for part in heard] == [15, 15, 15]
    assert math.isclose(sum(heard, Likelihood()).nll_sum, found.nll_sum)
    with pytest.raises(ValueError, match="window 65 does not fit the model's context of 64"):
        check_window(model, 65)


def test_likelihoods_merge_and_nothing_scored_is_an_error() -> None:
    merged = Likelihood(2.0, 2) + Likelihood(4.0, 1)
    assert math.isclose(merged.perplexity, math.exp(2.0))
    assert Likelihood(1e6, 1).perplexity == math.inf
    with pytest.raises(ValueError, match="no token was scored"):
        _ = Likelihood().perplexity
