"""What lm-eval's tasks ask, answered where lm-eval is not: the records are those of scripts.evaluate."""

import gzip
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import scripts.carried_tasks
import scripts.evaluate
from analysis.results import Record, append_record, finished_records, read_records
from pipeline_parallel.launch import Launch
from scripts.carried_tasks import Answer, Export, Fold, main
from tests.scripts.tiny_tasks import model_folder, task_folder
from tests.sparse_predictor.tiny_stages import one_error_line

TASKS = "tiny_choices,tiny_texts,tiny_answers,tiny_sampled"
SWEEP: dict[str, Any] = {"method": ("dense", "oracle", "random"), "mlp_density": (0.5, 0.3)}
NUM_RUNS = 4 * (1 + 2 * 2)
# Stands in for a machine without them: importing one fails.
WITHOUT = """
import runpy, sys
sys.modules |= dict.fromkeys(["lm_eval", "datasets", "pandas", "evaluate", "sacrebleu"])
runpy.run_module("scripts.carried_tasks", run_name="__main__", alter_sys=True)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`model`, `tasks`, `requests` as exported, `answers.jsonl` as answered by a process without lm-eval."""
    folder = tmp_path_factory.mktemp("carried")
    model_folder(folder / "model", context=256)
    answers = (task_folder(folder / "tasks") / "tiny_answers.yaml").read_text()
    sampled = answers.replace("tiny_answers", "tiny_sampled").replace("until: []", "do_sample: true\n  until: ['q']")
    (folder / "tasks/tiny_sampled.yaml").write_text(sampled)
    export(folder, folder / "requests", seed=3)
    words = f"answer --model {folder / 'model'} --requests {folder / 'requests'} --output {folder / 'answers.jsonl'}"
    words += " --dtype float64 --batch-size 2 --seed 3 --method dense oracle random --mlp-density 0.5 0.3 --quiet"
    done = subprocess.run([sys.executable, "-c", WITHOUT, *words.split()], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    return folder


def export(folder: Path, output: Path, **changes: Any) -> None:
    flags = {"tasks": TASKS, "include_path": folder / "tasks", "limit": 3, "quiet": True, **changes}
    main(Export(model=str(folder / "model"), output=output, **flags))


def answer(folder: Path, output: Path, **changes: Any) -> list[Record]:
    flags = {**SWEEP, "requests": folder / "requests", "dtype": "float64", "batch_size": 2, "seed": 3, "quiet": True}
    return scripts.carried_tasks.answer(Answer(model=str(folder / "model"), output=output, **{**flags, **changes}))


def fold(folder: Path, output: Path, *answers: Path, **changes: Any) -> list[Record]:
    flags = {"include_path": folder / "tasks", "quiet": True, **changes}
    return scripts.carried_tasks.fold(Fold(model=str(folder / "model"), answers=answers, output=output, **flags))


def without(records: list[Record], *parts: str) -> list[Record]:
    return [{key: value for key, value in record.items() if key not in parts} for record in records]


def test_folded_answers_are_the_records_of_evaluate(folder: Path, tmp_path: Path) -> None:
    options = scripts.evaluate.Options(
        model=str(folder / "model"),
        output=tmp_path / "evaluated.jsonl",
        tasks=TASKS,
        include_path=folder / "tasks",
        limit=3,
        dtype="float64",
        batch_size=2,
        seed=3,
        quiet=True,
        **SWEEP,
    )
    expected = scripts.evaluate.main(options)
    answers = read_records(folder / "answers.jsonl")
    assert len(answers) == NUM_RUNS
    for record in answers:
        record["environment"]["device"] = "a GPU"
        append_record(tmp_path / "answers.jsonl", record)
    found = fold(folder, tmp_path / "folded.jsonl", tmp_path / "answers.jsonl")
    assert found == read_records(tmp_path / "folded.jsonl")
    assert without(found, "environment", "timing") == without(expected, "environment", "timing")
    assert {record["metric"] for record in found} >= {"acc", "acc_norm", "word_perplexity", "exact_match", "agreement"}
    asked = {record["run"]["task"]: record for record in answers if record["labels"]["method"] == "dense"}
    for record in found:
        assert record["environment"]["device"] == "a GPU"
        assert record["timing"]["dense_seconds"] == asked[record["run"]["task"]]["value"] > 0.0
    assert fold(folder, tmp_path / "folded.jsonl", tmp_path / "answers.jsonl", resume=True) == found
    assert read_records(tmp_path / "folded.jsonl") == found, "what is there is kept"


@pytest.mark.parametrize("kept", [0, 7, NUM_RUNS])
def test_resumed_answers_are_uninterrupted_ones(folder: Path, tmp_path: Path, kept: int) -> None:
    lines = (folder / "answers.jsonl").read_bytes().splitlines(keepends=True)
    part = b"".join(lines[:kept]) + (lines[kept][:100] if kept < len(lines) else b"")  # killed while it wrote
    (tmp_path / "a.jsonl").write_bytes(part)
    returned = answer(folder, tmp_path / "a.jsonl", resume=True)
    found, whole = finished_records(tmp_path / "a.jsonl"), finished_records(folder / "answers.jsonl")
    assert found == returned and found[:kept] == whole[:kept]
    assert without(found, "environment", "value") == without(whole, "environment", "value")


def test_answers_of_several_files_and_commands_are_one_sweep_and_the_newest_count(folder: Path, tmp_path: Path) -> None:
    expected = [
        record
        for record in fold(folder, tmp_path / "all.jsonl", folder / "answers.jsonl")
        if record["labels"]["task"] == "tiny_choices" and record["labels"]["method"] != "random"
    ]
    answer(folder, tmp_path / "sparse.jsonl", method=("oracle",), tasks="tiny_choices")
    stale, *sparse = read_records(tmp_path / "sparse.jsonl")
    assert stale["labels"]["method"] == "dense" and len(sparse) == 2
    (tmp_path / "sparse.jsonl").unlink()
    for record in ({**sparse[0], "answers": [[[-1.0, True]] * 9], "value": 1e9}, *sparse):
        append_record(tmp_path / "sparse.jsonl", record)
    answer(folder, tmp_path / "dense.jsonl", method=("dense",), tasks="tiny_choices")
    found = fold(folder, tmp_path / "few.jsonl", tmp_path / "sparse.jsonl", tmp_path / "dense.jsonl")
    assert without(found, "environment", "timing") == without(expected, "environment", "timing")
    assert all(record["timing"]["seconds"] < 1e9 for record in found)


def test_answers_to_something_else_are_refused(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "tasks"
    task_folder(other, rows=2)  # fewer questions
    message = "tiny_choices asks something else here than what was answered .*; export and answer again"
    with pytest.raises(ValueError, match=message):
        fold(folder, tmp_path / "r.jsonl", folder / "answers.jsonl", include_path=other)
    with pytest.raises(ValueError, match="no such task.*; if export was given --include-path, give it to fold, too"):
        fold(folder, tmp_path / "r.jsonl", folder / "answers.jsonl", include_path=None)
    answers = (folder / "answers.jsonl").read_text().splitlines()
    bad = {"run": None, "sources": None, "answers": [1], "achieved": None, "labels": {"task": "t"}}
    for key, value in bad.items():
        (tmp_path / "lacking.jsonl").write_text(json.dumps({**json.loads(answers[0]), key: value}))
        with pytest.raises(ValueError, match=rf"lacking.jsonl: `{key}(\[0\])?`: .*; answer again"):
            fold(folder, tmp_path / "r.jsonl", tmp_path / "lacking.jsonl")
    model_folder(tmp_path / "model", context=20)  # prompts are cut
    with pytest.raises(ValueError, match=message):
        fold(tmp_path, tmp_path / "r.jsonl", folder / "answers.jsonl", include_path=folder / "tasks")
    assert not (tmp_path / "r.jsonl").exists()


def test_answers_without_dense_are_refused(folder: Path, tmp_path: Path) -> None:
    for record in read_records(folder / "answers.jsonl"):
        if record["labels"]["method"] != "dense":
            append_record(tmp_path / "a.jsonl", record)
    message = r"a\.jsonl: no dense answers of tiny_choices \(dtype float64, batch_size 2, limit 3\), and dense is the"
    with pytest.raises(ValueError, match=message):
        fold(folder, tmp_path / "r.jsonl", tmp_path / "a.jsonl")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("answer --requests {folder}/nothing", "/nothing: No such file or directory"),
        ("answer --requests {folder}/model/config.json", "config.json: not a whole file of requests, as scripts."),
        ("answer --requests {tmp}/other", "other: not a whole file of requests"),
        ("answer --requests {tmp}/half", "half: not a whole file of requests"),
        (
            "answer --requests {tmp}/typed",
            "JSON: `asked[0].calls[0].continuations[0].num_scored`: expected `int`, got `str`)",
        ),
        ("answer --requests {folder}/requests", "requests was exported with --seed 3: answer with that, not with 0"),
        (
            "answer --requests {folder}/requests --seed 3 --tasks boolq",
            "--tasks boolq: {folder}/requests asks tiny_choices, tiny_texts, tiny_answers, tiny_sampled; export it",
        ),
        ("answer --requests {folder}/requests --seed 3 --method predictor", "method predictor needs --predictors"),
        ("export --tasks perplexity,tiny_choices", "--tasks perplexity: it needs no lm-eval; score it there"),
        ("export --tasks tiny_choices --limit 0", "--limit must be at least 1, got 0"),
        (
            "answer --requests {folder}/requests --seed 3 --tasks ,",
            "--tasks ',': give some of tiny_choices, tiny_texts,",
        ),
        ("fold --answers", "--answers: give at least one file of answers"),
        ("fold --answers {folder}/nothing", "/nothing: no such file of result records"),
        ("fold --answers {tmp}/records.jsonl", "records.jsonl: holds accuracy, not answers (scripts.carried_tasks"),
    ],
)
def test_refusals_are_one_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture, words: str, message: str
) -> None:
    (tmp_path / "other").write_bytes(gzip.compress(json.dumps({"format": "prompts", "format_version": 1}).encode()))
    typed = re.sub(
        '"num_scored":[0-9]+', '"num_scored":"x"', gzip.decompress((folder / "requests").read_bytes()).decode()
    )
    (tmp_path / "typed").write_bytes(gzip.compress(typed.encode()))
    (tmp_path / "half").write_bytes((folder / "requests").read_bytes()[:200])
    record = {**read_records(folder / "answers.jsonl")[0], "name": "accuracy"}
    append_record(tmp_path / "records.jsonl", record)
    words = f"{words} --model {{folder}}/model --output {{tmp}}/output --quiet"
    line = one_error_line(main, Export | Answer | Fold, words.format(folder=folder, tmp=tmp_path).split(), capsys)
    assert message.format(folder=folder) in line
    assert not (tmp_path / "output").exists()


def test_only_answers_are_given_on_several_ranks(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scripts.carried_tasks, "current_launch", lambda: Launch(world_size=2))
    with pytest.raises(ValueError, match="export and fold run in one process; leave out torchrun"):
        export(folder, tmp_path / "requests")
