"""The peer of decode.py and prefill.py: transformers' own class with our weights, its scores and its speed."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import torch

from modules.checkpoint_keys import tensor_locations
from modules.decoder import Decoder
from scripts.benchmark.shapes import HF_CONFIGS, Shape


def hugging_face_model(model: Decoder, shape: Shape) -> Any:
    """transformers' own class with the weights of our (whole) model, in its layout."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**HF_CONFIGS[shape]), dtype=model.dtype)
    state = {}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    prefixes = {"embs": "", "lm_head": ""}
    body = "model." if model.config.model_type == "llama" else "model.decoder."
    for name, location in tensor_locations(model, model.config).items():
        value = parameters[name].data
        part = prefixes.get(location.part, f"layers.{location.part}.")
        key = location.key if location.key.startswith("lm_head") else f"{body}{part}{location.key}"
        state[key] = value.t().contiguous() if location.transposed else value
    theirs.load_state_dict(state, strict=True, assign=True)
    # Buffers that are computed, not stored (rotary frequencies), are still without values.
    fresh = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**HF_CONFIGS[shape] | {"num_hidden_layers": 1, "vocab_size": 8, "intermediate_size": 8})
    )
    computed = dict(fresh.named_buffers())
    for name, _ in list(theirs.named_buffers()):
        module, _, kind = name.rpartition(".")
        theirs.get_submodule(module).register_buffer(kind, computed[name].to(model.device), persistent=False)
    return theirs.eval()


@torch.inference_mode()
def echoed_by_hugging_face(theirs: Any, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
    """As `echoed`."""
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=theirs.device)
        logprobs = theirs(ids).logits[0, :-1].float().log_softmax(-1)
        found.append(logprobs.gather(-1, ids[0, 1:, None])[:, 0].tolist())
    return found


@torch.inference_mode()
def measure_hugging_face(
    theirs: Any, batches: Mapping[int, Sequence[Sequence[int]]], *, new_tokens: int, repetitions: int, decode: bool
) -> dict[int, float]:
    """tokens/s by batch size of transformers' `generate`, greedy, on prompts of equal length: of its prefill (one new
    token), or of the tokens after it."""
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
        speeds[batch_size] = median(found)
    return speeds


def synchronize(device: torch.device) -> None:
    """Wait for a GPU; nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
