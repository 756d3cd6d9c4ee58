"""Score a model, dense and sparse in one run: perplexity, lm-eval's tasks, achieved densities, recall and precision,
decode speed.

Dense is always run first and is the baseline of every record. Several methods and densities may be given; each
pair is one sparse run. Under torchrun all ranks take part and the first one writes the records.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import torch
from loguru import logger

from analysis.results import Record, finished_records, make_record
from data.bootstrap import Resampling
from data.corpora import iter_documents, parse_corpus, token_documents
from modules.generation import generate
from modules.requests import GenerationRequest, GenerationResult, GenerationTimings
from modules.scoring import Likelihood, Window, check_window, score_windows, windows_likelihood
from pipeline_parallel.engine import check_same_everywhere, exchange_of
from pipeline_parallel.launch import current_launch
from scripts.command_line import progress, run_stage
from scripts.lm_eval_tasks import TaskOptions, benchmark_records, expand_presets, load_benchmarks
from scripts.model_loading import LoadedModel, RunOptions
from scripts.run_records import (
    RecordFile,
    achieved_on_mesh,
    execution_of,
    hash_of,
    model_labels,
    print_tables,
    run_labels,
    sources_of,
)
from scripts.selection_options import SweepOptions, attach_each
from scripts.written_text import self_writer
from sparse_predictor.methods.registry import is_thinning
from sparse_predictor.metrics import measure_selection
from sparse_predictor.selection import Selection, attach_selection, remove_sparsity

PROMPT_TOKENS = 64  # of a timed decoding
FIRST_WINDOWS = 60  # older figures are of so many
MAX_EXPONENT = 700.0
TIMED_RUNS = 5
LEAST = {"max_windows": 1, "max_tokens": 1, "quality_windows": 0, "decode_tokens": 0}


@dataclass(frozen=True, kw_only=True)
class PerplexityOptions(RunOptions):
    """Flags of task `perplexity`."""

    corpus: str = "wikitext"
    """wikitext[:SPLIT], c4[:SPLIT], a .txt, .jsonl or .jsonl.gz file, or self[:SEED]; the test side by default."""
    window: int = 2048
    """Tokens per window; documents are scored one by one."""
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
    """One run over the text, of all ranks: the likelihood of each window, in order, and how long it took."""

    windows: list[Likelihood]
    seconds: float

    @property
    def perplexity(self) -> float:
        """Of the whole text."""
        return sum(self.windows, Likelihood()).perplexity

    @property
    def first(self) -> float:
        """Of the first `FIRST_WINDOWS`."""
        return sum(self.windows[:FIRST_WINDOWS], Likelihood()).perplexity

    def to_record(self) -> dict[str, list[float]]:
        """Negative log-likelihood (nats) and scored tokens per window."""
        return {
            "nll": [round(one.nll_sum, 4) for one in self.windows],
            "tokens": [one.num_tokens for one in self.windows],
        }


def score_of(record: Record) -> Score:
    """What a record says of its run; without windows if it was written before they were kept."""
    try:
        parts = record.get("windows") or {"nll": [], "tokens": []}
        windows = [Likelihood(nll, int(tokens)) for nll, tokens in zip(parts["nll"], parts["tokens"], strict=True)]
        return Score(windows, float(record["timing"]["seconds"]))
    except (KeyError, TypeError, ValueError) as error:
        labels = ", ".join(f"{name} {record['labels'].get(name)}" for name in ("task", "method", "mlp_density"))
        raise ValueError(
            f"the record of {labels} is damaged ({error!r}); remove it, or give another --output"
        ) from error


def compared(sparse: Score, dense: Score) -> dict[str, Any]:
    """Of a record: the 95 % interval of the ratio of perplexities, by drawing the windows again, for both runs the
    same ones; and both perplexities of the first windows, where there are more."""
    found: dict[str, Any] = {}
    if len(sparse.windows) != len(dense.windows) or len(sparse.windows) < 2:
        return found
    lost = [ours.nll_sum - theirs.nll_sum for ours, theirs in zip(sparse.windows, dense.windows, strict=True)]
    tokens = torch.tensor([one.num_tokens for one in sparse.windows])
    resampling = Resampling(len(lost), seed=0)
    log_ratio = sum(lost) / int(tokens.sum())
    ends = resampling.interval(log_ratio, resampling.ratios(torch.tensor(lost, dtype=torch.float64), tokens))
    if max(ends) < MAX_EXPONENT:
        found["ratio_interval"] = [math.exp(end) for end in ends]
    if len(sparse.windows) > FIRST_WINDOWS:
        found["first_windows"] = {"num": FIRST_WINDOWS, "perplexity": sparse.first, "dense": dense.first}
    return found


@dataclass(frozen=True)
class Decoded:
    """Speeds (tokens/s) of the timed runs, and the densities that they computed while generating."""

    speeds: list[float]
    mlp_density: float
    head_density: float


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
    writer = self_writer(loaded, quiet=options.quiet, max_tokens=max_tokens)
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
    mine = [
        (place, piece)
        for place, piece in enumerate(all_windows(documents, options))
        if place // batch_size % mesh.dp_size == mesh.dp_rank
    ]
    num_tokens = sum(piece.num_scored for _, piece in mine)
    heard: list[Likelihood] = []
    started = time.perf_counter()
    with progress((), title, quiet=options.quiet, unit="tok", total=num_tokens) as bar:

        def on_window(piece: Window, found: Likelihood) -> None:
            heard.append(found)
            bar.update(piece.num_scored)

        windows_likelihood(model, [piece for _, piece in mine], batch_size=batch_size, on_window=on_window)
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    # Stages without the head have nothing to add, and tensor-parallel ranks all know the same: the first ones count.
    parts = mesh.gather([(place, found) for (place, _), found in zip(mine, heard, strict=True) if found.num_tokens])
    windows = dict(pair for part in parts[:: mesh.tp_size] for pair in part)
    score = Score([windows[place] for place in sorted(windows)], time.perf_counter() - started)
    score.perplexity  # noqa: B018 (ValueError where nothing was scored)
    return score


def decode_once(loaded: LoadedModel, prompt: Sequence[int], num_tokens: int) -> tuple[float, GenerationResult]:
    """Tokens/s of greedy decoding at batch 1, and what was generated; the prompt is not counted and EOS does not stop
    it. Of one replica: each does the same, and rank 0 records the time of its own.
    """
    timings = GenerationTimings()
    request = GenerationRequest(prompt_token_ids=prompt, max_new_tokens=num_tokens + 1)
    (found,) = generate(loaded.model, [request], eos_token_ids=(), timings=timings, exchange=exchange_of(loaded.mesh))
    return timings.decode_tokens_per_s, found


def decode_speeds(
    loaded: LoadedModel, selection: Selection, prompt: Sequence[int], num_tokens: int
) -> tuple[Decoded, Decoded]:
    """(sparse, dense): the two alternate, so that both see the same machine; the first run of each warms up."""
    runs: dict[bool, list[tuple[float, GenerationResult]]] = {False: [], True: []}
    for _ in range(1 + TIMED_RUNS):
        for is_sparse, chosen in ((False, Selection()), (True, selection)):
            attach_selection(loaded.model, chosen)
            runs[is_sparse].append(decode_once(loaded, prompt, num_tokens))
    sparse, dense = (
        Decoded([speed for speed, _ in timed[1:]], timed[-1][1].mlp_density, timed[-1][1].head_density)
        for timed in (runs[True], runs[False])
    )
    return sparse, dense


def perplexity_records(
    loaded: LoadedModel,
    documents: Sequence[Sequence[int]],
    options: PerplexityOptions,
    selections: Sequence[Selection],
    labels: Mapping[str, Any],
    output: RecordFile,
) -> list[Record]:
    """Dense first, then every selection; what the file holds already is not run again. `labels` are the model's."""
    labels = {
        **labels,
        "task": f"perplexity:{parse_corpus(options.corpus, side='test').label}",
        "window": options.window,
        "stride": options.stride or options.window,
        "num_tokens": sum(piece.num_scored for piece in all_windows(documents, options)),
    }
    dense_labels = {**labels, **run_labels(Selection(), loaded.model.config.num_hidden_layers)}
    sources = sources_of(loaded, Selection(), documents)
    found = output.find("perplexity", dense_labels, sources=sources)[-1:]
    if not found:
        attach_selection(loaded.model, Selection())
        score = score_documents(loaded, documents, options, "dense")
        dense_labels["execution"] = "dense"
        timing = {"seconds": score.seconds}
        record = make_record(
            "perplexity",
            dense_labels,
            "perplexity",
            score.perplexity,
            "",
            timing=timing,
            sources=sources,
            windows=score.to_record(),
            **compared(score, score),
        )
        found = output.write([record])
    dense = found[0]
    for selection in selections:
        found = found + _sparse_records(loaded, documents, options, selection, labels, dense, output)
    return found


