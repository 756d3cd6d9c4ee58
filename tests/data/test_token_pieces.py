"""Documents cut into token pieces: nothing lost, nothing added but the tokenizer's own special tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from data.corpora import Document, token_documents, token_pieces

BOS, EOS = 1, 2


def as_documents(texts: list[str]) -> list[Document]:
    return [Document(document_id=str(idx), text=text) for idx, text in enumerate(texts)]


def test_a_long_document_becomes_consecutive_pieces_each_begun_as_the_tokenizer_begins_a_text(
    make_tokenizer: Callable[..., Any],
) -> None:
    tokenizer = make_tokenizer(prefix=(BOS,))
    pieces = list(token_pieces(tokenizer, as_documents(["abcdefg", "h"]), max_document_tokens=4))
    assert [(piece.document_id, piece.token_ids) for piece in pieces] == [
        ("0", [BOS, *b"abc"]),
        ("0", [BOS, *b"def"]),
        ("0", [BOS, *b"g"]),
        ("1", [BOS, *b"h"]),
    ]


def test_a_tokenizer_that_ends_texts_ends_only_the_last_piece(make_tokenizer: Callable[..., Any]) -> None:
    tokenizer = make_tokenizer(prefix=(BOS,), suffix=(EOS,))
    assert list(token_documents(tokenizer, as_documents(["abc"]), max_document_tokens=3)) == [
        [BOS, *b"ab"],
        [BOS, *b"c", EOS],
    ]


def test_without_a_limit_a_document_is_tokenised_as_the_tokenizer_alone_would(
    make_tokenizer: Callable[..., Any],
) -> None:
    for tokenizer in (make_tokenizer(), make_tokenizer((BOS,)), make_tokenizer((BOS, 3), (EOS,))):
        assert list(token_documents(tokenizer, as_documents(["abc" * 50]))) == [tokenizer("abc" * 50)["input_ids"]]


@given(
    texts=st.lists(st.text(alphabet="abc", min_size=1, max_size=20), min_size=1, max_size=8),
    max_tokens=st.integers(1, 80),
    max_document_tokens=st.integers(2, 12),
    has_bos=st.booleans(),
)
def test_the_total_is_exactly_max_tokens_and_pieces_join_to_their_documents(
    make_tokenizer: Callable[..., Any],
    texts: list[str],
    max_tokens: int,
    max_document_tokens: int,
    has_bos: bool,
) -> None:
    tokenizer = make_tokenizer((BOS,) if has_bos else ())
    documents = as_documents(texts)
    whole = list(token_pieces(tokenizer, documents, max_document_tokens=max_document_tokens))
    for document in documents:
        own = [piece.token_ids for piece in whole if piece.document_id == document.document_id]
        assert all(0 < len(token_ids) <= max_document_tokens for token_ids in own)
        joined = [token_id for token_ids in own for token_id in token_ids[has_bos:]]
        assert document.text == "".join(map(chr, joined))
    limited = list(
        token_documents(tokenizer, documents, max_tokens=max_tokens, max_document_tokens=max_document_tokens)
    )
    flat = [token_id for piece in whole for token_id in piece.token_ids]
    assert [token_id for token_ids in limited for token_id in token_ids] == flat[:max_tokens]


def test_no_document_beyond_max_tokens_is_asked_for(make_tokenizer: Callable[..., Any]) -> None:
    def documents() -> Any:
        yield Document(document_id="0", text="abc")
        raise AssertionError("read too far")

    assert list(token_documents(make_tokenizer(), documents(), max_tokens=3)) == [[*b"abc"]]


def test_token_ids_stay_as_they_are_and_later_pieces_begin_as_the_first(
    make_tokenizer: Callable[..., Any],
) -> None:
    documents = [
        Document(document_id="0", token_ids=[BOS, 7, EOS, 8, 9]),
        Document(document_id="1", token_ids=[7, 8, 9, EOS]),
        Document(document_id="2", token_ids=[BOS]),
    ]
    pieces = list(token_documents(make_tokenizer((BOS,), (EOS,)), documents, max_document_tokens=3))
    assert pieces == [[BOS, 7, EOS], [BOS, 8, 9], [7, 8, 9], [EOS], [BOS]]
    assert list(token_documents(None, documents[1:])) == [[7, 8, 9, EOS], [BOS]]


def test_a_genuine_eos_survives_where_it_is_also_the_pad_token() -> None:
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2, "a": 3, "b": 4}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    documents = as_documents(["a b </s> a </s>"])
    assert list(token_documents(tokenizer, documents)) == [[1, 3, 4, 2, 3, 2]]
    assert list(token_documents(tokenizer, documents, max_document_tokens=4)) == [[1, 3, 4, 2], [1, 3, 2]]


def test_token_ids_of_another_model_are_refused(make_tokenizer: Callable[..., Any]) -> None:
    documents = [Document(document_id="4", token_ids=[3, 100])]
    with pytest.raises(ValueError, match="document 4 holds token id 100, but the vocabulary has 100 entries"):
        list(token_documents(None, documents, vocab_size=100))
    assert list(token_documents(None, documents, vocab_size=101)) == [[3, 100]]


def test_text_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(ValueError, match="document 0 is text, and the model has no tokenizer"):
        list(token_documents(None, as_documents(["a"])))


def test_limits_that_leave_no_room_are_refused(make_tokenizer: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="max_tokens must be >= 1, got 0"):
        token_documents(make_tokenizer(), [], max_tokens=0)
    with pytest.raises(ValueError, match="max_document_tokens must be >= 1, got -1"):
        token_documents(make_tokenizer(), [], max_document_tokens=-1)
    with pytest.raises(ValueError, match="must exceed the 2 tokens that begin every text, got 2"):
        token_documents(make_tokenizer((BOS, BOS)), [], max_document_tokens=2)


def test_a_tokenizer_that_rewrites_text_is_refused() -> None:
    def tokenizer(text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [5, 6] if add_special_tokens else [7]}

    with pytest.raises(ValueError, match="rewrites text when it adds special tokens"):
        token_documents(tokenizer, [])
