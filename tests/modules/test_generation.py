"""Generation: equal to recomputing everything, and what a row gets does not depend on its neighbours."""

import math
from typing import Any

import pytest
import torch

from modules.decoder import Decoder
from modules.generation import decode_one_token, generate, prefill
from modules.requests import GenerationRequest, GenerationResult, GenerationTimings
from modules.sampling import SamplingParams
from modules.sparsity import ActiveSet, SelectionContext
from sparse_predictor.selection import apply_sparsity
from tests.modules.tiny_kinds import LLAMA, OPT, random_tokens
from tests.modules.tiny_models import tiny_decoder

LENGTHS = [9, 1, 17, 4, 1, 12]
NO_EOS: tuple[int, ...] = ()


@pytest.fixture(scope="module", params=["llama", "opt"])
def model(request: pytest.FixtureRequest) -> Decoder:
    return tiny_decoder({"llama": LLAMA, "opt": OPT}[request.param])


@pytest.fixture(scope="module")
def llama() -> Decoder:
    return tiny_decoder(LLAMA)


def prompts() -> list[list[int]]:
    return [row[:length] for row, length in zip(random_tokens(6, 17).tolist(), LENGTHS, strict=True)]


def requests(**options: Any) -> list[GenerationRequest]:
    return [GenerationRequest(prompt_token_ids=prompt, **options) for prompt in prompts()]


def greedy_by_recomputing(model: Decoder, prompt: list[int], max_new_tokens: int) -> tuple[list[int], list[float]]:
    token_ids, logprobs = list(prompt), []
    for _ in range(max_new_tokens):
        logits = model.logits(model(torch.tensor([token_ids])))[0, -1]
        token_ids.append(int(logits.argmax()))
        logprobs.append(float(logits.log_softmax(-1)[token_ids[-1]]))
    return token_ids[len(prompt) :], logprobs


def decode(token_ids: list[int], *, special: bool = False) -> str:
    """Four tokens in the alphabet of a stop string, the others one letter each; 0 is a special token."""
    pieces = {0: "<0>" if special else "", 10: "ST", 11: "O", 12: "P now", 13: "é"}
    return "".join(pieces.get(token, chr(97 + token % 8)) for token in token_ids)


def scripted(monkeypatch: pytest.MonkeyPatch, model: Decoder, script: list[int]) -> None:
    """Make generation write `script`, token by token."""

    def sample_script(logits: torch.Tensor, params: object, steps: list[int]) -> torch.Tensor:
        return torch.tensor([script[step] for step in steps])

    monkeypatch.setattr("modules.microbatch.sample", sample_script)


@pytest.mark.parametrize("batch_size", [1, 4, 6])
def test_greedy_equals_recomputing_the_whole_sequence(model: Decoder, batch_size: int) -> None:
    results = generate(model, requests(max_new_tokens=12), batch_size=batch_size, eos_token_ids=NO_EOS)
    for prompt, result in zip(prompts(), results, strict=True):
        token_ids, logprobs = greedy_by_recomputing(model, prompt, 12)
        assert result.token_ids == token_ids
        torch.testing.assert_close(torch.tensor(result.logprobs), torch.tensor(logprobs), rtol=0, atol=1e-4)
        assert result.finish_reason == "length" and result.num_prompt_tokens == len(prompt)


def test_ragged_prefill_and_decode_give_each_rows_own_logits(model: Decoder) -> None:
    cache = model.new_cache(6, 32)
    together = [prefill(model, prompts(), cache)]
    following = torch.tensor([20, 21, 22, 23, 24, 25])
    together += [decode_one_token(model, following + step, cache) for step in range(3)]
    for row, prompt in enumerate(prompts()):
        alone_cache = model.new_cache(1, 32)
        alone = [prefill(model, [prompt], alone_cache)]
        alone += [decode_one_token(model, following[row : row + 1] + step, alone_cache) for step in range(3)]
        for ours, theirs in zip(together, alone, strict=True):
            torch.testing.assert_close(ours[row], theirs[0], rtol=0, atol=1e-4)