def _sparse_records(
    loaded: LoadedModel,
    documents: Sequence[Sequence[int]],
    options: PerplexityOptions,
    selection: Selection,
    labels: Mapping[str, Any],
    dense: Record,
    output: RecordFile,
) -> list[Record]:
    """One sparse run: its perplexity record and, if asked for, its decode speed."""
    model, num_layers = loaded.model, loaded.model.config.num_hidden_layers
    labels = {**labels, **run_labels(selection, num_layers)}
    decode_labels = {**labels, "batch_size": 1, "num_tokens": options.decode_tokens}
    sources = sources_of(loaded, selection, documents)
    there = output.find("perplexity", labels, sources=sources)[-1:]
    if options.decode_tokens:
        there += output.find("decode", decode_labels, sources=sources)[-1:]
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
            baseline={"name": "dense", "value": dense["value"]},
            achieved=done,
            timing={"seconds": score.seconds, "dense_seconds": dense["timing"]["seconds"]},
            sources=sources,
            windows=score.to_record(),
            **compared(score, score_of(dense)),
            **measured,
        )
    ]
    if options.decode_tokens:
        prompt = documents[0][: min(PROMPT_TOKENS, options.window)]
        ours, theirs = decode_speeds(loaded, selection, prompt, options.decode_tokens)
        speed, dense_speed = median(ours.speeds), median(theirs.speeds)
        if speed < dense_speed:
            logger.info(f"{title} decodes at {speed / dense_speed:.2f} of the dense speed here: dense is faster")
        execution = "mask" if is_thinning(selection.method) else "gather"
        records.append(
            make_record(
                "decode",
                {**decode_labels, "execution": execution},
                "tokens_per_s",
                speed,
                "tokens/s",
                baseline={"name": "dense", "value": dense_speed},
                sources=sources,
                achieved={"mlp_density": ours.mlp_density, "head_density": ours.head_density},
                timing={"samples": ours.speeds, "baseline_samples": theirs.speeds},
            )
        )
    remove_sparsity(model)
    return output.write(records)


