"""lm-eval's own command line with our model: arguments in, results file and table out."""

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import lm_eval.tasks
import pytest

import scripts.evaluate
import scripts.lm_eval
from scripts.command_line import run_stage
from scripts.lm_eval import LaunchOptions, launch_device
from tests.scripts.tiny_tasks import LocalTaskManager, model_folder, task_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("command_line")
    model_folder(folder / "model", context=1024)
    task_folder(folder / "tasks")
    return folder


@pytest.fixture
def lm_eval_command(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs `python -m scripts.lm_eval` with these arguments, on local tasks."""

    def run(*arguments: str) -> None:
        words = ["--model", "dejavu-lab", "--include_path", str(folder / "tasks"), *arguments]
        monkeypatch.setattr(sys, "argv", ["lm_eval", *words])
        run_stage(scripts.lm_eval.main, LaunchOptions, ["--device", launch_device(words)], distributed=True)

    monkeypatch.setattr(lm_eval.tasks, "TaskManager", LocalTaskManager)
    monkeypatch.setattr(os, "environ", dict(os.environ))  # lm-eval sets variables
    monkeypatch.setattr(logging, "raiseExceptions", False)  # its handler keeps the stderr of the first test
    return run


def test_scores_of_both_entrances_are_the_same(
    folder: Path, tmp_path: Path, lm_eval_command: Any, capsys: pytest.CaptureFixture
) -> None:
    arguments = ["--model_args", f"model={folder / 'model'},method=oracle,mlp_density=0.5", "--limit", "4"]
    tasks = "tiny_choices,tiny_texts,tiny_answers"
    lm_eval_command(*arguments, "--tasks", tasks, "--batch_size", "2", "--output_path", str(tmp_path), "--log_samples")
    printed = capsys.readouterr()
    assert "dejavu-lab (" in printed.out and "|tiny_choices|" in printed.out
    assert lm_eval.tasks.TaskManager is LocalTaskManager, "as it was"
    results = json.loads(next(tmp_path.rglob("results_*.json")).read_text())
    options = scripts.evaluate.Options(
        model=str(folder / "model"),
        output=tmp_path / "r.jsonl",
        tasks=tasks,
        include_path=folder / "tasks",
        method=("oracle",),
        limit=4,
        batch_size=2,
        quiet=True,
    )
    records = [record for record in scripts.evaluate.main(options) if record["labels"]["method"] == "oracle"]
    compared = [record for record in records if record["metric"] != "agreement"]
    assert [record["metric"] for record in compared] == ["acc", "acc_norm", "word_perplexity", "exact_match"]
    for record in compared:
        found = results["results"][record["labels"]["task"]]
        assert record["value"] == pytest.approx(found[f"{record['metric']},none"], rel=1e-12)
        if record["stderr"] is not None:
            assert record["stderr"] == pytest.approx(found[f"{record['metric']}_stderr,none"], rel=1e-12)
    assert results["config"]["method"] == "oracle" and results["config"]["phase"] == "all"
    assert results["config"]["achieved"]["sparse_calls"] > 0 and results["config"]["batch_sizes"] == [2]


def test_our_tasks_are_known_by_name_and_the_chat_template_is_used(
    folder: Path, tmp_path: Path, lm_eval_command: Any
) -> None:
    arguments = ["--model_args", f"model={folder / 'model'}", "--tasks", "arithmetic_words_1", "--limit", "1"]
    arguments += [
        "--apply_chat_template",
        "--batch_size",
        "auto",
        "--num_fewshot",
        "1",
        "--gen_kwargs",
        "max_gen_toks=4",
    ]
    lm_eval_command(*arguments, "--output_path", str(tmp_path), "--log_samples")
    (sample,) = map(json.loads, next(tmp_path.rglob("samples_*.jsonl")).read_text().splitlines())
    prompt = sample["arguments"]["gen_args_0"]["arg_0"]
    assert prompt.startswith("[user] Question: ") and prompt.endswith("\n[assistant] ")
    assert prompt.count("[assistant]") == 2 and "The answer is " in prompt


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "juggling"], "error: Tasks not found: juggling"),
        (["--tasks", "tiny_choices", "--model_args", "modl=x"], "error: --model_args modl: unknown; allowed are "),
        (["--tasks", "tiny_choices", "--model_args", "model=no/where/at/all"], "no/where/at/all: no such folder"),
        (["--tasks", "tiny_choices", "--batch_size", "some"], "error: batch_size must be auto or a number"),
    ],
)
def test_what_is_wrong_is_one_line(
    lm_eval_command: Any, capsys: pytest.CaptureFixture, arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as stop:
        lm_eval_command(*arguments)
    said = capsys.readouterr().err
    assert stop.value.code == 2 and message in said and "Traceback" not in said


def test_ranks_take_their_own_gpus_unless_the_cpu_is_asked_for() -> None:
    assert launch_device(["--device", "cuda:0"]) == launch_device([]) == launch_device(["--device=cuda"]) == "auto"
    assert launch_device(["--device", "cpu"]) == launch_device(["--device=cpu"]) == "cpu"
