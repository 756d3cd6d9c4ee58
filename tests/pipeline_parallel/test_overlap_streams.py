"""The two streams of a split prefill: what waits for what, what memory is held; on one GPU, the numbers."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from modules.checkpoint.load import random_model
from modules.families.registry import from_hf_config
from modules.normalization import add_norm
from pipeline_parallel import overlap
from pipeline_parallel.overlap import Overlap
from tests.modules.tiny_kinds import LLAMA, random_tokens


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "STEP", 3)


class Streams:
    """Stands for torch's streams: knows of each call what has happened before it, on whichever stream."""

    class Stream:
        device = "cuda"

        def __init__(self) -> None:
            self.past: frozenset[Any] = frozenset()

        def record_event(self) -> frozenset[Any]:
            return self.past

        def wait_event(self, event: frozenset[Any]) -> None:
            self.past |= event

        def wait_stream(self, other: Streams.Stream) -> None:
            self.past |= other.past

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.before: dict[Any, frozenset[Any]] = {}
        self.compute = self.current = self.Stream()
        self.communication = self.Stream()
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self.inside)

    @contextmanager
    def inside(self, stream: Streams.Stream) -> Iterator[None]:
        outside, self.current = self.current, stream
        yield
        self.current = outside

    def happens(self, call: Any) -> None:
        self.before[call] = self.current.past
        self.current.past |= {call}


def test_streams_wait_for_what_they_need_and_for_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half-block i of half 0 or 1 is ("block", half, i), the junction behind it ("junction", half, i)."""
    streams, tokens = Streams(monkeypatch), random_tokens(3, 7)
    model = random_model(from_hf_config(LLAMA))
    partials: list[Any] = []

    def junction(half: int) -> Any:
        counter = count(-1)

        def call(partial: Tensor, *arguments: Any, **options: Any) -> Any:
            assert streams.current is streams.communication
            streams.happens(("junction", half, next(counter)))
            partials.append(weakref.ref(partial))
            return add_norm(partial, *arguments, **options)

        return call

    def block(idx: int, forward: Any) -> Any:
        half = count()

        def call(*arguments: Any) -> Any:
            assert streams.current is streams.compute
            place = next(half)
            streams.happens(("block", place, idx))
            assert len(partials) == 2 + 2 * idx + place and partials[-1]() is not None, "freed while it may be read"
            return forward(*arguments)

        return call

    for idx, half_block in enumerate(model.half_blocks):
        half_block.block.forward = block(idx, half_block.block.forward)
    driver = Overlap(model, 21, (junction(0), junction(1)), ())
    driver.stream = streams.communication  # type: ignore[assignment]
    with torch.inference_mode():
        assert driver(tokens, model.begin(tokens)) is not None
    last, before = 5, streams.before
    for idx in range(last + 1):
        for half in (0, 1):
            assert ("block", half, idx) in before["junction", half, idx]
            assert ("junction", half, idx - 1) in before["block", half, idx]
        assert ("block", 0, idx) in before["block", 1, idx], "the second half sees the first one's keys"
        # What makes it an overlap: neither waits for the other half's junction.
        assert ("junction", 0, idx) not in before["block", 1, idx]
        assert ("junction", 1, idx - 1) not in before["block", 0, idx]
    assert {("junction", half, last) for half in (0, 1)} <= streams.compute.past, "nothing is left behind"
    assert all(partial() is None for partial in partials)


def test_flash_attentions_mask_of_the_second_half_is_the_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU torch makes a mask of it."""
    model, tokens = random_model(from_hf_config(LLAMA)), random_tokens(3, 7)
    driver = Overlap(model, 21, (model.add_norm, model.add_norm), ())
    with torch.inference_mode():
        plain = driver(tokens, model.begin(tokens))
        monkeypatch.setattr(
            overlap, "mask_up_to", lambda positions, end, *_: causal_lower_right(positions.shape[1], end)
        )
        found = driver(tokens, model.begin(tokens))
    assert plain is not None and found is not None
    torch.testing.assert_close(found, plain, rtol=0, atol=1e-6)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_two_streams_of_one_gpu_give_the_whole_passs_states_every_time(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the junction of one rank, which needs no other: streams, memory and attention are those of many."""
    monkeypatch.setattr(overlap, "STEP", 256)
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 8, "num_key_value_heads": 4}
    config = from_hf_config(LLAMA | sizes | {"max_position_embeddings": 4096})
    model = random_model(config, dtype=dtype, device="cuda")
    ids = torch.randint(3, config.vocab_size, (3, 700), generator=torch.Generator().manual_seed(0)).cuda()
    lengths = torch.tensor([700, 1, 300], device="cuda")
    real = torch.arange(700, device="cuda") < lengths[:, None]

    def states() -> Tensor:
        found = model(ids, cache=model.new_cache(3, 700), num_tokens=lengths)[real]
        return torch.cat((found, model(ids).flatten(0, 1)))

    with torch.inference_mode():
        whole = states()
        driver = Overlap(model, 1024, (model.add_norm, model.add_norm), ())
        model.prefill_driver = driver
        first = states()
        assert driver.num_split == 2 and driver.stream is not None
        error = float((first.float() - whole.float()).norm() / whole.float().norm())
        assert error <= {torch.bfloat16: 0.02, torch.float32: 1e-3}[dtype]
        for repeat in range(20):
            # Either stream late: whoever does not wait reads or overwrites what another still needs.
            with torch.cuda.stream(driver.stream if repeat % 2 else torch.cuda.current_stream()):
                torch.cuda._sleep(2_000_000)
            assert torch.equal(states(), first), f"repeat {repeat} differs"
