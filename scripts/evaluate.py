"""Score a model, dense and sparse in one run: perplexity, lm-eval's tasks, achieved densities, recall and precision,
decode speed.

Dense is always run first and is the baseline of every record. Several methods and densities may be given; each
pair is one sparse run. Under torchrun all ranks take part and the first one writes the records.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from loguru import logger

from analysis.results import Record
from scripts.command_line import run_stage
from scripts.lm_eval_tasks import expand_presets, load_benchmarks
from scripts.perplexity_runs import PerplexityOptions, check_options, perplexity_records, read_documents
from scripts.run_records import RecordBook, model_labels
from scripts.task_runs import benchmark_records
from sparse_predictor.selection import Method, Selection, SparsePhases, attach_selection, remove_sparsity

PERPLEXITY = "perplexity"


@dataclass(frozen=True, kw_only=True)
class Options(PerplexityOptions):
    """Score a model, dense and sparse in one run."""

    output: Path
    """JSON lines; records are appended (a second time, too, with a warning, unless --resume)."""
    tasks: str = PERPLEXITY
    """Comma-separated: perplexity (of --corpus), names of lm-eval tasks, arithmetic_words, zero-shot, few-shot."""
    include_path: Path | None = None
    """Folder with more lm-eval task files."""
    num_fewshot: int | None = None
    """Examples before each question; as the task or preset says by default."""
    limit: int | None = None
    """Questions of each task at most."""
    method: tuple[Method, ...] = ("dense",)
    """One or several: dense predictor oracle static random cats teal teal-all wina griffin."""
    predictors: Path | None = None
    """Directory written by scripts.train."""
    mlp_density: tuple[float, ...] = (0.5,)
    """One or several; every method is run at each."""
    head_density: float = 1.0
    """Share of key-value groups of heads kept."""
    density_budget: Path | None = None
    """JSON file with one density a layer (see scripts.budget)."""
    sparse_phases: SparsePhases = "all"
    """all: each scored token selects for itself, as when decoded. decode leaves scoring dense."""
    resume: bool = False
    """Keep the records that the output already holds, and do the other runs."""


def selections_of(options: Options) -> list[Selection]:
    """Every sparse method at every density."""
    if not options.method or not options.mlp_density:
        raise ValueError("--method and --mlp-density: give at least one each")
    if options.density_budget is not None and len(options.mlp_density) > 1:
        raise ValueError("--density-budget sets the densities; give one --mlp-density at most beside it")
    return [
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


def main(options: Options) -> list[Record]:
    """Of each task dense, then every method at every density; append one record a metric and return them all."""
    tasks = [task for task in options.tasks.split(",") if task]
    if not tasks:
        raise ValueError(f"--tasks {options.tasks!r}: give perplexity, a preset or names of lm-eval tasks")
    for name, least in (("limit", 1), ("num_fewshot", 0)):
        if (value := getattr(options, name)) is not None and value < least:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, got {value}")
    selections = selections_of(options)
    for selection in selections:
        selection.check()
    if PERPLEXITY in tasks:
        check_options(options)
    names = expand_presets([task for task in tasks if task != PERPLEXITY], options.num_fewshot)
    benchmarks = load_benchmarks(names, options.include_path)
    loaded = options.load()
    # Attach each once before anything is measured, so that what does not fit fails in seconds, not after a run.
    for selection in selections:
        attach_selection(loaded.model, selection)
    remove_sparsity(loaded.model)
    if options.sparse_phases == "decode" and selections and PERPLEXITY in tasks:
        logger.warning("--sparse-phases decode: perplexity never decodes, so it will be the dense one")
    documents = read_documents(loaded, options) if PERPLEXITY in tasks else []
    book = RecordBook(options.output, loaded.mesh, resume=options.resume)
    labels = model_labels(loaded, options, options.density_budget)
    records = perplexity_records(loaded, documents, options, selections, labels, book) if documents else []
    records += benchmark_records(loaded, benchmarks, options, selections, labels, book, limit=options.limit)
    if loaded.mesh.rank == 0:
        for record in records:
            task, method, density = (record["labels"].get(label) for label in ("task", "method", "mlp_density"))
            logger.info(f"{task}, {method} {density:g}: {record['metric']} {record['value']:.4g} {record['unit']}")
        logger.info(f"{len(records)} records in {options.output}; scripts.summarize makes tables and plots of them")
    return records


if __name__ == "__main__":
    run_stage(main, Options, distributed=True)
