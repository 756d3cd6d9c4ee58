"""What is asked of every family: it computes what Hugging Face's class does, however tokens are batched or cached."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from modules.decoder import Decoder
from modules.families.registry import from_hf_config, in_family, to_hf_config
from tests.modules.tiny_kinds import random_tokens
from tests.modules.tiny_models import tiny_decoder, tiny_hf_model


def assert_parity(hf_config: dict[str, Any]) -> None:
    """A tiny model of `hf_config`: prefill, decoding, ragged rows, and the way back to the config."""
    config = from_hf_config(hf_config)
    assert from_hf_config(to_hf_config(config)) == config == in_family(config)
    token_ids, reference, model = random_tokens(4, 40), tiny_hf_model(hf_config), tiny_decoder(hf_config)
    lengths = torch.tensor([40, 17, 1, 7])
    respelled = from_hf_config(reference.config.to_dict())
    assert replace(respelled, pad_token_id=None) == replace(config, pad_token_id=None)
    padded = token_ids.masked_fill(torch.arange(40) >= lengths[:, None], 2)
    with torch.inference_mode():
        expected = reference(token_ids).logits
        assert_close(logits_of(model, token_ids), expected)
        cache = model.new_cache(4, 48)
        steps = [logits_of(model, token_ids[:, :5], cache=cache), logits_of(model, token_ids[:, 5:19], cache=cache)]
        for idx in range(19, 40):
            steps.append(logits_of(model, token_ids[:, idx : idx + 1], cache=cache, phase="decode"))
        assert_close(torch.cat(steps, dim=1), expected)
        cache = model.new_cache(4, 48)
        ragged = logits_of(model, padded, cache=cache, num_tokens=lengths)
        uncached = logits_of(model, padded, num_tokens=lengths)
        following = random_tokens(4, 3, seed=2)
        decoded = [logits_of(model, following[:, idx : idx + 1], cache=cache, phase="decode") for idx in range(3)]
        assert cache.cache_seqlens.tolist() == [length + 3 for length in lengths.tolist()]
        for row, length in enumerate(lengths.tolist()):
            alone = reference(torch.cat([token_ids[row, :length], following[row]])[None]).logits[0]
            assert_close(ragged[row, :length], alone[:length])
            assert_close(uncached[row, :length], alone[:length])
            assert_close(torch.cat(decoded, dim=1)[row], alone[length:])


def logits_of(model: Decoder, token_ids: Tensor, **arguments: Any) -> Tensor:
    return model.logits(model(token_ids, **arguments))


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert expected.abs().max() > 0.5, "the reference is too small to tell models apart"
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)
