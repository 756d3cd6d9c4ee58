"""Stage B of scripts.train: neuron predictors refined end to end, on the text of the activation store and on more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from loguru import logger

from data.corpora import iter_documents, parse_corpus, token_documents
from scripts.command_line import progress, show_step
from scripts.model_loading import LoadedModel, ModelOptions
from scripts.run_records import hash_of
from sparse_predictor.refine import RefineOptions, refine
from sparse_predictor.stack import PredictorStack
from sparse_predictor.training_data import TrainingRows

BEGINNING = 64  # tokens by which a document is known again
LEAST = {"refine_steps": 0, "refine_window": 2, "refine_tokens": 1}


@dataclass(frozen=True, kw_only=True)
class RefinementFlags(ModelOptions):
    """How neuron predictors are refined."""

    refine_steps: int = 800
    """End-to-end steps of the neuron predictors against the dense logits, --batch-size windows each; 0: none."""
    refine_window: int = 1024
    """Tokens a window, of refinement and of the text that stand-ins and thresholds are fitted on."""
    refine_learning_rate: float = 3e-3
    """Peak, of AdamW."""
    refine_corpus: str | None = None
    """Refine on this text, too: as --corpus of collect, but without activations, so it may be far more."""
    refine_tokens: int | None = None
    """Tokens of it; all by default."""


def check_refinement(flags: RefinementFlags) -> None:
    """ValueError for flags that could not refine anything."""
    for name, least in LEAST.items():
        if (value := getattr(flags, name)) is not None and value < least:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, got {value}")
    if not (0.0 < flags.refine_learning_rate < 1.0):
        raise ValueError(f"--refine-learning-rate must lie in (0, 1), got {flags.refine_learning_rate}")
    if flags.refine_corpus is None:
        if flags.refine_tokens is not None:
            raise ValueError("--refine-tokens: of which text? give --refine-corpus as well")
    elif parse_corpus(flags.refine_corpus, side="train").kind == "self" and flags.refine_tokens is None:
        raise ValueError(f"--refine-corpus {flags.refine_corpus} has no end: give --refine-tokens as well")


def refine_neurons(
    flags: RefinementFlags,
    loaded: LoadedModel,
    rows: TrainingRows,
    stack: PredictorStack,
    *,
    densities: tuple[float, ...],
    lookahead: int,
    held_out_tokens: int,
    state_folder: Path,
    origin: Mapping[str, Any],
) -> dict[str, Any]:
    """Refine `stack` in place; returns the held-out divergence as it went, nats a token."""
    model = rows.model
    refinement = RefineOptions(
        steps=flags.refine_steps,
        batch_sequences=flags.batch_size,
        window=min(flags.refine_window, model.config.max_position_embeddings),
        learning_rate=flags.refine_learning_rate,
        densities=densities,
        seed=flags.seed,
    )
    text = refinement_text(flags, loaded, rows)
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
    """The store's training tokens, then those of --refine-corpus: int32 [N]. A document that begins as one that the
    store validates on is left out, since the best state is chosen by those."""
    stored = rows.token_ids("train")
    if flags.refine_corpus is None:
        return stored
    validating = {
        tuple(rows.store.token_ids[start : min(stop, start + BEGINNING)].tolist())
        for start, stop in rows.store.row_ranges("validation")
    }
    writer = loaded.self_writer(quiet=flags.quiet, max_tokens=flags.refine_tokens)
    documents = token_documents(
        loaded.tokenizer,
        iter_documents(flags.refine_corpus, side="train", self_writer=writer),
        vocab_size=rows.model.config.vocab_size,
    )
    others = chain.from_iterable(ids for ids in documents if tuple(ids[:BEGINNING]) not in validating)
    tokens = np.fromiter(islice(others, flags.refine_tokens), dtype=stored.dtype)
    if not len(tokens):
        raise ValueError(f"--refine-corpus {flags.refine_corpus} holds nothing but what the store validates on")
    logger.info(f"refining on {len(stored)} tokens of the store and {len(tokens)} of {flags.refine_corpus}")
    return np.concatenate([stored, tokens])
