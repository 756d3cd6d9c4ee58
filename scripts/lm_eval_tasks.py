"""Which lm-eval tasks there are (its own, those of `--include-path`, ours in `scripts/tasks`, names for several), and
their results, dense and for every selection, as the records of `scripts.evaluate`.

Records are named `accuracy`, one per task and metric. A task whose answers are written also has the metric `agreement`:
the share of its answers that are those of the dense model.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import logging
import math
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analysis.results import Record, make_record
from scripts.answerer import Answerer, BatchSizes
from scripts.model_loading import LoadedModel, ModelOptions
from scripts.run_records import RecordFile, execution_of, run_labels, sources_of
from sparse_predictor.selection import Selection, remove_sparsity

OUR_TASKS = Path(__file__).parent / "tasks"
# Task and number of examples before each question; None: as the task says.
PRESETS: dict[str, dict[str, int | None]] = {
    "zero-shot": dict.fromkeys(
        ("boolq", "winogrande", "rte", "arc_easy", "arc_challenge", "hellaswag", "openbookqa"), 0
    ),
    "few-shot": {"mmlu": 5, "gpqa_main_n_shot": 5, "medmcqa": 5},
}
# lm-eval's own default seeds: examples and shuffled choices are those of its command line.
RANDOM_SEED, FEWSHOT_SEED = 0, 1234
MOST_TEMPLATES = 1024


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """One name of `--tasks`: a task, a group or a tag of lm-eval, loaded. `num_fewshot` None: as each task says."""

    name: str
    num_fewshot: int | None
    loaded: dict[str, Any]

    @property
    def tasks(self) -> dict[str, Any]:
        """The tasks that are run, by name."""
        return self.loaded["tasks"]

    @property
    def reported(self) -> list[str]:
        """What gets records of its own: the name, and its direct members (of a tag: its tasks)."""
        members = self.loaded.get("group_map", {}).get(self.name, list(self.tasks))
        return list(dict.fromkeys([self.name, *members]))

    def leaves(self, name: str) -> list[str]:
        """The tasks below a group; a task's own name."""
        group = self.loaded.get("groups", {}).get(name)
        return [name] if group is None else [task.task_name for task in group.get_all_tasks()]

    @property
    def is_generated(self) -> bool:
        """Whether the model writes answers (of all tasks; else likelihoods are compared)."""
        return all(task.OUTPUT_TYPE == "generate_until" for task in self.tasks.values())

    def reset_seeds(self) -> None:
        """As before the first run, so that all runs see the same examples."""
        _seed_generators()
        for task in self.tasks.values():
            task.set_fewshot_seed(seed=FEWSHOT_SEED)


@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """Which tasks, and how much of each."""

    tasks: str
    """Comma-separated: names of lm-eval tasks, arithmetic_words, zero-shot, few-shot."""
    include_path: Path | None = None
    """Folder with more lm-eval task files."""
    num_fewshot: int | None = None
    """Examples before each question; as the task or preset says by default."""
    limit: int | None = None
    """Questions of each task at most."""

    def task_names(self) -> list[str]:
        """Those of --tasks; ValueError if there are none, or if the numbers are not possible."""
        names = [name for name in self.tasks.split(",") if name]
        if not names:
            raise ValueError(f"--tasks {self.tasks!r}: give perplexity, a preset or names of lm-eval tasks")
        for flag, least in (("limit", 1), ("num_fewshot", 0)):
            if (value := getattr(self, flag)) is not None and value < least:
                raise ValueError(f"--{flag.replace('_', '-')} must be at least {least}, got {value}")
        return names


def require_lm_eval() -> None:
    """ValueError if lm-eval is not installed."""
    try:
        import lm_eval  # noqa: F401
    except ImportError as error:
        raise ValueError("lm-eval is not installed; get it with: pip install -e .[eval]") from error


def expand_presets(names: Sequence[str], num_fewshot: int | None) -> dict[str, int | None]:
    """Task names, each with its number of examples, which a given one overrides."""
    found: dict[str, int | None] = {}
    for name in names:
        found.update(PRESETS.get(name, {name: None}))
    return {name: shots if num_fewshot is None else num_fewshot for name, shots in found.items()}


def load_benchmarks(names: dict[str, int | None], include_path: Path | None) -> list[Benchmark]:
    """Every name's tasks with their data (from the hub, unless the task says otherwise). ValueError names one that
    is unknown, with the nearest that are not, or whose data is not to be had."""
    if not names:
        return []
    require_lm_eval()
    if include_path is not None and not include_path.is_dir():
        raise ValueError(f"--include-path {include_path}: no such folder")
    manager = task_manager(include_path, with_defaults=False)
    if not set(names) <= set(manager.all_tasks):
        manager = task_manager(include_path, with_defaults=True)  # reading lm-eval's thousands of files takes seconds
    check_names(list(names), manager.all_tasks)
    return [_load(manager, name, num_fewshot) for name, num_fewshot in names.items()]


