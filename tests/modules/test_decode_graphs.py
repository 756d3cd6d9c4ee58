"""Decode steps of static shape: equal to eager decoding, whatever sizes are replayed in what order.

Without a GPU a graph is played by the step itself, run anew into the outputs of the first run: padded rows, static
inputs, the look at the whole cache and what a capture must put back are the same. The `cuda` tests capture for real.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from modules.checkpoint import random_model
from modules.config import ModelConfig
from modules.decode_graphs import DecodeGraphs, StepOutputs
from modules.decoder import Decoder
from modules.generation import generate, prefill
from modules.requests import GenerationRequest
from modules.sampling import SamplingParams
from tests.modules.tiny_kinds import LLAMA, OPT, random_tokens
from tests.modules.tiny_models import tiny_decoder

LENGTHS = [9, 1, 17, 4, 12]


def played(step: Callable[[], StepOutputs], device: torch.device, pool: Any) -> tuple[Callable[[], None], StepOutputs]:
    """In the place of `capture`: the same contract without a GPU."""
    for _ in range(2):
        step()
    outputs = step()

    def replay() -> None:
        fresh = step()
        for old, new in ((outputs.logits, fresh.logits), (outputs.greedy, fresh.greedy)):
            assert old is not None and new is not None
            old.copy_(new)

    return replay, outputs


@pytest.fixture
def graphs_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("modules.decode_graphs.capture", played)
    monkeypatch.setattr("modules.generation.can_capture", lambda model: not model.is_sparse)
    yield


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


def test_rows_that_sample_take_their_logits_from_the_graph(graphs_on_a_cpu: None) -> None:
    model = tiny_decoder(LLAMA, dtype=torch.float64)
    sampled = requests(sampling=SamplingParams(temperature=1.0, seed=3))
    together = generate(model, sampled, batch_size=3, eos_token_ids=())
    alone = [generate(model, [each], eos_token_ids=())[0] for each in sampled]
    assert [each.token_ids for each in together] == [each.token_ids for each in alone]


def compare_with_eager(model: Decoder, tolerance: float) -> None:
    """Replay sizes in mixed order, with rows in use that are not replayed, against eager steps of the same cache."""
    cache = model.new_cache(8, 64)
    prompts = random_tokens(5, 20).tolist()
    fresh = cache.fresh_rows(range(5))
    prefill(model, [row[:length] for row, length in zip(prompts, LENGTHS, strict=True)], fresh)
    keys, values = cache.keys.clone(), cache.values.clone()
    graphs = DecodeGraphs(model, cache)
    for num_rows in (3, 1, 5, 2, 5, 3):
        cache.keys.copy_(keys)
        cache.values.copy_(values)
        tokens = list(range(20, 20 + num_rows))
        logits, greedy = graphs.run(tokens, LENGTHS[:num_rows])
        assert logits is not None and greedy is not None
        others = slice(num_rows, 5)
        # Rows behind the replayed ones are as they were, but for position 0 of those that pad the size (in generation
        # no request is in these).
        for states, before in ((cache.keys, keys), (cache.values, values)):
            for row in range(*others.indices(8)):
                kept = slice(1 if row < graphs.size_for(num_rows) else 0, LENGTHS[row])
                assert torch.equal(states[:, row, :, kept], before[:, row, :, kept])
        device = model.device
        view = cache.first_rows(num_rows, torch.tensor(LENGTHS[:num_rows], device=device), max(LENGTHS[:num_rows]))
        view.has_static_shapes = False
        hidden_states = model(torch.tensor(tokens, device=device)[:, None], cache=view, phase="decode")
        eager = model.logits(hidden_states[:, 0])
        torch.testing.assert_close(logits, eager, rtol=0, atol=tolerance)
        assert greedy[0].tolist() == logits.argmax(-1).tolist() and bool(greedy[2].all())
        expected = logits.double().log_softmax(-1).amax(-1)
        torch.testing.assert_close(greedy[1], expected, rtol=0, atol=1e-5)


@torch.inference_mode()
def test_graphs_of_several_sizes_replayed_in_mixed_order_equal_eager_steps(graphs_on_a_cpu: None) -> None:
    compare_with_eager(tiny_decoder(LLAMA, dtype=torch.float64), 1e-9)


@pytest.mark.cuda
@torch.inference_mode()
def test_captured_graphs_replayed_in_mixed_order_equal_eager_steps() -> None:
    config = ModelConfig.from_hf(LLAMA)
    compare_with_eager(random_model(config, std=0.2, device="cuda"), 1e-3)


@pytest.mark.cuda
def test_generation_in_captured_graphs_equals_the_cpu() -> None:
    config = ModelConfig.from_hf(LLAMA)
    on_cpu = random_model(config, std=0.2)
    on_gpu = random_model(config, std=0.2, device="cuda")
    on_gpu.load_state_dict(on_cpu.state_dict())
    for warm_up in (False, True):
        found = generate(on_gpu, requests(), batch_size=3, eos_token_ids=(), warm_up=warm_up)
        for ours, theirs in zip(found, generate(on_cpu, requests(), eos_token_ids=()), strict=True):
            assert ours.token_ids == theirs.token_ids
            torch.testing.assert_close(torch.tensor(ours.logprobs), torch.tensor(theirs.logprobs), rtol=0, atol=1e-3)
