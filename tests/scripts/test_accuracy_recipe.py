"""The recipe of the accuracy tables: what is trained, and what is scored with which predictors; `stub` stands in for
Python."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

import scripts.evaluate

STUB = """#!/usr/bin/env bash
printf '%s\\n' "begin $*" >>calls
case "$*" in *"${FAILS:-nothing}"*) exit 3 ;; esac
case "$*" in *--refine-steps\\ 150* | *--refine-steps\\ 800*) sleep 0.5 ;; esac
printf '%s\\n' "end $*" >>calls
previous=""
for flag in "$@"; do
    case "$previous $flag" in --output*budget_*.json) mkdir -p "$(dirname "$flag")" && echo {} >"$flag" ;; esac
    previous="$flag"
done
"""
CURVE, DENSITIES = "0.22", ["0.7", "0.5", "0.3"]


def run_recipe(checkout: Path, *arguments: str, **variables: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """The process, and what its calls of Python wrote when they began and ended: `begin ...`, `end ...`."""
    shell = Path(scripts.evaluate.__file__).parent
    (checkout / "scripts/recipes").mkdir(parents=True, exist_ok=True)
    for name in ("presets.sh", "usage.sh", "recipes/accuracy.sh"):
        shutil.copy(shell / name, checkout / "scripts" / name)
    (checkout / "stub").write_text(STUB)
    (checkout / "stub").chmod(0o755)
    (checkout / "calls").unlink(missing_ok=True)
    command = ["bash", str(checkout / "scripts/recipes/accuracy.sh"), *arguments]
    environment = {**os.environ, "PYTHON": "./stub", **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    calls = checkout / "calls"
    return done, calls.read_text().splitlines() if calls.exists() else []


def flags(call: str, name: str) -> list[str]:
    """The values after a flag."""
    return call.partition(f" {name} ")[2].partition(" --")[0].split()


def begun(calls: list[str], stage: str) -> list[str]:
    return [call for call in calls if call.startswith(f"begin -m scripts.{stage} " if stage else "begin ")]


def test_predictors_are_trained_first_side_by_side_and_with_nothing_else(tmp_path: Path) -> None:
    done, calls = run_recipe(tmp_path, "model", CALIBRATION="c4.jsonl", ACTIVATIONS="store")
    assert done.returncode == 0, done.stderr
    assert "scripts.collect --model model --dtype bfloat16 --corpus c4.jsonl --output-dir store --units mlp" in calls[0]
    assert calls[0].endswith(" --max-tokens 440000 --resume") and calls[1].startswith("end -m scripts.collect")
    side_by_side, after = calls[2:22], calls[22:]
    ended = [call for call in side_by_side if call.startswith("end ")]
    assert len(ended) == 10, "three stages of three densities, and the curve's one"
    first_end = next(idx for idx, call in enumerate(side_by_side) if call.startswith("end ") and "train" in call)
    assert first_end == 4, "nobody waits for another density"
    (uniform,) = [call for call in begun(side_by_side, "") if CURVE in call.split()]
    assert f"--output-dir outputs/accuracy/predictors_{CURVE} " in uniform and "--density-budget" not in uniform
    assert uniform.endswith(" --refine-steps 800")
    for density in DENSITIES:
        run, file = "outputs/accuracy", f"outputs/accuracy/budget_predictor_{density}.json"
        own = [call for call in begun(side_by_side, "") if density in call.split()]
        brief, budget, trained = own
        for call, name, steps in ((brief, "brief", "150"), (trained, "predictors", "800")):
            assert f"--output-dir {run}/{name}_{density} " in call and call.endswith(f" --refine-steps {steps}")
            assert flags(call, "--densities") == [density] and "--activations store " in call
            assert " --dtype bfloat16 " in call and " --units mlp " in call
        assert f"--predictors {run}/brief_{density}" in budget and flags(budget, "--output") == [file]
        assert flags(budget, "--mlp-density") == [density] and flags(budget, "--corpus") == ["c4.jsonl"]
        assert flags(trained, "--density-budget") == [file] and "--density-budget" not in brief
    assert [flags(call, "--output-dir")[0].split("/")[-1] for call in begun(after, "train")] == [
        "calibration",
        "deja_vu",
    ]
    assert all(flags(call, "--densities") == DENSITIES for call in begun(after, "train"))


@pytest.mark.parametrize("requests", [False, True])
def test_every_method_is_scored_at_every_density_with_its_predictors(tmp_path: Path, requests: bool) -> None:
    variables = {"REQUESTS": "requests.json.gz"} if requests else {"TASKS": "a,b", "INCLUDE_PATH": "tasks"}
    done, calls = run_recipe(tmp_path, "model", METHODS="oracle cats", RUN_DIR="run", TEST="wiki.txt", **variables)
    assert done.returncode == 0, done.stderr
    scored = begun(calls, "evaluate") + begun(calls, "carried_tasks")
    expected = {("predictor", density, "run/deja_vu", "deja vu") for density in DENSITIES}
    for density in DENSITIES:
        expected.add(("predictor", density, f"run/predictors_{density}", ""))
        expected |= {(method, density, "run/calibration", "") for method in ("oracle", "cats")}
    for name in ("perplexity", "answers" if requests else "accuracy"):
        found = [call for call in scored if f" --output run/{name}.jsonl " in call]
        on_the_curve = {("predictor", CURVE, f"run/predictors_{CURVE}", "")} if name == "perplexity" else set()
        assert all(" --resume " in call and "--dtype float32" in call for call in found)
        assert not any("--max-windows" in call for call in found), "the whole text is scored"
        assert expected | on_the_curve == {
            (method, density, flags(call, "--predictors")[0], " ".join(flags(call, "--label")))
            for call in found
            for method in flags(call, "--method")
            for density in flags(call, "--mlp-density")
        }
        asked = "--requests requests.json.gz" if requests else "--tasks a,b --include-path tasks"
        given = "--tasks perplexity --corpus wiki.txt" if name == "perplexity" else asked
        assert found and all(given in call for call in found)
    (of_cats,) = [call for call in begun(calls, "budget") if flags(call, "--method") == ["cats"]]
    (scored_so,) = [call for call in begun(calls, "evaluate") if "--density-budget" in call]
    for call in (of_cats, scored_so):
        assert flags(call, "--mlp-density") == ["0.5"] and flags(call, "--predictors") == ["run/calibration"]
    assert flags(scored_so, "--density-budget") == flags(of_cats, "--output")
    assert ("scripts.carried_tasks fold makes records" in done.stderr) == requests


def test_what_is_complete_is_kept_and_a_step_that_fails_ends_the_recipe(tmp_path: Path) -> None:
    done, calls = run_recipe(tmp_path, "model", FAILS="predictors_0.5")
    assert done.returncode == 3 and not begun(calls, "evaluate")
    assert not any("deja_vu" in call for call in calls)
    shutil.rmtree(tmp_path / "outputs")
    done, calls = run_recipe(tmp_path, "model", METHODS="static", CURVE="")
    assert done.returncode == 0 and len(begun(calls, "budget")) == 3, "no cats, no budget of it"
    assert not any(CURVE in call for call in calls)
    done, calls = run_recipe(tmp_path, "model", METHODS="static")
    assert done.returncode == 0 and not begun(calls, "budget") and begun(calls, "evaluate")


def test_without_a_checkpoint_it_says_how_it_is_called(tmp_path: Path) -> None:
    done, calls = run_recipe(tmp_path)
    assert done.returncode == 2 and not calls
    assert done.stderr == (
        "error: give one checkpoint: bash scripts/recipes/accuracy.sh CHECKPOINT (--help says more)\n"
    )
