"""`--corpus self[:SEED]`: text that the model writes itself, for machines without a network and without a corpus.

Document k of a seed depends on (seed, k): the subject and the form of its text, and its sampling stream. A chat model
gets the task in its chat template and the document is its answer; any other model continues an opening sentence, which
is then part of the document; a model without a tokenizer continues a random token. With `num_words` a task also asks
for random words of the tokenizer's vocabulary, so that no two texts begin alike (as TinyStories, Eldan & Li 2023).

The text is written once and kept: a file per model and seed, a line per document. It grows by whole batches of
documents, as they are written. So a killed run is continued, the next stage reads what the last one wrote, and of two
processes one writes while the other waits for the batch and reads it. The file belongs to the checkpoint, its tokenizer
and the settings of writing; not to the dtype or the device, whose rounding would only make another text of the same
kind. It can also be given as `--corpus FILE`. The environment variable DEJAVU_LAB_CACHE names another folder than
outputs/written_text.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import re
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
from loguru import logger

from data.files import only_writer, parse_json, whole_lines
from modules.checkpoint.sources import checkpoint_fingerprint
from modules.generation import generate
from modules.graphs import can_capture
from modules.requests import GenerationRequest
from modules.sampling import SamplingParams, mix_seed
from pipeline_parallel.engine import exchange_of
from pipeline_parallel.launch import current_launch
from scripts.command_line import progress
from scripts.model_loading import LoadedModel, chat_token_ids

MAX_DOCUMENT_TOKENS = 256
BATCH_SIZE = 32
FIRST_GUESS = 220  # tokens of a document, before any has been written
TEMPERATURE = 1.0
TOP_P = 0.9
WORD = re.compile(r"[Ġ▁][a-z]{4,}")  # a whole word as byte-level and as sentencepiece vocabularies spell it

TOPICS = (
    "volcanoes", "the history of bread", "railways", "honey bees", "the Roman aqueducts", "learning to swim",
    "black holes", "a small fishing village", "jazz music", "vaccines", "chess", "the water cycle", "medieval castles",
    "electric cars", "growing tomatoes", "the human heart", "deserts", "a lost dog", "the French Revolution",
    "computer programming", "coral reefs", "saving money", "polar expeditions", "glass making", "football",
    "the printing press", "migratory birds", "a night train", "coffee", "earthquakes", "teaching children to read",
    "bridges", "dreams", "the ocean floor", "paper money", "an old clockmaker", "wolves", "public libraries",
    "photography", "mountain weather",
)  # fmt: skip
FORMS = (
    "a short story", "an encyclopedia article", "a news report", "a set of step-by-step instructions", "a dialogue",
    "a personal letter", "a persuasive essay", "a list of questions with answers", "a lecture for students",
    "a diary entry",
)  # fmt: skip


def write_documents(
    loaded: LoadedModel,
    *,
    seed: int,
    max_tokens: int | None = None,
    first_document: int = 0,
    batch_size: int = BATCH_SIZE,
    temperature: float = TEMPERATURE,
    top_p: float = TOP_P,
    num_words: int = 0,
    quiet: bool = False,
) -> Iterator[list[int]]:
    """Yields token ids of one document after another, without end; the same ones for the same seed, words and
    options of sampling.

    `max_tokens`, if the reader knows it, only decides how many documents are written at a time. `first_document`:
    the ones before it are left out.
    """
    num_written = num_documents = 0
    with progress((), "writing text", quiet=quiet, total=max_tokens, unit="tok") as bar:
        while True:
            batch = write_batch(
                loaded,
                seed=seed,
                first_document=first_document + num_documents,
                num_documents=documents_at_once(loaded, batch_size, max_tokens, num_written, num_documents),
                batch_size=batch_size,
                temperature=temperature,
                top_p=top_p,
                num_words=num_words,
                on_token=lambda: bar.update(1),
            )
            num_written += sum(map(len, batch))
            num_documents += len(batch)
            yield from batch


def documents_at_once(
    loaded: LoadedModel, batch_size: int, max_tokens: int | None, num_written: int, num_documents: int
) -> int:
    """How many documents to write next: a batch, or fewer where `max_tokens` are nearly there, by the mean so far."""
    if max_tokens is None:
        return batch_size
    mean = num_written / num_documents if num_documents else min(FIRST_GUESS, _context(loaded))
    return max(1, min(batch_size, -(-(max_tokens - num_written) // max(1, round(mean)))))


def write_batch(
    loaded: LoadedModel,
    *,
    seed: int,
    first_document: int,
    num_documents: int,
    batch_size: int = BATCH_SIZE,
    temperature: float = TEMPERATURE,
    top_p: float = TOP_P,
    num_words: int = 0,
    on_token: Callable[[], object],
) -> list[list[int]]:
    """Token ids of consecutive documents; `on_token` is called after each token that is drawn (a collective call)."""
    model, context = loaded.model, _context(loaded)
    eos = loaded.eos_token_ids
    # A row that ends makes the step that already runs worthless, and with many rows one ends nearly every step. Then it
    # is cheaper to let all go on to the same length and cut: what a row draws depends on no other.
    cuts = can_capture(model) and batch_size > BATCH_SIZE
    words = vocabulary_words(loaded.tokenizer) if num_words else []
    batch = range(first_document, first_document + num_documents)
    starts = [_start(loaded, seed, document_idx, words, num_words) for document_idx in batch]
    requests = [
        GenerationRequest(
            prompt_token_ids=prompt,
            max_new_tokens=context - len(kept),
            sampling=SamplingParams(temperature=temperature, top_p=top_p, seed=mix_seed(seed, document_idx)),
        )
        for (prompt, kept), document_idx in zip(starts, batch, strict=True)
    ]
    results = generate(
        model,
        requests,
        batch_size=batch_size,
        eos_token_ids=() if cuts else eos,
        on_token=lambda request_idx, token_id, logprob: on_token(),
        exchange=exchange_of(loaded.mesh),
    )
    # Every replica writes; the first one's text is everybody's, should a rounding have made them differ.
    results = loaded.mesh.gather(results)[0]
    documents = []
    for (_, kept), result in zip(starts, results, strict=True):
        if result.error is not None:
            raise ValueError(f"corpus self: {result.error}")
        documents.append(kept + up_to_end(result.token_ids, eos))
    return documents


def _context(loaded: LoadedModel) -> int:
    return min(MAX_DOCUMENT_TOKENS, loaded.model.config.max_position_embeddings)


def up_to_end(token_ids: list[int], eos_token_ids: Sequence[int]) -> list[int]:
    """Token ids up to and with the first that ends a text."""
    end = next((i for i, token_id in enumerate(token_ids) if token_id in eos_token_ids), len(token_ids))
    return token_ids[: end + 1]


def vocabulary_words(tokenizer: Any) -> list[str]:
    """Whole lower-case words that are one token each, sorted; ValueError if there are none."""
    entries = [] if tokenizer is None else tokenizer.get_vocab()
    words = sorted(entry[1:] for entry in entries if WORD.fullmatch(entry))
    if not words:
        raise ValueError("corpus self: this model's vocabulary holds no words to write about")
    return words


def _start(
    loaded: LoadedModel, seed: int, document_idx: int, words: list[str], num_words: int
) -> tuple[list[int], list[int]]:
    """(prompt, the part of it that belongs to the document)."""
    draw = random.Random(mix_seed(seed, document_idx))
    tokenizer: Any = loaded.tokenizer
    if tokenizer is None:
        first = [draw.randrange(loaded.model.config.vocab_size)]
        return first, first
    topic, form = draw.choice(TOPICS), draw.choice(FORMS)
    about = topic
    if words:
        about += " in which these words come up: " + ", ".join(draw.sample(words, num_words))
    if getattr(tokenizer, "chat_template", None):
        return chat_token_ids(tokenizer, f"Write {form} about {about}."), []
    opening = list(tokenizer(f"This is {form} about {about}.\n\n")["input_ids"])
    return opening, opening


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


def self_writer(
    loaded: LoadedModel, *, quiet: bool = False, max_tokens: int | None = None
) -> Callable[[int], Iterator[list[int]]]:
    """seed -> the documents of `--corpus self:SEED` (see `kept_documents`), as readers of corpora want them;
    `max_tokens`, how many will be read, sizes the batches, so that little is written in vain."""
    return lambda seed: kept_documents(loaded, seed=seed, max_tokens=max_tokens, quiet=quiet)


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
            lines = list(whole_lines(self.path, self._position))
        except FileNotFoundError:
            return []
        except OSError as error:
            self._give_up(error)
            return []
        found: list[list[int]] = []
        for line in lines:
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
