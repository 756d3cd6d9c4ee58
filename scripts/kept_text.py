"""The text of `--corpus self[:SEED]` is written once and kept: a file per model and seed, a line per document.

It grows by whole batches of documents, as they are written. So a killed run is continued, the next stage reads what the
last one wrote, and of two processes one writes while the other waits for the batch and reads it. The file belongs to
the checkpoint, its tokenizer and the settings of writing; not to the dtype or the device, whose rounding would
only make another text of the same kind. It can also be given as `--corpus FILE`.

The environment variable DEJAVU_LAB_CACHE names another folder than outputs/written_text.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import time
import zlib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from loguru import logger

from data.files import only_writer, parse_json
from modules.checkpoint.sources import checkpoint_fingerprint
from pipeline_parallel.launch import current_launch
from scripts.command_line import progress
from scripts.self_text import (
    BATCH_SIZE,
    FORMS,
    MAX_DOCUMENT_TOKENS,
    TEMPERATURE,
    TOP_P,
    TOPICS,
    documents_at_once,
    write_batch,
)

if TYPE_CHECKING:
    from scripts.model_loading import LoadedModel

CACHE_VARIABLE = "DEJAVU_LAB_CACHE"
DEFAULT_FOLDER = Path(__file__).parents[1] / "outputs" / "written_text"
# What a text also depends on, beside config and weights: the words that tokens stand for, and what ends a text.
TEXT_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
)
WAIT_S = 1.0


class KeptDocument(msgspec.Struct, frozen=True):
    """A line of the file; `crc32` is of the token ids as JSON."""

    document: int
    crc32: int
    token_ids: list[Annotated[int, msgspec.Meta(ge=0)]]


def kept_documents(
    loaded: LoadedModel, *, seed: int, max_tokens: int | None = None, quiet: bool = False
) -> Iterator[list[int]]:
    """The documents of `--corpus self:SEED` as token ids, without end: those that are kept, then new ones.

    `max_tokens`, if the reader knows it, only decides how many documents are written at a time. All ranks must read
    alike (collective calls); the first one keeps the file.
    """
    file = TextFile(loaded, seed)
    num_read = num_documents = 0
    with contextlib.ExitStack() as open_bar:
        bar = None
        while True:
            batch = file.read()
            if not batch:
                with file.writing():
                    batch = file.read()
                    if not batch:
                        if bar is None:
                            logger.info(f"the model writes the text of self:{seed}; it is kept in {file.path}")
                            left = None if max_tokens is None else max(0, max_tokens - num_read)
                            bar = progress((), "writing text", quiet=quiet, total=left, unit="tok")
                            open_bar.enter_context(bar)
                        batch = write_batch(
                            loaded,
                            seed=seed,
                            first_document=num_documents,
                            num_documents=documents_at_once(loaded, BATCH_SIZE, max_tokens, num_read, num_documents),
                            on_token=partial(bar.update, 1),
                        )
                        file.append(batch)
            elif not num_documents:
                logger.info(f"self:{seed}: {sum(map(len, batch))} tokens read from {file.path}")
            num_read += sum(map(len, batch))
            num_documents += len(batch)
            yield from batch


def text_path(loaded: LoadedModel, *, seed: int) -> Path:
    """The file of a model and a seed."""
    digest = hashlib.sha256(checkpoint_fingerprint(loaded.directory).encode())
    digest.update(json.dumps([MAX_DOCUMENT_TOKENS, TEMPERATURE, TOP_P, TOPICS, FORMS, seed]).encode())
    for name in TEXT_FILES:
        if (path := loaded.directory / name).is_file():
            digest.update(f"/{name}/".encode() + path.read_bytes())
    folder = Path(os.environ.get(CACHE_VARIABLE) or DEFAULT_FOLDER)
    name = re.sub(r"[^\w.-]+", "-", loaded.model_id)[:60]
    return folder / f"{name}-{digest.hexdigest()[:12]}-seed{seed}.jsonl"


class TextFile:
    """The kept text of a model and a seed, and how far it has been read; every rank calls all of it."""

    def __init__(self, loaded: LoadedModel, seed: int) -> None:
        self.path = text_path(loaded, seed=seed)
        self._mesh, self._vocab_size = loaded.mesh, loaded.model.config.vocab_size
        self._is_first = loaded.mesh.rank == 0
        self._position = self._num_documents = 0
        self._fault: str | None = None
        self._is_kept = True

    def read(self) -> list[list[int]]:
        """The sound documents that have been added since the last call."""
        found = self._read_on() if self._is_first and self._is_kept else []
        return self._mesh.gather(found)[0]

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the file's lock; where another process has it, wait."""
        with contextlib.ExitStack() as held:
            if self._is_first:
                self._lock(held)
            current_launch().barrier()  # however long the first rank waits: a collective has a timeout
            yield

    def append(self, documents: Sequence[Sequence[int]]) -> None:
        """Add documents to what is sound of the file, under its lock."""
        if not (self._is_first and self._is_kept):
            return
        lines = []
        for idx, token_ids in enumerate(documents, start=self._num_documents):
            kept = KeptDocument(document=idx, crc32=_sum(token_ids), token_ids=list(token_ids))
            lines.append(msgspec.json.encode(kept) + b"\n")
        try:
            with open(self.path, "r+b" if self.path.exists() else "w+b") as file:
                file.truncate(self._position)
                file.seek(self._position)
                file.write(b"".join(lines))
        except OSError as error:
            self._give_up(error)
            return
        if self._fault is not None:
            logger.warning(f"{self._fault}; from there on the text is written anew")
        self._fault = None
        self._position += sum(map(len, lines))
        self._num_documents += len(lines)

    def _read_on(self) -> list[list[int]]:
        try:
            with open(self.path, "rb") as file:
                file.seek(self._position)
                lines = file.read().splitlines(keepends=True)
        except FileNotFoundError:
            return []
        except OSError as error:
            self._give_up(error)
            return []
        found: list[list[int]] = []
        for line in lines:
            if not line.endswith(b"\n"):
                break  # being written, or left by a kill
            where = f"{self.path} line {self._num_documents + 1}"
            try:
                kept = parse_json(line, KeptDocument, where)
            except ValueError as error:
                self._fault = str(error)
                break
            is_sound = kept.document == self._num_documents and kept.crc32 == _sum(kept.token_ids)
            if not is_sound or max(kept.token_ids, default=self._vocab_size) >= self._vocab_size:
                self._fault = f"{where}: damaged"
                break
            found.append(kept.token_ids)
            self._position += len(line)
            self._num_documents += 1
        return found

    def _lock(self, held: contextlib.ExitStack) -> None:
        told = False
        while self._is_kept:
            try:
                held.enter_context(only_writer(self.path))
                return
            except BlockingIOError as error:
                if not told:
                    logger.info(f"waiting: {str(error).partition(';')[0]}")
                told = True
                time.sleep(WAIT_S)
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        logger.warning(f"written text is not kept: {error.filename or self.path}: {error.strerror or error}")
        self._is_kept = False


def _sum(token_ids: Sequence[int]) -> int:
    return zlib.crc32(msgspec.json.encode(list(token_ids)))
