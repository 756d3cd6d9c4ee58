"""Prefills in two halves: the same numbers as in one piece, in an order that leaves each half's junction to run beside
the other half's computing; and what is not split."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from loguru import logger
from torch import Tensor

from modules.checkpoint.load import build_on_meta
from modules.decoder import Decoder
from modules.families.registry import from_hf_config
from pipeline_parallel import overlap
from pipeline_parallel.all_reduce_choice import SplitPoint
from pipeline_parallel.fused_add_norm import FusedAddNorm
from pipeline_parallel.mesh import ParallelMesh
from pipeline_parallel.overlap import (
    DEFAULT_PROGRAMS,
    Overlap,
    check_overlap_tokens,
    choose_overlap,
    first_half,
    overlap_tokens,
    split_path,
    split_prefills,
)
from tests.modules.tiny_kinds import KINDS, LLAMA, random_tokens
from tests.modules.tiny_models import tiny_hf_model
from tests.pipeline_parallel.thread_operator import ThreadOperator, by_tokens, fuse, loaded
from tests.pipeline_parallel.thread_ranks import on_threads

POINT = SplitPoint(num_tokens=21, attention_programs=3, mlp_programs=5, offset=6)
JUNCTIONS: dict[str, Callable[[int], str] | None] = {
    "nccl": None,
    "fused-by-tokens": by_tokens,
    "fused-two-shot": lambda tokens: "two-shot",
}


WINDOWS = LLAMA | {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "STEP", 3)


def cut(hf_config: dict[str, Any], mesh: ParallelMesh, weights: Any, junction: str) -> tuple[Decoder, Any]:
    """This rank's part, with a junction of JUNCTIONS and its operator, if it has one."""
    model, strategy_for = loaded(hf_config, mesh, weights), JUNCTIONS[junction]
    return model, None if strategy_for is None else fuse(model, mesh, strategy_for)


def calls_of(model: Decoder, tokens: Tensor, lengths: Tensor) -> list[Tensor]:
    """Hidden states of real tokens: of a pass without a cache; of one into an empty cache, then one into the filled
    cache and a decode step; of rows of a larger cache as if they were empty. Then the cache's lengths."""
    real = torch.arange(7) < lengths[:, None]
    cache, large = model.new_cache(3, 24), model.new_cache(4, 24)
    # Copies: what the fused junction returns is good until its next call.
    found = [model(tokens[:, :7]).clone(), model(tokens[:, :7], num_tokens=lengths)[real]]
    found.append(model(tokens[:, :7], cache=cache, num_tokens=lengths)[real])
    found.append(model(tokens[:, 7:14], cache=cache).clone())
    found.append(model(tokens[:, 14:15], cache=cache, phase="decode").clone())
    found.append(model(tokens[:, :7], cache=large.fresh_rows([3, 0, 1]), num_tokens=lengths)[real])
    view = large.first_rows(2, lengths[1:].clone(), int(lengths.max()))
    found.append(model(tokens[1:, 7:8], cache=view, phase="decode").clone())
    return [*found, cache.cache_seqlens]


