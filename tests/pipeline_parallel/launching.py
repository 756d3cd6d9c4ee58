"""Starts ranks, with or without torchrun's agent, and collects what they said: for tests of what a run does when
one of them fails."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

REPOSITORY = Path(__file__).parents[2]
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, kw_only=True)
class Ended:
    """One process after its end. `seconds`: from the call of `wait_all`."""

    exit_code: int
    stdout: str
    stderr: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Started:
    """A running process; kill it with `started.process.kill()`."""

    process: subprocess.Popen[bytes]
    stdout: IO[bytes]
    stderr: IO[bytes]


def free_port() -> int:
    """A TCP port of this host that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_ranks(
    arguments: Sequence[str], world_size: int, environment: Mapping[str, str] | None = None
) -> list[Started]:
    """`python ARGUMENTS...` (e.g. ["-m", "scripts.infer", ...]) once a rank, each with torchrun's variables but
    without its agent, which would end the others when one ends."""
    port = str(free_port())
    ours = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(world_size)}
    ours["LOCAL_WORLD_SIZE"] = ours["WORLD_SIZE"]
    return [
        _start(
            [sys.executable, *arguments], {**ours, "RANK": str(rank), "LOCAL_RANK": str(rank), **(environment or {})}
        )
        for rank in range(world_size)
    ]


def start_torchrun(arguments: Sequence[str], world_size: int, environment: Mapping[str, str] | None = None) -> Started:
    """The same ranks under torchrun; `arguments` name a module (-m NAME ...) or a file."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
    return _start([sys.executable, *launcher, *arguments], environment or {})


def _start(command: Sequence[str], environment: Mapping[str, str]) -> Started:
    inherited = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    paths = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    inherited |= {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    # As the shell stages do: torch prints a C++ backtrace for each connection that a failing rank cuts, or does not.
    inherited.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Files, not pipes: nobody reads while the ranks run, and a full pipe would stop them.
    stdout, stderr = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 (closed once read)
    process = subprocess.Popen(command, cwd=REPOSITORY, env={**inherited, **environment}, stdout=stdout, stderr=stderr)
    return Started(process=process, stdout=stdout, stderr=stderr)


def wait_for(condition: Path, timeout_s: float = 60.0) -> None:
    """Wait until the file is there: a rank's sign that it has come so far."""
    deadline = time.monotonic() + timeout_s
    while not condition.exists():
        assert time.monotonic() < deadline, f"{condition} did not appear within {timeout_s} s"
        time.sleep(0.02)


def wait_all(started: Sequence[Started], timeout_s: float = 30.0) -> list[Ended]:
    """Wait for all; an AssertionError with what they said if one is still there after `timeout_s` (all are killed)."""
    begin = time.monotonic()
    seconds: dict[int, float] = {}
    while len(seconds) < len(started) and time.monotonic() < begin + timeout_s:
        for position, one in enumerate(started):
            if position not in seconds and one.process.poll() is not None:
                seconds[position] = time.monotonic() - begin
        time.sleep(0.02)
    for one in started:
        one.process.kill()
        one.process.wait()
    ended = [
        Ended(
            exit_code=one.process.returncode,
            stdout=_read(one.stdout),
            stderr=_read(one.stderr),
            seconds=seconds.get(position, float("inf")),
        )
        for position, one in enumerate(started)
    ]
    assert len(seconds) == len(started), f"still running after {timeout_s} s: {ended}"
    return ended


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    with file:
        return file.read().decode(errors="replace")


def ranks_of(torchrun: Started) -> dict[int, int]:
    """rank -> process id of the processes that torchrun has started."""
    parent = torchrun.process.pid
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    variables = {int(pid): Path(f"/proc/{pid}/environ").read_text().split("\0") for pid in children}
    return {int(one.removeprefix("RANK=")): pid for pid in variables for one in variables[pid] if one[:5] == "RANK="}
