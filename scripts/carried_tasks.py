"""lm-eval's tasks on a machine that has no lm-eval, no data sets and no network: files with their requests go there,
and files with the answers come back.

    export   here: what the tasks ask of a model, as token ids -> requests (.json.gz). No model is run.
    answer   there: the same sparsity flags as scripts.evaluate -> records named `answers`, appended run by run
    fold     here: those answers -> the records that scripts.evaluate would have written there

`fold` makes the tasks' requests again, and refuses answers to other requests. Records have the
environment, the times, the achieved densities and the sources of the machine that answered.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

import msgspec
from loguru import logger

from analysis.results import Record, make_record, read_records
from data.files import convert_json, parse_json, replace_file
from modules.checkpoint.load import build_on_meta, load_config
from modules.requests import GenerationRequest
from modules.scoring import Window
from pipeline_parallel.launch import current_launch
from pipeline_parallel.mesh import ParallelMesh
from scripts.answerer import Answerer, BatchSizes, Requests
from scripts.command_line import progress, run_stage
from scripts.evaluate import PERPLEXITY
from scripts.lm_eval_tasks import (
    Benchmark,
    TaskOptions,
    TaskRun,
    evaluate_benchmark,
    expand_presets,
    load_benchmarks,
    records_of_runs,
)
from scripts.model_loading import LoadedModel, RunOptions, model_name, resolve_model
from scripts.run_records import RecordFile, hash_of, model_labels, print_tables, run_labels, sources_of
from scripts.selection_options import SweepOptions, attach_each
from sparse_predictor.selection import Selection, remove_sparsity

FORMAT, FORMAT_VERSION = "requests of lm-eval's tasks", 1
ANSWERS = "answers"
OF_THE_SELECTION = (
    "method", "mlp_density", "head_density", "phase", "label", "predictors", "density_budget", "lookahead",
    "standin_rank", "calibration_tokens",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Export(TaskOptions):
    """Write down what tasks ask of a model."""

    model: str
    """Folder or hub id; its config and tokenizer are read, no weights."""
    output: Path
    """Requests, gzipped JSON."""
    seed: int = 0
    """Of sampled texts; the answers must be given with the same."""
    quiet: bool = False
    """Warnings only."""


@dataclass(frozen=True, kw_only=True)
class Answer(SweepOptions, RunOptions):
    """Answer exported requests, dense and sparse; needs neither lm-eval nor data sets."""

    requests: Path
    """Written by export."""
    output: Path
    """JSON lines; one record per task and run is appended when it is done."""
    tasks: str | None = None
    """Comma-separated, of those that were exported; all by default."""


@dataclass(frozen=True, kw_only=True)
class Fold:
    """Make result records of answers."""

    model: str
    """As exported: folder or hub id; its config and tokenizer are read, no weights."""
    answers: tuple[Path, ...]
    """One or several files written by answer."""
    output: Path
    """JSON lines; records are appended."""
    include_path: Path | None = None
    """Folder with more lm-eval task files, as exported."""
    resume: bool = False
    """Keep the records that the output already holds."""
    quiet: bool = False
    """Warnings only."""


class AskedOf(TypedDict):
    """A name of `--tasks`, and how it was asked."""

    task: str
    num_fewshot: int | None
    limit: int | None


class _Scored(msgspec.Struct, frozen=True):
    token_ids: list[int]
    num_scored: int


class AskedList(msgspec.Struct, frozen=True, kw_only=True):
    """One list of requests as the file has it: texts whose ends are scored, or prompts to be continued."""

    title: str
    continuations: list[_Scored]
    generations: list[GenerationRequest]
    eos_token_ids: list[int]

    @classmethod
    def of(cls, title: str, requests: Requests, eos_token_ids: Sequence[int]) -> AskedList:
        """What an `Answerer` is asked."""
        return cls(
            title=title,
            continuations=[_Scored(one.token_ids, one.num_scored) for one in requests if isinstance(one, Window)],
            generations=[one for one in requests if isinstance(one, GenerationRequest)],
            eos_token_ids=list(eos_token_ids),
        )

    @property
    def requests(self) -> Requests:
        """As an `Answerer` takes them."""
        scored = [Window(one.token_ids, len(one.token_ids) - one.num_scored) for one in self.continuations]
        return self.generations or scored

    @property
    def digest(self) -> str:
        """Twelve hex digits that identify the requests."""
        return hash_of(json.dumps(msgspec.to_builtins(self)).encode())


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What one name of `--tasks` asks: `run` (task, num_fewshot, limit) and its lists, in order."""

    run: AskedOf
    calls: list[AskedList]


class _Requests(msgspec.Struct, kw_only=True):
    """The file that `export` writes."""

    format: str
    format_version: int
    seed: int
    asked: list[Asked]


class _Replayed(AskedOf):
    """`asked`: a digest of each call."""

    asked: list[str]


class _Labels(msgspec.Struct, kw_only=True):
    """What answers are sorted by."""

    model: str
    task: str
    method: str
    phase: str
    dtype: str
    seed: int
    batch_size: int
    mlp_density: float
    head_density: float


