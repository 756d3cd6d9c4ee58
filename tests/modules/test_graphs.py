"""Decode steps of static shape: equal to eager decoding, whatever sizes are replayed in what order, and whatever step
ran ahead in vain.

Without a GPU a graph is played by the step itself, run anew into the outputs of the first run: padded rows, static
inputs, the look at the whole cache and what a capture must put back are the same. The `cuda` tests capture for real.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from modules.checkpoint.load import random_model
from modules.decoder import Decoder
from modules.families.registry import from_hf_config
from modules.generation import generate, prefill
from modules.graphs import DecodeGraphs, StepInputs
from modules.requests import GenerationRequest, GenerationResult
from modules.sampling import SamplingParams
from tests.modules.played_graphs import PlayedGraphs, greedy_step, play_graphs
from tests.modules.tiny_kinds import LLAMA, OPT, random_tokens
from tests.modules.tiny_models import tiny_decoder

LENGTHS = [9, 1, 17, 4, 12]


@pytest.fixture
def graphs_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> PlayedGraphs:
    return play_graphs(monkeypatch)


def requests(**options: Any) -> list[GenerationRequest]:
    """Ragged, of different lengths, so that rows leave and others take their places while graphs are in use."""
    tokens = random_tokens(5, 20).tolist()
    counts = [7, 12, 3, 9, 5]
    return [
        GenerationRequest(prompt_token_ids=ids[:length], max_new_tokens=count, **options)
        for ids, length, count in zip(tokens, LENGTHS, counts, strict=True)
    ]


@pytest.mark.parametrize("hf_config", [LLAMA, OPT], ids=["llama", "opt"])
@pytest.mark.parametrize("batch_size", [1, 3, 5])
@pytest.mark.parametrize("warm_up", [False, True])
def test_generation_in_graphs_equals_eager_generation(
    hf_config: dict[str, Any], batch_size: int, warm_up: bool, request: pytest.FixtureRequest
) -> None:
    model = tiny_decoder(hf_config, dtype=torch.float64)
    eager = [generate(model, [each], eos_token_ids=())[0] for each in requests()]
    request.getfixturevalue("graphs_on_a_cpu")
    found = generate(model, requests(), batch_size=batch_size, eos_token_ids=(), warm_up=warm_up)
    for ours, theirs in zip(found, eager, strict=True):
        assert ours.token_ids == theirs.token_ids
        torch.testing.assert_close(torch.tensor(ours.logprobs), torch.tensor(theirs.logprobs), rtol=0, atol=1e-9)


SAMPLING = [
    SamplingParams(temperature=1.0, seed=3),
    SamplingParams(),
    SamplingParams(temperature=0.8, top_p=0.9, seed=-2),
    SamplingParams(temperature=1.5, top_k=20, seed=2**63 + 5),
    SamplingParams(temperature=1.0, top_k=9, top_p=0.5, seed=3),
]


def test_rows_sample_in_the_graph_as_they_do_alone_while_others_come_and_go(graphs_on_a_cpu: PlayedGraphs) -> None:
    model = tiny_decoder(LLAMA, dtype=torch.float64)
    mixed = [replace(each, sampling=sampling) for each, sampling in zip(requests(), SAMPLING, strict=True)]
    eos = range(0, 131, 5)  # so that rows end without notice, too
    alone = [eager_alone(model, request, eos) for request in mixed]
    assert {theirs.finish_reason for theirs in alone} == {"stop", "length"}
    for batch_size in (1, 3, 5):
        found = generate(model, mixed, batch_size=batch_size, eos_token_ids=eos)
        for ours, theirs in zip(found, alone, strict=True):
            assert ours.token_ids == theirs.token_ids and ours.finish_reason == theirs.finish_reason
            assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-9)
    assert graphs_on_a_cpu.steps_ahead("used") > 0 and graphs_on_a_cpu.steps_ahead("discarded") > 0


def eager_alone(model: Decoder, request: GenerationRequest, eos: Sequence[int]) -> GenerationResult:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("modules.generation.can_capture", lambda model: False)
        return generate(model, [request], batch_size=1, eos_token_ids=eos)[0]


def test_each_step_but_the_first_runs_before_it_is_asked_for(graphs_on_a_cpu: PlayedGraphs) -> None:
    model = tiny_decoder(LLAMA, dtype=torch.float64)
    passes = []
    model.first_norm.register_forward_hook(lambda *_: passes.append(1))  # type: ignore[union-attr]
    asked = [replace(each, max_new_tokens=9) for each in requests()[:2]]
    first, second = generate(model, asked, batch_size=2, eos_token_ids=(), warm_up=True)
    assert graphs_on_a_cpu.made[0].steps_ahead == {"used": 7, "discarded": 0}
    # The first tokens are the prompt's; a step that fills the rows up is not run past.
    warm_up = 1 + 3 * graphs_on_a_cpu.num_captured
    assert len(passes) == warm_up + 1 + 8
    # When a row ends without notice, the step ahead of the others is in vain.
    eos = next(each for each in first.token_ids[1:] if each not in second.token_ids)
    cut = generate(model, asked, batch_size=2, eos_token_ids=[eos])
    assert cut[0].finish_reason == "stop" and cut[0].token_ids == first.token_ids[: len(cut[0].token_ids)]
    assert cut[1].token_ids == second.token_ids
    assert graphs_on_a_cpu.made[1].steps_ahead == {"used": 6, "discarded": 1}


def test_ranks_that_share_layers_run_ahead_in_greedy_steps_only(graphs_on_a_cpu: PlayedGraphs) -> None:
    model = tiny_decoder(LLAMA, dtype=torch.float64)
    mixed = [replace(each, sampling=sampling) for each, sampling in zip(requests(), SAMPLING, strict=True)]
    whole = generate(model, mixed, batch_size=3, eos_token_ids=())
    greedy = generate(model, requests(), batch_size=3, eos_token_ids=())
    model.shards["lm_head.weight"] = object()  # type: ignore[assignment]
    sampling = [each for each in mixed if each.sampling.temperature]
    for asked, expected in ((mixed, whole), (requests(), greedy), (sampling, None)):
        found = generate(model, asked, batch_size=3, eos_token_ids=())
        assert expected is None or [each.token_ids for each in found] == [each.token_ids for each in expected]
    of_whole, of_part = graphs_on_a_cpu.made[1].steps_ahead, graphs_on_a_cpu.made[3].steps_ahead
    assert of_part == of_whole and of_part["used"] > 0
    assert graphs_on_a_cpu.made[4].steps_ahead == {"used": 0, "discarded": 0}


@pytest.mark.parametrize(("sampled", "num_steps"), [([], 4), ([1], 8), ([0, 1, 2, 3, 4], 4)])
def test_a_warm_up_captures_what_will_be_needed(
    graphs_on_a_cpu: PlayedGraphs, sampled: list[int], num_steps: int
) -> None:
    model = tiny_decoder(LLAMA, dtype=torch.float64)
    mixed = [
        replace(each, sampling=SAMPLING[0] if place in sampled else SamplingParams())
        for place, each in enumerate(requests())
    ]
    generate(model, mixed, batch_size=5, eos_token_ids=(), warm_up=True)
    assert graphs_on_a_cpu.num_captured == num_steps, "rows 1, 2, 4, 5, each as the requests are"


def test_broken_logits_of_a_graph_stop_the_run_and_name_the_request(graphs_on_a_cpu: PlayedGraphs) -> None:
    model = tiny_decoder(LLAMA)
    asked = [replace(each, max_new_tokens=6, request_id=f"number {place}") for place, each in enumerate(requests()[:2])]
    results = generate(model, asked, eos_token_ids=())
    seen = {*asked[0].prompt_token_ids, *asked[1].prompt_token_ids, *results[0].token_ids, *results[1].token_ids[:2]}
    broken = next(token_id for token_id in results[1].token_ids[2:-1] if token_id not in seen)
    with torch.no_grad():
        model.embeddings.tokens.weight[broken] = torch.nan
    for sampling in (SamplingParams(), SamplingParams(temperature=1e-6)):
        with pytest.raises(ValueError, match="request 'number 1': .*batch row 1 .*not finite"):
            generate(model, [replace(each, sampling=sampling) for each in asked], eos_token_ids=())


def test_generation_in_graphs_ends_at_the_context(graphs_on_a_cpu: PlayedGraphs) -> None:
    model = tiny_decoder(LLAMA, dtype=torch.float64)
    tokens = random_tokens(1, 64)[0].tolist()
    asked = [GenerationRequest(prompt_token_ids=tokens[:length], max_new_tokens=30) for length in (60, 5, 63, 64)]
    found = generate(model, asked, batch_size=3, eos_token_ids=())
    assert [len(each.token_ids) for each in found] == [4, 30, 1, 0]
    assert [each.token_ids for each in found] == [eager_alone(model, each, ()).token_ids for each in asked]


@pytest.mark.parametrize(
    "other", [{"lengths": [4]}, {"steps": [9]}, {"sampling": [SamplingParams(temperature=1.0, seed=8)]}]
)
@torch.inference_mode()
def test_a_step_ahead_is_not_taken_for_one_of_the_same_token_elsewhere(
    graphs_on_a_cpu: PlayedGraphs, other: dict[str, Any]
) -> None:
    """Another row may have come to the same token, at another length or step, or sampled otherwise."""
    model = tiny_decoder(LLAMA, dtype=torch.float64)
    prompt = random_tokens(1, 9)[0].tolist()
    found = []
    for ahead in (True, False):
        cache = model.new_cache(1, 64)
        prefill(model, [prompt], cache.fresh_rows(range(1)))
        graphs = DecodeGraphs(model, cache)
        inputs = StepInputs([5], [9], [1], [SamplingParams(temperature=1.0, seed=3)])
        first = graphs.run(inputs, ahead=ahead)
        assert first is not None
        result = graphs.run(replace(inputs.followed_by(first.token_ids), **other))
        assert result is not None
        found.append((result.token_ids, result.logprobs, result.logits.tolist()))
        assert graphs.steps_ahead == {"used": 0, "discarded": int(ahead)}
    assert found[0] == found[1]


def compare_with_eager(model: Decoder, tolerance: float) -> None:
    """Replay sizes in mixed order, with rows in use that are not replayed, against eager steps of the same cache."""
    cache = model.new_cache(8, 64)
    prompts = random_tokens(5, 20).tolist()
    fresh = cache.fresh_rows(range(5))
    prefill(model, [row[:length] for row, length in zip(prompts, LENGTHS, strict=True)], fresh)
    first = [states.clone() for states in cache.states]
    graphs = DecodeGraphs(model, cache)
    for num_rows in (3, 1, 5, 2, 5, 3):
        for states, before in zip(cache.states, first, strict=True):
            states.copy_(before)
        tokens = list(range(20, 20 + num_rows))
        found = graphs.run(greedy_step(tokens, LENGTHS[:num_rows]))
        assert found is not None
        others = slice(num_rows, 5)
        # Rows behind the replayed ones are as they were, but for position 0 of those that pad the size (in generation
        # no request is in these).
        for states, before in zip(cache.states, first, strict=True):
            for row in range(*others.indices(8)):
                kept = slice(1 if row < graphs.size_for(num_rows) else 0, LENGTHS[row])
                assert torch.equal(states[row, :, kept], before[row, :, kept])
        device = model.device
        view = cache.first_rows(num_rows, torch.tensor(LENGTHS[:num_rows], device=device), max(LENGTHS[:num_rows]))
        view.has_static_shapes = False
        hidden_states = model(torch.tensor(tokens, device=device)[:, None], cache=view, phase="decode")
        eager = model.logits(hidden_states[:, 0])
        torch.testing.assert_close(found.logits, eager, rtol=0, atol=tolerance)
        assert found.token_ids == found.logits.argmax(-1).tolist() and all(found.finite)
        expected = found.logits.double().log_softmax(-1).amax(-1).tolist()
        assert found.logprobs == pytest.approx(expected, abs=1e-5)


@torch.inference_mode()
def test_graphs_of_several_sizes_replayed_in_mixed_order_equal_eager_steps(graphs_on_a_cpu: PlayedGraphs) -> None:
    compare_with_eager(tiny_decoder(LLAMA, dtype=torch.float64), 1e-9)


@pytest.mark.cuda
@torch.inference_mode()
def test_captured_graphs_replayed_in_mixed_order_equal_eager_steps() -> None:
    config = from_hf_config(LLAMA)
    compare_with_eager(random_model(config, std=0.2, device="cuda"), 1e-3)


@pytest.mark.cuda
def test_generation_in_captured_graphs_equals_the_cpu() -> None:
    config = from_hf_config(LLAMA)
    on_cpu = random_model(config, std=0.2)
    on_gpu = random_model(config, std=0.2, device="cuda")
    on_gpu.load_state_dict(on_cpu.state_dict())
    mixed = [replace(each, sampling=sampling) for each, sampling in zip(requests(), SAMPLING, strict=True)]
    for asked, warm_up in ((requests(), False), (requests(), True), (mixed, False), (mixed, True)):
        found = generate(on_gpu, asked, batch_size=3, eos_token_ids=(), warm_up=warm_up)
        for ours, theirs in zip(found, generate(on_cpu, asked, eos_token_ids=()), strict=True):
            assert ours.token_ids == theirs.token_ids
            torch.testing.assert_close(torch.tensor(ours.logprobs), torch.tensor(theirs.logprobs), rtol=0, atol=1e-3)
