"""The kernels of the greedy choice themselves, on a CPU, under Triton's interpreter."""

import os

import pytest

from modules.kernels import greedy_choice
from tests.modules.kernels import greedy_choice_cases as cases

pytestmark = [
    pytest.mark.skipif(greedy_choice.triton is None, reason="triton is not installed"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, of inf - inf
]


@pytest.fixture(autouse=True)
def no_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(greedy_choice, "reference_greedy_choice")


@pytest.mark.parametrize("vocab_size", cases.VOCAB_SIZES)
def test_choice_is_that_of_pytorch(vocab_size: int) -> None:
    cases.assert_choice_is_pytorchs(cases.logits_of_every_kind(vocab_size))
