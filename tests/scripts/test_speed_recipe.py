"""The recipe of the speed tables: every command it runs is one that its stage takes; what is done is not done again."""

import importlib
import subprocess
from pathlib import Path

import pytest
import tyro

from tests.scripts.shell_files import run_shell


def speed(checkout: Path, **variables: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """The recipe in a checkout of shell files alone, and the commands that it ran."""
    return run_shell(checkout, "recipes/speed.sh", "out", **variables)


@pytest.mark.parametrize("num_gpus", [1, 2])
def test_every_command_is_one_that_its_stage_takes(tmp_path: Path, num_gpus: int) -> None:
    stated = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0"}
    done, calls = speed(tmp_path, NUM_GPUS=str(num_gpus), **stated)
    assert done.returncode == 0, done.stderr
    started = [call for call in calls if call.startswith("-m pipeline_parallel.torchrun")]
    assert len(started) == (7 if num_gpus == 2 else 0)
    assert all(f"--nproc-per-node {num_gpus} " in call for call in started)
    for call in calls:
        name, *flags = call.rpartition("-m scripts.")[2].split()
        options = tyro.cli(importlib.import_module(f"scripts.{name}").Options, args=flags)
        assert options.output.parent.name == "out"
    again, calls = speed(tmp_path, NUM_GPUS=str(num_gpus), **stated)
    assert again.returncode == 0 and calls == []


def test_a_step_is_measured_as_often_as_is_asked_for_and_only_the_calls_that_lack(tmp_path: Path) -> None:
    done, calls = speed(tmp_path, STEPS="density-1", CALLS="2")
    assert done.returncode == 0 and len(calls) == 4 and calls[:2] == calls[2:]
    done, calls = speed(tmp_path, STEPS="density-1", CALLS="3")
    assert done.returncode == 0 and len(calls) == 2


def test_trained_predictors_and_the_kernels_of_others_are_measured_where_they_are_given(tmp_path: Path) -> None:
    given = {"TRAINED": "model", "PREDICTORS": "near:0.5 far:0.3", "TEAL": "teal_kernel:prepare"}
    done, calls = speed(tmp_path, STEPS="trained thinned", **given)
    assert done.returncode == 0, done.stderr
    found = []
    for call in calls:
        name, *flags = call.rpartition("-m scripts.")[2].split()
        found.append(tyro.cli(importlib.import_module(f"scripts.{name}").Options, args=flags))
    assert [(each.model, str(each.predictors), each.mlp_density) for each in found[:2]] == [
        ("model", "near", 0.5),
        ("model", "far", 0.3),
    ]
    assert all(each.corpus == "wikitext" and each.method == "predictor" for each in found[:2])
    assert [(each.peer, each.peer_name, each.operator) for each in found[2:]] == [
        ("teal_kernel:prepare", "TEAL", "thinned_rows")
    ] * 3


def test_several_gpus_without_a_word_on_multicast_are_refused_before_anything_runs(tmp_path: Path) -> None:
    done, calls = speed(tmp_path, NUM_GPUS="2", NCCL_NVLS_ENABLE="")
    assert done.returncode == 2 and calls == [] and "set TORCH_SYMM_MEM_DISABLE_MULTICAST" in done.stderr


def test_a_step_that_fails_is_named_and_the_others_are_run(tmp_path: Path) -> None:
    done, calls = speed(tmp_path, STEPS="kernels baselines", FAILS="kernels")
    assert done.returncode == 1 and "not measured: kernels (the others are in out)" in done.stderr
    assert len(calls) == 1 + 2
    done, calls = speed(tmp_path, STEPS="kernels baselines")
    assert done.returncode == 0 and len(calls) == 3 and all("benchmark.kernels" in call for call in calls)
    unknown, _ = speed(tmp_path, STEPS="cooking")
    assert unknown.returncode == 1 and "STEPS: cooking is not one of llama-3.2-3b" in unknown.stderr
