"""The peer of decode.py and prefill.py: transformers' own class with our weights, its scores and its speed.

Compiled: `generate(cache_implementation="static")`, whose decode steps transformers itself compiles on a GPU (mode
reduce-overhead, that is CUDA graphs).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch._dynamo.exc
from loguru import logger
from torch import Tensor

from modules.checkpoint.write import hf_state_dict
from modules.decoder import Decoder

# A compiled model is warm once a run is no longer faster than the one before; the first compiles, the second records.
MAX_WARM_UPS = 6


def hugging_face_model(model: Decoder, hf_config: Mapping[str, Any]) -> Any:
    """transformers' own class with the weights of our (whole) model, in its layout; `hf_config`: its config.json."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**hf_config), dtype=model.compute_dtype)
    state = {name: value.contiguous() for name, value in hf_state_dict(model).items()}
    theirs.load_state_dict(state, strict=True, assign=True)
    # Buffers that are computed, not stored (rotary frequencies), are still without values.
    fresh = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**{**hf_config, "num_hidden_layers": 1, "vocab_size": 8, "intermediate_size": 8})
    )
    computed = dict(fresh.named_buffers())
    for name, _ in list(theirs.named_buffers()):
        module, _, kind = name.rpartition(".")
        theirs.get_submodule(module).register_buffer(kind, computed[name].to(model.device), persistent=False)
    theirs.generation_config.eos_token_id = None  # it goes on for as long as ours does
    return theirs.eval()


@torch.inference_mode()
def echoed_by_hugging_face(theirs: Any, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
    """As `echoed`."""
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=theirs.device)
        logits = theirs(ids).logits[0, :-1]
        logprobs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
        found.append(logprobs.gather(-1, ids[0, 1:, None])[:, 0].tolist())
    return found


@torch.inference_mode()
def measure_hugging_face(
    theirs: Any, batches: Mapping[int, Sequence[Sequence[int]]], *, new_tokens: int, repetitions: int, decode: bool
) -> dict[int, list[float]]:
    """tokens/s of each repetition, by batch size, of transformers' `generate`, greedy, on prompts of equal length: of
    its prefill (one new token), or of the tokens after it."""
    speeds = {}
    for batch_size, prompts in batches.items():
        ids = torch.tensor(prompts, device=theirs.device)
        count = min(new_tokens, 24) if decode else 1  # a step is slow, and as slow as the next

        def seconds(count: int, ids: torch.Tensor = ids) -> float:
            synchronize(ids.device)
            started = time.perf_counter()
            theirs.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
            )
            synchronize(ids.device)
            return time.perf_counter() - started

        seconds(2)
        found = []
        for _ in range(repetitions):
            prefill_s = seconds(1)
            found.append(batch_size * count / (seconds(count + 1) - prefill_s) if decode else ids.numel() / prefill_s)
        speeds[batch_size] = found
    return speeds


def measure_compiled(
    theirs: Any, prompts: Sequence[Sequence[int]], *, new_tokens: int, repetitions: int
) -> list[float]:
    """tokens/s of each repetition, of the decode steps of transformers' `generate` with a static cache, compiled,
    greedy, on prompts of equal length. The clock starts when the first new token is there, so that the prefill does
    not count. ValueError if transformers did not compile: that would be another baseline."""
    from transformers import GenerationConfig, StoppingCriteriaList

    ids = torch.tensor(prompts, device=theirs.device)
    config = GenerationConfig(
        max_new_tokens=new_tokens + 1,
        do_sample=False,
        pad_token_id=0,
        cache_implementation="static",
        compile_config=compile_config(fullgraph=True),
    )

    def seconds() -> float:
        clock = FirstTokenClock(ids)
        criteria = StoppingCriteriaList([clock])
        written = theirs.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=config, stopping_criteria=criteria
        )
        synchronize(ids.device)
        ended_s = time.perf_counter()
        assert written.shape[1] == ids.shape[1] + new_tokens + 1, "Hugging Face wrote another number of tokens"
        return ended_s - clock.started_s

    try:
        warm = [seconds()]
    except torch._dynamo.exc.Unsupported as problem:
        logger.warning(f"Hugging Face's model is not one graph, so it is compiled in pieces: {problem.msg[:200]}")
        config.compile_config = compile_config(fullgraph=False)
        warm = [seconds()]
    warm.append(seconds())
    while warm[-1] < 0.97 * warm[-2] and len(warm) < MAX_WARM_UPS:
        warm.append(seconds())
    if not hasattr(theirs, "_compiled_call"):
        raise ValueError(f"transformers did not compile its decode steps on {ids.device}; it is not timed")
    return [ids.shape[0] * new_tokens / seconds() for _ in range(repetitions)]


def compile_config(*, fullgraph: bool) -> Any:
    """transformers' own default for a static cache (inductor, mode reduce-overhead), as one graph if that works."""
    from transformers import CompileConfig

    return CompileConfig(fullgraph=fullgraph)


class FirstTokenClock:
    """A stopping criterion that never stops; `started_s` is when it was first asked: after the prefill's token."""

    def __init__(self, ids: Tensor) -> None:
        self.nothing_stops = torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)  # once: it costs no launch
        self.started_s = 0.0

    def __call__(self, input_ids: Tensor, scores: Tensor, **unused: Any) -> Tensor:
        if not self.started_s:
            synchronize(input_ids.device)
            self.started_s = time.perf_counter()
        return self.nothing_stops


def synchronize(device: torch.device) -> None:
    """Wait for a GPU; nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
