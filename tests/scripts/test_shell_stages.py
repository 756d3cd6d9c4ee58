"""The shell files of the stages: presets, what they print, torchrun where there are several GPUs, and the sweep."""

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.scripts.shell_files import SHELL, run_shell


def run_shell_stage(checkout: Path, stage: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run scripts/STAGE.sh of a checkout that holds only the shell files; `echo` stands in for Python."""
    return run_shell(checkout, f"{stage}.sh", *arguments, **{"PYTHON": "echo", **variables})[0]


@pytest.mark.parametrize("stage", ["collect", "train", "infer", "evaluate", "drift"])
def test_shell_stages_print_and_run_the_python_command_of_a_preset(tmp_path: Path, stage: str) -> None:
    unknown = run_shell_stage(tmp_path, stage, "GPT-5")
    assert unknown.returncode == 2 and "SmolLM2 Llama-3.2-3B Llama-3.1-8B OPT-125M OPT-6.7B" in unknown.stderr
    missing = run_shell_stage(tmp_path, stage, "OPT-125M")
    assert missing.returncode == 2 and "convert_llama_checkpoint.py --source facebook/opt-125m" in missing.stderr
    assert "bash scripts/quickstart.sh" in run_shell_stage(tmp_path, stage, "SmolLM2").stderr
    checkpoint = tmp_path / "outputs/smollm2/checkpoint"
    checkpoint.mkdir(parents=True)
    (checkpoint / "config.json").write_text("{}")
    done = run_shell_stage(tmp_path, stage, "SmolLM2", "--seed", "7 8")
    module = "scripts.studies.drift" if stage == "drift" else f"scripts.{stage}"
    assert done.returncode == 0 and done.stdout.startswith(f"-m {module} --model outputs/smollm2/checkpoint ")
    assert done.stdout.endswith(" --seed 7 8\n") and done.stderr.endswith("--seed 7\\ 8\n")
    distributed = run_shell_stage(tmp_path, stage, "SmolLM2", NUM_GPUS="4")
    assert distributed.stdout.startswith(f"-m pipeline_parallel.torchrun --standalone --nproc-per-node 4 -m {module}")


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_every_shell_file_that_is_run_says_how_and_does_nothing_else(tmp_path: Path, flag: str) -> None:
    shutil.copytree(SHELL, tmp_path / "scripts", ignore=shutil.ignore_patterns("*.py", "benchmark", "__pycache__"))
    files = [path for path in (tmp_path / "scripts").rglob("*.sh") if path.read_text().startswith("#!")]
    assert {path.name for path in files} >= {"quickstart.sh", "test.sh", "evaluate.sh", "slurm.sh"}
    environment = {**os.environ, "PYTHON": "false"}
    for path in files:
        done = subprocess.run(["bash", str(path), flag], env=environment, capture_output=True, text=True, cwd=tmp_path)
        name = path.relative_to(tmp_path)
        assert (done.returncode, done.stderr) == (0, ""), name
        assert f"bash {name}" in done.stdout or f"sbatch {name}" in done.stdout
        assert ("SmolLM2 Llama-3.2-3B" in done.stdout) == ("PRESET" in done.stdout)
    assert not (tmp_path / "outputs").exists() and not (tmp_path / ".venv").exists()


def test_the_drift_stage_takes_the_small_model_by_itself_and_samples_it_without_a_gpu(checkout: Path) -> None:
    (checkout / "outputs/opt-125m/checkpoint").mkdir(parents=True)
    (checkout / "outputs/opt-125m/checkpoint/config.json").write_text("{}")
    of_small = run_shell_stage(checkout, "drift", "--seed", "7").stdout
    assert of_small.startswith("-m scripts.studies.drift --model outputs/smollm2/checkpoint --corpus self ")
    assert " --calibration-corpus self --output-dir outputs/smollm2/drift " in of_small
    assert " --test-tokens " in of_small and of_small.endswith(" --seed 7\n")
    assert run_shell_stage(checkout, "drift", "SmolLM2", "--seed", "7").stdout == of_small
    of_opt = run_shell_stage(checkout, "drift", "OPT-125M").stdout
    assert " --corpus wikitext --calibration-corpus c4 " in of_opt and "--test-tokens" not in of_opt


# Stands in for Python: notes its arguments, and as evaluate adds a line to --output unless it is told to fail.
STUB = """#!/usr/bin/env bash
printf '%s\\n' "$*" >>calls
case "$*" in *scripts.evaluate*) ;; *) exit 0 ;; esac
previous=""
for flag in "$@"; do
    if [ "$previous" = --output ]; then output="$flag"; fi
    previous="$flag"
