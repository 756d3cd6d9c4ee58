"""Score a model, dense and sparse in one run: perplexity, achieved densities, recall and precision, decode speed.

Dense is always run first and is the baseline of every record. Several methods and densities may be given; each
pair is one sparse run. Under torchrun all ranks take part and the first one writes the records.
"""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from loguru import logger

from analysis.results import Record, append_record, make_record
from data.corpora import iter_documents, parse_corpus, token_documents
from modules.generation import generate
from modules.requests import GenerationRequest, GenerationTimings
from modules.scoring import Likelihood, check_window, score_windows, windows_likelihood
from modules.sparsity import BLOCKS, SparsityStats
from pipeline_parallel.engine import check_same_everywhere, exchange_of
from scripts.command_line import progress, run_stage
from scripts.model_loading import LoadedModel, RunOptions
from sparse_predictor.cost import mlp_bytes_share, thinned_densities
from sparse_predictor.metrics import measure_selection
from sparse_predictor.selection import Method, Selection, SparsePhases, attach_selection, remove_sparsity

TASKS = ("perplexity",)
PROMPT_TOKENS = 64  # of a timed decoding
LEAST = {"max_windows": 1, "max_tokens": 1, "quality_windows": 0, "decode_tokens": 0}


@dataclass(frozen=True, kw_only=True)
class Options(RunOptions):
    """Score a model, dense and sparse in one run."""

    output: Path
    """JSON lines; records are appended."""
    corpus: str = "wikitext"
    """wikitext[:SPLIT], c4[:SPLIT], a .txt, .jsonl or .jsonl.gz file, or self[:SEED]; the test side by default."""
    tasks: str = "perplexity"
    """Comma-separated; perplexity is what this version scores."""
    method: tuple[Method, ...] = ("dense",)
    """One or several: dense predictor oracle static random cats teal."""
    predictors: Path | None = None
    """Directory written by scripts.train."""
    mlp_density: tuple[float, ...] = (0.5,)
    """One or several; every method is run at each."""
    head_density: float = 1.0
    """Share of key-value groups of heads kept."""
    sparse_phases: SparsePhases = "all"
    """all: each scored token selects for itself, as when decoded. decode leaves scoring dense."""
    density_budget: Path | None = None
    """JSON file with one density a layer."""
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

    likelihood: Likelihood
    seconds: float


