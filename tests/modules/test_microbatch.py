"""Rows that share a cache: whoever comes and goes, each request gets what it gets alone."""

from collections import deque
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from modules.decoder import Decoder
from modules.generation import generate
from modules.microbatch import Microbatch, densities
from modules.requests import GenerationRequest, RunningRequest
from modules.sparsity import BLOCKS, ActiveSet, SelectionContext
from tests.modules.tiny_kinds import LLAMA, OPT, random_tokens
from tests.modules.tiny_models import tiny_decoder

CONTEXT = 64
Lengths = list[tuple[int, int]]
lengths = st.lists(st.tuples(st.integers(1, 12), st.integers(0, 6)), min_size=1, max_size=12)


class ByToken:
    """Active units that depend on a row's own input alone: as many as its first entry says."""

    lookahead = 0

    def select(self, hidden_states: Tensor, context: SelectionContext) -> ActiveSet:
        rows = hidden_states.flatten(0, 1)
        num_units = 2 if context.block == "attention" else 80
        share = 0.2 + 0.6 * torch.sigmoid(rows[:, :1])
        return ActiveSet(torch.arange(num_units) < share * num_units)


@cache
def tiny(kind: str, sparse: bool) -> Decoder:
    model = tiny_decoder({"llama": LLAMA, "opt": OPT | {"ffn_dim": 80}}[kind], dtype=torch.float64)
    for layer in model.layers if sparse and kind == "llama" else ():
        for block in BLOCKS:
            model.half_block(layer, block).block.selector = ByToken()
    model.is_sparse = sparse and kind == "llama"
    return model


def requests_of(lengths: Lengths) -> list[GenerationRequest]:
    return [
        GenerationRequest(prompt_token_ids=ids[:length], max_new_tokens=count, echo=bool(place % 2))
        for place, (ids, (length, count)) in enumerate(zip(random_tokens(12, 12).tolist(), lengths, strict=False))
    ]


@settings(max_examples=25)
@given(lengths, st.integers(1, 5), st.sampled_from(["llama", "opt"]), st.booleans(), st.integers(4, 60))
def test_each_request_gets_what_it_gets_alone(
    lengths: Lengths, batch_size: int, kind: str, sparse: bool, prefill_tokens: int
) -> None:
    model, requests = tiny(kind, sparse), requests_of(lengths)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("modules.microbatch.MAX_PREFILL_TOKENS", prefill_tokens)
        together = generate(model, requests, batch_size=batch_size, eos_token_ids=range(0, 131, 4))
    for request, found in zip(requests, together, strict=True):
        (alone,) = generate(model, [request], batch_size=1, eos_token_ids=range(0, 131, 4))
        assert found.token_ids == alone.token_ids and found.finish_reason == alone.finish_reason
        assert found.logprobs == pytest.approx(alone.logprobs, abs=1e-9)
        assert (found.prompt_logprobs or [])[1:] == pytest.approx((alone.prompt_logprobs or [])[1:], abs=1e-9)
        assert found.mlp_density == pytest.approx(alone.mlp_density, abs=1e-12), "counts move with their rows"
        assert found.head_density == pytest.approx(alone.head_density, abs=1e-12)


