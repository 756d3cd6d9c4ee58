"""Score a model, dense and sparse in one run: perplexity, lm-eval's tasks, achieved densities, recall and precision,
decode speed.

Dense is always run first and is the baseline of every record. Several methods and densities may be given; each
pair is one sparse run. Under torchrun all ranks take part and the first one writes the records.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from loguru import logger

from analysis.results import Record, finished_records
from pipeline_parallel.launch import current_launch
from scripts.command_line import run_stage
from scripts.lm_eval_tasks import TaskOptions, expand_presets, load_benchmarks
from scripts.perplexity_runs import PerplexityOptions, check_options, perplexity_records, read_documents
from scripts.run_records import RecordBook, model_labels, tell_tables
from scripts.selection_options import SweepOptions, attach_each
from scripts.task_runs import benchmark_records

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
    book = RecordBook(options.output, loaded.mesh, resume=options.resume)
    labels = model_labels(loaded, options, options.label)
    records = perplexity_records(loaded, documents, options, selections, labels, book) if documents else []
    records += benchmark_records(loaded, benchmarks, options, selections, labels, book, limit=options.limit)
    if loaded.mesh.rank == 0:
        tell_tables(records, options.output, quiet=options.quiet)
    return records


if __name__ == "__main__":
    run_stage(main, Options, distributed=True)
