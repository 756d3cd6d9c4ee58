"""Tokenizers of the two kinds that models have, small enough to be written down: byte-level, and as sentencepiece."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<s>", "</s>", "<|end|>", "<|x|>")
WORDS = ("Hello", "Paris", "world", "ST", "OP", "P!", "now", ",", "ParisST", "a", "b", "c")


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """As GPT-2's and Llama 3's: every byte is a token, and so is each word with and without a space before it."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = dict.fromkeys([*SPECIAL, *letters, *(space + word for word in WORDS for space in ("", "Ġ"))])
    made = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, [], ignore_merges=True))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return _special(made)


def sentencepiece_tokenizer(*, metaspace: bool = False) -> PreTrainedTokenizerFast:
    """As Llama 2's: the decoder strips the space before the first word; bytes for what has no token. `metaspace`: with
    the decoder that newer files have."""
    pieces = [*SPECIAL, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    pieces += [space + word for word in WORDS for space in ("", "▁")]
    made = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=4, byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    llama = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    newer = [decoders.ByteFallback(), decoders.Metaspace()]
    made.decoder = decoders.Sequence(newer if metaspace else llama)
    return _special(made)


def _special(made: Tokenizer) -> PreTrainedTokenizerFast:
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    made.post_processor = TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")
