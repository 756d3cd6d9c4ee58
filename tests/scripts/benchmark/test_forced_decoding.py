"""Perplexity through decode steps is the perplexity of a prefill in which every token selects for itself."""

from pathlib import Path

import pytest
import torch

from modules.decoder import Decoder
from modules.scoring import Likelihood, Window, score_windows, windows_likelihood
from scripts.benchmark import decode_steps
from scripts.benchmark.decode_steps import forced_likelihood
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