@pytest.mark.parametrize(
    ("kind", "junction", "tp_size"),
    [
        ("llama-biases", "nccl", 2),
        ("llama-biases", "fused-two-shot", 3),
        ("llama-9-heads-3-groups", "fused-by-tokens", 2),
        ("opt", "nccl", 3),
        ("opt", "fused-by-tokens", 2),
        ("opt-post-norm-projected", "nccl", 2),
        ("windows", "fused-two-shot", 2),
    ],
)
def test_split_passes_have_the_numbers_of_whole_ones(kind: str, junction: str, tp_size: int) -> None:
    """Of ragged rows, of which one ends within the first half, and one just there."""
    hf_config, tokens, lengths = KINDS.get(kind, WINDOWS), random_tokens(3, 15), torch.tensor([7, 1, 3])
    weights = tiny_hf_model(hf_config).state_dict()
    with torch.inference_mode():
        alone = calls_of(loaded(hf_config, ParallelMesh.single("cpu"), weights), tokens, lengths)

    def run(mesh: ParallelMesh) -> tuple[list[Tensor], list[Tensor]]:
        with torch.inference_mode():
            model, _ = cut(hf_config, mesh, weights, junction)
            whole = calls_of(model, tokens, lengths)
            split_prefills(model, 21, ())
            return whole, calls_of(model, tokens, lengths)

    for whole, split in on_threads(tp_size, 1, run):
        for one, two, expected in zip(whole, split, alone, strict=True):
            torch.testing.assert_close(two, one, rtol=0, atol=1e-5)
            torch.testing.assert_close(two, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("points", [(), (POINT,)], ids=["unmeasured", "measured"])
def test_halves_take_turns_and_junctions_leave_room_for_what_runs_beside(points: tuple[SplitPoint, ...]) -> None:
    weights, tokens = tiny_hf_model(LLAMA).state_dict(), random_tokens(3, 7)

    first, second = (12, 9) if not points else (15, 6)
    attention, mlp = (3, 5) if points else (DEFAULT_PROGRAMS,) * 2

    def run(mesh: ParallelMesh) -> tuple[Any, ...]:
        with torch.inference_mode():
            model, operator = cut(LLAMA, mesh, weights, "fused-two-shot")
            junction = model.add_norm
            assert isinstance(junction, FusedAddNorm)
            other = operator.with_own_memory()
            driver = Overlap(model, 21, (junction.for_half(operator), junction.for_half(other)), points)
            order: list[Any] = []

            def heard(name: str, function: Any) -> Any:
                def call(*arguments: Any) -> Any:
                    order.append((name, arguments[0].shape[0] * (arguments[0].shape[1] if name == "block" else 1)))
                    return function(*arguments)

                return call

            for half_block in model.half_blocks:
                half_block.block.forward = heard("block", half_block.block.forward)
            driver.junctions[0].operator = heard_operator(operator, order)  # type: ignore[attr-defined]
            driver.junctions[1].operator = heard_operator(other, order)  # type: ignore[attr-defined]
            model.prefill_driver = driver
            model(tokens)
            assert operator.begun == (first, None) and other.begun == (second, attention)
            found_in_place = operator.found_in_place + other.found_in_place
            return order, operator.programs, other.programs, operator.asked, other.asked, found_in_place

    for order, first_programs, second_programs, asked, others_asked, found_in_place in on_threads(2, 1, run):
        both = [("block", first), ("junction", first), ("block", second), ("junction", second)]
        assert order == [("junction", first), ("junction", second), *both * 6]
        # The first half's beside the second's same half-block, the second's beside the first's next one.
        assert first_programs == [None, *(attention, mlp) * 3]
        assert second_programs == [attention, *(mlp, attention) * 2, mlp, None]
        assert asked[0] == others_asked[0] == "begin" and len(asked) == len(others_asked) == 8
        assert {call[1] for call in asked[1:]} == {first} and {call[1] for call in others_asked[1:]} == {second}
        # Each half's blocks leave what they compute with its own junction, never where the other's is read.
        assert found_in_place == [False, *[True] * 6] * 2


def heard_operator(operator: ThreadOperator, order: list[Any]) -> Any:
    class Heard(ThreadOperator):
        def __init__(self) -> None:
            self.__dict__ = operator.__dict__

        def __call__(self, *arguments: Any) -> Any:
            order.append(("junction", len(arguments[0])))
            return super().__call__(*arguments)

    return Heard()


@pytest.mark.parametrize("batch", [1, 2, 3, 5, 8, 48, 256, 300])
def test_the_first_half_is_whole_tiles_and_leaves_the_second_two_tokens(
    batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overlap, "STEP", 256)
    for tokens in (1, 2, 3, 255, 256, 257, 258, 511, 1024, 1500, 2048, 8191):
        for offset in (-2048, -256, 0, 256, 2048):
            first = first_half(batch, tokens, offset)
            assert first * batch % 256 == 0 and (first == 0 or 0 < first <= tokens - 2)
            assert first > 0 or tokens - 2 < 256 // torch.gcd(torch.tensor(256), torch.tensor(batch)).item()
    assert [first_half(1, 2048, offset) for offset in (0, 256, -512, 4096)] == [1024, 1280, 512, 1792]
    assert [first_half(8, tokens, 256) for tokens in (1024, 33, 34)] == [544, 0, 32]


def test_what_is_left_alone() -> None:
    weights, tokens = tiny_hf_model(LLAMA).state_dict(), random_tokens(3, 7)

    def run(mesh: ParallelMesh) -> list[bool]:
        with torch.inference_mode():
            model, _ = cut(LLAMA, mesh, weights, "nccl")
            split_prefills(model, 21, ())
            driver = model.prefill_driver
            assert driver is not None and overlap_tokens(model) == 21

            def splits(ids: Tensor) -> bool:
                return driver(ids, model.begin(ids)) is not None

            found = [splits(tokens), splits(tokens[:, :6]), splits(tokens.view(21, 1))]
            model.is_sparse = True
            found.append(splits(tokens))
            model.is_sparse = False
            handle = model.half_blocks[2].residual_in.register_forward_hook(lambda *arguments: None)
            found.append(splits(tokens))
            handle.remove()
            model.prefill_driver = lambda *arguments: pytest.fail("decode steps are not asked about")
            model(tokens, phase="decode")
            return found

    assert on_threads(2, 1, run) == [[True, False, False, False, False]] * 2


def chosen(tokens: Any, mesh: ParallelMesh) -> tuple[Decoder, str]:
    """A model for which that was asked, and what was logged."""
    model = build_on_meta(from_hf_config(LLAMA))
    heard: list[str] = []
    sink = logger.add(heard.append, level="INFO", format="{message}")
    try:
        choose_overlap(model, mesh, tokens)
    finally:
        logger.remove(sink)
    return model, "".join(heard)


def mesh_of(**sizes: int) -> ParallelMesh:
    return ParallelMesh(device=torch.device("cpu"), **sizes)


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A split file for the tiny Llama on two ranks of this device, still to be put into its place."""
    monkeypatch.setattr(overlap, "CONFIGS_DIR", tmp_path)
    monkeypatch.setattr(ParallelMesh, "gather", lambda self, value: [value, value])
    path = split_path("cpu", 2, LLAMA["hidden_size"])
    assert path == tmp_path / "splits" / "cpu-2x48.json"
    path.parent.mkdir()
    entry = {"attention_ctas": 4, "mlp_ctas": 8, "split_offset": 256}
    source = tmp_path / "measured"
    source.write_text(json.dumps({"1536": entry, "4096": entry}))
    return source


def test_auto_splits_only_what_was_measured_and_a_number_splits_anyway(
    measured: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, said = chosen("auto", mesh_of(tp_size=2))
    assert model.prefill_driver is None and overlap_tokens(model) == 0
    assert said == "--overlap-tokens auto: prefills are not split, since that is for GPUs, and the model is on cpu\n"
    with monkeypatch.context() as patch:
        patch.setattr("torch.cuda.get_device_name", lambda device: "GPU")
        _, said = chosen("auto", replace(mesh_of(tp_size=2), device=torch.device("cuda")))
    assert "prefills are not split, since nothing was measured for these GPUs (scripts.benchmark.prefill --tune" in said
    model, said = chosen(300, mesh_of(tp_size=2))
    assert overlap_tokens(model) == 300 and "prefills of 300 tokens or more are split in two" in said
    measured.rename(split_path("cpu", 2, LLAMA["hidden_size"]))
    model, said = chosen("auto", mesh_of(tp_size=2))
    assert isinstance(model.prefill_driver, Overlap) and overlap_tokens(model) == 1536
    assert [point.offset for point in model.prefill_driver.points] == [256, 256]
    assert overlap_tokens(chosen(300, mesh_of(tp_size=2))[0]) == 300


@pytest.mark.parametrize(
    ("tokens", "sizes", "message"),
    [
        (0, {"tp_size": 2}, ""),
        (1024, {}, ""),
        (9, {"tp_size": 2, "pp_size": 2}, "9: prefills are not split, since 2 pipeline stages hand on whole passes"),
    ],
)
def test_where_nothing_is_split(measured: Path, tokens: Any, sizes: dict[str, int], message: str) -> None:
    model, said = chosen(tokens, mesh_of(**sizes))
    assert model.prefill_driver is None and message in said and bool(said) == bool(message)


def test_ranks_that_know_other_splits_do_not_split(measured: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ParallelMesh, "gather", lambda self, value: [value, "another"])
    model, said = chosen(300, mesh_of(tp_size=2))
    assert model.prefill_driver is None and "the ranks differ in what was measured for them" in said


def test_a_threshold_below_zero_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--overlap-tokens must be auto, 0 \(never\) or a number of tokens, got -1"):
        check_overlap_tokens(-1)
