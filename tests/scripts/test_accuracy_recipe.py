"""The recipe of the accuracy tables: what is trained, and what is scored with which predictors; `stub` stands in for
Python."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.scripts.shell_files import run_shell

STUB = """#!/usr/bin/env bash
printf '%s\\n' "begin $*" >>calls
if [ -n "${SHOWS:-}" ]; then printf '%s\\n' "${!SHOWS:-}" >>seen; fi
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
    return run_shell(checkout, "recipes/accuracy.sh", *arguments, stub=STUB, **variables)


def flags(call: str, name: str) -> list[str]:
    """The values after a flag."""
    return call.partition(f" {name} ")[2].partition(" --")[0].split()


def begun(calls: list[str], stage: str) -> list[str]:
    return [call for call in calls if call.startswith(f"begin -m scripts.{stage} " if stage else "begin ")]


def test_predictors_are_trained_first_side_by_side(tmp_path: Path) -> None:
    done, calls = run_recipe(
        tmp_path, "model", CALIBRATION="c4.jsonl", ACTIVATIONS="store", STEPS="collect brief train"
    )
    assert done.returncode == 0, done.stderr
    assert "scripts.collect --model model --dtype bfloat16 --corpus c4.jsonl --output-dir store --units mlp" in calls[0]
    assert calls[0].endswith(" --max-tokens 440000 --resume") and calls[1].startswith("end -m scripts.collect")
    begun_brief, rest = calls[2:18], calls[18:]
    assert sum(call.startswith("end ") for call in begun_brief) == 8, "three densities train and divide; two more train"
    trainings = [call.split()[0] for call in begun_brief if call.endswith(" --refine-steps 150")]
    assert trainings == ["begin"] * 3 + ["end"] * 3, "nobody waits for another"
    assert {flags(call, "--output-dir")[0] for call in begun(begun_brief, "train")} == {
        f"outputs/accuracy/{name}" for name in ("brief_0.7", "brief_0.5", "brief_0.3", "calibration", "deja_vu")
    }
    (uniform,) = [call for call in begun(rest, "") if CURVE in call.split()]
    assert f"--output-dir outputs/accuracy/predictors_{CURVE} " in uniform and "--density-budget" not in uniform
    assert uniform.endswith(" --refine-steps 800")
    for density in DENSITIES:
        run, file = "outputs/accuracy", f"outputs/accuracy/budget_predictor_{density}.json"
        own = [call for call in begun(begun_brief, "") if flags(call, "--densities") == [density]]
        (trained,) = [call for call in begun(rest, "train") if density in call.split()]
        for call, name, count in ((*own, "brief", "150"), (trained, "predictors", "800")):
            assert f"--output-dir {run}/{name}_{density} " in call and call.endswith(f" --refine-steps {count}")
            assert flags(call, "--densities") == [density] and "--activations store " in call
            assert " --dtype bfloat16 " in call and " --units mlp " in call
        (budget,) = [call for call in begun(begun_brief, "budget") if density in call.split()]
        assert f"--predictors {run}/brief_{density}" in budget and flags(budget, "--output") == [file]
        assert flags(budget, "--mlp-density") == [density] and flags(budget, "--corpus") == ["c4.jsonl"]
        assert flags(trained, "--density-budget") == [file] and "--density-budget" not in own[0]
    of_all = [call for call in begun(begun_brief, "train") if "calibration " in call or "deja_vu" in call]
    assert all(flags(call, "--densities") == DENSITIES for call in of_all if "brief" not in call)


