"""The decoder computes what Hugging Face's own classes compute, however the tokens are batched, padded or cached."""

import math

import pytest
import torch

from modules.checkpoint.load import build_on_meta, checkpoint_shapes, load_weights
from modules.families.registry import from_hf_config
from tests.modules.families.parity import assert_close, assert_parity, logits_of
from tests.modules.tiny_kinds import KINDS, OPT, random_tokens
from tests.modules.tiny_models import StateDict, tiny_decoder, tiny_hf_model

GOLDEN_LOSS = 5.66817752253038
CACHED_KINDS = [
    "llama-9-heads-3-groups",
    "llama-llama3-scaling",
    "llama-biases",
    "opt",
    "opt-post-norm-projected",
]


@pytest.mark.parametrize("kind", KINDS)
def test_logits_match_hugging_face(kind: str) -> None:
    token_ids = random_tokens(2, 40)
    with torch.inference_mode():
        expected = tiny_hf_model(KINDS[kind])(token_ids).logits
        actual = logits_of(tiny_decoder(KINDS[kind]), token_ids)
    assert_close(actual, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_hub_and_transformers_spellings_give_one_config(kind: str) -> None:
    respelled = tiny_hf_model(KINDS[kind]).config.to_dict()
    ours, theirs = from_hf_config(KINDS[kind]), from_hf_config(respelled)
    assert {**vars(ours), "pad_token_id": None} == {**vars(theirs), "pad_token_id": None}


@pytest.mark.parametrize("kind", CACHED_KINDS)
def test_cached_and_padded_tokens_compute_what_hugging_face_does(kind: str) -> None:
    assert_parity(KINDS[kind])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["opt", "opt-post-norm-projected", "llama"])
def test_half_precision_with_padded_rows_is_finite_and_near_float32(kind: str, dtype: torch.dtype) -> None:
    token_ids, num_tokens = random_tokens(3, 9), torch.tensor([1, 9, 4])
    with torch.inference_mode():
        wide = logits_of(tiny_decoder(KINDS[kind]), token_ids, num_tokens=num_tokens)
        model = tiny_decoder(KINDS[kind], dtype=dtype)
        cache = model.new_cache(3, 12)
        narrow = logits_of(model, token_ids, cache=cache, num_tokens=num_tokens)
        step = logits_of(model, token_ids[:, :1], cache=cache, phase="decode")
    assert narrow.dtype == step.dtype == dtype
    assert torch.isfinite(narrow).all() and torch.isfinite(step).all()
    assert (narrow.float() - wide).norm() / wide.norm() < (0.01 if dtype == torch.float16 else 0.08)


def test_a_tied_head_is_the_embedding_itself() -> None:
    tied, untied = tiny_decoder(KINDS["llama-tied"]), tiny_decoder(KINDS["llama"])
    assert tied.lm_head.weight is tied.embeddings.tokens.weight
    assert untied.lm_head.weight is not untied.embeddings.tokens.weight


def test_dense_opt_keeps_its_golden_value() -> None:
    """Weights from a formula; the loss from a separate float64 program in numpy, not from Hugging Face."""
    weights = tiny_hf_model(OPT).state_dict()
    del weights["lm_head.weight"]  # tied
    for idx, (name, old) in enumerate(sorted(weights.items())):
        count = torch.arange(old.numel(), dtype=torch.float64).view(old.shape)
        value = torch.sin(count * 1.7 + 13.0 * idx) * 0.3
        weights[name] = value + 1.0 if name.endswith("norm.weight") else value
    config = from_hf_config(OPT)
    model = build_on_meta(config)
    load_weights(model, StateDict(weights, config, checkpoint_shapes(config), "formula"))
    token_ids = (torch.arange(32) * 37 % 128 + 3)[None]
    with torch.inference_mode():
        logprobs = torch.log_softmax(logits_of(model, token_ids), dim=-1)
    loss = -logprobs[0, :-1].gather(-1, token_ids[0, 1:, None]).mean()
    assert math.isclose(float(loss), GOLDEN_LOSS, rel_tol=1e-9)
