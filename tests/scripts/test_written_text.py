"""Text that a model writes itself is kept: read by the next run, continued after a kill, written anew where damaged."""

import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
from loguru import logger

import scripts.written_text
from data.corpora import iter_documents
from data.files import only_writer
from scripts.model_loading import LoadedModel, ModelOptions
from scripts.written_text import kept_documents, text_path, write_documents
from tests.modules.tiny_kinds import LLAMA
from tests.modules.tiny_models import save_hf_folder
from tests.scripts.tiny_prompts import words_folder

COUNT = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return words_folder(tmp_path_factory.mktemp("words"))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and batches of three documents."""
    monkeypatch.setenv("DEJAVU_LAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("scripts.written_text.BATCH_SIZE", 3)
    return tmp_path / "cache"


@pytest.fixture
def said() -> Iterator[list[str]]:
    """What is logged from here on."""
    lines: list[str] = []
    sink = logger.add(lambda message: lines.append(str(message)), level="INFO", format="{level} {message}")
    yield lines
    logger.remove(sink)


def load(folder: Path, **more: object) -> LoadedModel:
    return ModelOptions(model=str(folder), quiet=True, **more).load()


def read(loaded: LoadedModel, count: int = COUNT, seed: int = 0) -> list[list[int]]:
    return list(islice(kept_documents(loaded, seed=seed, quiet=True), count))


def nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scripts.written_text, "write_batch", lambda *args, **more: pytest.fail("text was written"))


def test_the_next_run_reads_what_the_first_has_written_whatever_its_dtype(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    first = read(load(folder))
    assert first == list(islice(write_documents(load(folder), seed=0, quiet=True), COUNT))
    (file,) = cache.glob("*.jsonl")
    nothing_is_written(monkeypatch)
    assert read(load(folder, dtype="bfloat16")) == first
    assert any(f"read from {file}" in line for line in said)
    kept = [document.token_ids for document in iter_documents(str(file), side="train")]
    assert kept[:COUNT] == first and len(kept) == 6, "whole batches are kept, and the file is a corpus by itself"


def test_a_killed_run_is_continued_with_the_same_text(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = list(islice(write_documents(load(folder), seed=0, quiet=True), COUNT))
    assert read(load(folder), count=2) == whole[:2]  # the run ends here, after one batch
    written: list[int] = []
    write_batch = scripts.written_text.write_batch

    def noted(loaded: LoadedModel, **more: object) -> list[list[int]]:
        written.append(more["first_document"])
        return write_batch(loaded, **more)

    monkeypatch.setattr(scripts.written_text, "write_batch", noted)
    assert read(load(folder)) == whole and written == [3]


def zeroed(content: bytes) -> bytes:
    return content[:200] + bytes(50) + content[250:]


def other_token(content: bytes) -> bytes:
    line = json.loads(content.splitlines()[1])
    line["token_ids"][0] ^= 1
    return b"\n".join([content.splitlines()[0], json.dumps(line).encode(), *content.splitlines()[2:], b""])


def swapped(content: bytes) -> bytes:
    first, second, *rest = content.splitlines(keepends=True)
    return b"".join([second, first, *rest])


@pytest.mark.parametrize(
    ("damage", "is_told"),
    [
        (zeroed, True),
        (other_token, True),
        (swapped, True),
        (lambda content: b"\xff\xfe\n", True),
        (lambda content: b'{"token_ids": "all"}\n' + content, True),
        (lambda content: content[:-9], False),  # a kill while it was written
        (lambda content: b"", False),
    ],
)
def test_a_damaged_file_is_noticed_and_written_anew(
    folder: Path, cache: Path, said: list[str], damage: Callable[[bytes], bytes], is_told: bool
) -> None:
    whole = read(load(folder))
    (file,) = cache.glob("*.jsonl")
    content = file.read_bytes()
    file.write_bytes(damage(content))
    assert read(load(folder)) == whole
    after = file.read_bytes()  # as far as one of them goes: batches begin elsewhere now
    assert after.startswith(content) or content.startswith(after)
    assert any(line.startswith(f"WARNING {file} line ") for line in said) == is_told


def test_other_models_tokenizers_and_seeds_have_files_of_their_own(folder: Path, tmp_path: Path, cache: Path) -> None:
    bare = tmp_path / "bare"
    save_hf_folder(bare, LLAMA)
    paths = {text_path(load(bare), seed=0), text_path(load(folder), seed=0), text_path(load(folder), seed=1)}
    again = words_folder(tmp_path / "again")
    (again / "generation_config.json").write_text('{"eos_token_id": 3}')
    assert text_path(load(again), seed=0) not in paths
    assert len(paths) == 3


def test_a_second_process_waits_and_takes_what_the_first_writes(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    whole = read(load(folder))
    (file,) = cache.glob("*.jsonl")
    content = file.read_bytes()
    file.unlink()
    writer = only_writer(file)
    writer.__enter__()

    def the_first_finishes(seconds: float) -> None:
        if seconds == scripts.written_text.WAIT_S:  # not the moment that a lock is tried again after
            file.write_bytes(content)
            writer.__exit__(None, None, None)

    monkeypatch.setattr("scripts.written_text.time.sleep", the_first_finishes)
    nothing_is_written(monkeypatch)
    assert read(load(folder)) == whole
    assert any("is being written by process" in line for line in said)


def test_ranks_wait_for_the_first_ones_lock_where_waiting_has_no_timeout(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[bool] = []
    launch = SimpleNamespace(barrier=lambda: held.append(any(cache.glob("*.lock"))))
    monkeypatch.setattr("scripts.written_text.current_launch", lambda: launch)
    read(load(folder))
    assert held == [True, True], "once per batch"


def test_text_that_cannot_be_kept_is_written_all_the_same(folder: Path, cache: Path, said: list[str]) -> None:
    cache.write_text("a file where the folder should be")
    assert read(load(folder)) == list(islice(write_documents(load(folder), seed=0, quiet=True), COUNT))
    (told,) = [line for line in said if line.startswith("WARNING")]
    assert "text is not kept" in told and str(cache) in told