@settings(max_examples=40)
@given(lengths, st.integers(1, 5), st.integers(4, 40), st.data())
def test_rows_have_no_gaps_and_requests_come_in_once_and_in_order(
    lengths: Lengths, num_rows: int, prefill_tokens: int, data: st.DataObject
) -> None:
    model = tiny("llama", False)
    queue = deque(RunningRequest(idx, one, CONTEXT) for idx, one in enumerate(requests_of(lengths)))
    waiting = list(queue)
    microbatch = Microbatch(model, num_rows, 20, counts_units=False, use_graphs=False)
    marks = microbatch.cache.states[0][:, 0, 0, 0]  # stands for a row's content
    ended: list[int] = []
    came: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("modules.microbatch.MAX_PREFILL_TOKENS", prefill_tokens)
        while True:
            going = [microbatch.rows[row] for row in ended]
            staying = [row for row in microbatch.rows if row not in going]
            microbatch.admit(queue, ended)
            turn = microbatch.step
            if turn is None:
                break
            fresh = [microbatch.rows[row] for row in turn.rows] if turn.phase == "prefill" else []
            assert 0 < len(microbatch.rows) <= num_rows
            assert sorted(row.request_idx for row in microbatch.rows) == sorted(
                row.request_idx for row in [*staying, *fresh]
            )
            came += [row.request_idx for row in fresh]
            if fresh:
                width = max(row.num_prompt for row in fresh)
                assert len(fresh) == 1 or width * len(fresh) <= prefill_tokens
                for row in turn.rows:
                    marks[row] = microbatch.rows[row].request_idx
                echoed = sum(row.num_prompt - 1 for row in fresh if row.request.echo)
                assert turn.message_size == 2 * len(fresh) + echoed
            else:
                assert turn.rows == list(range(len(microbatch.rows))) and turn.message_size == 2 * len(turn.rows)
                assert not queue or len(microbatch.rows) == num_rows, "a free row is filled while somebody waits"
            # Every row's content has moved with it.
            assert marks[: len(microbatch.rows)].tolist() == [row.request_idx for row in microbatch.rows]
            ended = sorted(data.draw(st.sets(st.sampled_from(turn.rows), min_size=0 if queue else 1)))
    assert came == [row.request_idx for row in waiting] and not microbatch.rows


def message_of(prompts: Lengths, turn_message: list[float]) -> tuple[Microbatch, list[Any]]:
    """A micro-batch whose first turn said `turn_message`, and what was yielded."""
    queue = deque(RunningRequest(idx, one, CONTEXT) for idx, one in enumerate(requests_of(prompts)))
    microbatch = Microbatch(tiny("llama", False), 4, 20, counts_units=False, use_graphs=False)
    microbatch.admit(queue, [])
    assert microbatch.step is not None and microbatch.step.message_size == len(turn_message)
    return microbatch, list(microbatch.take_in(turn_message))


def test_a_message_is_tokens_then_log_probabilities_then_the_echoed_prompts() -> None:
    microbatch, heard = message_of([(2, 3), (3, 3), (1, 3), (4, 0)], [7, 8, 9, 5, -1, -2, -3, -9, -4, -5, -6, -7, -8])
    assert [(row.request_idx, token_id, logprob) for row, token_id, logprob in heard] == [
        (0, 7, -1),
        (1, 8, -2),
        (2, 9, -3),
    ]
    rows = microbatch.rows
    assert [row.token_ids for row in rows] == [[7], [8], [9], []], "nobody asked for a token of the last"
    assert [row.prompt_logprobs for row in rows] == [None, [None, -4, -5], None, [None, -6, -7, -8]]
    assert [row.num_cached for row in rows] == [2, 3, 1, 4]


def test_densities_are_those_of_decode_steps_if_there_were_any() -> None:
    assert densities([1, 4, 6, 10, 1, 1, 1, 1]) == {"attention": 0.25, "mlp": 0.6}
    assert densities([0, 0, 0, 0, 1, 2, 3, 4]) == {"attention": 0.5, "mlp": 0.75}
    assert densities([0.0] * 8) == {"attention": 1.0, "mlp": 1.0}


class CountedOperations(TorchDispatchMode):
    """How many tensor operations were asked for."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_where_all_rows_go_on_the_next_step_is_not_held_up_by_tensors() -> None:
    queue = deque(RunningRequest(idx, one, CONTEXT) for idx, one in enumerate(requests_of([(2, 6), (3, 6)])))
    microbatch = Microbatch(tiny("llama", True), 2, 20, counts_units=True, use_graphs=False)
    microbatch.admit(queue, [])
    with CountedOperations() as operations:
        microbatch.admit(queue, [])
    # On a GPU each would wait for the step that runs there, and the one after it could not be queued in time.
    assert microbatch.step is not None and microbatch.step.phase == "decode" and operations.count == 0
