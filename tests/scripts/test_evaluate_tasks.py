"""lm-eval's tasks through `scripts.evaluate`: what the records say, resuming, refusals, several ranks."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lm_eval.utils
import pytest

import scripts.evaluate
import scripts.lm_eval_tasks
from analysis.results import Record, read_records
from data.arithmetic import (
    FEWSHOT_SEED,
    LARGEST,
    NUM_EXAMPLES,
    NUM_TESTS,
    STEPS,
    TEST_SEED,
    make_problem,
    make_problems,
)
from scripts.evaluate import Options
from scripts.lm_eval_tasks import (
    check_names,
    load_benchmarks,
    task_manager,
    templates_kept,
)
from tests.pipeline_parallel.launching import start_ranks, wait_all
from tests.scripts.ranked_tasks import RUNS, options
from tests.scripts.tiny_tasks import LocalTaskManager, model_folder, task_folder
from tests.sparse_predictor.tiny_stages import one_error_line, write_corpus

TASKS = "perplexity,tiny_choices,tiny_answers"
SWEEP: dict[str, Any] = {
    "tasks": TASKS,
    "method": ("oracle",),
    "mlp_density": (0.5,),
    "limit": 2,
    "window": 32,
    "decode_tokens": 2,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`model` (whose context holds four worked examples), `tasks`, `text.jsonl`."""
    folder = tmp_path_factory.mktemp("evaluate")
    model_folder(folder / "model", context=2048)
    task_folder(folder / "tasks")
    write_corpus(folder / "text.jsonl", [[5 + i % 70 for i in range(80)]])
    return folder


def evaluate(folder: Path, output: Path, **changes: Any) -> list[Record]:
    return scripts.evaluate.main(options(folder, output, **{"method": ("random",), "quality_windows": 0, **changes}))


@pytest.fixture(scope="module")
def sweep(folder: Path) -> Path:
    """The file of an uninterrupted sweep."""
    evaluate(folder, folder / "sweep.jsonl", **SWEEP)
    return folder / "sweep.jsonl"


def accuracies(path: Path, **labels: Any) -> list[Record]:
    found = [record for record in read_records(path) if record["name"] == "accuracy"]
    return [record for record in found if all(record["labels"][name] == value for name, value in labels.items())]


def test_records_have_the_score_its_error_and_what_was_done(sweep: Path) -> None:
    dense, sparse = (accuracies(sweep, task="tiny_choices", method=method) for method in ("dense", "oracle"))
    assert [record["metric"] for record in dense] == [record["metric"] for record in sparse] == ["acc", "acc_norm"]
    for ours, theirs in zip(sparse, dense, strict=True):
        assert ours["baseline"] == {"name": "dense", "value": theirs["value"]} and theirs["baseline"] is None
        assert 0.0 <= ours["value"] <= 1.0 and (ours["stderr"] is None) == (ours["value"] in (0.0, 1.0))
        labels = ours["labels"]
        assert (labels["num_samples"], labels["num_fewshot"], labels["phase"]) == (2, 0, "all")
        assert labels["mlp_density"] == 0.5 and labels["weights"] == "trained" and labels["batch_size"] == 2
        assert ours["achieved"]["per_layer"]["mlp"] == [0.5] * 3 and ours["achieved"]["sparse_calls"] > 0
        assert theirs["achieved"]["per_layer"]["mlp"] == [1.0] * 3 and theirs["achieved"]["sparse_calls"] == 0
        assert set(ours["timing"]) == {"seconds", "dense_seconds"} and ours["timing"]["seconds"] > 0


def test_a_group_is_reported_with_its_members(folder: Path, tmp_path: Path) -> None:
    shape = {"mlp_density": (1.0,), "limit": 1, "batch_size": 8, "num_fewshot": 1}
    evaluate(folder, tmp_path / "r.jsonl", tasks="arithmetic_words", **shape)
    for method in ("dense", "random"):
        found = accuracies(tmp_path / "r.jsonl", method=method)
        scores = {record["labels"]["task"]: record for record in found if record["metric"] == "exact_match"}
        assert list(scores) == ["arithmetic_words", *(f"arithmetic_words_{steps}" for steps in STEPS)]
        group = scores["arithmetic_words"]
        assert (group["labels"]["num_samples"], group["labels"]["num_fewshot"]) == (len(STEPS), 1)
        assert group["value"] == 0.0 and all(record["stderr"] is None for record in scores.values())
    agreements = [record["value"] for record in found if record["metric"] == "agreement"]
    assert agreements == [1.0] * (1 + len(STEPS)), "everything is active"


