"""The kernel that chooses head groups itself, on a CPU, under Triton's interpreter."""

import os

import pytest
import torch

from modules.kernels import choose_groups
from tests.modules.kernels import choose_groups_cases as cases

pytestmark = [
    pytest.mark.skipif(choose_groups.triton is None, reason="triton is not installed"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"),
]


@pytest.fixture(autouse=True)
def no_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(choose_groups, "reference_choose_groups")


@pytest.mark.parametrize("case", cases.CASES)
def test_the_largest_scores_are_chosen(case: tuple[int, int, int, int]) -> None:
    cases.assert_whole_scores_are_chosen(case, torch.bfloat16, [(case[2] + 1) // 2])


def test_more_rows_than_registers_hold_are_read_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose_groups, "TILE_ELEMENTS", 512)
    cases.assert_whole_scores_are_chosen((2, 37, 40, 33), torch.float16, [1, 20])


def test_deferred_states_are_normed_and_not_written() -> None:
    cases.assert_deferred_states_are_normed_and_not_written("cpu")


def test_nan_takes_no_more_than_its_share() -> None:
    cases.assert_nan_takes_no_more_than_its_share("cpu")