done
if [ -n "${WRITES-yes}" ]; then echo record >>"$output"; fi
exit "${FAILS:-0}"
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """With a checkpoint of SmolLM2."""
    checkpoint = tmp_path / "outputs/smollm2/checkpoint"
    checkpoint.mkdir(parents=True)
    (checkpoint / "config.json").write_text("{}")
    return tmp_path


def sweep(checkout: Path, *flags: str, **variables: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """`evaluate.sh SmolLM2 --sweep`, and the Python commands that it ran."""
    return run_shell(checkout, "evaluate.sh", "SmolLM2", "--sweep", *flags, stub=STUB, **variables)


def test_a_sweep_is_one_evaluation_into_one_file_and_its_report(checkout: Path) -> None:
    done, (evaluate, summarize) = sweep(checkout)
    assert done.returncode == 0, done.stderr
    assert "--sweep" not in evaluate
    for flags in (
        "--method dense oracle predictor teal teal-all wina-unrotated griffin static random cats",
        "random cats --mlp-density 0.7 0.5 0.3",
        "--tasks perplexity,zero-shot,arithmetic_words --resume",
        "--corpus self",
        "--max-tokens 24576",
        "--output outputs/smollm2/sweep.jsonl",
    ):
        assert f" {flags}" in evaluate
    report = "--results outputs/smollm2/sweep.jsonl --output-dir outputs/smollm2/sweep"
    assert summarize == f"-m scripts.summarize {report}"
    printed = [shlex.split(line)[2:] for line in done.stderr.splitlines() if line.startswith("+ ")]
    assert printed == [evaluate.split(), summarize.split()]


def test_a_sweep_of_a_model_without_gates_leaves_cats_out(checkout: Path) -> None:
    (checkout / "outputs/opt-125m/checkpoint").mkdir(parents=True)
    (checkout / "outputs/opt-125m/checkpoint/config.json").write_text("{}")
    done, (evaluate, _) = run_shell(checkout, "evaluate.sh", "OPT-125M", "--sweep", stub=STUB)
    assert done.returncode == 0, done.stderr
    assert " oracle predictor teal " in evaluate and "cats" not in evaluate


def test_an_interrupted_sweep_keeps_its_records_and_goes_on(checkout: Path) -> None:
    results = checkout / "outputs/smollm2/sweep.jsonl"
    failed, calls = sweep(checkout, FAILS="3")
    assert failed.returncode == 3 and len(calls) == 1  # no report of half a sweep
    assert results.read_text() == "record\n"
    done, (evaluate, _) = sweep(checkout)
    assert done.returncode == 0 and " --resume " in evaluate
    assert results.read_text() == "record\nrecord\n"


def test_ranks_share_the_evaluation_and_one_process_reports(checkout: Path) -> None:
    _, (evaluate, summarize) = sweep(checkout, NUM_GPUS="4")
    assert evaluate.startswith("-m pipeline_parallel.torchrun --standalone --nproc-per-node 4 -m scripts.evaluate")
    assert summarize.startswith("-m scripts.summarize")


def test_a_host_without_the_records_makes_no_report(checkout: Path) -> None:
    done, calls = sweep(checkout, WRITES="", NNODES="2", RDZV_ENDPOINT="host:1")
    assert done.returncode == 0 and len(calls) == 1
    assert "outputs/smollm2/sweep.jsonl: no records on this host, so no report" in done.stderr
