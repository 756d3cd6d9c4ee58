"""GRIFFIN's neurons: those of the prompt while decoding, those of a text's first half where it is scored."""

from typing import Any

import pytest
import torch
from torch import Tensor

from modules.decoder import Decoder
from modules.generation import generate
from modules.requests import GenerationRequest
from modules.scoring import Window, score_windows, windows_likelihood
from modules.sparsity import SparsityStats
from pipeline_parallel.mesh import ParallelMesh
from scripts.answerer import score_continuations
from sparse_predictor.methods.griffin import PromptSelector
from sparse_predictor.selection import Selection, attach_selection, remove_sparsity
from tests.modules.played_graphs import play_graphs
from tests.modules.tiny_kinds import KINDS, random_tokens
from tests.modules.tiny_models import tiny_decoder

LENGTHS, COUNTS = [9, 1, 17, 4, 12], [7, 12, 3, 9, 5]


def attach(model: Decoder, phases: str = "all", density: float = 0.3) -> SparsityStats:
    return attach_selection(model, Selection(method="griffin", mlp_density=density, sparse_phases=phases))  # type: ignore


def requests() -> list[GenerationRequest]:
    tokens = random_tokens(5, 20).tolist()
    return [
        GenerationRequest(prompt_token_ids=ids[:length], max_new_tokens=count)
        for ids, length, count in zip(tokens, LENGTHS, COUNTS, strict=True)
    ]


def neurons_of(activations: Tensor, count: int) -> Tensor:
    """Section 4 of the paper, word by word: activations [tokens, F] of a prompt -> bool [F]."""
    relative = activations / activations.norm(dim=1, keepdim=True)
    statistic = relative.square().sum(0).sqrt()
    return statistic >= statistic.sort(descending=True).values[count - 1]


def masked(model: Decoder, token_ids: Tensor, num_prompt: int) -> Tensor:
    """Hidden states [1, T, D] of a text whose tokens from `num_prompt` on run on the neurons of those before."""

    def mask(module: Any, args: Any, activations: Tensor) -> Tensor:
        kept = neurons_of(activations[0, :num_prompt], 24).to(activations)
        return torch.cat([activations[:, :num_prompt], activations[:, num_prompt:] * kept], 1)

    handles = [model.mlp(layer).activations.register_forward_hook(mask) for layer in model.layers]
    with torch.no_grad():
        found = model(token_ids)
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("kind", ["llama", "opt"])
def test_what_is_decoded_runs_on_the_neurons_of_its_own_prompt(kind: str) -> None:
    model = tiny_decoder(KINDS[kind], dtype=torch.float64)
    count = model.config.intermediate_size
    attach(model, "decode", 24 / count)
    found = generate(model, requests(), batch_size=3, eos_token_ids=())
    for request, result in zip(requests(), found, strict=True):
        remove_sparsity(model)
        text = torch.tensor([[*request.prompt_token_ids, *result.token_ids]])
        states = masked(model, text, len(request.prompt_token_ids))
        logits = model.logits(states[0, len(request.prompt_token_ids) - 1 : -1]).log_softmax(-1)
        assert logits.argmax(-1).tolist() == result.token_ids
        assert logits.amax(-1).tolist() == pytest.approx(result.logprobs, abs=1e-9)
        if len(result.token_ids) > 1:
            assert result.mlp_density == pytest.approx(24 / count)