class _Sources(msgspec.Struct, kw_only=True):
    """What the answers were given with."""

    checkpoint: str


class _Executions(msgspec.Struct, kw_only=True):
    """Calls by how they were computed."""

    mask: int
    gather: int


class _Achieved(msgspec.Struct, kw_only=True):
    """What the run that answered did."""

    executions: _Executions


class _AnswersRecord(msgspec.Struct, kw_only=True):
    """What folding reads of a record named `answers`: a text, or a log-probability and whether it is greedy's, each."""

    labels: _Labels
    run: _Replayed
    sources: _Sources
    achieved: _Achieved
    answers: list[list[str | tuple[float, bool]]]


class Listener(Answerer):
    """Writes down what it is asked, and makes answers up."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded, self.quiet = loaded, True
        self.calls: list[AskedList] = []

    def answer(self, title: str, requests: Requests, eos_token_ids: Sequence[int] = ()) -> list[Any]:
        """Longer texts are said to be less likely; written ones are empty."""
        self.calls.append(AskedList.of(title, requests, eos_token_ids))
        return [(-float(len(one.token_ids)), False) if isinstance(one, Window) else "" for one in requests]


class Replay(Answerer):
    """Answers what a stored record answered."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded, self.quiet = loaded, True

    def begin(self, record: Record) -> None:
        """From here on that record's answers are given, in their order."""
        self.seconds, self.achieved, self.environment = record["value"], record["achieved"], record["environment"]
        self.task = record["run"]["task"]
        self._left = list(zip(record["run"]["asked"], record["answers"], strict=True))

    def answer(self, title: str, requests: Requests, eos_token_ids: Sequence[int] = ()) -> list[Any]:
        """ValueError if something else was asked there."""
        digest, answers = self._left.pop(0) if self._left else ("", [])
        if digest != AskedList.of(title, requests, eos_token_ids).digest or len(answers) != len(requests):
            raise ValueError(
                f"{self.task} asks something else here than what was answered ({title}): another tokenizer or "
                "context (--model), other task files or data, or another version of lm-eval or of this program; export "
                "and answer again"
            )
        return [tuple(answer) if isinstance(answer, list) else answer for answer in answers]


def export(options: Export) -> list[Asked]:
    """Ask every task's requests of a listener, and write them down."""
    names = options.task_names()
    if PERPLEXITY in names:
        raise ValueError(f"--tasks {PERPLEXITY}: it needs no lm-eval; score it there, with scripts.evaluate")
    benchmarks = load_benchmarks(expand_presets(names, options.num_fewshot), options.include_path)
    listener = Listener(_outline(options.model))
    from scripts.lm_eval_model import EngineLM  # here, since the machine that answers has no lm-eval

    model = EngineLM(listener, seed=options.seed)
    found: list[Asked] = []
    for benchmark in benchmarks:
        listener.calls = []
        evaluate_benchmark(model, benchmark, options.limit, resamples=0)
        run: AskedOf = {"task": benchmark.name, "num_fewshot": benchmark.num_fewshot, "limit": options.limit}
        found.append(Asked(run=run, calls=listener.calls))
        logger.info(f"{benchmark.name}: {sum(len(one.requests) for one in listener.calls)} requests")
    content = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "seed": options.seed,
        "asked": msgspec.to_builtins(found),
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    replace_file(options.output, gzip.compress(json.dumps(content, separators=(",", ":")).encode()))
    logger.info(f"{options.output}: {options.output.stat().st_size / 2**20:.1f} MiB; carry it, and answer it there")
    return found


def read_requests(path: Path, *, seed: int) -> dict[str, Asked]:
    """By task, what `export` wrote; ValueError if that is not what the file holds, or if it is of another seed."""
    try:
        content = parse_json(gzip.decompress(path.read_bytes()), _Requests, "JSON")
        if (content.format, content.format_version) != (FORMAT, FORMAT_VERSION):
            raise ValueError(f"format {content.format!r}, version {content.format_version!r}")
    except (gzip.BadGzipFile, zlib.error, EOFError, ValueError) as error:
        what = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(
            f"{path}: not a whole file of requests, as scripts.carried_tasks export writes it ({what}); export it again"
        ) from error
    if content.seed != seed:
        raise ValueError(f"{path} was exported with --seed {content.seed}: answer with that, not with {seed}")
    return {one.run["task"]: one for one in content.asked}


