"""Starts ranks, with or without torchrun's agent, and collects what they said: for tests of what a run does when
one of them fails."""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import IO
from unittest import mock

from tests.pipeline_parallel import forked_rank

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

    process: subprocess.Popen[bytes] | ForkServerProcess
    stdout: IO[bytes]
    stderr: IO[bytes]

    @property
    def exit_code(self) -> int | None:
        """None while it runs, -n if signal n has ended it."""
        return self.process.poll() if isinstance(self.process, subprocess.Popen) else self.process.exitcode


def free_port() -> int:
    """A TCP port of this host that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_ranks(
    arguments: Sequence[str],
    world_size: int,
    environment: Mapping[str, str] | None = None,
    *,
    forked: bool = False,
) -> list[Started]:
    """`python ARGUMENTS...` (e.g. ["-m", "scripts.infer", ...]) once per rank, each with torchrun's variables but
    without its agent, which would end the others when one ends.

    `forked`: from one process that has imported what stages import, which is most of what a start takes. These have the
    order of sets of strings in common, and end without the interpreter's own end; what may depend on that is for fresh
    ones.
    """
    port = str(free_port())
    ours = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(world_size)}
    ours["LOCAL_WORLD_SIZE"] = ours["WORLD_SIZE"]
    variables = [
        {**ours, "RANK": str(rank), "LOCAL_RANK": str(rank), **(environment or {})} for rank in range(world_size)
    ]
    return [_fork(arguments, one) if forked else _start([sys.executable, *arguments], one) for one in variables]


def start_torchrun(arguments: Sequence[str], world_size: int, environment: Mapping[str, str] | None = None) -> Started:
    """The same ranks under our torchrun; `arguments` name a module (-m NAME ...) or a file."""
    launcher = ["-m", "pipeline_parallel.torchrun", "--standalone", "--nproc-per-node", str(world_size)]
    return _start([sys.executable, *launcher, *arguments], environment or {})


def _inherited() -> dict[str, str]:
    """What every started process finds in its environment besides what it is given."""
    inherited = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    paths = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    inherited |= {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    # As the shell stages do: torch prints a C++ backtrace for each connection that a failing rank cuts, or does not.
    inherited.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    return inherited


def _start(command: Sequence[str], environment: Mapping[str, str]) -> Started:
    # Files, not pipes: nobody reads while the ranks run, and a full pipe would stop them.
    stdout, stderr = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 (closed once read)
    variables = {**_inherited(), **environment}
    process = subprocess.Popen(command, cwd=REPOSITORY, env=variables, stdout=stdout, stderr=stderr)
    return Started(process=process, stdout=stdout, stderr=stderr)


@cache
def _server() -> ForkServerContext:
    """A process of this run that has imported what stages import, forked for each of `_fork`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(forked_rank.IMPORTED))
    with mock.patch.dict(os.environ, _inherited(), clear=True):  # libraries read some of it when they are loaded
        forkserver.ensure_running()
    return context


def _fork(arguments: Sequence[str], environment: Mapping[str, str]) -> Started:
    stdout, stderr = tempfile.NamedTemporaryFile(), tempfile.NamedTemporaryFile()  # noqa: SIM115 (closed once read)
    given = (list(arguments), {**_inherited(), **environment}, str(REPOSITORY), stdout.name, stderr.name)
    process = _server().Process(target=forked_rank.run, args=given, daemon=True)
    process.start()
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
            if position not in seconds and one.exit_code is not None:
                seconds[position] = time.monotonic() - begin
        time.sleep(0.02)
    for one in started:
        one.process.kill()
    ended = [
        Ended(
            exit_code=_exit_code(one),
            stdout=_read(one.stdout),
            stderr=_read(one.stderr),
            seconds=seconds.get(position, float("inf")),
        )
        for position, one in enumerate(started)
    ]
    assert len(seconds) == len(started), f"still running after {timeout_s} s: {ended}"
    return ended


def _exit_code(killed: Started) -> int:
    wait = killed.process.wait if isinstance(killed.process, subprocess.Popen) else killed.process.join
    wait()
    code = killed.exit_code
    assert code is not None
    return code


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
