"""`--corpus self[:SEED]`: text that the model writes itself, for machines without a network and without a corpus.

Document k of a seed depends on (seed, k): the subject and the form of its text, and its sampling stream. A chat model
gets the task in its chat template and the document is its answer; any other model continues an opening sentence, which
is then part of the document; a model without a tokenizer continues a random token. With `num_words` a task also asks
for random words of the tokenizer's vocabulary, so that no two texts begin alike (as TinyStories, Eldan & Li 2023).
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from modules.generation import generate
from modules.graphs import can_capture
from modules.requests import GenerationRequest
from modules.sampling import SamplingParams, mix_seed
from pipeline_parallel.engine import exchange_of
from scripts.command_line import progress

if TYPE_CHECKING:
    from scripts.model_loading import LoadedModel

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
    """Token ids of consecutive documents; `on_token` hears of each token that is drawn (a collective call)."""
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
    from scripts.model_loading import chat_token_ids

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
