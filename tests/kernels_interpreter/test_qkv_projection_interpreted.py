"""The kernel of queries, keys and values itself, on a CPU, under Triton's interpreter."""

import os

import pytest
import torch

from modules.kernels import qkv_projection
from modules.kernels.qkv_projection import Tuning
from tests.modules.kernels import qkv_projection_cases as cases

# Marks, not a skip of the module: pytest fails a run that collects nothing, and scripts/test.sh with it.
pytestmark = [
    pytest.mark.skipif(qkv_projection.triton is None, reason="triton is not installed"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"),
]


@pytest.fixture(autouse=True)
def no_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(qkv_projection, "reference_project_qkv")


@pytest.mark.parametrize("case", cases.SMALL_CASES)
def test_kernel_follows_the_equation(case: cases.Case) -> None:
    cases.assert_equation_holds(case, torch.float32)


@pytest.mark.parametrize("case", cases.SMALL_CASES[1:4])
def test_kernel_rounds_as_single_operators_would(case: cases.Case) -> None:
    cases.assert_equation_holds(case, torch.bfloat16)


@pytest.mark.parametrize("programs_per_sm", [2, 12])
@pytest.mark.parametrize("pairs", [1, 4])
def test_any_launch_shape_covers_all_tiles(pairs: int, programs_per_sm: int) -> None:
    cases.assert_equation_holds(cases.SMALL_CASES[1], torch.float32, tuning=Tuning(pairs, 1, programs_per_sm))


def test_rows_of_inactive_groups_are_not_read() -> None:
    inputs = cases.qkv_inputs(cases.SMALL_CASES[1], torch.float32)
    inactive = ~inputs["active_groups"].any(0).repeat_interleave(3)
    assert inactive.any()
    inputs["q_weight"].unflatten(0, (6, 16))[inactive] = float("nan")
    queries = cases.run_poisoned(inputs)
    assert torch.equal(queries[0].isnan().all(-1), inactive)
