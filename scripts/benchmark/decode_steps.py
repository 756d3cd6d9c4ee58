"""Decode steps by themselves, driven from here: a text forced through them, or their graphs replayed.

`forced_likelihood`: perplexity through decode steps. The tokens of a text are forced one by one, where a prefill takes
them all at once; on a GPU through the captured graphs that generation replays, so the number belongs to what is timed.
`bare_step_ms`: what steps cost when nothing is read and nothing asked of the host. They are those of the timed
generation, from the same prompts with the same choices, so they compute the same units; what generation takes beyond
them is the host's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from statistics import median

import torch
from torch import Tensor

from modules.cache import Cache
from modules.decoder import Decoder
from modules.generation import decode_one_token
from modules.graphs import DecodeGraphs, StepInputs, can_capture
from modules.requests import GenerationRequest
from modules.sampling import SamplingParams, greedy
from modules.scoring import Likelihood, Window, chosen_logprobs, pad_right

# One token [B] for each of the first rows, behind so many cached -> logits [B, V] of the next.
Step = Callable[[list[int], int], Tensor]


@torch.inference_mode()
def forced_likelihood(model: Decoder, windows: Iterable[Window], *, batch_size: int = 8) -> Likelihood:
    """As `windows_likelihood` of a model whose sparse phases are `all`, but decoding every token. ValueError if logits
    are not finite."""
    pending = sorted(windows, key=lambda piece: -len(piece.token_ids))
    if not pending:
        return Likelihood()
    # Graphs look at the whole cache, in pieces of 64 positions.
    room = min(-(-len(pending[0].token_ids) // 64) * 64, model.config.max_position_embeddings)
    cache = model.new_cache(min(batch_size, len(pending)), room)
    step = graph_step(DecodeGraphs(model, cache)) if can_capture(model) else eager_step(model, cache)
    queue, total = iter(pending), Likelihood()
    while batch := list(islice(queue, batch_size)):
        total += _batch_likelihood(step, batch, model.device)
    return total


def _batch_likelihood(step: Step, batch: list[Window], device: torch.device) -> Likelihood:
    """Of windows that run together, the longest first: a row that ends is the last one."""
    nll_sum = torch.zeros((), dtype=torch.float64, device=device)
    # All that a step needs is on the device beforehand, and none of its results is read: the host runs ahead.
    text, _ = pad_right([piece.token_ids for piece in batch], device)
    context = torch.tensor([piece.num_context for piece in batch], device=device)
    for place in range(len(batch[0].token_ids) - 1):
        rows = [piece for piece in batch if place + 1 < len(piece.token_ids)]
        logits = step([piece.token_ids[place] for piece in rows], place)
        targets, counted = text[: len(rows), place + 1], context[: len(rows)] <= place + 1
        nll_sum -= chosen_logprobs(logits, targets).double().masked_fill(~counted, 0.0).sum()
    if not bool(nll_sum.isfinite()):
        raise ValueError("logits of a decode step are not finite (NaN or inf), or a token of the text is impossible")
    return Likelihood(float(nll_sum), sum(len(piece.token_ids) - max(1, piece.num_context) for piece in batch))


def graph_step(graphs: DecodeGraphs) -> Step:
    """Through the captured graphs; what they choose themselves is not used."""

    def step(token_ids: list[int], length: int) -> Tensor:
        count = len(token_ids)
        captured = graphs.filled(StepInputs(token_ids, [length] * count, [1] * count, [SamplingParams()] * count))
        captured.replay()
        assert captured.logits is not None, "the head is elsewhere"
        return captured.logits[:count]

    return step


def eager_step(model: Decoder, cache: Cache) -> Step:
    """Through the model as it is."""

    def step(token_ids: list[int], length: int) -> Tensor:
        lengths = torch.full((len(token_ids),), length, device=model.device)
        rows = cache.first_rows(len(token_ids), lengths, length)
        return decode_one_token(model, torch.tensor(token_ids, device=model.device), rows)

    return step


@torch.inference_mode()
def bare_step_ms(model: Decoder, requests: Sequence[GenerationRequest], repetitions: int) -> float | None:
    """Median milliseconds of a greedy decode step of these requests run together, prompts of equal length; None where
    steps are not CUDA graphs."""
    if not can_capture(model):
        return None
    prompts = torch.tensor([request.prompt_token_ids for request in requests], device=model.device)
    (count, length), steps = prompts.shape, requests[0].max_new_tokens - 1
    # Graphs look at the whole cache, in pieces of 64 positions.
    room = min(-(-(length + steps + 1) // 64) * 64, model.config.max_position_embeddings)
    cache = model.new_cache(count, room)
    chosen = greedy(model.logits(model(prompts, cache=cache)[:, -1])).tolist()
    graphs, lengths = DecodeGraphs(model, cache), [length] * count
    inputs = StepInputs(chosen, lengths, [1] * count, [SamplingParams()] * count)
    graphs.filled(inputs).replay()  # captured, and run once
    samples = []
    for _ in range(repetitions):
        step = graphs.filled(inputs)
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(model.device)
        began.record()
        for _ in range(steps):
            step.replay()
        ended.record()
        torch.cuda.synchronize(model.device)
        samples.append(began.elapsed_time(ended) / steps)
    return median(samples)
