"""The kernel of scores and list itself, on a CPU, under Triton's interpreter."""

import os

import pytest
import torch

from modules.kernels import select_units
from modules.kernels.weight_tiles import Tuning
from tests.modules.kernels import select_units_cases as cases

pytestmark = [
    pytest.mark.skipif(select_units.triton is None, reason="triton is not installed"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"),
]


@pytest.fixture(autouse=True)
def no_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(select_units, "reference_select_units")


@pytest.mark.parametrize("case", cases.CASES)
def test_units_at_or_above_the_threshold_are_listed(case: tuple[int, int, int, Tuning | None]) -> None:
    rules = cases.RULES if case == cases.CASES[0] else cases.RULES[1::4]  # the interpreter is slow
    cases.assert_whole_scores_are_selected(case, torch.float16, launches=True, rules=rules)


@pytest.mark.parametrize(
    ("rows", "tuning"), [(1, None), (1, Tuning(8, 4, 2)), (3, Tuning(8, 4, 2, prefetches=True)), (3, None)]
)
def test_deferred_states_are_normed_first(rows: int, tuning: Tuning | None) -> None:
    cases.assert_deferred_states_are_normed_first(rows, tuning)


def test_order_is_fixed_on_demand() -> None:
    cases.assert_order_is_fixed_on_demand("cpu")
