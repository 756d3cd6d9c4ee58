"""lm-eval's tasks, dense and for every selection, as the records of `scripts.evaluate`.

Records are named `accuracy`, one per task and metric. A task whose answers are written also has the metric `agreement`:
the share of its answers that are those of the dense model.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from analysis.results import Record, make_record
from scripts.answerer import Answerer
from scripts.batch_sizes import BatchSizes
from scripts.lm_eval_tasks import Benchmark, progress_bars, templates_kept
from scripts.model_loading import LoadedModel, ModelOptions
from scripts.run_records import RecordBook, execution_of, run_labels, sources_of
from sparse_predictor.selection import Selection, remove_sparsity

if TYPE_CHECKING:
    from scripts.lm_eval_model import EngineLM

# Standard errors of means are exact; those of other metrics (a perplexity's) come from so many resamples.
RESAMPLES = 1000
# Fewer answers that are all alike have a standard error of 0 by the formula, which says nothing: none is recorded. Of a
# group lm-eval pools the errors of its tasks, so the smallest of them counts.
FEW_SAMPLES = 30
OF_THE_TASK = ("task", "num_fewshot", "num_samples", "filter")
Metric = tuple[str, str, str]  # task, metric, filter
Answers = dict[str, list[str]]


@dataclass(frozen=True, kw_only=True)
class TaskRun:
    """One run of a task: what its records say of it, and `begin`, by which the model is made ready to be asked."""

    labels: Mapping[str, Any]
    sources: Mapping[str, str | None]
    begin: Callable[[], object]


def benchmark_records(
    loaded: LoadedModel,
    benchmarks: Sequence[Benchmark],
    options: ModelOptions,
    selections: Sequence[Selection],
    labels: Mapping[str, Any],
    book: RecordBook,
    *,
    limit: int | None,
) -> list[Record]:
    """Every task dense, then with every selection; what the book holds already is not run again. `labels` are the
    model's."""
    if not benchmarks:
        return []
    from scripts.lm_eval_model import EngineLM  # here, since lm-eval is an extra

    answerer = Answerer(loaded, BatchSizes(loaded, fixed=options.batch_size), quiet=options.quiet)
    runs = [
        TaskRun(
            labels={**labels, **run_labels(selection, loaded.model.config.num_hidden_layers)},
            sources=sources_of(loaded, selection),
            begin=partial(answerer.attach, selection),
        )
        for selection in (Selection(), *selections)
    ]
    model = EngineLM(answerer, seed=options.seed)
    found = [record for one in benchmarks for record in records_of_runs(model, one, runs, book, limit)]
    remove_sparsity(loaded.model)
    return found


def records_of_runs(
    model: EngineLM, benchmark: Benchmark, runs: Sequence[TaskRun], book: RecordBook, limit: int | None
) -> list[Record]:
    """One benchmark in several runs, of which the first is dense and the baseline of the others."""
    dense: list[Record] = []
    found: list[Record] = []
    for run in runs:
        records = _run(model, benchmark, run, dense, book, limit)
        dense = dense or records
        found += records
    return found


def _run(
    model: EngineLM,
    benchmark: Benchmark,
    run: TaskRun,
    dense: Sequence[Record],
    book: RecordBook,
    limit: int | None,
) -> list[Record]:
    """The records of one task (group, tag) and run, from the book or from lm-eval; `dense` [] in the dense run."""
    asked = {"task": benchmark.name, "num_fewshot": benchmark.num_fewshot, "limit": limit}
    there = [
        record
        for record in book.find("accuracy", run.labels, unknown=OF_THE_TASK, sources=run.sources)
        if asked.items() <= (record.get("run") or {}).items()
    ]
    if there and len({_metric(record) for record in there}) == there[0]["run"].get("num_records"):
        return there
    run.begin()
    results = evaluate_benchmark(model, benchmark, limit)
    values, answers = _values(results, benchmark), _answers(results, benchmark)
    theirs = {_metric(record): record for record in dense}
    for task, given in answers.items() if dense else ():
        expected = next(record["answers"] for key, record in theirs.items() if key[0] == task and "answers" in record)
        same = [ours == other for ours, other in zip(given, expected, strict=True)]
        values[task, "agreement", "none"] = _share(same)
    done = model.answerer.achieved
    seconds = max(model.loaded.mesh.gather(model.answerer.seconds))
    # With its own time: a dense record is found again when the sweep is resumed.
    timing = {"seconds": seconds, "dense_seconds": dense[0]["timing"]["seconds"] if dense else seconds}
    records: list[Record] = []
    for (task, metric, chosen), (value, stderr) in values.items():
        baseline = None
        if dense:
            agreement = metric == "agreement"
            baseline = {"name": "dense", "value": 1.0 if agreement else theirs[task, metric, chosen]["value"]}
        is_first = not any(record["labels"]["task"] == task for record in records)
        kept: dict[str, Any] = {"answers": answers[task]} if not dense and task in answers and is_first else {}
        records.append(
            make_record(
                "accuracy",
                {
                    **run.labels,
                    "execution": execution_of(done),
                    "task": task,
                    "num_fewshot": results["n-shot"][benchmark.leaves(task)[0]],
                    "num_samples": results["results"][task]["sample_len"],
                    **({} if chosen == "none" else {"filter": chosen}),
                },
                metric,
                value,
                "",
                baseline=baseline,
                environment=model.answerer.environment,
                stderr=stderr,
                achieved=done,
                timing=timing,
                run={**asked, "num_records": len(values)},
                sources=run.sources,
                **kept,
            )
        )
    return book.write(records)