def answer(options: Answer) -> list[Record]:
    """Every task dense, then every method at every density; the records, of which one per task and run is appended."""
    selections = options.selections(seed=options.seed)
    asked = _chosen(read_requests(options.requests, seed=options.seed), options)
    loaded = options.load()
    if any(call.generations for one in asked for call in one.calls):
        loaded.require_tokenizer("answers are text")
    attach_each(loaded.model, selections)
    output = RecordFile(options.output, loaded.mesh, resume=options.resume)
    answerer = Answerer(loaded, BatchSizes(loaded, fixed=options.batch_size), quiet=options.quiet)
    of_the_model = model_labels(loaded, options, options.label)
    found: list[Record] = []
    for one in asked:
        digests = [call.digest for call in one.calls]
        for selection in (Selection(), *selections):
            thinned = run_labels(selection, loaded.model.config.num_hidden_layers)
            labels = {**of_the_model, **thinned, "task": one.run["task"]}
            same: dict[str, Any] = {"run": {**one.run, "asked": digests}, "sources": sources_of(loaded, selection)}
            if there := output.find(ANSWERS, labels, **same):
                found += there[-1:]
                continue
            answerer.attach(selection)
            answers = [answerer.answer(call.title, call.requests, call.eos_token_ids) for call in one.calls]
            seconds, done = max(loaded.mesh.gather(answerer.seconds)), answerer.achieved
            record = make_record(ANSWERS, labels, "seconds", seconds, "s", achieved=done, **same, answers=answers)
            found += output.write([record])
            if loaded.mesh.rank == 0:
                logger.info(f"{one.run['task']}, {thinned['method']} {thinned['mlp_density']:g}: {seconds:.1f} s")
    remove_sparsity(loaded.model)
    return found


def _chosen(asked: Mapping[str, Asked], options: Answer) -> list[Asked]:
    names = list(asked) if options.tasks is None else [name for name in options.tasks.split(",") if name]
    if not names:
        raise ValueError(f"--tasks {options.tasks!r}: give some of {', '.join(asked)}, or leave it out for all")
    for name in names:
        if name not in asked:
            raise ValueError(f"--tasks {name}: {options.requests} asks {', '.join(asked)}; export it first")
    return [asked[name] for name in names]


def fold(options: Fold) -> list[Record]:
    """Ask the tasks again, with answers that are known, and append what comes of it."""
    groups = _groups(options.answers)
    replay = Replay(_outline(options.model))
    output = RecordFile(options.output, replay.loaded.mesh, resume=options.resume)
    from scripts.lm_eval_model import EngineLM

    found: list[Record] = []
    for records in progress(groups, "tasks", quiet=options.quiet):
        run = records[0]["run"]
        (benchmark,) = _benchmark_of(run, options.include_path)
        runs = [
            TaskRun(
                labels={label: value for label, value in record["labels"].items() if label != "task"},
                sources=record["sources"],
                begin=partial(replay.begin, record),
            )
            for record in records
        ]
        model = EngineLM(replay, seed=records[0]["labels"]["seed"])
        found += records_of_runs(model, benchmark, runs, output, run["limit"])
    print_tables(found, options.output, quiet=options.quiet)
    return found


def _benchmark_of(run: Mapping[str, Any], include_path: Path | None) -> list[Benchmark]:
    try:
        return load_benchmarks({run["task"]: run["num_fewshot"]}, include_path)
    except ValueError as error:
        if include_path is not None:
            raise
        raise ValueError(f"{error}; if export was given --include-path, give it to fold, too") from error


def _groups(paths: Sequence[Path]) -> list[list[Record]]:
    """What belongs in one sweep of one task: the newest answers of every run, dense first. ValueError without dense."""
    if not paths:
        raise ValueError("--answers: give at least one file of answers")
    groups: dict[str, dict[str, Record]] = {}
    for path in paths:
        for record in read_records(path):
            if record["name"] != ANSWERS:
                raise ValueError(
                    f"{path}: holds {record['name']}, not answers (scripts.carried_tasks answer writes them)"
                )
            try:
                convert_json(record, _AnswersRecord, path)
            except ValueError as error:
                raise ValueError(f"{error}; answer again") from error
            shared = {label: value for label, value in record["labels"].items() if label not in OF_THE_SELECTION}
            asked = {key: value for key, value in record["run"].items() if key != "asked"}
            group = groups.setdefault(repr((shared, asked, record["sources"]["checkpoint"])), {})
            group[repr((record["labels"], record["sources"]))] = record
    found = [
        sorted(group.values(), key=lambda record: record["labels"]["method"] != "dense") for group in groups.values()
    ]
    for first, *_ in found:
        if first["labels"]["method"] != "dense":
            labels = {**first["labels"], **first["run"]}
            which = ", ".join(f"{name} {labels[name]}" for name in ("dtype", "batch_size", "limit"))
            raise ValueError(
                f"{', '.join(map(str, paths))}: no dense answers of {labels['task']} ({which}), and dense is the "
                "baseline of all records: give their file, too, or answer again"
            )
    return found


def _outline(model: str) -> LoadedModel:
    """A model without its weights: making requests needs none. ValueError under torchrun."""
    if current_launch().world_size > 1:
        raise ValueError("export and fold run in one process; leave out torchrun (answer runs under it)")
    directory, mesh = resolve_model(model), ParallelMesh.single("cpu")
    decoder = build_on_meta(load_config(directory))
    return LoadedModel(model=decoder, directory=directory, model_id=model_name(model), mesh=mesh)


def main(options: Export | Answer | Fold) -> list[Asked] | list[Record]:
    """lm-eval's tasks on a machine that has no lm-eval: export here, answer there, fold here."""
    if isinstance(options, Export):
        return export(options)
    return answer(options) if isinstance(options, Answer) else fold(options)


if __name__ == "__main__":
    run_stage(main, Export | Answer | Fold, distributed=True)
