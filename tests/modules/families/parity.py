"""What every family's test asks: one computation with Hugging Face's class, however tokens are batched or cached."""

from typing import Any

import torch
from torch import Tensor

from modules.decoder import Decoder
from modules.families.registry import from_hf_config, in_family, to_hf_config
from tests.modules.tiny_kinds import random_tokens
from tests.modules.tiny_models import tiny_decoder, tiny_hf_model


def assert_parity(hf_config: dict[str, Any]) -> None:
    """A tiny model of `hf_config`, whose context holds 40 tokens: prefill, decoding, ragged rows, and the config."""
    config = from_hf_config(hf_config)
    assert from_hf_config(tiny_hf_model(hf_config).config.to_dict()) == config == in_family(config)
    assert from_hf_config(to_hf_config(config)) == config
    token_ids, reference, model = random_tokens(2, 40), tiny_hf_model(hf_config), tiny_decoder(hf_config)
    lengths = torch.tensor([40, 17])
    with torch.inference_mode():
        expected = reference(token_ids).logits
        _assert_close(_logits(model, token_ids), expected)
        cache = model.new_cache(2, 48)
        steps = [_logits(model, token_ids[:, :5], cache=cache), _logits(model, token_ids[:, 5:19], cache=cache)]
        for idx in range(19, 40):
            steps.append(_logits(model, token_ids[:, idx : idx + 1], cache=cache, phase="decode"))
        _assert_close(torch.cat(steps, dim=1), expected)
        cache = model.new_cache(2, 48)
        ragged = _logits(model, token_ids, cache=cache, num_tokens=lengths)
        following = random_tokens(2, 3, seed=2)
        decoded = [_logits(model, following[:, idx : idx + 1], cache=cache, phase="decode") for idx in range(3)]
        for row, length in enumerate(lengths.tolist()):
            alone = reference(torch.cat([token_ids[row, :length], following[row]])[None]).logits[0]
            _assert_close(ragged[row, :length], alone[:length])
            _assert_close(torch.cat(decoded, dim=1)[row], alone[length:])


def _logits(model: Decoder, token_ids: Tensor, **arguments: Any) -> Tensor:
    return model.logits(model(token_ids, **arguments))


def _assert_close(actual: Tensor, expected: Tensor) -> None:
    assert expected.abs().max() > 0.5, "the reference is too small to tell models apart"
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)
