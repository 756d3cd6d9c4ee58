"""Models that say what a test wants: each token has one successor, whatever stands before it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.modules.tiny_kinds import LLAMA


def chain_folder(folder: Path, tokenizer: PreTrainedTokenizerFast, tokens: Sequence[str], **config: Any) -> Path:
    """A Hugging Face folder of a model that continues each of `tokens` with the next, and the last with itself."""
    size = len(tokenizer) + len(tokenizer) % 2
    shape = {"vocab_size": len(tokenizer), "hidden_size": size, "intermediate_size": 2, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "eos_token_id": 1}
    made = LLAMA | shape | heads | config
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**made))
    ids = tokenizer.convert_tokens_to_ids(list(tokens))
    assert len({*ids}) == len(ids) and None not in ids
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.model.norm.weight.fill_(1.0)
        model.model.embed_tokens.weight.copy_(torch.eye(len(tokenizer), size))
        for token_id, following in zip(ids, [*ids[1:], ids[-1]], strict=True):
            model.lm_head.weight[following, token_id] = 1.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