def test_sampled_tokens_do_not_depend_on_batch_size_or_neighbours(model: Decoder) -> None:
    options = [
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=0.8, top_p=0.9, seed=2),
        SamplingParams(),
        SamplingParams(temperature=1.5, top_k=20, seed=3),
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=1.0, seed=5),
    ]
    # Different lengths, so that rows leave the batch at different times and the others move in the cache.
    mixed = [
        GenerationRequest(prompt_token_ids=prompt, sampling=sampling, max_new_tokens=count)
        for prompt, sampling, count in zip(prompts(), options, [7, 20, 3, 15, 11, 1], strict=True)
    ]
    alone = [generate(model, [request], eos_token_ids=NO_EOS)[0].token_ids for request in mixed]
    assert [len(token_ids) for token_ids in alone] == [7, 20, 3, 15, 11, 1]
    for batch_size in (2, 6):
        assert [r.token_ids for r in generate(model, mixed, batch_size=batch_size, eos_token_ids=NO_EOS)] == alone
    shuffled = generate(model, mixed[::-1], batch_size=4, eos_token_ids=NO_EOS)
    assert [result.token_ids for result in shuffled[::-1]] == alone


def test_generation_stops_at_any_of_several_eos_ids(llama: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, llama, [40, 41, 42, 43])
    for eos, expected in [([99, 42], [40, 41, 42]), ([40, 42], [40]), ([99], [40, 41, 42, 43])]:
        (result,) = generate(llama, requests(max_new_tokens=4)[:1], eos_token_ids=eos, decode=decode)
        assert result.token_ids == expected and len(result.logprobs) == len(expected)
        assert result.finish_reason == ("length" if 99 in eos and len(eos) == 1 else "stop")
        assert result.text == decode([token for token in expected if token not in eos]), "an EOS is no text"


def test_the_models_own_eos_is_the_default(llama: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, llama, [40, 2, 41])
    (result,) = generate(llama, requests(max_new_tokens=3)[:1])
    assert result.token_ids == [40, 2] and result.text is None


def test_a_stop_string_that_spans_tokens_ends_the_text_before_it(
    llama: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch, llama, [40, 10, 11, 12, 44, 45])
    options = {"max_new_tokens": 6, "stop": ("never", "STOP")}
    (result,) = generate(llama, requests(**options)[:1], decode=decode, eos_token_ids=NO_EOS)
    assert result.finish_reason == "stop"
    assert result.text == decode([40])
    assert result.token_ids == [40, 10, 11, 12], "up to and with the token that completed it"


def test_stop_strings_need_a_decoder(llama: Decoder) -> None:
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        generate(llama, requests(stop=("x",)))


def test_generation_ends_at_the_context_and_other_rows_go_on(llama: Decoder) -> None:
    long_prompt = random_tokens(1, 64)[0].tolist()
    batch = [
        GenerationRequest(prompt_token_ids=long_prompt[:60], max_new_tokens=30),
        GenerationRequest(prompt_token_ids=long_prompt[:5], max_new_tokens=30),
        GenerationRequest(prompt_token_ids=long_prompt, max_new_tokens=30),
    ]
    results = generate(llama, batch, eos_token_ids=NO_EOS)
    assert [len(result.token_ids) for result in results] == [4, 30, 0]
    assert [result.finish_reason for result in results] == ["length"] * 3
    assert results[1].token_ids == greedy_by_recomputing(llama, long_prompt[:5], 30)[0]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([5] * 65, "65 tokens do not fit the model's context of 64"),
        ([], "the prompt has no tokens"),
        ([5, 131], "token id 131 lies outside the vocabulary of 131"),
        ([-1], "token id -1"),
    ],
)
def test_a_prompt_that_cannot_run_fails_alone(llama: Decoder, bad: list[int], message: str) -> None:
    good = requests(max_new_tokens=4)
    batch = [good[0], GenerationRequest(prompt_token_ids=bad), good[1]]
    heard: dict[int, GenerationResult] = {}
    results = generate(llama, batch, eos_token_ids=NO_EOS, on_finish=heard.__setitem__)
    assert results[1].finish_reason == "error" and message in str(results[1].error)
    assert results[1].token_ids == [] and results[1].num_prompt_tokens == len(bad)
    for result, prompt in ((results[0], prompts()[0]), (results[2], prompts()[1])):
        assert result.token_ids == greedy_by_recomputing(llama, prompt, 4)[0] and result.error is None
    assert [heard[idx] for idx in range(3)] == results


