"""Ranks that run the same loop over the same requests stay together whatever the requests are, and nobody waits for
ever: all ranks of a replica as threads, with messages that are never buffered."""

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from modules.checkpoint.load import random_model
from modules.decoder import Decoder
from modules.families.registry import from_hf_config
from modules.generation import generate
from modules.requests import GenerationRequest, GenerationResult, GenerationTimings
from modules.sampling import SamplingParams
from modules.sparsity import BLOCKS, ActiveSet, SelectionContext
from pipeline_parallel.engine import exchange_of, parallelise
from pipeline_parallel.mesh import ParallelMesh
from pipeline_parallel.stage import StageLinks
from tests.modules.tiny_kinds import LLAMA
from tests.pipeline_parallel.thread_ranks import on_threads

TINY = LLAMA | {"hidden_size": 24, "intermediate_size": 30, "num_hidden_layers": 4, "max_position_embeddings": 24}
EOS = tuple(range(10, 40))  # likely, so that many rows end early
PENALTIES: list[dict[str, Any]] = [{}, {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2}]
MESHES = [(1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (3, 1)]


class EveryThird:
    """Units whose number and the token's position leave the same remainder: a choice that anybody can make alone."""

    lookahead = 0

    def select(self, hidden_states: Tensor, context: SelectionContext) -> ActiveSet:
        if context.units is None:
            num_units = 30 if context.block == "mlp" else 2
            units = torch.arange(num_units)
        else:
            units = context.units.local
        remainders = context.positions.flatten()[:, None] % 3
        return ActiveSet((units % 3 == remainders) & (units >= 0))


def rank_model(mesh: ParallelMesh, sparse: bool) -> Decoder:
    """A rank's part of the model."""
    config = from_hf_config(TINY)
    model = random_model(config, std=0.3, dtype=torch.float64, prepare=lambda whole: parallelise(whole, mesh))
    for layer in model.layers if sparse else ():
        for block in BLOCKS:
            model.half_block(layer, block).block.selector = EveryThird()
    model.is_sparse = sparse
    return model


@cache
def whole_model(sparse: bool) -> Decoder:
    """All of it."""
    return rank_model(ParallelMesh.single("cpu"), sparse)


def decode(token_ids: list[int], *, special: bool = False) -> str:
    return "".join(chr(97 + token % 7) for token in token_ids)


@st.composite
def request_lists(draw: st.DrawFn) -> list[GenerationRequest]:
    """Few or many, short or long, some that cannot run, some that only score, some that stop at a string."""
    made = []
    for place in range(draw(st.integers(0, 9))):
        length = draw(st.integers(0, 26))  # 0: refused; 24: fills the context; more: refused
        ids = torch.randint(0, 131, (length,), generator=torch.Generator().manual_seed(place)).tolist()
        made.append(
            GenerationRequest(
                prompt_token_ids=ids,
                max_new_tokens=draw(st.integers(0, 7)),
                sampling=SamplingParams(
                    temperature=float(draw(st.booleans())), seed=place, **draw(st.sampled_from(PENALTIES))
                ),
                stop=draw(st.sampled_from([(), ("ab", "c"), ("d",)])),
                echo=draw(st.booleans()),
            )
        )
    return made


def run(model: Decoder, requests: list[GenerationRequest], batch_size: int, **options: Any) -> list[GenerationResult]:
    return generate(model, requests, batch_size=batch_size, eos_token_ids=EOS, decode=decode, **options)


def assert_same(found: GenerationResult, expected: GenerationResult, *, densities: bool) -> None:
    for name in ("token_ids", "text", "finish_reason", "error", "num_prompt_tokens"):
        assert getattr(found, name) == getattr(expected, name), name
    assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-9)
    assert (found.prompt_logprobs is None) == (expected.prompt_logprobs is None)
    pairs = zip((found.prompt_logprobs or [])[1:], (expected.prompt_logprobs or [])[1:], strict=True)
    assert all(ours == pytest.approx(theirs, abs=1e-9) for ours, theirs in pairs)
    if densities:
        assert found.mlp_density == pytest.approx(expected.mlp_density, abs=1e-12)
        assert found.head_density == pytest.approx(expected.head_density, abs=1e-12)


@settings(max_examples=25)
@given(st.sampled_from(MESHES), request_lists(), st.integers(1, 6), st.booleans(), st.booleans())
def test_every_rank_hears_of_every_token_and_the_leader_of_every_answer(
    sizes: tuple[int, int], requests: list[GenerationRequest], batch_size: int, sparse: bool, warm_up: bool
) -> None:
    expected = run(whole_model(sparse), requests, batch_size)
    tokens: dict[int, list[int]] = {}

    def on_rank(mesh: ParallelMesh) -> tuple[list[GenerationResult], list[tuple[int, int]], GenerationTimings]:
        model = rank_model(mesh, sparse)
        heard: list[tuple[int, int]] = []
        timings = GenerationTimings()
        answers = run(
            model,
            requests,
            batch_size,
            exchange=exchange_of(mesh),
            warm_up=warm_up,
            timings=timings,
            on_token=lambda idx, token_id, _: heard.append((idx, token_id)),
        )
        if isinstance(model.links, StageLinks):
            model.links.finish()
        return answers, heard, timings

    ranks = on_threads(*sizes, on_rank)
    for rank, (answers, heard, timings) in enumerate(ranks):
        assert len(answers) == len(requests)
        for answer, one in zip(answers, expected, strict=True):
            # Others than the leader know what they have counted themselves.
            assert_same(answer, one, densities=rank == 0)
        assert heard == ranks[0][1], "all ranks hear the same tokens in the same order"
        assert timings.prefill_tokens == sum(one.num_prompt_tokens for one in expected if one.error is None)
    for idx, token_id in ranks[0][1]:
        tokens.setdefault(idx, []).append(token_id)
    assert tokens == {idx: one.token_ids for idx, one in enumerate(expected) if one.token_ids}
