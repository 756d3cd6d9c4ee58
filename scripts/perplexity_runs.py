"""Perplexity of a corpus and decode speed: dense, and for every selection, as the records of `scripts.evaluate`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from statistics import median
from typing import Any

import torch
from loguru import logger

from analysis.results import Record, make_record
from data.corpora import iter_documents, parse_corpus, token_documents
from modules.generation import generate
from modules.requests import GenerationRequest, GenerationTimings
from modules.scoring import Likelihood, Window, check_window, score_windows, windows_likelihood
from pipeline_parallel.engine import check_same_everywhere, exchange_of
from scripts.command_line import progress
from scripts.model_loading import LoadedModel, RunOptions
from scripts.run_records import RecordBook, achieved_on_mesh, execution_of, hash_of, selection_labels, sources_of
from sparse_predictor.metrics import measure_selection
from sparse_predictor.selection import Method, Selection, attach_selection, remove_sparsity
from sparse_predictor.thinning import is_thinning

PROMPT_TOKENS = 64  # of a timed decoding
LEAST = {"max_windows": 1, "max_tokens": 1, "quality_windows": 0, "decode_tokens": 0}


@dataclass(frozen=True, kw_only=True)
class PerplexityOptions(RunOptions):
    """Flags of task `perplexity`."""

    corpus: str = "wikitext"
    """wikitext[:SPLIT], c4[:SPLIT], a .txt, .jsonl or .jsonl.gz file, or self[:SEED]; the test side by default."""
    window: int = 2048
    """Tokens a window; documents are scored one by one."""
    stride: int | None = None
    """Tokens between window starts; the window itself by default (no overlap)."""
    max_windows: int | None = None
    """Score at most so many windows."""
    max_tokens: int | None = None
    """Read at most so many tokens of the corpus."""
    quality_windows: int = 4
    """Windows of each sparse run on which recall and precision are measured; 0: none."""
    decode_tokens: int = 0
    """Also time greedy decoding of so many tokens at batch 1, dense and sparse alternating; 0: not timed."""


@dataclass(frozen=True)
class Score:
    """One run over the text: of all ranks, and the time until the last one was done."""

    perplexity: float
    seconds: float


def check_options(options: PerplexityOptions) -> None:
    """ValueError for flags that no run could follow; nothing is read yet."""
    for name, least in LEAST.items():
        if (value := getattr(options, name)) is not None and value < least:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, got {value}")
    is_bounded = options.max_tokens is not None or options.max_windows is not None
    if parse_corpus(options.corpus, side="test").kind == "self" and not is_bounded:
        raise ValueError("--corpus self has no end; say with --max-tokens or --max-windows how much of it to score")


def read_documents(loaded: LoadedModel, options: PerplexityOptions) -> list[list[int]]:
    """The text to score, as token ids (a collective call); ValueError if ranks read different ones."""
    model = loaded.model
    # So many windows hold at most so many tokens; a hub corpus is not read any further.
    enough = None if options.max_windows is None else options.max_windows * options.window
    max_tokens = min((limit for limit in (options.max_tokens, enough) if limit is not None), default=None)
    check_window(model, options.window)
    writer = loaded.self_writer(quiet=options.quiet, max_tokens=max_tokens)
    texts = iter_documents(options.corpus, side="test", self_writer=writer)
    limits = {"max_tokens": max_tokens, "vocab_size": model.config.vocab_size}
    documents = list(token_documents(loaded.tokenizer, texts, **limits))
    del texts  # the last hold on a text that has no end: it stops being written here
    check_same_everywhere(loaded.mesh, f"--corpus {options.corpus}: the text", hash_of(repr(documents).encode()))
    room = model.config.max_position_embeddings - min(PROMPT_TOKENS, options.window, len(documents[0])) - 1
    if options.decode_tokens > max(0, room):
        raise ValueError(f"--decode-tokens {options.decode_tokens}: the context has room for {room} after the prompt")
    return documents


def all_windows(documents: Sequence[Sequence[int]], options: PerplexityOptions) -> list[Window]:
    """Each document cut into its own windows; `max_windows` of them at most in all."""
    pieces = (piece for document in documents for piece in score_windows(document, options.window, options.stride))
    return list(islice(pieces, options.max_windows))


def score_documents(
    loaded: LoadedModel, documents: Sequence[Sequence[int]], options: PerplexityOptions, title: str
) -> Score:
    """Perplexity over whole documents, with all ranks."""
    model, mesh, batch_size = loaded.model, loaded.mesh, options.batch_size
    # Batches are dealt to the replicas, not windows: the same ones run together however many replicas there are.
    windows = [
        piece
        for place, piece in enumerate(all_windows(documents, options))
        if place // batch_size % mesh.dp_size == mesh.dp_rank
    ]
    num_tokens = sum(piece.num_scored for piece in windows)
    started = time.perf_counter()
    with progress((), title, quiet=options.quiet, unit="tok", total=num_tokens) as bar:
        likelihood = windows_likelihood(
            model,
            windows,
            batch_size=batch_size,
            on_window=lambda piece, found: bar.update(piece.num_scored),
        )
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    # Stages without the head have nothing to add, and tensor-parallel ranks all know the same: the first ones count.
    likelihood = sum(mesh.gather(likelihood)[:: mesh.tp_size], Likelihood())
    return Score(likelihood.perplexity, time.perf_counter() - started)


def decode_speed(loaded: LoadedModel, prompt: Sequence[int], num_tokens: int) -> float:
    """Tokens a second of greedy decoding at batch 1; the prompt is not counted and EOS does not stop it.

    Of one replica: each does the same, and rank 0 records the time of its own.
    """
    timings = GenerationTimings()
    request = GenerationRequest(prompt_token_ids=prompt, max_new_tokens=num_tokens + 1)
    generate(loaded.model, [request], eos_token_ids=(), timings=timings, exchange=exchange_of(loaded.mesh))
    return timings.decode_tokens_per_s


def decode_speeds(
    loaded: LoadedModel, selection: Selection, prompt: Sequence[int], num_tokens: int
) -> tuple[float, float]:
    """(sparse, dense) decode speed: median of three, the two alternating so that both see the same machine."""
    speeds: dict[Method, list[float]] = {"dense": [], selection.method: []}
    for _ in range(4):
        for chosen in (Selection(), selection):
            attach_selection(loaded.model, chosen)
            speeds[chosen.method].append(decode_speed(loaded, prompt, num_tokens))
    # The first of each warms up.
    return median(speeds[selection.method][1:]), median(speeds["dense"][1:])


def perplexity_records(
    loaded: LoadedModel,
    documents: Sequence[Sequence[int]],
    options: PerplexityOptions,
    selections: Sequence[Selection],
    labels: Mapping[str, Any],
    book: RecordBook,
) -> list[Record]:
    """Dense first, then every selection; what the book holds already is not run again. `labels` are the model's."""
    labels = {
        **labels,
        "task": f"perplexity:{parse_corpus(options.corpus, side='test').label}",
        "window": options.window,
        "stride": options.stride or options.window,
        "num_tokens": sum(piece.num_scored for piece in all_windows(documents, options)),
    }
    dense_labels = {**labels, **selection_labels(Selection(), loaded.model.config.num_hidden_layers)}
    sources = sources_of(loaded, Selection(), documents)
    found = book.find("perplexity", dense_labels, sources=sources)[-1:]
    if not found:
        attach_selection(loaded.model, Selection())
        score = score_documents(loaded, documents, options, "dense")
        dense_labels["execution"] = "dense"
        timing = {"seconds": score.seconds}
        record = make_record(
            "perplexity", dense_labels, "perplexity", score.perplexity, "", timing=timing, sources=sources
        )
        found = book.write([record])
    dense = Score(found[0]["value"], found[0]["timing"]["seconds"])
    for selection in selections:
        found = found + _sparse_records(loaded, documents, options, selection, labels, dense, book)
    return found


