"""Decode steps as CUDA graphs: one for each batch size, captured when it is first needed, replayed after that.

A graph fixes every shape and address: the rows are padded to a captured size, attention looks at the whole cache, and
what the host decides (tokens, lengths) is copied into the graph's own inputs. On a pipeline stage the hand-offs stay
outside of the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from modules.decoder import Decoder
from modules.forward_pass import ForwardPass
from modules.kv_cache import KVCache
from modules.normalization import residual_dtype
from modules.sampling import greedy
from modules.scoring import chosen_logprobs


@dataclass(frozen=True)
class StepOutputs:
    """What a decode step leaves at fixed addresses: states to hand on, and where the head is, logits [rows, V] and
    `greedy` float64 [3, rows]: the likeliest token, its log-probability, and 1 where the logits are finite: all that
    the host needs to know of a greedy step, in one read.
    """

    forward_pass: ForwardPass
    states: tuple[Tensor, Tensor]
    logits: Tensor | None = None
    greedy: Tensor | None = None


@dataclass(frozen=True)
class CapturedStep:
    """`replay` goes from the inputs (token ids and cached lengths int64 [2, rows]; states from the stage before) to
    the outputs."""

    replay: Callable[[], None]
    inputs: Tensor
    received: tuple[Tensor, Tensor] | None
    outputs: StepOutputs


def can_capture(model: Decoder) -> bool:
    """Whether decode steps can be CUDA graphs: dense models on a GPU, since a graph cannot follow a choice that the
    host reads."""
    return model.device.type == "cuda" and not model.is_sparse


def capture(step: Callable[[], StepOutputs], device: torch.device, pool: Any) -> tuple[Callable[[], None], StepOutputs]:
    """Capture a step as a graph: how to replay it, and its outputs."""
    # Libraries and communicators set themselves up outside of the graph.
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # thread_local: communication libraries may touch the device from threads of their own meanwhile.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        outputs = step()
    return graph.replay, outputs


class DecodeGraphs:
    """The decode steps of one cache (see `can_capture`)."""

    def __init__(self, model: Decoder, cache: KVCache) -> None:
        self.model, self.cache = model, cache
        cache.has_static_shapes = True
        self._steps: dict[int, CapturedStep] = {}
        self._pool = torch.cuda.graph_pool_handle() if model.device.type == "cuda" else None

    def size_for(self, num_rows: int) -> int:
        """The batch size that is captured for so many rows: the next power of two, or all rows of the cache."""
        return min(1 << (num_rows - 1).bit_length(), self.cache.rows.shape[0])

    def run(self, token_ids: list[int], lengths: list[int]) -> tuple[Tensor | None, Tensor | None]:
        """One token [B] for each of the first rows, `lengths` [B] cached -> logits [B, V] and `greedy` [3, B] (None
        where no head is). They stay valid until the next call."""
        num_rows, links = len(token_ids), self.model.links
        step = self.prepare(num_rows)
        size, outputs = step.inputs.shape[1], step.outputs
        padding = [0] * (size - num_rows)  # unused rows write to a place that nobody reads
        host = torch.tensor([token_ids + padding, lengths + padding])
        step.inputs.copy_(host.pin_memory() if step.inputs.is_cuda else host, non_blocking=True)
        if links is not None and step.received is not None:
            arrived = links.receive(size, 1, outputs.forward_pass)
            for static, states in zip(step.received, arrived, strict=True):
                static.copy_(states)
        step.replay()
        if links is not None and not links.is_last:
            links.send(*outputs.states, outputs.forward_pass)
        if outputs.logits is None or outputs.greedy is None:
            return None, None
        return outputs.logits[:num_rows], outputs.greedy[:, :num_rows]

    def prepare(self, num_rows: int) -> CapturedStep:
        """The graph for so many rows, captured now if there is none yet."""
        size = self.size_for(num_rows)
        if size not in self._steps:
            self._steps[size] = self._capture(size)
        return self._steps[size]

    def _capture(self, size: int) -> CapturedStep:
        model, device = self.model, self.model.device
        inputs = torch.zeros(2, size, dtype=torch.int64, device=device)
        received = None
        if not model.is_first:
            shape = (size, 1, model.config.hidden_size)
            received = (
                torch.zeros(shape, dtype=model.dtype, device=device),
                torch.zeros(shape, dtype=residual_dtype(model.dtype), device=device),
            )

        def step() -> StepOutputs:
            token_ids = inputs[0][:, None]
            cache = self.cache.first_rows(size, inputs[1], 0)
            forward_pass = model.begin(token_ids, cache=cache, phase="decode")
            states = model.enter(token_ids, forward_pass) if received is None else received
            states = model.run_half_blocks(*states, forward_pass)
            if not model.is_last:
                return StepOutputs(forward_pass, states)
            logits = model.logits(states[0][:, 0])
            chosen = greedy(logits)
            facts = (chosen, chosen_logprobs(logits, chosen), logits.amax(-1).isfinite())
            return StepOutputs(forward_pass, states, logits, torch.stack([fact.double() for fact in facts]))

        # Capturing runs the step, which writes to position 0 of rows that may be in use: put that back.
        kept = [states[:, :size, :, 0].clone() for states in (self.cache.keys, self.cache.values)]
        replay, outputs = capture(step, device, self._pool)
        for states_of_cache, first in zip((self.cache.keys, self.cache.values), kept, strict=True):
            states_of_cache[:, :size, :, 0] = first
        return CapturedStep(replay, inputs, received, outputs)
