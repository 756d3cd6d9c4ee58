"""What decode steps cost by themselves: their graph replayed once a token, nothing read and nothing asked of the host.

The steps are those of the timed generation, from the same prompts with the same choices, so they compute the same
units; what generation takes beyond them is the host's.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import torch

from modules.decoder import Decoder
from modules.graphs import DecodeGraphs, StepInputs, can_capture
from modules.requests import GenerationRequest
from modules.sampling import SamplingParams, greedy


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
