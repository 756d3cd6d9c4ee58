"""Decode steps by themselves: forced text has the likelihood of a masked prefill, bare replays are a generation's."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from modules import graphs
from modules.decoder import Decoder
from modules.generation import generate
from modules.requests import GenerationRequest
from modules.scoring import Likelihood, Window, score_windows, windows_likelihood
from scripts.benchmark import decode_steps
from scripts.benchmark.decode_steps import bare_step_ms, forced_likelihood
from scripts.benchmark.random_models import Sizes, attach_random
from sparse_predictor.selection import Selection
from tests.modules.played_graphs import play_graphs
from tests.modules.tiny_kinds import LLAMA, random_tokens
from tests.modules.tiny_models import tiny_decoder

SIZES = Sizes(predictor_rank=8, standin_rank=8, lookahead=1)


def windows() -> list[Window]:
    """Of 12 tokens and one of 7, some with context."""
    text = random_tokens(1, 43)[0].tolist()
    return [*score_windows(text, 12), *score_windows(text[:20], 12, 8)]


def sparse_model(folder: Path) -> Decoder:
    model = tiny_decoder(LLAMA, dtype=torch.float64)
    selection = Selection(
        method="predictor", predictors=folder, mlp_density=0.4, head_density=0.5, sparse_phases="all", seed=1
    )
    attach_random(model, selection, SIZES, random_tokens(4, 12), lambda: [], num_rounds=0)
    return model


@pytest.mark.parametrize("in_graphs", [False, True])
@pytest.mark.parametrize("sparse", [False, True])
def test_forced_decoding_has_the_likelihood_of_a_masked_prefill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sparse: bool, in_graphs: bool
) -> None:
    model = sparse_model(tmp_path) if sparse else tiny_decoder(LLAMA, dtype=torch.float64)
    expected = windows_likelihood(model, windows())
    if in_graphs:
        play_graphs(monkeypatch)
        monkeypatch.setattr(decode_steps, "can_capture", lambda model: True)
    found = forced_likelihood(model, windows(), batch_size=3)
    assert found.num_tokens == expected.num_tokens
    assert found.nll_sum == pytest.approx(expected.nll_sum, rel=0, abs=1e-9)


def test_no_window_has_no_likelihood_and_bad_logits_are_refused() -> None:
    model = tiny_decoder(LLAMA)
    assert forced_likelihood(model, []) == Likelihood()
    model.lm_head.weight.data[3] = float("nan")
    with pytest.raises(ValueError, match="not finite"):
        forced_likelihood(model, windows())


class WallEvent:
    """A device event where there is no device."""

    def __init__(self, enable_timing: bool) -> None:
        self.time_s = 0.0

    def record(self) -> None:
        self.time_s = time.perf_counter()

    def elapsed_time(self, later: "WallEvent") -> float:
        return 1000.0 * (later.time_s - self.time_s)


@pytest.mark.parametrize("sparse", [False, True])
def test_the_last_token_is_that_of_the_generation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sparse: bool
) -> None:
    model = sparse_model(tmp_path) if sparse else tiny_decoder(LLAMA, dtype=torch.float64)
    requests = [GenerationRequest(prompt_token_ids=row, max_new_tokens=9) for row in random_tokens(2, 7).tolist()]
    expected = [result.token_ids for result in generate(model, requests, eos_token_ids=())]
    made: list[Any] = []

    class Kept(graphs.DecodeGraphs):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

    play_graphs(monkeypatch)
    monkeypatch.setattr(decode_steps, "DecodeGraphs", Kept)
    monkeypatch.setattr(decode_steps, "can_capture", lambda model: True)
    monkeypatch.setattr(torch.cuda, "Event", WallEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    found = bare_step_ms(model, requests, repetitions=2)
    assert found is not None and found > 0.0
    (step,) = made[0]._steps.values()
    # Eight steps follow the prefill's token; the last has left its choice as the next one's input.
    assert step.inputs[graphs._TOKEN].tolist() == [token_ids[-1] for token_ids in expected]
    assert step.inputs[graphs._LENGTH].tolist() == [7 + 8] * 2


def test_where_steps_are_no_graphs_there_is_no_number() -> None:
    requests = [GenerationRequest(prompt_token_ids=[3, 4], max_new_tokens=2)]
    assert bare_step_ms(tiny_decoder(LLAMA), requests, repetitions=1) is None