@functools.cache
def task_manager(include_path: Path | None, *, with_defaults: bool) -> Any:
    """lm-eval's index of our tasks and those of the given folder, and (`with_defaults`) of its own."""
    from lm_eval.tasks import TaskManager

    folders = [OUR_TASKS, *([] if include_path is None else [include_path])]
    return TaskManager(include_path=[str(folder) for folder in folders], include_defaults=with_defaults)


def check_names(names: Sequence[str], known: Sequence[str]) -> None:
    """ValueError for the first name that is not known, with the nearest that are."""
    for name in names:
        if name not in known:
            nearest = list(
                dict.fromkeys([f"{name}_local"] * (f"{name}_local" in known) + get_close_matches(name, known, 5))
            )
            hint = f"; the nearest are {', '.join(nearest)}" if nearest else ""
            raise ValueError(
                f"--tasks {name}: no such task{hint} (besides lm-eval's tasks: perplexity, {', '.join(PRESETS)}, and "
                "those of --include-path)"
            )


def _load(manager: Any, name: str, num_fewshot: int | None) -> Benchmark:
    logger = logging.getLogger("lm_eval")
    level = logger.level
    _seed_generators()
    try:
        logger.setLevel(logging.ERROR)  # it warns of every task whose data is made in place
        loaded = manager.load([name])
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(
            f"--tasks {name}: its data is not to be had ({reason[:200]}); without the hub, give tasks that read local "
            "files with --include-path"
        ) from error
    finally:
        logger.setLevel(level)
    for task in loaded["tasks"].values():
        own = task.get_config("num_fewshot")
        if own != 0 and (num_fewshot is not None or own is None):  # lm-eval never overrides a task's own zero
            task.set_config(key="num_fewshot", value=num_fewshot or 0)
    return Benchmark(name=name, num_fewshot=num_fewshot, loaded=loaded)


def _seed_generators() -> None:
    import numpy as np

    random.seed(RANDOM_SEED)  # tasks shuffle choices with the global generators
    np.random.seed(FEWSHOT_SEED)


@contextmanager
def progress_bars(shown: bool) -> Iterator[None]:
    """lm-eval has no flag for its bars: without `shown` there are none."""
    import lm_eval.api.task

    theirs = lm_eval.api.task.tqdm
    if not shown:
        lm_eval.api.task.tqdm = functools.partial(theirs, disable=True)
    try:
        yield
    finally:
        lm_eval.api.task.tqdm = theirs


@contextmanager
def templates_kept() -> Iterator[None]:
    """lm-eval compiles the same few templates again for each question, which takes most of its time: here once."""
    import lm_eval.utils

    environment = lm_eval.utils.env
    environment.from_string = functools.lru_cache(MOST_TEMPLATES)(environment.from_string)
    try:
        yield
    finally:
        del environment.from_string  # the method of its class again


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
    """One run of a task: its labels and sources for records, and `begin`, which prepares the model for it."""

    labels: Mapping[str, Any]
    sources: Mapping[str, str | None]
    begin: Callable[[], object]


def benchmark_records(
    loaded: LoadedModel,
    benchmarks: Sequence[Benchmark],
    options: ModelOptions,
    selections: Sequence[Selection],
    labels: Mapping[str, Any],
    output: RecordFile,
    *,
    limit: int | None,
) -> list[Record]:
    """Every task dense, then with every selection; what the file holds already is not run again. `labels` are the
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
    found = [record for one in benchmarks for record in records_of_runs(model, one, runs, output, limit)]
    remove_sparsity(loaded.model)
    return found


def records_of_runs(
    model: EngineLM, benchmark: Benchmark, runs: Sequence[TaskRun], output: RecordFile, limit: int | None
) -> list[Record]:
    """One benchmark in several runs, of which the first is dense and the baseline of the others."""
    dense: list[Record] = []
    found: list[Record] = []
    for run in runs:
        records = _run(model, benchmark, run, dense, output, limit)
        dense = dense or records
        found += records
    return found


def _run(
    model: EngineLM,
    benchmark: Benchmark,
    run: TaskRun,
    dense: Sequence[Record],
    output: RecordFile,
    limit: int | None,
) -> list[Record]:
    """The records of one task (group, tag) and run, from the file or from lm-eval; `dense` [] in the dense run."""
    asked = {"task": benchmark.name, "num_fewshot": benchmark.num_fewshot, "limit": limit}
    there = [
        record
        for record in output.find("accuracy", run.labels, unknown=OF_THE_TASK, sources=run.sources)
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
    return output.write(records)


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
