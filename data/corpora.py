"""Where text comes from: `--corpus SPEC`, read as documents and cut into pieces of token ids.

A spec is one of

    wikitext[:SPLIT]      WikiText-2 raw, through `datasets`, streamed (train, validation, test)
    c4[:SPLIT]            C4 English, likewise (train, validation)
    FILE.txt, FILE.raw    plain text, UTF-8
    FILE.jsonl[.gz]       an object per line: `text`, else `prompt`; or `token_ids`, text already tokenised
    self[:SEED]           text that the model writes itself from that seed

The two sides never meet unless a spec says so: `train` (collection) takes split train and seed 0, `test`
(evaluation) takes split test (C4: validation) and seed 1. Plain text on the test side is one stream, byte for
byte the file's, as perplexity is usually measured; on the train side it is cut at article headings (WikiText)
or blank lines (other text), because activations are split into training and validation rows by document.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from data.files import check_token_ids, read_json_lines, require_file

Side = Literal["train", "test"]
SelfWriter = Callable[[int], Iterable[Sequence[int] | str]]
SIDES = ("train", "test")
SELF_SEEDS = {"train": 0, "test": 1}
TEXT_SUFFIXES = (".txt", ".raw")
JSON_SUFFIXES = (".jsonl", ".jsonl.gz")
# Plain text without headings is cut at the first blank line after this many characters (about 2k tokens), or
# at the first line end after four times as many.
SECTION_CHARACTERS = 8192
ARTICLE_HEADING = re.compile(r" = (?!= ).* = \n?")


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """A spec with its defaults filled in. `kind`: wikitext | c4 | text | jsonl | self."""

    kind: str
    side: Side
    split: str = ""
    path: Path | None = None
    seed: int | None = None

    @property
    def label(self) -> str:
        """The spec with nothing left to defaults, for manifests and records: `wikitext:train`, `self:0`."""
        if self.path is not None:
            return self.path.name
        return f"{self.kind}:{self.split if self.seed is None else self.seed}"

    def is_same_text(self, other: Corpus) -> bool:
        """Whether both read the same text, for whichever side, and however the path of a file is spelt."""
        if self.path is not None and other.path is not None:
            return self.path.samefile(other.path)
        return (self.label, self.path) == (other.label, other.path)


@dataclass(frozen=True, kw_only=True)
class Document:
    """`text`, or `token_ids` if it arrives tokenised; `document_id`: its place in the corpus."""

    document_id: str
    text: str | None = None
    token_ids: Sequence[int] | None = None


@dataclass(frozen=True, kw_only=True)
class TokenPiece:
    """Consecutive tokens of one document, special tokens included: one row of a batch."""

    document_id: str
    token_ids: list[int]


def parse_corpus(spec: str, *, side: Side) -> Corpus:
    """Resolve `spec` for one side. ValueError: unknown spec, split, seed; FileNotFoundError: no such file."""
    if side not in SIDES:
        raise ValueError(f"side must be train or test, got {side!r}")
    name, _, argument = spec.partition(":")
    if name in HUB_CORPORA:
        hub = HUB_CORPORA[name]
        split = argument or hub.default_split[side]
        if split not in hub.splits:
            raise ValueError(f"corpus {spec!r}: {name} has no split {split!r}; choose {', '.join(hub.splits)}")
        return Corpus(kind=name, side=side, split=split)
    if name == "self":
        if argument and not (argument.isascii() and argument.isdigit()):
            raise ValueError(f"corpus {spec!r}: the seed must be an integer >= 0, e.g. self:0")
        return Corpus(kind="self", side=side, seed=int(argument) if argument else SELF_SEEDS[side])
    if spec.endswith(TEXT_SUFFIXES):
        return Corpus(kind="text", side=side, path=require_file(Path(spec), "corpus"))
    if spec.endswith(JSON_SUFFIXES):
        return Corpus(kind="jsonl", side=side, path=require_file(Path(spec), "corpus"))
    raise ValueError(
        f"unknown corpus {spec!r}; give wikitext[:SPLIT], c4[:SPLIT], self[:SEED] "
        f"or a file ending in {', '.join(TEXT_SUFFIXES + JSON_SUFFIXES)}"
    )


def iter_documents(spec: str, *, side: Side, self_writer: SelfWriter | None = None) -> Iterator[Document]:
    """Yield the documents of `spec`; blank ones are passed over.

    `self_writer(seed)` yields what the model writes, as token ids (kept as they are) or text; `self` needs
    it. The spec is checked at the call, before anything is read. While reading: ValueError for a corpus
    without any text, a bad JSON line (file and line number named), text that is not UTF-8; ConnectionError if
    the Hub cannot be read.
    """
    corpus = parse_corpus(spec, side=side)
    if corpus.kind == "self" and self_writer is None:
        raise ValueError(f"corpus {spec!r} is written by the model itself, and no model was given to write it")
    return _numbered(corpus, spec, self_writer)


def _numbered(corpus: Corpus, spec: str, self_writer: SelfWriter | None) -> Iterator[Document]:
    num_documents = 0
    for content in _contents(corpus, self_writer):
        document_id = str(num_documents)
        if isinstance(content, str):
            if not content.strip():
                continue
            yield Document(document_id=document_id, text=content)
        else:
            if len(content) == 0:
                continue
            yield Document(document_id=document_id, token_ids=content)
        num_documents += 1
    if num_documents == 0:
        raise ValueError(f"corpus {spec!r} ({corpus.label}) holds no text")


def _contents(corpus: Corpus, self_writer: SelfWriter | None) -> Iterator[Sequence[int] | str]:
    if corpus.kind == "self":
        assert self_writer is not None and corpus.seed is not None
        yield from self_writer(corpus.seed)
    elif corpus.kind == "jsonl":
        assert corpus.path is not None
        for line_number, record in read_json_lines(corpus.path):
            yield _line_content(record, f"{corpus.path} line {line_number}")
    elif corpus.kind == "c4":
        yield from hub_texts(corpus.kind, corpus.split)
    else:
        lines = _text_lines(corpus.path) if corpus.path is not None else _wikitext_lines(corpus)
        yield from cut_documents(lines) if corpus.side == "train" else ["".join(lines)]


def _line_content(record: dict[str, Any], where: str) -> Sequence[int] | str:
    if "token_ids" in record:
        if "text" in record or "prompt" in record:
            raise ValueError(f"{where}: both `token_ids` and text; keep one (ids belong to one tokenizer only)")
        return check_token_ids(record["token_ids"], where, "token_ids")
    for key in ("text", "prompt"):
        if key in record:
            if not isinstance(record[key], str):
                raise ValueError(f"{where}: `{key}` must be a string, got {type(record[key]).__name__}")
            return record[key]
    raise ValueError(f"{where}: no `text`, `prompt` or `token_ids`; its keys are {', '.join(record) or 'none'}")


def _text_lines(path: Path) -> Iterator[str]:
    try:
        with open(path, encoding="utf-8", newline="") as file:  # newline="": line ends stay as they are in the file
            yield from file
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error.reason})") from error


def _wikitext_lines(corpus: Corpus) -> Iterator[str]:
    """The lines of the original raw file: the data set holds its blank lines, which are " \\n", as ""."""
    return (row or " \n" for row in hub_texts(corpus.kind, corpus.split))


def cut_documents(lines: Iterable[str]) -> Iterator[str]:
    """Cut text into documents whose concatenation is the text: at WikiText headings, else at blank lines.

    A WikiText heading is a line ` = Title = ` after a blank line. Text in which none has been seen is cut at
    the first blank line after SECTION_CHARACTERS, or at the first line end after four times as many.
    """
    section: list[str] = []
    size = 0
    after_blank = True
    has_headings = False
    for line in lines:
        is_heading = after_blank and ARTICLE_HEADING.fullmatch(line) is not None
        has_headings = has_headings or is_heading
        long_enough = size >= (SECTION_CHARACTERS if after_blank else 4 * SECTION_CHARACTERS)
        if section and (is_heading or (long_enough and not has_headings)):
            yield "".join(section)
            section, size = [], 0
        section.append(line)
        size += len(line)
        after_blank = not line.strip()
    if section:
        yield "".join(section)


def token_pieces(
    tokenizer: Any,
    documents: Iterable[Document],
    *,
    max_tokens: int | None = None,
    max_document_tokens: int | None = None,
    vocab_size: int | None = None,
) -> Iterator[TokenPiece]:
    """Tokenise documents and cut each into consecutive pieces of at most `max_document_tokens` (None: uncut).

    Special tokens are the tokenizer's own: whatever it puts before a text (a BOS, or nothing) begins every
    piece, since a piece is what the model sees as a sequence; what it puts after a text ends the last piece.
    Nothing else is added or removed, an EOS inside a document included. Documents that arrive as token ids
    stay as they are; only if one begins with the tokenizer's prefix do its later pieces too. `tokenizer` may
    be None if all of them do. The pieces hold exactly `max_tokens` tokens in total if there are enough (None:
    all). `vocab_size` checks ids.
    """
    for name, value in (("max_tokens", max_tokens), ("max_document_tokens", max_document_tokens)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be >= 1, got {value}")
    prefix, suffix = _special_tokens(tokenizer) if tokenizer is not None else ([], [])
    if max_document_tokens is not None and max_document_tokens <= len(prefix):
        raise ValueError(
            f"max_document_tokens must exceed the {len(prefix)} tokens that begin every text, got {max_document_tokens}"
        )
    return _pieces(tokenizer, documents, prefix, suffix, max_tokens, max_document_tokens, vocab_size)


def token_documents(tokenizer: Any, documents: Iterable[Document], **limits: int | None) -> Iterator[list[int]]:
    """The token ids of `token_pieces` (same limits), without the documents they come from."""
    return (piece.token_ids for piece in token_pieces(tokenizer, documents, **limits))


def _pieces(
    tokenizer: Any,
    documents: Iterable[Document],
    prefix: list[int],
    suffix: list[int],
    max_tokens: int | None,
    max_document_tokens: int | None,
    vocab_size: int | None,
) -> Iterator[TokenPiece]:
    num_left = max_tokens
    for document in documents:
        head, body = _head_and_body(tokenizer, document, prefix, suffix)
        if vocab_size is not None and body and max(body) >= vocab_size:
            raise ValueError(
                f"document {document.document_id} holds token id {max(body)}, "
                f"but the vocabulary has {vocab_size} entries: it was tokenised for another model"
            )
        step = len(body) if max_document_tokens is None else max_document_tokens - len(head)
        for start in range(0, len(body), step or 1):
            token_ids = (head + body[start : start + step])[:num_left]
            yield TokenPiece(document_id=document.document_id, token_ids=token_ids)
            if num_left is not None:
                num_left -= len(token_ids)
                if num_left == 0:
                    return


def _head_and_body(
    tokenizer: Any, document: Document, prefix: list[int], suffix: list[int]
) -> tuple[list[int], list[int]]:
    """What begins each piece of the document, and the tokens to be cut into pieces."""
    if document.token_ids is not None:
        token_ids = [int(token_id) for token_id in document.token_ids]
        if prefix and token_ids[: len(prefix)] == prefix and len(token_ids) > len(prefix):
            return prefix, token_ids[len(prefix) :]
        return [], token_ids
    if tokenizer is None:
        raise ValueError(f"document {document.document_id} is text, and the model has no tokenizer to read it with")
    # verbose=False: a text longer than the context is expected here, and cut just below
    return prefix, list(tokenizer(document.text, add_special_tokens=False, verbose=False)["input_ids"]) + suffix


def _special_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """What this tokenizer puts before and after a text, found by tokenising one with and without."""
    framed = list(tokenizer("a")["input_ids"])
    bare = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    for start in range(len(framed) - len(bare) + 1):
        if framed[start : start + len(bare)] == bare:
            return framed[:start], framed[start + len(bare) :]
    raise ValueError(f"the tokenizer rewrites text when it adds special tokens: {bare} became {framed}")


@dataclass(frozen=True, kw_only=True)
class HubCorpus:
    """A data set on the Hub: repository, configuration, splits, and the default split of each side."""

    path: str
    name: str
    splits: tuple[str, ...]
    default_split: dict[str, str]


HUB_CORPORA = {
    "wikitext": HubCorpus(
        path="Salesforce/wikitext",
        name="wikitext-2-raw-v1",
        splits=("train", "validation", "test"),
        default_split={"train": "train", "test": "test"},
    ),
    "c4": HubCorpus(
        path="allenai/c4",
        name="en",
        splits=("train", "validation"),
        default_split={"train": "train", "test": "validation"},
    ),
}


def hub_texts(name: str, split: str) -> Iterator[str]:
    """The text of each row of HUB_CORPORA[name]; ConnectionError, in one line, if it cannot be read."""
    import datasets  # here: it takes a second to import, and no other corpus needs it

    hub = HUB_CORPORA[name]
    try:
        for row in datasets.load_dataset(hub.path, hub.name, split=split, streaming=True):
            yield row["text"]
    except (OSError, datasets.exceptions.DatasetsError) as error:
        reason = " ".join(str(error).split())
        raise ConnectionError(
            f"corpus {name}:{split}: cannot read {hub.path} from the Hub ({reason}); "
            "check the network, or give a local .txt or .jsonl file, or self"
        ) from error