@pytest.mark.parametrize("phases", ["decode", "all"])
def test_neighbours_and_graphs_change_nothing(phases: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_decoder(KINDS["llama"], dtype=torch.float64)
    attach(model, phases)
    alone = generate(model, requests(), batch_size=1, eos_token_ids=())
    expected = [(each.token_ids, each.mlp_density) for each in alone]
    for batch_size in (2, 5):
        together = generate(model, requests(), batch_size=batch_size, eos_token_ids=())
        assert [(each.token_ids, each.mlp_density) for each in together] == expected
    with monkeypatch.context() as patch:
        seen = play_graphs(patch)
        played = generate(model, requests(), batch_size=3, eos_token_ids=(), warm_up=True)
    assert seen.steps_ahead("used") > 0
    assert [(each.token_ids, each.mlp_density) for each in played] == expected
    remove_sparsity(model)
    dense = generate(model, requests(), batch_size=1, eos_token_ids=())
    assert [each.token_ids for each in dense] != [each.token_ids for each in alone]
    assert [each.token_ids[0] for each in dense] == [each.token_ids[0] for each in alone], "the prompt is dense"


def test_a_scored_text_runs_its_second_half_on_the_neurons_of_its_first() -> None:
    model = tiny_decoder(KINDS["llama"], dtype=torch.float64)
    tokens, lengths = random_tokens(3, 15), torch.tensor([15, 1, 8])
    expected = [
        masked(model, ids[None, :length], max(1, length // 2))
        for ids, length in zip(tokens, lengths.tolist(), strict=True)
    ]
    stats = attach(model)
    with torch.no_grad():
        found = model(tokens, num_tokens=lengths)
    for row, (states, length) in enumerate(zip(expected, lengths.tolist(), strict=True)):
        assert float((found[row, :length] - states[0]).abs().max()) < 1e-9
    dense_tokens = 7 + 1 + 4
    assert stats.densities("mlp") == pytest.approx([(dense_tokens * 80 + 12 * 24) / (24 * 80)] * 3)
    attach(model, "decode")
    with torch.no_grad():
        phases = model(tokens)
    remove_sparsity(model)
    with torch.no_grad():
        assert torch.equal(phases, model(tokens)), "decode: scored text is dense"


def test_a_continuation_runs_on_the_neurons_of_the_context_it_was_given() -> None:
    model, launch = tiny_decoder(KINDS["llama"], dtype=torch.float64), ParallelMesh.single("cpu")
    tokens = random_tokens(4, 15).tolist()
    tokens[3] = tokens[0]  # the same text, but another part of it is the context
    asked = [Window(ids, len(ids) - scored) for ids, scored in zip(tokens, (5, 1, 14, 9), strict=True)]
    expected = []
    for one in asked:
        num_context = one.num_context
        states = masked(model, torch.tensor([one.token_ids[:-1]]), num_context if num_context > 1 else 14 // 2)
        logprobs = model.logits(states[0, num_context - 1 :]).log_softmax(-1)
        expected.append(float(logprobs.gather(1, torch.tensor(one.token_ids[num_context:])[:, None]).sum()))
    stats = attach(model)
    for batch_size in (1, 4):
        found = score_continuations(model, launch, asked, batch_size=lambda tokens, size=batch_size: size)
        assert [score for score, _ in found] == pytest.approx(expected, abs=1e-9)
    dense = 10 + 14 + 7 + 6  # the tokens of each context, or half of a text without one
    assert stats.densities("mlp") == pytest.approx([(dense * 80 + (4 * 14 - dense) * 24) / (4 * 14 * 80)] * 3)
    remove_sparsity(model)


def test_a_window_runs_on_the_neurons_of_what_it_conditions_on() -> None:
    model = tiny_decoder(KINDS["llama"], dtype=torch.float64)
    text = random_tokens(1, 22)[0].tolist()
    windows = list(score_windows(text, 12, 5))
    assert [piece.num_context for piece in windows] == [1, 7, 7]
    expected = 0.0
    for piece in windows:
        prompt = 7 if piece.num_context > 1 else 11 // 2
        states = masked(model, torch.tensor([piece.token_ids[:-1]]), prompt)
        logprobs = model.logits(states[0]).log_softmax(-1).gather(1, torch.tensor(piece.token_ids[1:])[:, None])
        expected -= float(logprobs[piece.num_context - 1 :].sum())
    attach(model)
    assert windows_likelihood(model, windows, batch_size=3).nll_sum == pytest.approx(expected, abs=1e-9)
    remove_sparsity(model)


def test_without_a_prompt_there_is_nothing_to_go_by() -> None:
    model = tiny_decoder(KINDS["llama"])
    ids = random_tokens(1, 1)
    with torch.no_grad():
        dense = model(ids, cache=model.new_cache(1, 4), phase="decode")
        attach(model)
        assert isinstance(model.mlp(0).selector, PromptSelector)
        assert torch.equal(model(ids, cache=model.new_cache(1, 4), phase="decode"), dense)
