"""The fused residual junction in whole models, its operator played by threads in plain PyTorch: rows of the residual
stay with their owners over all half-blocks and a hand-off, and what comes out is the whole model's."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from modules.checkpoint.load import build_on_meta
from modules.decoder import Decoder
from modules.families.registry import from_hf_config
from pipeline_parallel.all_reduce_choice import ChoiceTable
from pipeline_parallel.communication import ReducingAddNorm
from pipeline_parallel.engine import parallelise
from pipeline_parallel.fused_add_norm import (
    FusedAddNorm,
    choose_all_reduce,
    describe_all_reduce,
    strategy_of,
    why_not_fused,
)
from pipeline_parallel.kernels.all_reduce_norm import owned_rows
from pipeline_parallel.mesh import ParallelMesh
from tests.modules.tiny_kinds import KINDS, LLAMA, random_tokens
from tests.modules.tiny_models import tiny_hf_model
from tests.pipeline_parallel.thread_operator import by_tokens, fuse, loaded
from tests.pipeline_parallel.thread_ranks import on_threads


def logits_of(model: Decoder, tokens: Tensor, lengths: Tensor) -> list[Tensor]:
    """Of a ragged prefill and two decode steps: on the last stage; [] on others."""
    cache, found = model.new_cache(3, 16), []
    for step, counts in ((slice(0, 7), lengths), (slice(7, 8), None), (slice(8, 9), None)):
        hidden = model(
            tokens[:, step], cache=cache, num_tokens=counts, phase="prefill" if counts is not None else "decode"
        )
        if model.is_last:
            found.append(model.logits(hidden))
    return found


@pytest.mark.parametrize(
    ("tp_size", "pp_size", "strategy_for"), [(3, 1, by_tokens), (2, 3, by_tokens), (2, 1, lambda tokens: "two-shot")]
)
@pytest.mark.parametrize("kind", ["llama-biases", "opt"])
def test_logits_are_those_of_one_process(
    kind: str, tp_size: int, pp_size: int, strategy_for: Callable[[int], str]
) -> None:
    hf_config, lengths, tokens = KINDS[kind], torch.tensor([7, 1, 4]), random_tokens(3, 9)
    weights = tiny_hf_model(hf_config).state_dict()
    with torch.inference_mode():
        expected = logits_of(loaded(hf_config, ParallelMesh.single("cpu"), weights), tokens, lengths)

        def run(mesh: ParallelMesh) -> tuple[list[Tensor], list[Any], list[bool]]:
            with torch.inference_mode():
                model = loaded(hf_config, mesh, weights)
                operator = fuse(model, mesh, strategy_for)
                return logits_of(model, tokens, lengths), operator.asked, operator.found_in_place

        ranks = on_threads(tp_size, pp_size, run)
    for found, *_ in ranks[-tp_size:]:
        for step, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(step, theirs, rtol=0, atol=2e-5)
    for rank, (_, asked, found_in_place) in enumerate(ranks):
        per_stage = 2 * 3 // pp_size
        first = ["begin", (strategy_for(21), 21, len(owned_rows(21, rank % tp_size, tp_size)))]
        if rank < tp_size:
            assert asked[: len(first)] == first
            assert len(asked) == 3 * (2 + per_stage), "every half-block, and the embeddings, of three passes"
        else:
            assert len(asked) == 3 * per_stage and "begin" not in asked
        # What a block computes is left where the ranks read it; embeddings are looked up elsewhere.
        assert found_in_place == 3 * [*([False] if rank < tp_size else []), *[True] * per_stage]
        assert {call[0] for call in asked if call != "begin"} == {strategy_for(21), strategy_for(3)}


@pytest.mark.parametrize("is_fused", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("kind", ["llama-9-heads-3-groups", "opt"])
def test_a_decode_step_in_kernels_equals_a_plain_one(kind: str, num_rows: int, is_fused: bool) -> None:
    """Of three ranks, of which one has less than its share; the residual junction in both ways."""
    weights, tokens = tiny_hf_model(KINDS[kind]).state_dict(), random_tokens(3, 8)[:num_rows]

    def run(mesh: ParallelMesh) -> list[Tensor]:
        with torch.inference_mode():
            model = loaded(KINDS[kind], mesh, weights)
            if is_fused:
                fuse(model, mesh, by_tokens)
            cache = model.new_cache(num_rows, 16)
            model(tokens[:, :7], cache=cache)
            cache.has_static_shapes = True
            before, found = [states.clone() for states in cache.states], []
            for fused in (False, True):
                for states, first in zip(cache.states, before, strict=True):
                    states.copy_(first)
                token_ids = tokens[:, 7:]
                plain = model.begin(token_ids, cache=cache, phase="decode")
                stream = model.enter(token_ids, model.begin_step(token_ids, cache) if fused else plain)
                model.run_half_blocks(stream)
                found += [model.step_logits(stream).clone()]
                found += [states.clone() for states in cache.states]
            return found

    for found in on_threads(3, 1, run):
        for plain, ours in zip(found[: len(found) // 2], found[len(found) // 2 :], strict=True):
            torch.testing.assert_close(ours, plain, rtol=0, atol=2e-5)


def test_more_tokens_than_fit_and_what_the_table_says_go_the_unfused_way() -> None:
    weights, tokens = tiny_hf_model(LLAMA).state_dict(), random_tokens(3, 9)

    def run(mesh: ParallelMesh) -> list[Any]:
        with torch.inference_mode():
            model = loaded(LLAMA, mesh, weights)
            operator = fuse(model, mesh, lambda tokens: "nccl" if tokens == 9 else "two-shot")
            for rows in (1, 3, 2):  # 9, 27 and 18 tokens
                model(tokens[:rows])
            return operator.asked

    for asked in on_threads(2, 1, run):
        assert {call[1] for call in asked if call != "begin"} == {18}


def test_states_that_later_layers_look_back_at_are_kept() -> None:
    weights, tokens = tiny_hf_model(LLAMA).state_dict(), random_tokens(2, 4)

    def run(mesh: ParallelMesh) -> bool:
        with torch.inference_mode():
            model = loaded(LLAMA, mesh, weights)
            model.max_lookahead = 1
            fuse(model, mesh, by_tokens)
            forward_pass = model.begin(tokens)
            model.run_half_blocks(model.enter(tokens, forward_pass))
            kept = [states for layers in forward_pass.inputs.values() for states in layers.values()]
            return bool(kept) and all(bool(states.isfinite().all()) for states in kept)

    assert on_threads(2, 1, run) == [True, True]


def refusal(hf_config: dict[str, Any], dtype: torch.dtype, device: str, tp_size: int = 2) -> str | None:
    model, group = build_on_meta(from_hf_config(hf_config)).to(dtype), cast(Any, object())
    return why_not_fused(model, ParallelMesh(tp_size=tp_size, tp_group=group, device=torch.device(device)))


def test_what_cannot_be_fused_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    half, hosts = torch.bfloat16, ["here", "here"]
    gather = lambda group: lambda mine: [(host, mine[1]) for host in hosts]  # noqa: E731
    monkeypatch.setattr("pipeline_parallel.fused_add_norm.gatherer", gather)
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    assert "pre-norm" in str(refusal(KINDS["opt-post-norm-projected"], half, "cuda"))
    assert "weights are torch.float32" in str(refusal(LLAMA, torch.float32, "cuda"))
    assert "the model is on cpu" in str(refusal(LLAMA, half, "cpu"))
    assert "not 9 ranks of 48" in str(refusal(LLAMA, half, "cuda", tp_size=9))
    assert refusal(LLAMA, half, "cuda") is None
    monkeypatch.delenv("NCCL_NVLS_ENABLE")
    assert "set NCCL_NVLS_ENABLE=0" in str(refusal(LLAMA, half, "cuda"))
    monkeypatch.delenv("TORCH_SYMM_MEM_DISABLE_MULTICAST")
    assert "TORCH_SYMM_MEM_DISABLE_MULTICAST is None: set it to 1" in str(refusal(LLAMA, half, "cuda"))
    hosts[:] = ["here", "there"]
    assert "several hosts: here, there" in str(refusal(LLAMA, half, "cuda"))


@pytest.mark.parametrize("measured", [(), ("p2p",), ("multimem",), ("p2p", "multimem")])
@pytest.mark.parametrize("transport", ["p2p", "multimem"])
@pytest.mark.parametrize("choice", ["auto", "fused"])
def test_the_junction_follows_what_was_measured_for_the_transport_there_is(
    choice: Any, transport: str, measured: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(device: str, ranks: int, hidden_size: int, kind: str) -> ChoiceTable | None:
        fastest = {"1": "nccl", "64": "one-shot"}
        fields = {"device": device, "ranks": ranks, "hidden_size": hidden_size, "transport": kind}
        return ChoiceTable(**fields, fastest=fastest) if kind in measured else None  # type: ignore[arg-type]

    def create(group: Any, max_tokens: int, hidden_size: int, dtype: torch.dtype, device: Any) -> Any:
        fields = {"rank": 0, "world_size": 2, "max_tokens": max_tokens, "dtype": dtype, "transport": transport}
        return SimpleNamespace(**fields)

    for name, fake in (
        ("find_choice_table", find),
        ("create_workspace", create),
        ("why_not_fused", lambda model, mesh: None),
        ("verify_transport", lambda workspace, gather: None),
    ):
        monkeypatch.setattr(f"pipeline_parallel.fused_add_norm.{name}", fake)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "GPU")
    mesh = ParallelMesh(tp_size=2, tp_group=cast(Any, object()), device=torch.device("cpu"))
    monkeypatch.setattr(ParallelMesh, "gather", lambda self, value: [value, value])
    model = build_on_meta(from_hf_config(LLAMA), lambda whole: parallelise(whole, mesh)).to(torch.bfloat16)
    choose_all_reduce(model, mesh, choice)
    if choice == "auto" and transport not in measured:
        assert isinstance(model.add_norm, ReducingAddNorm)
        return
    assert isinstance(model.add_norm, FusedAddNorm)
    few = "nccl" if choice == "auto" else "one-shot"
    assert (
        describe_all_reduce(model)
        == {
            "auto": f"one-shot/nccl {transport}",
            "fused": f"one-shot {transport}" if transport in measured else f"one-shot/two-shot {transport}",
        }[choice]
    )
    assert [model.add_norm.strategy_for(count) for count in (1, 64)] == [few, "one-shot"]


def test_ranks_that_differ_stay_unfused_together(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = ParallelMesh(tp_size=2, tp_group=cast(Any, object()), device=torch.device("cpu"))
    model = build_on_meta(from_hf_config(LLAMA), lambda whole: parallelise(whole, mesh))
    monkeypatch.setattr("pipeline_parallel.fused_add_norm.why_not_fused", lambda model, mesh: None)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "GPU")
    monkeypatch.setattr(ParallelMesh, "gather", lambda self, value: [value, "another"])
    choose_all_reduce(model, mesh, "auto")
    assert isinstance(model.add_norm, ReducingAddNorm) and describe_all_reduce(model) == "gloo"
    with pytest.raises(ValueError, match="--all-reduce fused: the ranks differ in their GPUs"):
        choose_all_reduce(model, mesh, "fused")


def test_strategies_follow_the_table_or_the_size() -> None:
    fastest: Any = {"1": "one-shot", "64": "nccl", "1024": "two-shot"}
    table = ChoiceTable(device="X", ranks=2, hidden_size=48, transport="p2p", fastest=fastest)
    auto, fused = strategy_of(table, may_be_nccl=True), strategy_of(table, may_be_nccl=False)
    assert [auto(count) for count in (1, 60, 100, 2000)] == ["one-shot", "nccl", "nccl", "two-shot"]
    assert [fused(count) for count in (1, 60, 100, 2000)] == ["one-shot", "one-shot", "two-shot", "two-shot"]
    assert [strategy_of(None, may_be_nccl=True)(count) for count in (64, 65)] == ["nccl", "nccl"]
    assert [strategy_of(None, may_be_nccl=False)(count) for count in (64, 65)] == ["one-shot", "two-shot"]
