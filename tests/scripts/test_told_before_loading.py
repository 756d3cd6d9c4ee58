"""What is wrong with densities and predictors is told before any model is loaded, in every stage with these flags."""

from pathlib import Path
from typing import Any

import pytest

import scripts.benchmark.agreement
import scripts.benchmark.decode
import scripts.budget
import scripts.collect
import scripts.evaluate
import scripts.infer
import scripts.train
from scripts.command_line import run_stage
from scripts.model_loading import ModelOptions, RunOptions
from tests.sparse_predictor.tiny_stages import one_error_line

STAGES: dict[str, tuple[Any, type[Any], list[str]]] = {
    "infer": (scripts.infer.main, scripts.infer.Options, ["--input", "prompts.jsonl", "--output", "out.jsonl"]),
    "evaluate": (scripts.evaluate.main, scripts.evaluate.Options, ["--corpus", "c4", "--output", "r.jsonl"]),
    "budget": (scripts.budget.main, scripts.budget.Options, ["--corpus", "c4", "--output", "budget.json"]),
    "decode": (
        scripts.benchmark.decode.main,
        scripts.benchmark.decode.Options,
        ["--corpus", "c4", "--output", "r.jsonl"],
    ),
    "agreement": (
        scripts.benchmark.agreement.main,
        scripts.benchmark.agreement.Options,
        ["--corpus", "c4", "--output", "r.jsonl"],
    ),
}


@pytest.fixture(autouse=True)
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    for options in (ModelOptions, RunOptions):
        monkeypatch.setattr(options, "load", lambda options: pytest.fail("a model is loaded"))
    monkeypatch.setattr(scripts.benchmark.decode, "load_subject", lambda *given: pytest.fail("a model is loaded"))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--method", "predictor"], "method predictor needs --predictors (a directory written by scripts.train)"),
        (["--method", "static", "--predictors", "nowhere"], "nowhere/manifest.json is missing: not a predictor dir"),
        (["--method", "teal", "--predictors", "checkpoint"], "not a predictor manifest (checkpoint/manifest.json: "),
        (["--method", "random", "--mlp-density", "1.5"], "density must lie in (0, 1], got 1.5"),
        (["--method", "random", "--head-density", "0"], "density must lie in (0, 1], got 0.0"),
        (["--method", "random", "--mlp-density", "nan"], "density must lie in (0, 1], got nan"),
        (["--method", "random", "--mlp-density", "inf"], "density must lie in (0, 1], got inf"),
        (["--method", "random", "--head-density", "nan"], "density must lie in (0, 1], got nan"),
    ],
)
def test_stages_that_run_sparsely(
    stage: str,
    flags: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint/manifest.json").write_text('{"format": "checkpoint", "format_version": 1}')
    main, options, needed = STAGES[stage]
    line = one_error_line(main, options, ["--model", "checkpoint", *needed, *flags], capsys)
    assert message in line and "__init__" not in line


@pytest.mark.parametrize("stage", ["infer", "evaluate", "decode", "agreement"])
@pytest.mark.parametrize("flag", ["--mlp-density", "--head-density"])
def test_densities_of_dense_runs(
    stage: str, flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    main, options, needed = STAGES[stage]
    for value in ("nan", "-0.1", "0", "1.5", "inf"):
        line = one_error_line(main, options, ["--model", "m", *needed, "--method", "dense", flag, value], capsys)
        assert f"density must lie in (0, 1], got {float(value)}" in line


@pytest.mark.parametrize("stage", ["infer", "evaluate", "agreement"])
@pytest.mark.parametrize(
    ("text", "message"), [('{"mlp": [0.5, 1.5]}', "`mlp[1]`: expected `float` <= 1.0, got 1.5"), ("[]", ": expected")]
)
def test_density_budgets(
    stage: str, text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "budget.json").write_text(text)
    main, options, needed = STAGES[stage]
    flags = ["--model", "m", *needed, "--method", "random", "--density-budget", "budget.json"]
    assert message in one_error_line(main, options, flags, capsys)


@pytest.mark.parametrize("stage", ["infer", "evaluate"])
def test_a_density_beside_a_budget_of_another(
    stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "budget.json").write_text('{"mlp": [0.3, 0.5], "attention": [1.0, 0.5]}')
    main, options, needed = STAGES[stage]
    begin = ["--model", "m", *needed, "--method", "random", "--density-budget", "budget.json"]
    line = one_error_line(main, options, [*begin, "--mlp-density", "0.5"], capsys)
    assert "--mlp-density 0.5 contradicts --density-budget budget.json, which keeps 0.4 in the mean: leave out" in line
    line = one_error_line(main, options, [*begin, "--mlp-density", "0.4", "--head-density", "1.0"], capsys)
    assert "--head-density 1.0 contradicts --density-budget budget.json, which keeps 0.75 in the mean" in line
    with pytest.raises(pytest.fail.Exception, match="a model is loaded"):  # nothing is wrong with the default
        (tmp_path / "prompts.jsonl").write_text('{"prompt_token_ids": [1]}')
        run_stage(main, options, begin)


def test_an_output_that_holds_something_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.jsonl").write_text('{"prompt": "p"}\n{"prompt": "q"}\n')
    (tmp_path / "out.jsonl").write_text("answers\n")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "p"}\n')
    for stage, message in (("evaluate", "r.jsonl, line 1: not a result record"), ("infer", "out.jsonl holds answers")):
        main, options, needed = STAGES[stage]
        assert message in one_error_line(main, options, ["--model", "m", *needed], capsys)


def test_lm_evals_own_command_line(tmp_path: Path) -> None:
    engine = pytest.importorskip("scripts.lm_eval_model").EngineLM
    for arguments, message in (
        ("method=predictor", "method predictor needs --predictors"),
        (f"method=cats,predictors={tmp_path}", "manifest.json is missing"),
        ("method=random,mlp_density=2", "mlp density must lie in"),
    ):
        with pytest.raises(ValueError if "predictors=" not in arguments else FileNotFoundError, match=message):
            engine.create_from_arg_string(f"model={tmp_path},{arguments}")


def test_stages_that_define_labels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    flags = ["--model", "m", "--corpus", "c4", "--output-dir", str(tmp_path), "--label-density", "1.5"]
    line = one_error_line(scripts.collect.main, scripts.collect.Options, flags, capsys)
    assert "--label-density must lie in (0, 1], got 1.5" in line
    for name, value in (("--densities", "0"), ("--label-density", "-1")):
        flags = ["--model", "m", "--activations", "a", "--output-dir", str(tmp_path), name, value]
        line = one_error_line(scripts.train.main, scripts.train.Options, flags, capsys)
        assert f"--densities and --label-density must lie in (0, 1], got {float(value)}" in line
