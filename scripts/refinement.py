"""Stage B of scripts.train: neuron predictors refined end to end, on the text of the activation store and on more."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from loguru import logger

from data.activation_store import ActivationStore
from data.corpora import iter_documents, parse_corpus, token_documents
from scripts.command_line import progress, show_step
from scripts.model_loading import LoadedModel, ModelOptions
from scripts.run_records import hash_of
from scripts.written_text import self_writer
from sparse_predictor.predictor import PredictorStack
from sparse_predictor.refine import RefineOptions, refine
from sparse_predictor.training_data import TrainingRows

# A document is known again by so many tokens; where the store holds fewer, since it was cut, by no less than these.
BEGINNING, LEAST_BEGINNING = 64, 16
LEAST = {"refine_steps": 0, "refine_window": 2, "refine_tokens": 1}


@dataclass(frozen=True, kw_only=True)
class RefinementFlags(ModelOptions):
    """How neuron predictors are refined."""

    refine_steps: int | None = None
    """End-to-end steps of the neuron predictors against the dense logits, --batch-size windows each; 0: none. Default:
    800 on a GPU or with --refine-corpus, none on a CPU."""
    refine_window: int = 1024
    """Tokens per window, of refinement and of the text that stand-ins and thresholds are fitted on."""
    refine_learning_rate: float = 3e-3
    """Peak, of AdamW."""
    refine_corpus: str | None = None
    """Refine on this text, too: as --corpus of collect, but without activations, so it may be far more. What the store
    holds already is left out of it."""
    refine_tokens: int | None = None
    """Tokens of it; all of a file by default."""


def number(chosen: int | None) -> int:
    """A flag that has a number by now, whether or not one was given (`scripts.train.fit_to_device`)."""
    assert chosen is not None
    return chosen


def check_refinement(flags: RefinementFlags, *, refines: bool) -> None:
    """ValueError for flags that could not refine anything; `refines`: whether neurons are trained."""
    for name, least in LEAST.items():
        if (value := getattr(flags, name)) is not None and value < least:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, got {value}")
    if not (0.0 < flags.refine_learning_rate < 1.0):
        raise ValueError(f"--refine-learning-rate must lie in (0, 1), got {flags.refine_learning_rate}")
    if flags.refine_corpus is None:
        if flags.refine_tokens is not None:
            raise ValueError("--refine-tokens: of which text? give --refine-corpus as well")
        return
    if flags.refine_steps == 0 or not refines:
        raise ValueError("--refine-corpus: only neurons are refined, and with --refine-steps of at least 1")
    if parse_corpus(flags.refine_corpus, side="train").path is None and flags.refine_tokens is None:
        raise ValueError(
            f"--refine-corpus {flags.refine_corpus} has no end, or a far one: give --refine-tokens as well"
        )


def refine_neurons(
    flags: RefinementFlags,
    rows: TrainingRows,
    stack: PredictorStack,
    text: np.ndarray,
    *,
    densities: tuple[float, ...],
    lookahead: int,
    held_out_tokens: int,
    state_folder: Path,
    origin: Mapping[str, Any],
) -> dict[str, Any]:
    """Refine `stack` in place on a token stream int32 [N]; returns the held-out divergence in nats per token."""
    model = rows.model
    refinement = RefineOptions(
        steps=number(flags.refine_steps),
        batch_sequences=flags.batch_size,
        window=min(flags.refine_window, model.config.max_position_embeddings),
        learning_rate=flags.refine_learning_rate,
        densities=densities,
        seed=flags.seed,
    )
    held_out = rows.text("validation", held_out_tokens, flags.refine_window)
    with progress((), "refining", quiet=flags.quiet, total=refinement.steps, unit="step") as bar:
        curve = refine(
            model,
            stack,
            text,
            held_out,
            refinement,
            lookahead=lookahead,
            state_path=state_folder / "training_refinement.pt",
            origin={**rows.identity(), **origin, "refinement_text": hash_of(text.tobytes())},
            on_step=lambda step, loss: show_step(bar, step, loss),
        )
    return {"held_out_divergence": curve, "best": min(divergence for _, divergence in curve), "tokens": len(text)}


def refinement_text(flags: RefinementFlags, loaded: LoadedModel, rows: TrainingRows) -> np.ndarray:
    """The store's training tokens, then those of --refine-corpus: int32 [N].

    Documents of the store are left out of the latter: it validates on some, and the others are there. They are known
    by their first tokens, so one that the corpus cuts or begins otherwise is not. ValueError if nothing is left.
    """
    stored = rows.token_ids("train")
    if flags.refine_corpus is None:
        return stored
    documents = token_documents(
        loaded.tokenizer,
        iter_documents(
            flags.refine_corpus,
            side="train",
            self_writer=self_writer(loaded, quiet=flags.quiet, max_tokens=flags.refine_tokens),
        ),
        vocab_size=rows.model.config.vocab_size,
    )
    is_stored = _knows(rows.store)
    others = chain.from_iterable(ids for ids in documents if not is_stored(ids))
    tokens = np.fromiter(islice(others, flags.refine_tokens), dtype=stored.dtype)
    if not len(tokens):
        raise ValueError(f"--refine-corpus {flags.refine_corpus} holds nothing but what the store does")
    if flags.refine_tokens is not None and len(tokens) < flags.refine_tokens:
        logger.warning(f"--refine-corpus {flags.refine_corpus} ends after {len(tokens)} tokens")
    logger.info(f"refining on {len(stored)} tokens of the store and {len(tokens)} of {flags.refine_corpus}")
    return np.concatenate([stored, tokens])


def _knows(store: ActivationStore) -> Callable[[list[int]], bool]:
    """Whether a store holds a document, by its tokens."""
    ranges = [(entry.start, min(entry.stop, entry.start + BEGINNING)) for entry in store.documents]
    beginnings = {tuple(store.token_ids[start:stop].tolist()) for start, stop in ranges}
    sizes = {len(beginning) for beginning in beginnings}

    def knows(ids: list[int]) -> bool:
        few = (size for size in sizes if size >= LEAST_BEGINNING or size == len(ids))
        return any(tuple(ids[:size]) in beginnings for size in few)

    return knows
