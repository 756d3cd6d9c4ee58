"""Which layers a stage gets, and what is left of a decoder on it."""

from collections.abc import Sequence
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modules.checkpoint.load import build_on_meta
from modules.decoder import Decoder
from modules.families.registry import from_hf_config
from pipeline_parallel.mesh import ParallelMesh
from pipeline_parallel.stage import apply_pipeline, plan_stages, stages_of
from tests.modules.tiny_kinds import KINDS

sizes = st.integers(0, 50)


def largest(stages: Sequence[range], layers: Sequence[int], first: int, last: int) -> int:
    """Size of the largest stage."""
    totals = [sum(layers[idx] for idx in stage) for stage in stages]
    totals[0] += first
    totals[-1] += last
    return max(totals)


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[list[int], int, int, int]:
    """(layer sizes, embeddings, head, stages)."""
    layers = draw(st.lists(sizes, min_size=1, max_size=8))
    return layers, draw(sizes), draw(sizes), draw(st.integers(1, len(layers)))


@settings(max_examples=100)
@given(pipelines())
def test_the_largest_stage_is_as_small_as_any_cut_makes_it(case: tuple[list[int], int, int, int]) -> None:
    layers, first, last, num_stages = case
    stages = plan_stages(layers, first, last, num_stages)
    assert len(stages) == num_stages and all(len(stage) >= 1 for stage in stages)
    assert [idx for stage in stages for idx in stage] == list(range(len(layers)))
    cuts = [(0, *inner, len(layers)) for inner in combinations(range(1, len(layers)), num_stages - 1)]
    all_plans = [[range(a, b) for a, b in zip(cut, cut[1:], strict=False)] for cut in cuts]
    assert largest(stages, layers, first, last) == min(largest(plan, layers, first, last) for plan in all_plans)


def test_a_large_vocabulary_takes_layers_off_the_first_and_the_last_stage() -> None:
    assert plan_stages([10] * 8, 0, 0, 4) == [range(0, 2), range(2, 4), range(4, 6), range(6, 8)]
    assert plan_stages([10] * 8, 20, 20, 4) == [range(0, 1), range(1, 4), range(4, 7), range(7, 8)]


@pytest.mark.parametrize("num_stages", [0, 4])
def test_stages_without_a_layer_are_refused(num_stages: int) -> None:
    with pytest.raises(ValueError, match=f"--pp-size {num_stages} does not fit a model of 3 layers"):
        plan_stages([1, 1, 1], 0, 0, num_stages)


def stage(kind: str, pp_rank: int, pp_size: int) -> Decoder:
    """One stage of a tiny model, on meta."""
    mesh = ParallelMesh(pp_rank=pp_rank, pp_size=pp_size, device=torch.device("cpu"))
    return build_on_meta(from_hf_config(KINDS[kind]), lambda model: apply_pipeline(model, mesh))


@pytest.mark.parametrize("pp_size", [2, 3])
@pytest.mark.parametrize("kind", ["llama-tied", "llama-biases", "opt-post-norm-projected", "opt-no-final-norm"])
def test_every_parameter_is_on_one_stage(kind: str, pp_size: int) -> None:
    whole = build_on_meta(from_hf_config(KINDS[kind]))
    stages = [stage(kind, pp_rank, pp_size) for pp_rank in range(pp_size)]
    names = [name for part in stages for name, _ in part.named_parameters(remove_duplicate=False)]
    assert sorted(names) == sorted(name for name, _ in whole.named_parameters(remove_duplicate=False))
    assert [part.layers for part in stages] == stages_of(whole, pp_size)
    for part in stages:
        assert part.is_first == (part is stages[0]) and part.is_last == (part is stages[-1])
        assert [part.has_block(idx, "mlp") for idx in range(3)] == [idx in part.layers for idx in range(3)]
        cache = part.new_cache(1, 4)
        assert list(cache.blocks) == list(part.layers)
