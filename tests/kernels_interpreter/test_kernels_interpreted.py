"""The kernels of modules/kernels themselves, on a CPU, under Triton's interpreter (which truncates to bfloat16).

The cases are those of their tests, as few and as small as show the same: a program costs a Python loop."""

import os
from typing import Any

import pytest
import torch

from modules.kernels import (
    add_norm,
    choose_groups,
    decode_attention,
    early_selection,
    greedy_choice,
    norm_linear,
    project_heads,
    qkv_projection,
    select_units,
    sparse_mlp,
    thinned_rows,
)
from tests.modules.kernels import test_add_norm as junction
from tests.modules.kernels import test_choose_groups as groups
from tests.modules.kernels import test_decode_attention as attention
from tests.modules.kernels import test_early_selection as early
from tests.modules.kernels import test_greedy_choice as greedy
from tests.modules.kernels import test_norm_linear as linear
from tests.modules.kernels import test_project_heads as heads
from tests.modules.kernels import test_qkv_projection as qkv
from tests.modules.kernels import test_select_units as units
from tests.modules.kernels import test_sparse_mlp as mlp
from tests.modules.kernels import test_thinned_rows as thinned
from tests.modules.kernels.kernel_checks import DTYPES, deterministic_algorithms

# Marks, not a skip of the module: pytest fails a run that collects nothing, and scripts/test.sh with it.
pytestmark = [
    pytest.mark.skipif(add_norm.triton is None, reason="triton is not installed"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, of inf - inf
]
REFERENCES: list[tuple[Any, str]] = [
    (add_norm, "reference_add_norm"),
    (choose_groups, "reference_choose_groups"),
    (decode_attention, "reference_attend"),
    (early_selection.EarlySelection, "in_plain_pytorch"),
    (greedy_choice, "reference_greedy_choice"),
    (norm_linear, "reference_norm_linear"),
    (project_heads, "reference_project_heads"),
    (qkv_projection, "reference_project_qkv"),
    (select_units, "reference_select_units"),
    (sparse_mlp, "mlp_in_plain_pytorch"),
    (thinned_rows, "reference_thinned_rows"),
]
FLOAT32, FLOAT16, BFLOAT16 = torch.float32, torch.float16, torch.bfloat16


@pytest.fixture(autouse=True)
def no_references(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name in REFERENCES:
        monkeypatch.delattr(owner, name)


@pytest.mark.parametrize(
    ("size", "dtype", "kind"),
    [(7, FLOAT32, "rms"), (48, BFLOAT16, "layer"), (576, FLOAT16, "rms"), (96, FLOAT32, "layer")],
)
def test_add_norm_at_any_shape(size: int, dtype: torch.dtype, kind: str) -> None:
    junction.assert_any_shape(size, dtype, kind, (0, 1, 3), truncates=True)


@pytest.mark.parametrize("kind", add_norm.KINDS)
def test_add_norm_with_any_options(kind: str) -> None:
    junction.assert_any_options(7, FLOAT16, kind)


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_norm_adds_further_parts_and_puts_the_result_where_it_should(dtype: torch.dtype) -> None:
    junction.assert_further_parts_are_added(dtype, truncates=True)


def test_add_norm_keeps_rows_apart() -> None:
    junction.test_nan_stays_in_its_row("cpu")
    junction.assert_rows_are_independent(48)


@pytest.mark.parametrize("case", groups.CASES)
def test_choose_groups_takes_the_largest_scores(case: tuple[int, int, int, int]) -> None:
    groups.assert_whole_scores_are_chosen(case, BFLOAT16, [(case[2] + 1) // 2])


def test_choose_groups_reads_in_tiles_what_registers_do_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose_groups, "TILE_ELEMENTS", 512)
    groups.assert_whole_scores_are_chosen((2, 37, 40, 33), FLOAT16, [1, 20])


def test_choose_groups_norms_states_and_bears_nan() -> None:
    groups.test_deferred_states_are_normed_and_not_written("cpu")
    groups.test_nan_takes_no_more_than_its_share("cpu")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", attention.SMALL_CASES)
def test_attention_follows_the_equation(case: attention.Case, dtype: torch.dtype) -> None:
    attention.assert_equation_holds(case, dtype)


@pytest.mark.parametrize("num_splits", [1, 5, 16])
@pytest.mark.parametrize("length", [1, 16, 17, 130])
def test_any_number_of_splits_covers_any_length(num_splits: int, length: int) -> None:
    case = attention.Case(2, 1, 16, 130, (length - 1,))
    tuning = decode_attention.Tuning(num_splits, block=16, num_warps=1)
    found = attention.assert_equation_holds(case, FLOAT32, tuning=tuning)
    assert found.maxima.shape == (1, 2, num_splits)
    granules = -(-length // decode_attention.GRANULE)
    assert found.maxima[0, 0].isfinite().sum() == min(granules, num_splits)


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_early_choices_are_made(dtype: torch.dtype) -> None:
    early.test_choices_are_made(dtype, "cpu")


@pytest.mark.parametrize("vocab_size", greedy.VOCAB_SIZES)
def test_greedy_choice_is_that_of_pytorch(vocab_size: int) -> None:
    greedy.assert_choice_is_pytorchs(greedy.logits_of_every_kind(vocab_size))


@pytest.mark.parametrize(("place", "case"), list(enumerate(linear.CASES)))
def test_norm_linear_follows_the_equation(place: int, case: linear.Case) -> None:
    for dtype, out_dtype in linear.TYPES if place == 0 else [linear.TYPES[place % 3]]:
        options = (True, False) if place == 0 else (place % 2 == 0,)
        linear.assert_product_is_right(
            case, dtype, out_dtype, launches=True, truncates=dtype == BFLOAT16, all_options=options
        )


def test_norm_linear_takes_plain_states_as_they_are() -> None:
    linear.test_plain_states_are_taken_as_they_are("cpu")


@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("case", heads.SMALL_CASES)
def test_project_heads_follows_the_equation(case: tuple[Any, ...], is_deterministic: bool) -> None:
    if is_deterministic:
        with deterministic_algorithms():
            heads.assert_equation_holds(case, FLOAT32, poisons=True)
    else:
        heads.assert_equation_holds(case, FLOAT32, poisons=True)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [*((case, FLOAT32) for case in qkv.SMALL_CASES), *((case, BFLOAT16) for case in qkv.SMALL_CASES[1:3])],
)
def test_qkv_follows_the_equation_and_rounds_as_single_operators_would(case: qkv.Case, dtype: torch.dtype) -> None:
    qkv.assert_equation_holds(case, dtype)


@pytest.mark.parametrize(("pairs", "programs_per_sm"), [(1, 12), (4, 2)])
def test_any_launch_shape_of_qkv_covers_all_tiles(pairs: int, programs_per_sm: int) -> None:
    tuning = qkv_projection.Tuning(pairs, 1, programs_per_sm)
    qkv.assert_equation_holds(qkv.SMALL_CASES[1], FLOAT32, tuning=tuning)


def test_qkv_does_not_read_rows_of_inactive_groups() -> None:
    inputs = qkv.qkv_inputs(qkv.SMALL_CASES[1], FLOAT32)
    inactive = ~inputs["active_groups"].any(0).repeat_interleave(3)
    assert inactive.any()
    inputs["q_weight"].unflatten(0, (6, 16))[inactive] = float("nan")
    with qkv.poisoned():
        queries = qkv_projection.project_qkv(**inputs)
    assert torch.equal(queries[0].isnan().all(-1), inactive)


@pytest.mark.parametrize("case", units.CASES)
def test_select_units_lists_units_at_or_above_the_threshold(case: Any) -> None:
    rules = units.RULES if case == units.CASES[0] else units.RULES[1::4]
    units.assert_whole_scores_are_selected(case, FLOAT16, launches=True, rules=rules)


@pytest.mark.parametrize(
    ("rows", "tuning"), [(1, None), (1, units.Tuning(8, 4, 2)), (3, units.Tuning(8, 4, 2, prefetches=True)), (3, None)]
)
def test_select_units_norms_states_first(rows: int, tuning: Any) -> None:
    units.assert_deferred_states_are_normed_first(rows, tuning)


def test_select_units_has_a_fixed_order_on_demand() -> None:
    units.test_order_is_fixed_on_demand("cpu")


@pytest.mark.parametrize("case", mlp.SMALL_CASES)
def test_sparse_mlp_follows_the_equation(case: mlp.Case) -> None:
    mlp.assert_equation_holds(case, FLOAT32)


def test_sparse_mlp_rounds_states_to_the_type_of_the_model() -> None:
    mlp.assert_equation_holds(mlp.SMALL_CASES[0], BFLOAT16)


@pytest.mark.parametrize("case", [mlp.SMALL_CASES[1], mlp.SMALL_CASES[5]])
def test_deterministic_sums_of_sparse_mlp_follow_the_equation(case: mlp.Case) -> None:
    with deterministic_algorithms():
        mlp.assert_equation_holds(case, FLOAT32)
        inputs = mlp.mlp_inputs(case, FLOAT32)
        inputs.pop("output", None)
        assert torch.equal(mlp.run_poisoned(inputs), mlp.run_poisoned(inputs))


@pytest.mark.parametrize(("place", "case"), list(enumerate(thinned.CASES)))
def test_thinned_rows_follow_the_equation(place: int, case: Any) -> None:
    dtype = DTYPES[place % 3]
    num_pairs = 4 if place == 2 else 2  # the smallest
    thinned.assert_product_is_right(case, dtype, launches=True, truncates=dtype == BFLOAT16, num_pairs=num_pairs)


def test_thinned_rows_draw_borders_as_by_comparison() -> None:
    thinned.test_borders_are_drawn_as_by_comparison("cpu")


def test_parts_of_thinned_rows_add_up_alike() -> None:
    thinned.assert_parts_add_up_alike("cpu")
