"""Real processes on gloo. Each start costs seconds, so one run shows all that its failure can show."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import time
from pathlib import Path

import pytest
import torch

from pipeline_parallel.launch import Ranks, current_launch, distributed
from tests.pipeline_parallel.launching import (
    REPOSITORY,
    Started,
    free_port,
    ranks_of,
    start_ranks,
    start_torchrun,
    wait_all,
    wait_for,
)

TOY = str(Path(__file__).with_name("toy_stage.py"))
ANSWERS = [f"answer {number} of rank {rank}" for rank in range(3) for number in (1, 2)]


def start(case: str, folder: Path, world_size: int, *, ready: bool = True) -> list[Started]:
    ranks = start_ranks([TOY, "--case", case, "--folder", str(folder)], world_size, forked=True)
    if ready:
        wait_until_ready(folder, world_size)
    return ranks


def wait_until_ready(folder: Path, world_size: int) -> None:
    for rank in range(world_size):
        wait_for(folder / f"ready{rank}")
    time.sleep(0.3)  # into the collective


def test_a_rank_that_raises_ends_all_with_one_line(tmp_path: Path) -> None:
    ended = wait_all(start("raise", tmp_path, 3, ready=False), timeout_s=60)
    assert [one.exit_code for one in ended] == [1, 1, 2]
    assert [one.stderr for one in ended] == ["", "", "error: rank 2: the disk is full\n"]
    assert sorted(ended[0].stdout.splitlines()) == sorted(ANSWERS)


def test_bad_input_that_only_rank_0_sees_ends_all_with_one_line(tmp_path: Path) -> None:
    ended = wait_all(start("bad-input", tmp_path, 2, ready=False), timeout_s=60)
    missing = tmp_path / "prompts.jsonl"
    assert [one.exit_code for one in ended] == [2, 1]
    assert [one.stderr for one in ended] == [f"error: rank 0: {missing}: No such file or directory\n", ""]


def test_when_the_rank_that_holds_the_store_is_killed_the_others_name_it(tmp_path: Path) -> None:
    ranks = start("stuck", tmp_path, 2)
    ranks[0].process.kill()
    second = wait_all(ranks)[1]
    assert second.exit_code == 1
    assert second.stderr.startswith("error: rank 0 (or its host, 127.0.0.1:") and second.stderr.endswith(" is gone\n")


def test_a_signal_ends_all_even_where_the_main_thread_cannot_act_on_it(tmp_path: Path) -> None:
    ranks = start("stuck", tmp_path, 2)
    ranks[1].process.terminate()
    ended = wait_all(ranks)
    assert [one.exit_code for one in ended] == [1, 128 + signal.SIGTERM]
    assert "".join(one.stderr for one in ended) == "error: rank 1: ended by SIGTERM\n"
    assert len(ended[0].stdout.splitlines()) == 4


def test_a_killed_rank_is_named_under_torchrun_too(tmp_path: Path) -> None:
    torchrun = start_torchrun([TOY, "--case", "killed", "--folder", str(tmp_path)], 3)
    wait_until_ready(tmp_path, 3)
    ranks = ranks_of(torchrun)
    os.kill(ranks[2], signal.SIGKILL)
    (ended,) = wait_all([torchrun])
    assert ended.exit_code == 128 + signal.SIGKILL
    (line,) = ended.stderr.splitlines()  # and no traceback of torchrun's
    assert line.startswith("error: rank 2: has not been heard of for ")
    assert sorted(ended.stdout.splitlines()) == sorted(ANSWERS)
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks.values())


def test_ranks_may_finish_at_different_times_without_a_word(tmp_path: Path) -> None:
    ended = wait_all(start("unequal", tmp_path, 2, ready=False), timeout_s=60)
    assert [(one.exit_code, one.stderr) for one in ended] == [(0, ""), (0, "")]
    assert sorted(ended[0].stdout.splitlines()) == sorted(ANSWERS[:4])


def test_one_process_needs_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for world_size in (None, "1"):  # `torchrun --nproc-per-node 1` is one process as well
        if world_size is not None:
            monkeypatch.setenv("WORLD_SIZE", world_size)
        with distributed() as launch:
            assert (launch.rank, launch.world_size, launch.device, launch.store) == (0, 1, None, None)
            assert launch is current_launch() and not torch.distributed.is_initialized()


def set_variables(monkeypatch: pytest.MonkeyPatch, **changes: str) -> None:
    for name in ("LOCAL_WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    given = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in {**given, **changes}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"RANK": "4"}, r"RANK 4 is outside \[0, WORLD_SIZE 4\)"),
        ({"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, r"LOCAL_RANK 2 is outside \[0, LOCAL_WORLD_SIZE 2\)"),
        ({"MASTER_ADDR": "", "RANK": ""}, "WORLD_SIZE is set but RANK and MASTER_ADDR is not; start .* torchrun"),
        ({"MASTER_PORT": "http"}, "variable MASTER_PORT must be an integer, got 'http'"),
    ],
)
def test_contradictory_variables_are_refused(
    changes: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_variables(monkeypatch, **changes)
    with pytest.raises(ValueError, match=message):
        Ranks.from_environment()


def test_each_rank_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    set_variables(monkeypatch)
    ranks = Ranks.from_environment()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert ranks.device("auto") == torch.device("cuda", 1) and ranks.device("cpu") == torch.device("cpu")
    with pytest.raises(ValueError, match="--device 'cuda:0': with 4 ranks give auto, cpu or cuda"):
        ranks.device("cuda:0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match=r"4 ranks on a host with 2 GPUs; .*--nproc-per-node 2"):
        ranks.device("auto")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert ranks.device("auto") == torch.device("cpu")


def test_a_rendezvous_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    set_variables(monkeypatch, MASTER_PORT=str(port))
    with pytest.raises(ConnectionError, match=f"rank 1 cannot reach rank 0 at 127.0.0.1:{port}: "):
        Ranks.from_environment().connect(0.5)


def test_the_slurm_recipe_starts_one_torchrun_a_host(tmp_path: Path) -> None:
    for name, script in {"srun": 'echo "$@"', "scontrol": "echo first-host; echo second-host"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(stat.S_IRWXU)
    job = {"SLURM_JOB_NODELIST": "host[1-2]", "SLURM_JOB_ID": "10012345", "SLURM_JOB_NUM_NODES": "2"}
    environment = {**os.environ, **job, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", "scripts/recipes/slurm.sh", "infer", "--tp-size", "8"]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--nnodes 2 --nproc-per-node gpu --rdzv-backend c10d --rdzv-endpoint first-host:22345" in done.stdout
    assert done.stdout.endswith("-m scripts.infer --tp-size 8\n")


def test_shell_stages_start_torchrun_on_each_of_several_hosts(tmp_path: Path) -> None:
    script = f"source {REPOSITORY}/scripts/presets.sh; run_python infer --tp-size 8"

    def run(**variables: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHON": "echo", "NUM_GPUS": "8", **variables}
        return subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True)

    launcher = (
        "-m pipeline_parallel.torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint first:29400"
    )
    assert run(NNODES="2", RDZV_ENDPOINT="first:29400").stdout == f"{launcher} -m scripts.infer --tp-size 8\n"
    nowhere = run(NNODES="2")
    assert nowhere.returncode != 0 and "RDZV_ENDPOINT: give HOST:PORT of one of the hosts" in nowhere.stderr
    assert run().stdout.startswith("-m pipeline_parallel.torchrun --standalone --nproc-per-node 8 -m scripts.infer")