PERPLEXITY = "perplexity"


@dataclass(frozen=True, kw_only=True)
class Options(TaskOptions, SweepOptions, PerplexityOptions):
    """Score a model, dense and sparse in one run."""

    output: Path
    """JSON lines; records are appended (a second time, too, with a warning, unless --resume)."""
    tasks: str = PERPLEXITY
    """Comma-separated: perplexity (of --corpus), names of lm-eval tasks, arithmetic_words, zero-shot, few-shot."""


def main(options: Options) -> list[Record]:
    """Of each task dense, then every method at every density; append one record per metric and return them all."""
    tasks = options.task_names()
    selections = options.selections(seed=options.seed)
    if PERPLEXITY in tasks:
        check_options(options)
    names = expand_presets([task for task in tasks if task != PERPLEXITY], options.num_fewshot)
    benchmarks = load_benchmarks(names, options.include_path)
    if current_launch().rank == 0:
        finished_records(options.output)  # or it holds something else, which is told before the model is loaded
    loaded = options.load()
    attach_each(loaded.model, selections)
    if options.sparse_phases == "decode" and selections and PERPLEXITY in tasks:
        logger.warning("--sparse-phases decode: perplexity never decodes, so it will be the dense one")
    documents = read_documents(loaded, options) if PERPLEXITY in tasks else []
    output = RecordFile(options.output, loaded.mesh, resume=options.resume)
    labels = model_labels(loaded, options, options.label)
    records = perplexity_records(loaded, documents, options, selections, labels, output) if documents else []
    records += benchmark_records(loaded, benchmarks, options, selections, labels, output, limit=options.limit)
    if loaded.mesh.rank == 0:
        print_tables(records, options.output, quiet=options.quiet)
    return records


if __name__ == "__main__":
    run_stage(main, Options, distributed=True)
