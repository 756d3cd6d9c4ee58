"""The choice of head groups: the reference on a CPU, what the kernel compiles to, and the kernel on a GPU."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from modules.kernels import choose_groups as module
from modules.kernels.choose_groups import choose_groups
from modules.kernels.deferred_norm import DeferredNorm, equal_copies
from tests.modules.kernels import choose_groups_cases as cases
from tests.modules.kernels.compiled import NORMED, compiled_ptx, compiles

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", cases.CASES)
def test_the_largest_scores_are_chosen(device: str, dtype: torch.dtype, case: tuple[int, int, int, int]) -> None:
    cases.assert_whole_scores_are_chosen(case, dtype, sorted({1, (case[2] + 1) // 2, case[2]}), device)


@pytest.mark.cuda
@pytest.mark.parametrize("case", [(8, 8, 8, 3072), (1, 32, 32, 4096), (2, 64, 64, 8192)])
def test_sizes_of_real_models(case: tuple[int, int, int, int]) -> None:
    cases.assert_whole_scores_are_chosen(case, torch.float32, [1, 5], "cuda")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_any_scores_give_exactly_as_many_groups_as_asked_for(device: str, dtype: torch.dtype) -> None:
    cases.assert_as_many_are_chosen_as_asked_for(dtype, device)


@pytest.mark.parametrize("device", DEVICES)
def test_deferred_states_are_normed_and_not_written(device: str) -> None:
    cases.assert_deferred_states_are_normed_and_not_written(device)


@pytest.mark.parametrize("device", DEVICES)
def test_nan_takes_no_more_than_its_share(device: str) -> None:
    cases.assert_nan_takes_no_more_than_its_share(device)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"second": torch.zeros(6, 5)}, r"second \(6, 5\) is not of shape \(6, 4\)"),
        ({"second": torch.zeros(6, 4).half()}, "second is torch.float16"),
        ({"score_bias": torch.zeros(65)}, "4 ranks and 65 groups; at most 64 and 64"),
        ({"first": torch.zeros(65, 16)}, "65 ranks and 6 groups"),
        ({"count": 7}, "count 7 is not 1 to 6"),
        ({"count": 0}, "count 0 is not 1 to 6"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"first": torch.zeros(4, 16), "second": torch.zeros(6, 4), "score_bias": torch.zeros(6)}
    with pytest.raises(ValueError, match=message):
        choose_groups(DeferredNorm.plain(torch.zeros(2, 16)), **{**arguments, "count": 2, **changes})


@compiles
def test_all_of_the_first_matrix_is_on_its_way_before_the_kernel_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    types = NORMED | {"first": "*bf16", "second": "*bf16", "score_bias": "*bf16", "active": "*i1", "new_residual": None}
    constants = {"COUNT": 3, "NUM_GROUPS": 8, "GROUPS_BLOCK": 8, "RANK": 8, "TILE": module.tile_of(8, 4096)}
    constants |= {"KIND": "rms", "HIDDEN_SIZE": 3072, "BLOCK": 4096, "PDL": True}
    ptx = compiled_ptx(module.choose_groups_kernel, types, constants, num_warps=module.NUM_WARPS)
    before, after = ptx.split("griddepcontrol.wait")
    widths = re.findall(r"\bld\.global\S*evict_first(\S*)", before)
    assert len(widths) == 8 and all(width.endswith(".v4.b32") for width in widths), widths
    assert not re.findall(r"\bld\.global\S*evict_first", after)
    assert ".local" not in ptx


@compiles
def test_float32_products_are_not_fused_with_the_addition_of_another_lanes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    types = NORMED | {"first": "*fp32", "second": "*fp32", "score_bias": "*fp32", "active": "*i1", "new_residual": None}
    constants = {"COUNT": 16, "NUM_GROUPS": 32, "GROUPS_BLOCK": 32, "RANK": 32, "TILE": 4}
    constants |= {"KIND": "rms", "HIDDEN_SIZE": 64, "BLOCK": 64, "PDL": True}
    kernel = module.choose_groups_kernel
    assert "fma.rn.f32" in compiled_ptx(kernel, types, constants, 4)
    assert "fma" not in compiled_ptx(kernel, types, constants, 4, **equal_copies(torch.float32))
    assert equal_copies(torch.bfloat16) == {"enable_fp_fusion": True}
