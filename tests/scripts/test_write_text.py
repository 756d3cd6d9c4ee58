"""A corpus that a model writes into a file: the same however it is batched, cut or interrupted, and readable."""

import json
import shutil
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from data.corpora import iter_documents
from modules.generation import generate
from scripts.model_loading import ModelOptions
from scripts.studies.trained_models import train_tokenizer
from scripts.write_text import Options, main
from scripts.written_text import up_to_end, vocabulary_words, write_documents
from tests.modules.tiny_kinds import LLAMA
from tests.modules.tiny_models import save_hf_folder

WORDS = ("story", "these", "come", "words", "bread", "honey", "bees", "swim", "castle", "wolves", "jazz", "chess")


@pytest.fixture(scope="module")
def bare_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without a tokenizer, which often ends a text early."""
    folder = tmp_path_factory.mktemp("bare")
    save_hf_folder(folder, LLAMA | {"eos_token_id": list(range(2, 8))})
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = train_tokenizer(iter([f" {first} {second}" for first in WORDS for second in WORDS]), 400)
    save_hf_folder(folder, LLAMA | {"vocab_size": len(tokenizer), "max_position_embeddings": 128})
    tokenizer.save_pretrained(folder)
    return folder


def options(folder: Path, output: Path, **more: object) -> Options:
    return replace(Options(model=str(folder), output=output, max_tokens=400, batch_size=5, quiet=True), **more)


def test_an_interrupted_file_is_continued_to_the_same_corpus(folder: Path, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    assert main(options(folder, whole)) >= 400
    lines = whole.read_bytes().splitlines(keepends=True)
    cut.write_bytes(b"".join(lines[:2]) + lines[2][:-9])
    for change, said in (({"seed": 1}, "seed is None of its text, 1 now"), ({}, "checkpoint is None of its text")):
        with pytest.raises(ValueError, match=f"cannot resume .*{said}.*; give another --output"):
            main(options(folder, cut, resume=True, **change))
    manifest = tmp_path / "whole.jsonl.manifest.json"
    shutil.copy(manifest, tmp_path / "cut.jsonl.manifest.json")
    with pytest.raises(ValueError, match=r"cannot resume .*: temperature is 0.9 of its text, 0.5 now; give another"):
        main(options(folder, cut, resume=True, temperature=0.5))
    assert main(options(folder, cut, resume=True, batch_size=2)) == main(options(folder, whole, resume=True))
    assert cut.read_bytes() == whole.read_bytes()
    texts = [document.text for document in iter_documents(str(whole), side="train")]
    assert texts == [json.loads(line)["text"] for line in lines if json.loads(line)["text"].strip()]
    assert len({text[:40] for text in texts if text}) == len(texts)


def test_texts_cut_at_their_end_are_those_of_rows_that_ended(
    bare_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = ModelOptions(model=str(bare_folder), quiet=True).load()
    ended = list(islice(write_documents(loaded, seed=3, quiet=True), 40))
    assert len({len(document) for document in ended}) > 5
    heard = []

    def listened(*arguments: object, **more: object) -> object:
        heard.append(more["eos_token_ids"])
        return generate(*arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr("scripts.written_text.can_capture", lambda model: True)
    monkeypatch.setattr("scripts.written_text.generate", listened)
    assert list(islice(write_documents(loaded, seed=3, batch_size=40, quiet=True), 40)) == ended
    assert heard == [()]
    assert list(islice(write_documents(loaded, seed=3, first_document=30, quiet=True), 10)) == ended[30:]


def test_a_model_without_a_tokenizer_writes_token_ids(bare_folder: Path, tmp_path: Path) -> None:
    main(options(bare_folder, tmp_path / "ids.jsonl", max_tokens=100))
    documents = list(iter_documents(str(tmp_path / "ids.jsonl"), side="train"))
    assert documents and all(document.token_ids for document in documents)


def test_words_are_whole_and_lower_case(folder: Path) -> None:
    tokenizer = ModelOptions(model=str(folder), quiet=True).load().tokenizer
    words = vocabulary_words(tokenizer)
    assert {"bread", "honey", "story"} <= set(words) and words == sorted(words)
    assert all(word.isascii() and word.isalpha() and word.islower() and len(word) > 3 for word in words)
    with pytest.raises(ValueError, match="vocabulary holds no words"):
        vocabulary_words(None)
    assert up_to_end([5, 2, 7, 2], (2, 9)) == [5, 2] and up_to_end([5, 7], (2,)) == [5, 7]


def test_what_cannot_be_written_is_an_error(folder: Path, tmp_path: Path) -> None:
    there = tmp_path / "there.jsonl"
    there.write_text('{"text": "by hand"}\n')
    for change, message in (
        ({"output": tmp_path / "text.jsonl.gz"}, r"must end in \.jsonl"),
        ({"max_tokens": 0}, "--max-tokens must be at least 1"),
        ({"temperature": 0.0}, "--temperature above 0"),
        ({"output": there}, "exists; give --resume"),
        ({"output": there, "resume": True}, "line 1: .*`num_tokens`: not of this command, or damaged"),
    ):
        with pytest.raises(ValueError, match=message):
            main(replace(options(folder, tmp_path / "new.jsonl"), **change))