def test_echo_puts_none_and_then_the_log_softmax_of_the_logits_before(model: Decoder) -> None:
    results = generate(model, requests(max_new_tokens=3, echo=True), batch_size=6, eos_token_ids=NO_EOS)
    for prompt, result in zip(prompts(), results, strict=True):
        token_ids = prompt + result.token_ids
        logits = model.logits(model(torch.tensor([token_ids])))[0]
        expected = [float(logits[i - 1].log_softmax(-1)[token_ids[i]]) for i in range(1, len(token_ids))]
        assert result.prompt_logprobs is not None and result.prompt_logprobs[0] is None
        found = [*result.prompt_logprobs, *result.logprobs]
        assert len(found) == len(token_ids)
        torch.testing.assert_close(torch.tensor(found[1:]), torch.tensor(expected), rtol=0, atol=1e-4)


def test_no_new_tokens_scores_the_prompt_only(llama: Decoder) -> None:
    results = generate(llama, requests(max_new_tokens=0, echo=True), batch_size=4)
    assert all(result.token_ids == [] and result.finish_reason == "length" for result in results)
    assert [len(result.prompt_logprobs or []) for result in results] == LENGTHS


def test_broken_activations_stop_the_run_and_name_the_request() -> None:
    model = tiny_decoder(LLAMA)
    with torch.no_grad():
        model.embeddings.tokens.weight[77] = math.nan
    batch = [
        GenerationRequest(prompt_token_ids=[5, 6]),
        GenerationRequest(prompt_token_ids=[77], request_id="mine"),
    ]
    with pytest.raises(ValueError, match="request 'mine': .*not finite"):
        generate(model, batch)


def test_densities_are_each_rows_own_and_of_its_decode_steps() -> None:
    model = tiny_decoder(LLAMA)

    class HalfForSomeTokens:
        """Half of the neurons where the first input is positive, all of them elsewhere; decode steps only."""

        lookahead = 0

        def select(self, hidden_states: torch.Tensor, context: SelectionContext) -> ActiveSet | None:
            if context.phase != "decode":
                return None
            all_of_them = hidden_states[:, 0, :1] < 0
            return ActiveSet(all_of_them | (torch.arange(80) < 40))

    stats = apply_sparsity(model, {(layer, "mlp"): HalfForSomeTokens() for layer in range(3)})
    counts = [6, 2, 1, 9, 4, 7]
    batch = [
        GenerationRequest(prompt_token_ids=prompt, max_new_tokens=count)
        for prompt, count in zip(prompts(), counts, strict=True)
    ]
    together = generate(model, batch, batch_size=6, eos_token_ids=NO_EOS)
    alone = [generate(model, [request], eos_token_ids=NO_EOS)[0] for request in batch]
    assert [result.mlp_density for result in together] == [result.mlp_density for result in alone]
    assert len({result.mlp_density for result in together}) > 2
    assert together[2].mlp_density == 1.0, "no decode step: its dense prompt"
    assert all(result.head_density == 1.0 for result in together)
    assert stats.executions()["gather"] > 0 and model.stats is stats and not stats.row_counts


def test_callbacks_and_timings_hear_of_every_token(llama: Decoder) -> None:
    heard: dict[int, list[tuple[int, float]]] = {}
    timings = GenerationTimings()
    results = generate(
        llama,
        requests(max_new_tokens=5),
        batch_size=4,
        eos_token_ids=NO_EOS,
        on_token=lambda idx, token_id, logprob: heard.setdefault(idx, []).append((token_id, logprob)),
        timings=timings,
    )
    for idx, result in enumerate(results):
        assert heard[idx] == list(zip(result.token_ids, result.logprobs, strict=True))
        assert result.time_to_first_token_ms is not None and result.time_to_first_token_ms > 0
        assert result.time_per_output_token_ms is not None and result.time_per_output_token_ms > 0
    assert timings.prefill_tokens == sum(LENGTHS) and timings.decode_tokens == 6 * 4
    assert timings.prefill_tokens_per_s > 0 and timings.decode_tokens_per_s > 0
