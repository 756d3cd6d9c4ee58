"""The greedy choice: the reference on a CPU, what the kernels compile to, and the kernels on a GPU."""

import re

import pytest
import torch
from torch import Tensor

from modules.kernels import greedy_choice as module
from modules.kernels.greedy_choice import greedy_choice
from modules.sampling import greedy
from modules.scoring import chosen_logprobs
from tests.modules.kernels.kernel_checks import DEVICES, NAN, assert_graph_follows, compiled_ptx, compiles, poisoned

VOCAB_SIZES = (1, 5, 1024, 3001)
INF = float("inf")


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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocab_size", [*VOCAB_SIZES, 128256, 300001])
def test_choice_is_that_of_pytorch(device: str, vocab_size: int) -> None:
    assert_choice_is_pytorchs(logits_of_every_kind(vocab_size).to(device))


@pytest.mark.parametrize(
    ("logits", "message"),
    [
        (torch.zeros(2, 5).half(), "logits are torch.float16, not torch.float32"),
        (torch.zeros(5), r"logits \(5,\) are not \[rows, V\]"),
        (torch.zeros(2, 0), r"logits \(2, 0\) are not \[rows, V\], contiguous and not empty"),
        (torch.zeros(5, 2).T, r"logits \(2, 5\) are not \[rows, V\], contiguous and not empty"),
    ],
)
def test_what_does_not_fit_is_refused(logits: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        greedy_choice(logits)


@compiles
def test_kernels_read_16_bytes_at_a_time() -> None:
    assert module.piece_of(128256) == 1024 and module.piece_of(300001) == 2048
    types: dict[str, str | None] = {"logits": "*fp32", "pieces": "*fp32", "token_ids": "*i32", "vocab_size": "i32"}
    ptx = compiled_ptx(module.reduce_pieces_kernel, types, {"PIECE": 1024, "PDL": True}, num_warps=4)
    loads = re.findall(r"\bld\.global(\S*)", ptx)
    assert len(loads) == 2 and all(width.endswith(".v4.b32") for width in loads), loads
    assert ".local" not in ptx


@pytest.mark.cuda
def test_a_captured_graph_follows_changed_logits() -> None:
    logits = logits_of_every_kind(5000).cuda()
    assert_graph_follows(lambda: greedy_choice(logits), lambda: logits.normal_())
