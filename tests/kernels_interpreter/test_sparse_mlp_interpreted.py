"""The kernel of the MLP over active neurons itself, on a CPU, under Triton's interpreter."""

import os

import pytest
import torch

from modules.kernels import sparse_mlp
from tests.modules.kernels import sparse_mlp_cases as cases

# Marks, not a skip of the module: pytest fails a run that collects nothing, and scripts/test.sh with it.
pytestmark = [
    pytest.mark.skipif(sparse_mlp.triton is None, reason="triton is not installed"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"),
]


@pytest.fixture(autouse=True)
def no_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sparse_mlp, "mlp_in_plain_pytorch")


@pytest.mark.parametrize("case", cases.SMALL_CASES)
def test_kernel_follows_the_equation(case: cases.Case) -> None:
    cases.assert_equation_holds(case, torch.float32)


def test_kernel_rounds_states_to_the_type_of_the_model() -> None:
    cases.assert_equation_holds(cases.SMALL_CASES[0], torch.bfloat16)


@pytest.mark.parametrize("case", [cases.SMALL_CASES[1], cases.SMALL_CASES[5]])
def test_deterministic_sums_follow_the_equation(case: cases.Case) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        cases.assert_equation_holds(case, torch.float32)
        inputs = cases.mlp_inputs(case, torch.float32)
        inputs.pop("output", None)
        assert torch.equal(cases.run_poisoned(inputs), cases.run_poisoned(inputs))
    finally:
        torch.use_deterministic_algorithms(False)
