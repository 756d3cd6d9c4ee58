"""The recipe's shell file: who writes, trains and studies what on which GPU; `stub` stands in for Python."""

import subprocess
from pathlib import Path

import pytest

from scripts.studies.ablation import VARIANTS
from tests.scripts.shell_files import run_shell

STUB = """#!/usr/bin/env bash
printf '%s|%s|%s\\n' "$CUDA_VISIBLE_DEVICES" "$NUM_GPUS" "$*" >>calls
case "$*" in *"${FAILS:-nothing}"*) exit 3 ;; esac
"""


def run_recipe(
    checkout: Path, *flags: str, **variables: str
) -> tuple[subprocess.CompletedProcess[str], list[list[str]]]:
    """The process, and its calls of Python: GPU, NUM_GPUS and the arguments of each."""
    done, calls = run_shell(checkout, "recipes/ablation.sh", *flags, stub=STUB, **variables)
    return done, [line.split("|") for line in calls]


@pytest.mark.parametrize("num_gpus", [1, 2, 8])
def test_every_variant_is_trained_once_and_all_gpus_write(tmp_path: Path, num_gpus: int) -> None:
    done, calls = run_recipe(tmp_path, "--seeds", "0", MODEL="model", NUM_GPUS=str(num_gpus), EXTRA_TEXT="c4.jsonl")
    assert done.returncode == 0, done.stderr
    written = [(gpu, arguments) for gpu, _, arguments in calls if "scripts.write_text" in arguments]
    assert sorted(gpu for gpu, _ in written) == [str(gpu) for gpu in range(num_gpus)]
    assert all(f"--seed {gpu} " in text and f"text-{gpu}.jsonl" in text for gpu, text in written)
    assert all(text.endswith(f"--max-tokens {20_000_000 // num_gpus}") for _, text in written)
    trained = [arguments for _, _, arguments in calls if "scripts.studies.ablation" in arguments]
    names = [name for call in trained for name in call.partition("--variants ")[2].partition(" --")[0].split()]
    assert sorted(names) == sorted(VARIANTS) and all(call.endswith(" --seeds 0") for call in trained)
    texts = " ".join(f"outputs/ablation/text-{gpu}.jsonl" for gpu in range(num_gpus))
    assert all(f"--corpus {texts} c4.jsonl --test-corpus wikitext " in call for call in trained)
    assert "scripts.studies.relufy --model model --corpus" in calls[-1][2] and {number for _, number, _ in calls} == {
        "1"
    }


def test_a_step_that_fails_ends_the_recipe(tmp_path: Path) -> None:
    done, calls = run_recipe(tmp_path, MODEL="model", FAILS="scripts.write_text")
    assert done.returncode == 3 and len(calls) == 1
    done, calls = run_recipe(tmp_path, MODEL="model", STEPS="relufy")
    assert done.returncode == 0 and "scripts.studies.relufy" in calls[-1][2] and len(calls) == 1