def test_rivals_get_budgets_and_thresholds_on_as_much_text(tmp_path: Path) -> None:
    variables = {"CALIBRATION_TOKENS": "999", "STEPS": "brief train", "CURVE": ""}
    done, calls = run_recipe(tmp_path, "model", METHODS="static teal teal-all cats", **variables)
    assert done.returncode == 0, done.stderr
    budgets = {(flags(call, "--method")[0], flags(call, "--mlp-density")[0]): call for call in begun(calls, "budget")}
    assert set(budgets) == {
        (method, density) for method in ("predictor", "teal", "teal-all", "cats") for density in DENSITIES
    }
    for (method, density), call in budgets.items():
        assert flags(call, "--tokens") == ["999"]
        assert flags(call, "--output") == [f"outputs/accuracy/budget_{method}_{density}.json"]
        if method != "predictor":
            assert flags(call, "--predictors") == ["outputs/accuracy/calibration"]
    assert all(flags(call, "--calibration-tokens") == ["999"] for call in begun(calls, "train"))


@pytest.mark.parametrize("requests", [False, True])
def test_every_method_is_scored_at_every_density_uniform_and_with_its_budget(tmp_path: Path, requests: bool) -> None:
    variables = {"REQUESTS": "requests.json.gz"} if requests else {"TASKS": "a,b", "INCLUDE_PATH": "tasks"}
    variables |= {"METHODS": "oracle cats teal", "RUN_DIR": "run", "TEST": "wiki.txt", "STEPS": "perplexity tasks"}
    done, calls = run_recipe(tmp_path, "model", **variables)
    assert done.returncode == 0, done.stderr
    scored = begun(calls, "evaluate") + begun(calls, "carried_tasks")
    for kind in ("perplexity", "answers" if requests else "accuracy"):
        expected = {("dense", "dense", "", "", "")}
        for density in DENSITIES:
            expected.add(("predictor", "predictor", density, f"run/predictors_{density}", ""))
            expected.add(("deja_vu", "predictor", density, "run/deja_vu", ""))
            for method in ("oracle", "cats", "teal"):
                expected.add((method, method, density, "run/calibration", ""))
            for method in ("cats", "teal"):
                file = f"run/budget_{method}_{density}.json"
                expected.add((method, method, "", "run/calibration", file))
        if kind == "perplexity":
            expected.add(("predictor", "predictor", CURVE, f"run/predictors_{CURVE}", ""))
        ours = [call for call in scored if f" --output run/{kind}_" in call]
        found = {
            (
                flags(call, "--output")[0].removeprefix(f"run/{kind}_").removesuffix(".jsonl"),
                method,
                density,
                *(" ".join(flags(call, name)) for name in ("--predictors", "--density-budget")),
            )
            for call in ours
            for method in flags(call, "--method")
            for density in flags(call, "--mlp-density") or [""]
        }
        assert found == expected
        assert all(" --resume" in call and "--dtype float32" in call for call in ours)
        asked = "--requests requests.json.gz" if requests else "--tasks a,b --include-path tasks"
        given = "--tasks perplexity --corpus wiki.txt" if kind == "perplexity" else asked
        assert all(given in call and "--max-windows" not in call for call in ours), "the whole test text"
        assert all((" --label deja vu " in call) == (f"{kind}_deja_vu" in call) for call in ours)
    assert not begun(calls, "train") and not begun(calls, "budget") and not begun(calls, "collect")
    assert ("scripts.carried_tasks fold makes records" in done.stderr) == requests


def test_what_is_complete_is_kept_and_a_step_that_fails_ends_the_recipe(tmp_path: Path) -> None:
    done, calls = run_recipe(tmp_path, "model", FAILS="predictors_0.5")
    assert done.returncode == 3 and not begun(calls, "evaluate")
    shutil.rmtree(tmp_path / "outputs")
    done, calls = run_recipe(tmp_path, "model", METHODS="static", CURVE="")
    assert done.returncode == 0 and len(begun(calls, "budget")) == 3, "no cats, no budget of it"
    assert not any(CURVE in call for call in calls)
    done, calls = run_recipe(tmp_path, "model", METHODS="static")
    assert done.returncode == 0 and not begun(calls, "budget") and begun(calls, "evaluate")
    done, calls = run_recipe(tmp_path, "model", STEPS="tain")
    assert done.returncode == 2 and not calls
    assert done.stderr == "error: STEPS: tain is not one of collect brief train perplexity tasks\n"
