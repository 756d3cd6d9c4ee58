"""Corpora: which text a spec means on each side, and the one line each mistake gives."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.corpora import SECTION_CHARACTERS, cut_documents, iter_documents, parse_corpus

WIKITEXT = (
    " \n = First = \n \n Some words . \n \n = = Section = = \n \n x = 3 = \n \n"
    " = Second ( film ) = \n \n More words . \n \n"
)


def texts(spec: str, side: Any = "train", **options: Any) -> list[str | None]:
    return [document.text for document in iter_documents(spec, side=side, **options)]


def fake_hub(monkeypatch: pytest.MonkeyPatch, rows: list[str]) -> list[tuple[Any, ...]]:
    """Let `datasets` serve these rows; returns the calls it gets."""
    calls: list[tuple[Any, ...]] = []

    def load_dataset(path: str, name: str, *, split: str, streaming: bool) -> list[dict[str, str]]:
        calls.append((path, name, split, streaming))
        return [{"text": row} for row in rows]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return calls


@pytest.mark.parametrize(
    ("spec", "side", "label"),
    [
        ("wikitext", "train", "wikitext:train"),
        ("wikitext", "test", "wikitext:test"),
        ("wikitext:validation", "train", "wikitext:validation"),
        ("c4", "train", "c4:train"),
        ("c4", "test", "c4:validation"),
        ("self", "train", "self:0"),
        ("self", "test", "self:1"),
        ("self:7", "test", "self:7"),
    ],
)
def test_each_side_has_its_own_default(spec: str, side: Any, label: str) -> None:
    assert parse_corpus(spec, side=side).label == label


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "wikitext:dev",
            "corpus 'wikitext:dev': wikitext has no split 'dev'; choose train, validation, test",
        ),
        ("c4:test", "corpus 'c4:test': c4 has no split 'test'; choose train, validation"),
        ("self:x", "corpus 'self:x': the seed must be an integer >= 0, e.g. self:0"),
        ("self:-1", "the seed must be an integer >= 0"),
        (
            "pile",
            "unknown corpus 'pile'; give wikitext[:SPLIT], c4[:SPLIT], self[:SEED] or a file ending in .txt",
        ),
        ("missing.txt", "corpus missing.txt does not exist"),
        ("missing.jsonl.gz", "corpus missing.jsonl.gz does not exist"),
    ],
)
def test_a_bad_spec_is_refused_at_the_call_in_one_line(spec: str, message: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=re.escape(message)) as caught:
        iter_documents(spec, side="train")
    assert "\n" not in str(caught.value)


def test_a_folder_is_no_corpus(tmp_path: Path) -> None:
    (tmp_path / "folder.txt").mkdir()
    with pytest.raises(IsADirectoryError, match=r"folder.txt is a folder; give a file"):
        iter_documents(str(tmp_path / "folder.txt"), side="train")


def test_text_for_testing_is_one_stream_exactly_as_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "wiki.test.raw"
    content = WIKITEXT + "carriage\r\nreturn, line\u2028separator"
    path.write_bytes(content.encode())
    assert texts(str(path), "test") == [content]


def test_wikitext_from_the_hub_is_the_original_file_on_the_test_side(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [line if line.strip() else "" for line in WIKITEXT.splitlines(keepends=True)]
    calls = fake_hub(monkeypatch, rows)
    assert texts("wikitext", "test") == [WIKITEXT]
    assert calls == [("Salesforce/wikitext", "wikitext-2-raw-v1", "test", True)]


def test_wikitext_for_training_is_cut_into_articles(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_hub(monkeypatch, [line if line.strip() else "" for line in WIKITEXT.splitlines(keepends=True)])
    articles = texts("wikitext", "train")
    assert len(articles) == 2
    assert articles[0] is not None and articles[0].startswith(" = First = \n") and "= 3 =" in articles[0]
    assert articles[1] is not None and articles[1].startswith(" = Second ( film ) = \n")


def test_c4_documents_come_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fake_hub(monkeypatch, ["one", " \n", "two"])
    documents = list(iter_documents("c4", side="test"))
    assert [(document.document_id, document.text) for document in documents] == [("0", "one"), ("1", "two")]
    assert calls == [("allenai/c4", "en", "validation", True)]


@given(st.lists(st.text(alphabet="ab =\n\r", max_size=30), max_size=30))
def test_cut_documents_lose_no_character(pieces: list[str]) -> None:
    lines = "\n".join(pieces).splitlines(keepends=True)
    assert "".join(cut_documents(lines)) == "".join(lines)


def test_plain_text_for_training_is_cut_at_blank_lines(tmp_path: Path) -> None:
    paragraph = "word " * 300 + "\n\n"
    path = tmp_path / "book.txt"
    path.write_text(paragraph * 40)
    documents = texts(str(path))
    assert "".join(document or "" for document in documents) == paragraph * 40
    assert len(documents) > 5
    for document in documents[:-1]:
        assert document is not None and document.endswith("\n\n")
        assert SECTION_CHARACTERS <= len(document) <= SECTION_CHARACTERS + len(paragraph)


def test_plain_text_without_blank_lines_is_cut_at_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_text("a line of text\n" * 10_000)
    documents = texts(str(path))
    assert len(documents) > 2
    assert all(document is not None and document.endswith("text\n") for document in documents)


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_json_lines_hold_text_or_prompt_or_token_ids(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"corpus{suffix}"
    lines = [
        {"text": "a", "url": "x"},
        {"prompt": "b"},
        {"token_ids": [2, 5]},
        {"text": " "},
        {"text": "c", "prompt": "-"},
    ]
    content = "\n\n".join(json.dumps(line) for line in lines).encode()
    path.write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
    documents = list(iter_documents(str(path), side="train"))
    assert [document.text for document in documents] == ["a", "b", None, "c"]
    assert documents[2].token_ids == [2, 5]
    assert [document.document_id for document in documents] == ["0", "1", "2", "3"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": ', "line 2: not JSON"),
        (b"[1]", r"line 2: expected a JSON object such as \{...\}, got list"),
        (
            b'{"title": "x", "url": "y"}',
            "line 2: no `text`, `prompt` or `token_ids`; its keys are title, url",
        ),
        (b'{"text": 3}', "line 2: `text` must be a string, got int"),
        (b'{"text": "\xff"}', "line 2: not UTF-8 text"),
        (b'{"token_ids": []}', "line 2: `token_ids` must be a non-empty list of token ids"),
        (b'{"token_ids": [1, true]}', "line 2: `token_ids` must hold integers >= 0, got True"),
        (b'{"token_ids": [1, -2]}', "line 2: `token_ids` must hold integers >= 0, got -2"),
        (b'{"token_ids": [1], "text": "a"}', "line 2: both `token_ids` and text; keep one"),
    ],
)
def test_a_bad_json_line_is_named_by_file_and_number(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(b'{"text": "good"}\n' + line + b"\n")
    with pytest.raises(ValueError, match=f"corpus.jsonl {message}"):
        texts(str(path))


def test_damaged_gzip_data_is_named(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "good"}\n' * 1000)[:-20])
    with pytest.raises(ValueError, match=r"corpus.jsonl.gz: damaged gzip data after line \d+"):
        texts(str(path))
    path.write_bytes(b'{"text": "good"}\n')
    with pytest.raises(ValueError, match=r"damaged gzip data after line 0"):
        texts(str(path))


@pytest.mark.parametrize("name", ["empty.txt", "empty.jsonl", "blank.txt", "blank.jsonl"])
@pytest.mark.parametrize("side", ["train", "test"])
def test_a_corpus_without_text_is_an_error(tmp_path: Path, name: str, side: str) -> None:
    path = tmp_path / name
    blank = "\n \n" if name.endswith(".txt") else '{"text": "  "}\n\n'
    path.write_text(blank if name.startswith("blank") else "")
    with pytest.raises(ValueError, match=f"{name}.* holds no text"):
        texts(str(path), side)


def test_text_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes("caf\u00e9 ".encode("latin-1"))
    with pytest.raises(ValueError, match="latin.txt is not UTF-8 text"):
        texts(str(path))


def test_self_is_written_from_the_seed_of_the_side_and_keeps_its_token_ids() -> None:
    def self_writer(seed: int) -> Iterator[list[int] | str]:
        yield [seed, 2, 3]
        yield []
        yield "text"

    documents = list(iter_documents("self", side="test", self_writer=self_writer))
    assert [(document.text, document.token_ids) for document in documents] == [
        (None, [1, 2, 3]),
        ("text", None),
    ]


def test_self_without_a_model_says_so() -> None:
    with pytest.raises(ValueError, match="corpus 'self:3' is written by the model itself, and no model was given"):
        iter_documents("self:3", side="train")


def test_a_hub_that_fails_while_streaming_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows() -> Iterator[dict[str, str]]:
        yield {"text": "one"}
        raise ConnectionError("Server\n  Disconnected")

    monkeypatch.setattr(datasets, "load_dataset", lambda *arguments, **options: rows())
    with pytest.raises(ConnectionError, match=r"c4:train: cannot read allenai/c4 .*\(Server Disconnected\)"):
        texts("c4")


def test_without_network_the_hub_corpora_fail_in_one_line_that_says_what_to_do() -> None:
    code = (
        "from data.corpora import iter_documents\n"
        "try:\n    next(iter_documents('wikitext', side='test'))\n"
        "except ConnectionError as error:\n    print(error)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        env={"HF_HUB_OFFLINE": "1", "HOME": "/nonexistent"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert len(result.stdout.splitlines()) == 1
    assert result.stdout.startswith("corpus wikitext:test: cannot read Salesforce/wikitext from the Hub (")
    assert "give a local .txt or .jsonl file, or self" in result.stdout
