"""Perplexity through decode steps: the tokens of a text are forced one by one, where a prefill takes them all at once.

On a GPU the steps are the captured graphs that generation replays, so the number belongs to what is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice

import torch
from torch import Tensor

from modules.cache import KVCache
from modules.decoder import Decoder
from modules.generation import decode_one_token
from modules.graphs import DecodeGraphs, StepInputs, can_capture
from modules.sampling import SamplingParams
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


def eager_step(model: Decoder, cache: KVCache) -> Step:
    """Through the model as it is."""

    def step(token_ids: list[int], length: int) -> Tensor:
        lengths = torch.full((len(token_ids),), length, device=model.device)
        rows = cache.first_rows(len(token_ids), lengths, length)
        return decode_one_token(model, torch.tensor(token_ids, device=model.device), rows)

    return step
