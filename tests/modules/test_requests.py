"""Where a text ends: stop strings over tokens of real tokenizers, special tokens among them."""

import random
from functools import partial
from os.path import commonprefix

import pytest
from transformers import PreTrainedTokenizerFast

from modules.requests import Decode, StopSearch
from scripts.model_loading import decode_text
from tests.modules.tiny_tokenizers import byte_level_tokenizer, sentencepiece_tokenizer

TOKENIZERS = {
    "byte-level": byte_level_tokenizer(),
    "sentencepiece": sentencepiece_tokenizer(),
    "metaspace": sentencepiece_tokenizer(metaspace=True),
}


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    return TOKENIZERS[request.param]


def ids(tokenizer: PreTrainedTokenizerFast, *tokens: str) -> list[int]:
    """Of tokens as sentencepiece spells them."""
    is_byte_level = tokenizer is TOKENIZERS["byte-level"]
    spelled = [token.replace("▁", "Ġ") if is_byte_level else token for token in tokens]
    found = tokenizer.convert_tokens_to_ids(spelled)
    assert None not in found and tokenizer.convert_ids_to_tokens(found) == spelled
    return found


def text_of(decode: Decode, token_ids: list[int], *stop: str, prompt: list[int]) -> tuple[str | None, int]:
    """What is given out, None if nothing stopped it, and the number of tokens until then."""
    search = StopSearch(decode, stop, prompt)
    for count, token_id in enumerate(token_ids, start=1):
        if (text := search.text_before(token_id)) is not None:
            return text, count
    return None, len(token_ids)


@pytest.mark.parametrize(
    ("tokens", "stop", "expected", "count"),
    [
        # A special token ends the text, alone or with its neighbours, and whatever has gone before.
        (["▁Hello", "<|end|>", "▁now"], ["<|end|>"], "Hello", 2),
        (["▁Hello", "<|end|>", "▁now"], ["<|end|> now"], "Hello", 3),
        # A string with a space before it, as the first word and later.
        (["▁Paris", "▁now"], [" Paris"], "", 1),
        (["▁Hello", "▁Paris"], [" Paris"], "Hello", 2),
        (["▁Hello", "▁Paris"], ["Paris"], "Hello ", 2),
        # A string that spans tokens, and one that begins or lies within one.
        (["▁Hello", "ST", "OP", "▁now"], ["never", "STOP"], "Hello", 3),
        (["▁ParisST", "OP"], ["STOP"], "Paris", 2),
        # One that a special token interrupts: the text that is given out would hold it.
        (["▁Hello", "ST", *["<|x|>"] * 40, "OP", "▁now"], ["STOP"], "Hello", 43),
        (["<|x|>", "▁ParisST", "<|x|>", "OP"], ["ST<|x|>OP"], "Paris", 4),
        # One that begins within the name of a special token: nothing of the name is given out.
        (["▁Hello", "▁now", "<|end|>", "▁world"], ["d|> wor"], "Hello now", 4),
        # The earliest of several.
        (["▁Hello", "ST", "OP"], ["OP", "ST", "P"], "Hello", 2),
        (["▁ParisST", "<|end|>"], ["ST<|end|>", "is"], "Par", 1),
        (["▁Hello", "▁now"], ["Paris", "<|end|>", "Hello now "], None, 2),
    ],
)
def test_a_text_ends_before_its_first_stop_string(
    tokenizer: PreTrainedTokenizerFast, tokens: list[str], stop: list[str], expected: str | None, count: int
) -> None:
    decode, token_ids = partial(decode_text, tokenizer), ids(tokenizer, *tokens)
    first = next((token for token in tokens if token != "<|x|>"), "")
    if tokenizer is TOKENIZERS["byte-level"] and expected and first[0] == "▁":
        expected = f" {expected}"  # this decoder strips no space
    for prompt in (["▁Hello"], ["<s>"], ["▁Hello", "<|x|>"], ["▁"]):
        assert text_of(decode, token_ids, *stop, prompt=ids(tokenizer, *prompt)) == (expected, count)