def evaluate_benchmark(
    model: EngineLM, benchmark: Benchmark, limit: int | None, *, resamples: int = RESAMPLES
) -> dict[str, Any]:
    """lm-eval's results of one benchmark, the same on all ranks (a collective call)."""
    from lm_eval import evaluator

    mesh = model.loaded.mesh
    is_heard = mesh.rank == 0 and not model.answerer.quiet
    logging.getLogger("lm_eval").setLevel(logging.WARNING if is_heard else logging.ERROR)
    os.environ.setdefault("DISABLE_MULTIPROC", "1")  # forking a process that has threads and a GPU is asking for it
    benchmark.reset_seeds()
    with progress_bars(is_heard), templates_kept(), contextlib.redirect_stdout(io.StringIO()):
        results = evaluator.evaluate(
            lm=model,
            task_dict=benchmark.loaded,
            limit=limit,
            bootstrap_iters=resamples if mesh.rank == 0 else 0,
            log_samples=benchmark.is_generated,
        )
    return mesh.from_rank_0(lambda: results)


def _metric(record: Record) -> Metric:
    return record["labels"]["task"], record["metric"], record["labels"].get("filter", "none")


def _values(results: Mapping[str, Any], benchmark: Benchmark) -> dict[Metric, tuple[float, float | None]]:
    """(value, standard error or None) of everything that is reported."""
    found: dict[Metric, tuple[float, float | None]] = {}
    for task in benchmark.reported:
        metrics = results["results"].get(task, {})
        for key, value in metrics.items():
            metric, comma, chosen = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float) or math.isnan(value):
                continue
            stderr = metrics.get(f"{metric}_stderr,{chosen}")
            is_number = isinstance(stderr, int | float) and math.isfinite(stderr)
            num_samples = min(results["results"][leaf]["sample_len"] for leaf in benchmark.leaves(task))
            found[task, metric, chosen] = (float(value), _told(float(stderr), num_samples) if is_number else None)
    if not found:
        raise ValueError(f"--tasks {benchmark.name}: lm-eval found no metric that is a number")
    return found


def _answers(results: Mapping[str, Any], benchmark: Benchmark) -> Answers:
    """Of written answers, a digest each as the metric saw them (after the first filter), in the order of questions."""
    if not benchmark.is_generated:
        return {}
    digests: Answers = {}
    for task, samples in results["samples"].items():
        chosen = samples[0]["filter"]
        texts = [repr(sample["filtered_resps"]) for sample in samples if sample["filter"] == chosen]
        digests[task] = [hashlib.sha256(text.encode()).hexdigest()[:8] for text in texts]
    reported = [task for task in benchmark.reported if task in results["results"]]
    found = {task: [digest for leaf in benchmark.leaves(task) for digest in digests[leaf]] for task in reported}
    return {task: answers for task, answers in found.items() if "sample_len" in results["results"][task]}


def _share(same: Sequence[bool]) -> tuple[float, float | None]:
    """Mean and its standard error."""
    share = sum(same) / len(same)
    return share, _told(math.sqrt(share * (1.0 - share) / (len(same) - 1)), len(same)) if len(same) > 1 else None


def _told(stderr: float, num_samples: int) -> float | None:
    """A standard error, unless it is the 0 of a few answers that are all alike."""
    return stderr if stderr > 0.0 or num_samples >= FEW_SAMPLES else None