@pytest.mark.parametrize(("num_samples", "stderr"), [(2, None), (29, None), (30, 0.0)])
def test_a_standard_error_of_zero_is_recorded_of_many_answers_only(num_samples: int, stderr: float | None) -> None:
    leaves = {"group": ["few", "many"], "many": ["many"]}
    benchmark: Any = SimpleNamespace(name="group", reported=list(leaves), leaves=lambda task: leaves[task])
    sizes = {"group": num_samples + 1000, "few": num_samples, "many": 1000}
    scores = {"acc,none": 0.5, "acc_stderr,none": 0.0, "exact_match,none": 0.5, "exact_match_stderr,none": 0.25}
    results = {task: {**scores, "sample_len": size} for task, size in sizes.items()}
    found = scripts.lm_eval_tasks._values({"results": results}, benchmark)
    assert found["group", "acc", "none"] == (0.5, stderr) and found["many", "acc", "none"] == (0.5, 0.0)
    assert found["group", "exact_match", "none"] == (0.5, 0.25)
    assert scripts.lm_eval_tasks._share([True] * num_samples) == (1.0, stderr)


def test_agreement_is_the_share_of_the_dense_models_answers(folder: Path, sweep: Path, tmp_path: Path) -> None:
    (found,) = [record for record in accuracies(sweep, task="tiny_answers") if record["metric"] == "agreement"]
    assert found["labels"]["method"] == "oracle" and found["baseline"] == {"name": "dense", "value": 1.0}
    changes = {"tasks": "tiny_answers", "method": ("oracle", "random"), "mlp_density": (1.0, 0.02)}
    values = {
        (record["labels"]["method"], record["labels"]["mlp_density"]): record["value"]
        for record in evaluate(folder, tmp_path / "r.jsonl", **changes)
        if record["metric"] == "agreement"
    }
    assert values["oracle", 1.0] == values["random", 1.0] == 1.0 and values["random", 0.02] < 1.0


def without_times(path: Path) -> list[Record]:
    records = read_records(path)
    for record in records:
        record.pop("timing", None)
        record["environment"].pop("date")
        if record["name"] == "decode":  # a speed, and so are its baseline and ratio
            record["value"] = record["baseline"] = record["ratio"] = None
    return records


# At the start, after a perplexity without its speed, within a task's records (dense and sparse), at the end.


def test_a_resumed_sweep_does_not_take_another_text_or_budget_for_its_own(folder: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "window": 32,
        "resume": True,
        "corpus": str(tmp_path / "text.jsonl"),
    }
    for idx, first_density in enumerate((0.3, 0.9)):
        budget = tmp_path / str(idx) / "budget.json"
        budget.parent.mkdir()
        budget.write_text(json.dumps({"mlp": [first_density, *[1.2 - first_density] * 2]}))
        write_corpus(tmp_path / "text.jsonl", [[5 + i % 70 for i in range(80)]])
        evaluate(folder, tmp_path / "r.jsonl", **changes, mlp_density=None, density_budget=budget)
    write_corpus(tmp_path / "text.jsonl", [[6 + i % 70 for i in range(80)]])
    evaluate(folder, tmp_path / "r.jsonl", **changes, mlp_density=(1.0,))
    found = read_records(tmp_path / "r.jsonl")
    assert [record["labels"]["method"] for record in found] == ["dense", "random", "random", "dense", "random"]
    assert found[1]["achieved"]["per_layer"] != found[2]["achieved"]["per_layer"]
    assert found[0]["value"] != found[3]["value"] and found[0]["sources"]["text"] != found[3]["sources"]["text"]


@pytest.mark.parametrize("kept", [0, 2, 4, 8, 9, "all"])
def test_a_resumed_sweep_is_an_uninterrupted_one(
    folder: Path, sweep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: int | str
) -> None:
    lines = sweep.read_bytes().splitlines(keepends=True)
    kept = len(lines) if kept == "all" else int(kept)
    part = b"".join(lines[:kept]) + (lines[kept][:100] if kept < len(lines) else b"")  # killed while it wrote
    (tmp_path / "r.jsonl").write_bytes(part)
    runs: list[str] = []
    monkeypatch.setattr(
        scripts.lm_eval_tasks,
        "evaluate_benchmark",
        lambda model, benchmark, limit, run=scripts.lm_eval_tasks.evaluate_benchmark: (
            runs.append(benchmark.name) or run(model, benchmark, limit)
        ),
    )
    returned = evaluate(folder, tmp_path / "r.jsonl", **SWEEP, resume=True)
    assert list(map(json.dumps, without_times(tmp_path / "r.jsonl"))) == list(map(json.dumps, without_times(sweep)))
    assert returned == read_records(tmp_path / "r.jsonl")
    done = {
        (record["run"]["task"], record["labels"]["method"])
        for record in read_records(tmp_path / "r.jsonl")[kept:]
        if "run" in record
    }
    assert len(runs) == len(done), "what was there in whole is not run again"