def test_any_part_of_any_text_stops_it_at_once_and_is_not_given_out(tokenizer: PreTrainedTokenizerFast) -> None:
    decode, draw = partial(decode_text, tokenizer), random.Random(5)
    pieces = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    words = [token_id for token_id, piece in enumerate(pieces) if len(piece) > 1 and not piece.startswith("<0x")]
    num_stopped = 0
    for _ in range(300):
        prompt, *token_ids = (
            draw.choice(words) if draw.random() < 0.8 else draw.randrange(len(pieces))
            for _ in range(draw.randint(2, 12))
        )

        def texts(count: int, prompt: int = prompt, token_ids: list[int] = token_ids) -> tuple[str, str]:
            """What is given out, and what special tokens add to it."""
            before, whole = decode([prompt], special=True), decode([prompt, *token_ids[:count]], special=True)
            return decode(token_ids[:count]), whole[len(commonprefix([before, whole])) :]

        source = draw.choice(texts(len(token_ids)))
        start = draw.randrange(len(source) or 1)
        stop = source[start : start + draw.randint(1, 6)]
        if not stop or "\ufffd" in stop:  # half a character is none
            continue
        first = next(count for count in range(1, 13) if any(stop in text for text in texts(count)))
        text, count = text_of(decode, token_ids, stop, prompt=[prompt])
        assert count == first and text is not None, (pieces[prompt], stop)
        assert stop not in text and texts(count)[0].startswith(text), (pieces[prompt], stop)
        num_stopped += 1
    assert num_stopped > 200


def test_special_tokens_leave_the_spacing_of_their_neighbours(tokenizer: PreTrainedTokenizerFast) -> None:
    decode = partial(decode_text, tokenizer)
    for tokens, expected in [
        (["Hello", "<|x|>", "▁world"], "Hello world"),
        (["Hello", "<|x|>", "world"], "Helloworld"),
        (["Hello", "▁", "<|x|>", "world"], "Hello world"),
        (["Hello", "<|x|>", "<|x|>", "▁world", "<|x|>", ",", "▁now"], "Hello world, now"),
    ]:
        token_ids = ids(tokenizer, *tokens)
        assert decode(token_ids) == expected
        ended = text_of(decode, ids(tokenizer, *tokens, "<|end|>"), "<|end|>", prompt=ids(tokenizer, "<s>"))
        assert ended == (expected, len(tokens) + 1)


def test_characters_of_several_tokens_are_whole_in_text_and_stop(tokenizer: PreTrainedTokenizerFast) -> None:
    decode = partial(decode_text, tokenizer)
    is_byte_level = tokenizer is TOKENIZERS["byte-level"]
    e_acute, e_grave = (["Ã", "©"], ["Ã", "¨"]) if is_byte_level else (["<0xC3>", "<0xA9>"], ["<0xC3>", "<0xA8>"])
    token_ids = ids(tokenizer, "a", *e_acute, "b", *e_grave, "c")
    prompt = ids(tokenizer, "▁Hello")
    assert text_of(decode, token_ids, "è", prompt=prompt) == ("aéb", 6)
    assert text_of(decode, token_ids, "éb", prompt=prompt) == ("a", 4)
    # The prompt's last token begins a character, the first new one ends it.
    split = ids(tokenizer, e_acute[0]), ids(tokenizer, e_acute[1], "b", "<|end|>")
    text, count = text_of(decode, split[1], "<|end|>", prompt=split[0])
    assert count == 3 and text is not None and text.endswith("b")


def test_a_long_text_is_decoded_from_its_tail_only(tokenizer: PreTrainedTokenizerFast) -> None:
    lengths: list[int] = []

    def decode(token_ids: list[int], *, special: bool = False) -> str:
        lengths.append(len(token_ids))
        return decode_text(tokenizer, token_ids, special=special)

    search = StopSearch(decode, ["STOP"], ids(tokenizer, "▁Hello") * 500)
    for token_id in ids(tokenizer, "a", "b", "<|x|>", "▁now") * 250:
        assert search.text_before(token_id) is None
    assert max(lengths) < 20 and sum(lengths) < 60 * 1000
    assert search.text_before(ids(tokenizer, "ST")[0]) is None
    text = search.text_before(ids(tokenizer, "OP")[0])
    assert text == decode_text(tokenizer, ids(tokenizer, "a", "b", "<|x|>", "▁now") * 250)