def score_documents(loaded: LoadedModel, documents: Sequence[Sequence[int]], options: Options, title: str) -> Score:
    """Perplexity over whole documents, each cut into its own windows; `max_windows` windows at most in all."""
    model, mesh, batch_size = loaded.model, loaded.mesh, options.batch_size
    pieces = (piece for document in documents for piece in score_windows(document, options.window, options.stride))
    # Batches are dealt to the replicas, not windows: the same ones run together however many replicas there are.
    windows = [
        piece
        for place, piece in enumerate(islice(pieces, options.max_windows))
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
    return Score(likelihood, time.perf_counter() - started)


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


def achieved(loaded: LoadedModel, selection: Selection, own_stats: SparsityStats) -> dict[str, Any]:
    """What a sparse run really did, for its record: densities, calls by path, bytes read; of all ranks together."""
    model, mesh = loaded.model, loaded.mesh
    stats = own_stats.summed(model.config.num_hidden_layers, mesh.sum)
    own_density = own_stats.mean_density("mlp") if own_stats.blocks else None  # without a batch
    per_layer = {block: stats.densities(block) for block in BLOCKS}
    executions = stats.executions()
    if selection.method == "teal":
        per_layer["mlp"] = thinned_densities(model, mesh.sum)
        own_density = own_density and mean(thinned_densities(model)[layer] for layer in model.layers)
        if selection.sparse_phases == "all":  # it masks inside the matmuls of blocks that have no selector
            thinned = sum(calls.executions["dense"] for (_, block), calls in stats.blocks.items() if block == "mlp")
            executions = {**executions, "dense": executions["dense"] - thinned, "mask": thinned}
    return {
        **({"mlp_density_per_rank": mesh.gather(own_density)} if mesh.world_size > 1 else {}),
        "mlp_density": sum(per_layer["mlp"]) / len(per_layer["mlp"]),
        "head_density": stats.mean_density("attention"),
        "per_layer": per_layer,
        "executions": executions,
        "sparse_calls": executions["gather"] + executions["mask"],
        "bytes_read_share": mlp_bytes_share(model, selection.method, stats, mesh.sum),
    }


def sparse_records(
    loaded: LoadedModel,
    documents: Sequence[Sequence[int]],
    options: Options,
    selection: Selection,
    labels: dict[str, Any],
    dense: Score,
) -> list[Record]:
    """One sparse run: appends and returns its perplexity record and, if asked for, its decode speed."""
    model, num_layers = loaded.model, loaded.model.config.num_hidden_layers
    targets = selection.densities(num_layers)
    labels = {**labels, "method": selection.method, "phase": selection.sparse_phases}
    labels |= {"mlp_density": mean(targets["mlp"]), "head_density": mean(targets["attention"])}
    title, stats = f"{selection.method} {labels['mlp_density']:g}", attach_selection(model, selection)
    score = score_documents(loaded, documents, options, title)
    done = achieved(loaded, selection, stats)
    measured: dict[str, Any] = {}
    if options.quality_windows and selection.method != "teal" and done["sparse_calls"]:
        attach_selection(model, selection)
        quality = measure_selection(model, targets)
        sample = replace(options, max_windows=options.quality_windows, quiet=True)
        score_documents(loaded, documents, sample, title)
        found = quality.summed(num_layers, loaded.mesh.sum).to_record()
        measured = {"quality": {**found, "windows": options.quality_windows}}
    records = [
        make_record(
            "perplexity",
            {**labels, "execution": next((path for path in ("mask", "gather") if done["executions"][path]), "dense")},
            "perplexity",
            score.likelihood.perplexity,
            "",
            baseline={"name": "dense", "value": dense.likelihood.perplexity},
            achieved=done,
            timing={"seconds": score.seconds, "dense_seconds": dense.seconds},
            **measured,
        )
    ]
    if options.decode_tokens:
        prompt = documents[0][: min(PROMPT_TOKENS, options.window)]
        sparse_speed, dense_speed = decode_speeds(loaded, selection, prompt, options.decode_tokens)
        if sparse_speed < dense_speed:
            logger.info(f"{title} decodes at {sparse_speed / dense_speed:.2f} of the dense speed here: dense is faster")
        execution = "mask" if selection.method == "teal" else "gather"
        records.append(
            make_record(
                "decode",
                {**labels, "batch_size": 1, "num_tokens": options.decode_tokens, "execution": execution},
                "tokens_per_s",
                sparse_speed,
                "tokens/s",
                baseline={"name": "dense", "value": dense_speed},
            )
        )
    remove_sparsity(model)
    if loaded.mesh.rank == 0:
        for record in records:
            append_record(options.output, record)
    return records


def main(options: Options) -> list[Record]:
    """Run dense, then every method at every density; append one record each and return them."""
    tasks = [task for task in options.tasks.split(",") if task]
    unknown = sorted(set(tasks) - set(TASKS))
    if unknown or not tasks:
        raise ValueError(f"--tasks {options.tasks!r}: this version scores {', '.join(TASKS)}")
    for name, least in LEAST.items():
        if (value := getattr(options, name)) is not None and value < least:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, got {value}")
    selections = [
        Selection(
            method=method,
            predictors=options.predictors,
            mlp_density=density,
            head_density=options.head_density,
            sparse_phases=options.sparse_phases,
            density_budget=options.density_budget,
            seed=options.seed,
        )
        for method in options.method
        if method != "dense"
        for density in options.mlp_density
    ]
    if not options.method or not options.mlp_density:
        raise ValueError("--method and --mlp-density: give at least one each")
    if options.density_budget is not None and len(options.mlp_density) > 1:
        raise ValueError("--density-budget sets the densities; give one --mlp-density at most beside it")
    corpus = parse_corpus(options.corpus, side="test")
    if corpus.kind == "self" and options.max_tokens is None:
        raise ValueError("--corpus self has no end; say with --max-tokens how much of it to score")
    loaded = options.load()
    model, mesh = loaded.model, loaded.mesh
    # Attach each once before anything is measured, so that a missing predictor fails in seconds, not after a run.
    for selection in selections:
        attach_selection(model, selection)
    remove_sparsity(model)
    if options.sparse_phases == "decode" and selections:
        logger.warning("--sparse-phases decode: perplexity never decodes, so it will be the dense one")
    writer = loaded.self_writer(quiet=options.quiet, max_tokens=options.max_tokens)
    # So many windows hold at most so many tokens; a hub corpus is not read any further.
    enough = None if options.max_windows is None else options.max_windows * options.window
    max_tokens = min((limit for limit in (options.max_tokens, enough) if limit is not None), default=None)
    check_window(model, options.window)
    limits = {"max_tokens": max_tokens, "vocab_size": model.config.vocab_size}
    texts = iter_documents(options.corpus, side="test", self_writer=writer)
    documents = list(token_documents(loaded.tokenizer, texts, **limits))
    del texts  # the last hold on a text that has no end: it stops being written here
    text_hash = hashlib.sha256(repr(documents).encode()).hexdigest()
    check_same_everywhere(mesh, f"--corpus {options.corpus}: the text", text_hash)
    room = model.config.max_position_embeddings - min(PROMPT_TOKENS, options.window, len(documents[0])) - 1
    if options.decode_tokens > max(0, room):
        raise ValueError(f"--decode-tokens {options.decode_tokens}: the context has room for {room} after the prompt")
    attach_selection(model, Selection())
    dense = score_documents(loaded, documents, options, "dense")
    labels: dict[str, Any] = {
        "model": loaded.model_id,
        "task": f"perplexity:{corpus.label}",
        "window": options.window,
        "stride": options.stride or options.window,
        "num_tokens": dense.likelihood.num_tokens,
        "batch_size": options.batch_size,
        "dtype": str(model.dtype).removeprefix("torch."),
        "weights": "trained",
        "seed": options.seed,
        "density_budget": options.density_budget and options.density_budget.stem,
    }
    labels |= {"method": "dense", "mlp_density": 1.0, "head_density": 1.0, "phase": "all", "execution": "dense"}
    if mesh.world_size > 1:
        labels |= {"tp_size": mesh.tp_size, "pp_size": mesh.pp_size, "dp_size": mesh.dp_size}
    perplexity_of_dense, timing = dense.likelihood.perplexity, {"seconds": dense.seconds}
    records = [make_record("perplexity", labels, "perplexity", perplexity_of_dense, "", timing=timing)]
    if mesh.rank == 0:
        append_record(options.output, records[0])
    for selection in selections:
        records += sparse_records(loaded, documents, options, selection, labels, dense)
    return records


if __name__ == "__main__":
    run_stage(main, Options, distributed=True)