def test_other_limits_and_examples_are_other_runs(folder: Path, tmp_path: Path) -> None:
    output, choices = tmp_path / "r.jsonl", {"tasks": "tiny_choices", "method": ("dense",), "resume": True}
    evaluate(folder, output, **choices, limit=2)
    evaluate(folder, output, **choices, limit=3)
    evaluate(folder, output, **choices, limit=2)
    evaluate(folder, output, **choices, limit=2, num_fewshot=0)
    assert [record["labels"]["num_samples"] for record in read_records(output)] == [2, 2, 3, 3, 2, 2]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tasks", "tiny_choces"], "--tasks tiny_choces: no such task; the nearest are tiny_choices"),
        (["--tasks", "perplexity,juggling"], "--tasks juggling: no such task"),
        (["--tasks", "tiny_choices", "--include-path", "nowhere"], "--include-path nowhere: no such folder"),
        (["--tasks", "tiny_choices", "--limit", "0"], "--limit must be at least 1, got 0"),
        (["--tasks", "tiny_choices", "--num-fewshot", "-1"], "--num-fewshot must be at least 0, got -1"),
    ],
)
def test_tasks_that_cannot_be_run_are_one_line(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    flags: list[str],
    message: str,
) -> None:
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", LocalTaskManager)
    task_manager.cache_clear()
    words = ["--model", str(folder / "model"), "--corpus", str(folder / "text.jsonl"), "--quiet"]
    words += ["--output", str(tmp_path / "r.jsonl"), "--include-path", str(folder / "tasks"), *flags]
    assert message in one_error_line(scripts.evaluate.main, Options, words, capsys)
    assert not (tmp_path / "r.jsonl").exists()
    task_manager.cache_clear()


def test_a_task_without_its_data_says_how_to_get_it(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "lost.yaml").write_text(
        (folder / "tasks/tiny_texts.yaml").read_text().replace("texts.json", "lost.json")
    )
    with pytest.raises(ValueError, match="--tasks tiny_texts: its data is not to be had .* --include-path"):
        load_benchmarks({"tiny_texts": None}, tmp_path)


def test_a_missing_lm_eval_is_one_line(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ValueError, match=r"not installed; get it with: pip install -e \.\[eval\]"):
        evaluate(folder, tmp_path / "r.jsonl", tasks="tiny_choices")


def test_templates_are_compiled_once_and_lm_eval_is_left_as_it_was() -> None:
    environment = lm_eval.utils.env
    with templates_kept():
        kept = environment.from_string("{{a}}")
        assert environment.from_string("{{a}}") is kept and kept.render(a=1) == "1" and kept.render(a=2) == "2"
    assert environment.from_string("{{a}}") is not kept and "from_string" not in vars(environment)


def test_names_are_not_guessed_but_the_nearest_are_said() -> None:
    with pytest.raises(ValueError, match="no such task; the nearest are arc_local, arcs "):
        check_names(["arc"], ["arcs", "arc_local", "winogrande"])
    check_names(["arc"], ["arc"])


@pytest.mark.parametrize("steps", STEPS)
def test_arithmetic_problems_are_right_and_examples_are_not_tests(steps: int) -> None:
    tests, examples = make_problems(steps, NUM_TESTS, TEST_SEED), make_problems(steps, NUM_EXAMPLES, FEWSHOT_SEED)
    assert tests == make_problems(steps, NUM_TESTS, TEST_SEED) and len(tests) == NUM_TESTS
    assert not {problem.question for problem in tests} & {problem.question for problem in examples}
    for problem in tests:
        equations = [equation.split(" = ") for equation in problem.reasoning.removesuffix(".").split(". ")]
        assert len(equations) == steps and all(eval(left) == int(right) for left, right in equations)
        assert int(equations[-1][1]) == problem.answer > 0
        assert [left.split()[0] for left, _ in equations[1:]] == [right for _, right in equations[:-1]]
        assert int(equations[0][0].split()[0]) <= LARGEST[steps] and problem.question.endswith("have now?")
    with pytest.raises(ValueError, match="steps must be one of 1, 2, 3, 4, got 5"):
        make_problem(5, 0)


def test_two_ranks_get_the_scores_of_one(folder: Path) -> None:
    ended = wait_all(start_ranks(["-m", "tests.scripts.ranked_tasks", str(folder)], 2, forked=True), timeout_s=240)
    assert [rank.exit_code for rank in ended] == [0, 0], "\n".join(rank.stderr[-2000:] for rank in ended)
    for name, (sizes, changes) in RUNS.items():
        expected = scripts.evaluate.main(options(folder, folder / f"one {name}.jsonl", **changes))
        found = read_records(folder / f"{name}.jsonl")
        assert len(found) == len(expected) > 0, name
        for ours, theirs in zip(found, expected, strict=True):
            assert ours["labels"] == {**theirs["labels"], **sizes}
            assert ours["value"] == pytest.approx(theirs["value"], rel=1e-9) and ours["stderr"] == theirs["stderr"]
            assert ours["achieved"]["per_layer"] == theirs["achieved"]["per_layer"]
            assert ours.get("answers") == theirs.get("answers")
    results = json.loads(next((folder / "cli").rglob("results_*.json")).read_text())
    assert len(list((folder / "cli").rglob("results_*.json"))) == 1, "the first rank alone writes"
    (_, dense) = accuracies(folder / "dp2.jsonl", task="tiny_choices", method="dense")
    assert results["results"]["tiny_choices"]["acc_norm,none"] == dense["value"]
    assert results["config"]["achieved"]["sparse_calls"] == 0
