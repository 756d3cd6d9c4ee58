"""A stage takes the cores that are idle: more threads would wait for each other at every step."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import scripts.model_loading
from scripts.model_loading import busy_cores, share_cores

ROOT = Path(__file__).parents[2]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the system says of its load, here two threads of others; no variable names a number of threads."""
    for name in scripts.model_loading.THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(scripts.model_loading, "LOAD", tmp_path / "loadavg")
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    (tmp_path / "loadavg").write_text("0.20 0.18 0.12 3/404 1234\n")
    share_cores.cache_clear()
    return tmp_path / "loadavg"


def test_busy_cores_get_fewer_threads(load: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    assert busy_cores() == 2.0
    assert share_cores() == 2 and chosen == [2]
    load.write_text("9.00 9.00 9.00 1/404 1234\n")
    assert share_cores() == 2, "once per process"
    share_cores.cache_clear()
    assert share_cores() == 4 and chosen == [2], "what ran a minute ago does not count"
    load.unlink()
    assert busy_cores() == 0.0


def test_a_number_of_threads_that_is_given_is_kept(load: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setattr(torch, "set_num_threads", lambda count: pytest.fail("changed"))
    assert share_cores() == 4


@pytest.mark.parametrize(
    ("given", "kept"), [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")]
)
def test_idle_threads_of_a_stage_sleep_early_unless_told_otherwise(given: dict[str, str], kept: str) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "KMP_"))}
    code = "import os, scripts; print(os.environ.get('GOMP_SPINCOUNT'))"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment | given, cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == kept
