"""Penalties: token by token what Hugging Face's `generate` does with them, whoever shares the batch."""

import math
from functools import cache
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
)

from modules.decoder import Decoder
from modules.generation import _log_penalties, generate
from modules.requests import GenerationRequest
from modules.sampling import SamplingParams, TokenHistory, penalised
from scripts.command_line import configure_logging
from tests.modules.played_graphs import PlayedGraphs, play_graphs
from tests.modules.tiny_kinds import LLAMA, random_tokens
from tests.modules.tiny_models import tiny_decoder, tiny_hf_model

LENGTHS = [9, 1, 17, 4, 12]
NEW_TOKENS = 24
# Few tokens in the prompts and the plain answers, so that there is something to repeat.
PROMPTS = [(row[:length] % 11 + 3).tolist() for row, length in zip(random_tokens(5, 17), LENGTHS, strict=True)]
PENALTIES: dict[str, dict[str, Any]] = {
    "none": {},
    "repetition": {"repetition_penalty": 1.5},
    "reward": {"repetition_penalty": 0.7},
    "bigrams": {"no_repeat_ngram_size": 2},
    "single-tokens": {"no_repeat_ngram_size": 1},
    "trigrams": {"no_repeat_ngram_size": 3},
    "words": {"bad_words_ids": ((5,), (107,), (30, 31), (107, 32, 5))},
    "all": {"repetition_penalty": 1.2, "no_repeat_ngram_size": 2, "bad_words_ids": ((5,), (30, 31))},
}


@cache
def theirs() -> PreTrainedModel:
    return tiny_hf_model(LLAMA)


@cache
def ours() -> Decoder:
    return tiny_decoder(LLAMA)


@cache
def followed_words(kind: str) -> dict[str, Any]:
    """The penalties; bad words are what the plain model would write, so that they matter."""
    found = dict(PENALTIES[kind])
    if "bad_words_ids" in found:
        plain = [hugging_face("none", tuple(prompt)) for prompt in PROMPTS]
        found["bad_words_ids"] += (
            (plain[0][2],),
            tuple(plain[1][3:5]),
            tuple(plain[2][4:7]),
            (PROMPTS[3][-1], plain[3][0]),
        )
    return found


@cache
def hugging_face(kind: str, prompt: tuple[int, ...]) -> list[int]:
    """What `generate` of a batch of one writes."""
    options = {
        name: [*map(list, value)] if isinstance(value, tuple) else value for name, value in followed_words(kind).items()
    }
    ids = torch.tensor([prompt])
    found = theirs().generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        **options,
    )
    return found[0, len(prompt) :].tolist()


def requests(kind: str, **options: Any) -> list[GenerationRequest]:
    sampling = SamplingParams(**followed_words(kind), **options)
    return [
        GenerationRequest(prompt_token_ids=prompt, max_new_tokens=NEW_TOKENS, sampling=sampling) for prompt in PROMPTS
    ]


@pytest.mark.parametrize("kind", ["none", "repetition", "trigrams", "words", "all"])
def test_greedy_text_is_that_of_hugging_face_in_ragged_batches(kind: str) -> None:
    found = generate(ours(), requests(kind), batch_size=2, eos_token_ids=())
    expected = [hugging_face(kind, tuple(prompt)) for prompt in PROMPTS]
    assert [result.token_ids for result in found] == expected
    if kind != "none":
        changed = [hugging_face("none", tuple(prompt)) != text for prompt, text in zip(PROMPTS, expected, strict=True)]
        assert any(changed), "a penalty that changes nothing shows nothing"


@pytest.mark.parametrize("kind", ["all"])
def test_log_probabilities_stay_those_of_the_model(kind: str) -> None:
    for prompt, result in zip(PROMPTS, generate(ours(), requests(kind), eos_token_ids=()), strict=True):
        logits = ours().logits(ours()(torch.tensor([prompt + result.token_ids])))[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(result.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(result.logprobs), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("sampled", [False, True])
def test_steps_in_graphs_take_the_penalties_and_none_runs_ahead(
    sampled: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logging()
    _log_penalties.cache_clear()
    options = {"temperature": 0.8, "top_k": 20, "min_p": 0.01, "seed": 4} if sampled else {}
    model = tiny_decoder(LLAMA, dtype=torch.float64)
    # One row without penalties among them.
    batch = [*requests("all", **options), *requests("none", **options)[:1]]
    alone = [generate(model, [one], eos_token_ids=())[0].token_ids for one in batch]
    seen: PlayedGraphs = play_graphs(monkeypatch)
    found = generate(model, batch, batch_size=3, eos_token_ids=(), warm_up=True)
    assert [result.token_ids for result in found] == alone
    assert seen.made and seen.steps_ahead("used") == seen.steps_ahead("discarded") == 0
    generate(model, batch, batch_size=3, eos_token_ids=())
    told = capsys.readouterr().err
    assert told.count("the host chooses each token, since it knows those before; no decode step runs ahead") == 1


@pytest.mark.parametrize("kind", [kind for kind in PENALTIES if kind != "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_penalised_logits_are_those_of_hugging_faces_processors(kind: str, dtype: torch.dtype) -> None:
    penalties, generator = PENALTIES[kind], torch.Generator().manual_seed(3)
    processors = LogitsProcessorList()
    if "repetition_penalty" in penalties:
        processors.append(RepetitionPenaltyLogitsProcessor(penalties["repetition_penalty"]))
    if "no_repeat_ngram_size" in penalties:
        processors.append(NoRepeatNGramLogitsProcessor(penalties["no_repeat_ngram_size"]))
    if "bad_words_ids" in penalties:
        processors.append(NoBadWordsLogitsProcessor([*map(list, penalties["bad_words_ids"])], eos_token_id=2))
    for length in (1, 2, 3, 40):
        logits = torch.randn(4, 131, generator=generator).to(dtype)
        logits[:, 9] = -math.inf
        texts = torch.randint(3, 12, (4, length), generator=generator)
        texts[0, -1:], texts[1, -2:] = 30, torch.tensor([107, 32])[-length:]
        histories = [TokenHistory(SamplingParams(**penalties), text) for text in texts[:, :-1].tolist()]
        for history, token_id in zip(histories, texts[:, -1].tolist(), strict=True):
            history.add(token_id)
        found = penalised(logits, [*histories[:3], None])
        expected = processors(texts, logits.float())
        torch.testing.assert_close(found[:3], expected[:3], rtol=1e-6, atol=0)
        assert torch.equal(found[3], logits[3].float())


def test_forbidding_every_token_is_an_error_that_names_the_request() -> None:
    banned = SamplingParams(bad_words_ids=tuple((token_id,) for token_id in range(131)))
    batch = [*requests("none")[:1], GenerationRequest(prompt_token_ids=[5], sampling=banned, request_id="mine")]
    with pytest.raises(ValueError, match="request 'mine': no_repeat_ngram_size or bad_words_ids forbid every token"):
        generate(ours(), batch)