def _sparse_records(
    loaded: LoadedModel,
    documents: Sequence[Sequence[int]],
    options: PerplexityOptions,
    selection: Selection,
    labels: Mapping[str, Any],
    dense: Score,
    book: RecordBook,
) -> list[Record]:
    """One sparse run: its perplexity record and, if asked for, its decode speed."""
    model, num_layers = loaded.model, loaded.model.config.num_hidden_layers
    labels = {**labels, **selection_labels(selection, num_layers)}
    decode_labels = {**labels, "batch_size": 1, "num_tokens": options.decode_tokens}
    sources = sources_of(loaded, selection, documents)
    there = book.find("perplexity", labels, sources=sources)[-1:]
    if options.decode_tokens:
        there += book.find("decode", decode_labels, sources=sources)[-1:]
    if len(there) == 1 + bool(options.decode_tokens):
        return there
    title, stats = f"{selection.method} {labels['mlp_density']:g}", attach_selection(model, selection)
    score = score_documents(loaded, documents, options, title)
    done = achieved_on_mesh(loaded, selection, stats)
    measured: dict[str, Any] = {}
    if options.quality_windows and not is_thinning(selection.method) and done["sparse_calls"]:
        attach_selection(model, selection)
        quality = measure_selection(model, selection.densities(num_layers))
        sample = replace(options, max_windows=options.quality_windows, quiet=True)
        score_documents(loaded, documents, sample, title)
        found = quality.summed(num_layers, loaded.mesh.sum).to_record()
        measured = {"quality": {**found, "windows": options.quality_windows}}
    records = [
        make_record(
            "perplexity",
            {**labels, "execution": execution_of(done)},
            "perplexity",
            score.perplexity,
            "",
            baseline={"name": "dense", "value": dense.perplexity},
            achieved=done,
            timing={"seconds": score.seconds, "dense_seconds": dense.seconds},
            sources=sources,
            **measured,
        )
    ]
    if options.decode_tokens:
        prompt = documents[0][: min(PROMPT_TOKENS, options.window)]
        sparse_speed, dense_speed = decode_speeds(loaded, selection, prompt, options.decode_tokens)
        if sparse_speed < dense_speed:
            logger.info(f"{title} decodes at {sparse_speed / dense_speed:.2f} of the dense speed here: dense is faster")
        execution = "mask" if is_thinning(selection.method) else "gather"
        records.append(
            make_record(
                "decode",
                {**decode_labels, "execution": execution},
                "tokens_per_s",
                sparse_speed,
                "tokens/s",
                baseline={"name": "dense", "value": dense_speed},
                sources=sources,
            )
        )
    remove_sparsity(model)
    return book.write(records)
