"""Logits of every kind, and what PyTorch makes of them."""

import torch
from torch import Tensor

from modules.kernels.greedy_choice import greedy_choice
from modules.sampling import greedy
from modules.scoring import chosen_logprobs
from tests.modules.kernels.norm_linear_cases import poisoned

VOCAB_SIZES = (1, 5, 1024, 3001)
INF, NAN = float("inf"), float("nan")


def logits_of_every_kind(vocab_size: int) -> Tensor:
    """[9, V]: plain, all equal, ties, far from 0, -inf here and there, -inf throughout, NaN, inf, both of these."""
    logits = torch.randn(9, vocab_size) * 5
    last = vocab_size - 1
    logits[1] = 2.5
    logits[2, last] = logits[2, vocab_size // 2] = logits[2].max() + 1
    logits[3] += 1e4
    logits[4, 1:] = -INF
    logits[5] = -INF
    logits[6, last] = NAN
    logits[7, last // 2] = INF
    logits[8, last] = INF
    logits[8, last // 2] = NAN
    return logits


def assert_choice_is_pytorchs(logits: Tensor) -> None:
    """Tokens and finiteness to the letter, log-probabilities to what float32 can tell."""
    with poisoned():
        token_ids, logprobs, finite = greedy_choice(logits)
    assert token_ids.dtype == torch.float64
    assert token_ids.tolist() == greedy(logits).tolist()
    good = logits.amax(-1).isfinite()
    assert finite.tolist() == good.double().tolist()
    expected = chosen_logprobs(logits.double(), greedy(logits))
    assert logprobs[~good].isnan().all()
    torch.testing.assert_close(logprobs[good], expected[good], rtol=1e-6, atol=1e-6)
