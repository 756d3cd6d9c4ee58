"""Several watches in one process; test_launch.py has real ranks."""

from __future__ import annotations

import ctypes
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from pipeline_parallel.watch import RankWatch

Start = Callable[..., RankWatch]
# How `endings` ends a thread.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


@pytest.fixture
def endings(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(rank, exit code) of each watch that would have ended its process; here it ends the calling thread."""
    seen: list[tuple[int, int]] = []

    def end(watch: RankWatch, exit_code: int) -> NoReturn:
        seen.append((watch._rank, exit_code))
        raise SystemExit(exit_code)

    monkeypatch.setattr(RankWatch, "_end", end)
    return seen


@pytest.fixture
def start(endings: list[tuple[int, int]]) -> Iterator[Start]:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    watches: list[RankWatch] = []

    def start(rank: int, world_size: int, **options: Any) -> RankWatch:
        connection = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
        quick = {"interval_s": 0.02, "patience_s": 0.6, **options}
        watches.append(RankWatch(connection, rank, world_size, **quick))
        return watches[-1]

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield start
    for watch in reversed(watches):
        if not watch._stopped.is_set():
            watch.stop()
    for number, handler in handlers.items():
        signal.signal(number, handler)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rank-watch")]


def wait_until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_first_report_counts_and_ends_all(
    start: Start, endings: list[tuple[int, int]], capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, _ = (start(rank, 3, describe="rank {} (tp 0)".format) for rank in range(3))
    second.report_failure("the disk is full", details="what led to it\n")
    first.report_failure("connection closed")
    wait_until(lambda: len(endings) == 3)
    assert sorted(endings) == [(0, 1), (1, 1), (2, 1)]
    assert capsys.readouterr().err == "what led to it\nerror: rank 1 (tp 0): the disk is full\n"


def test_torchruns_own_report_names_the_cause(
    start: Start, endings: list[tuple[int, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    start(0, 1).report_failure("the disk is full")
    wait_until(lambda: endings)
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(tmp_path / "error.json"))
    assert "traceback : error: rank 0: the disk is full" in ChildFailedError("a stage", {0: failure}).format_msg()


def test_a_rank_that_never_joins_is_named(
    start: Start, endings: list[tuple[int, int]], capsys: pytest.CaptureFixture[str]
) -> None:
    start(1, 2, join_timeout_s=0.2)
    wait_until(lambda: endings)
    assert capsys.readouterr().err == "error: rank 0: has not joined within 0 s\n"


def test_settle_needs_less_silence(
    start: Start, endings: list[tuple[int, int]], capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = start(0, 2, patience_s=30.0), start(1, 2)
    wait_until(lambda: first._beats[1] != b"0")
    second._stopped.set()  # no heartbeat any more, and no word either
    first._evidence_s = 0.3
    first.wait_for_cause()
    wait_until(lambda: endings)
    assert "error: rank 1: has not been heard of for 0 s" in capsys.readouterr().err


def test_a_process_that_stood_still_accuses_nobody(start: Start, endings: list[tuple[int, int]]) -> None:
    watches = [start(rank, 2) for rank in range(2)]
    ctypes.PyDLL(None).usleep(900_000)  # holds the interpreter's lock: no thread runs, longer than the patience
    time.sleep(0.2)
    finish = [threading.Thread(target=watch.finish) for watch in watches]
    for thread in finish:
        thread.start()
    for thread in finish:
        thread.join(10)
    assert endings == [] and not any(thread.is_alive() for thread in finish)


def test_a_callback_is_called_once_on_an_exception_and_not_at_all_at_a_normal_end(start: Start) -> None:
    watch, calls = start(0, 1), []
    with watch.on_abort(lambda: calls.append("normal")):
        pass
    with pytest.raises(KeyError), watch.on_abort(lambda: calls.append("abort")):
        raise KeyError
    watch._call_back()
    assert calls == ["abort"]


def test_a_callback_that_fails_does_not_hide_why_the_run_ends(start: Start) -> None:
    def fail() -> None:
        raise OSError("no space left")

    with pytest.raises(KeyError), start(0, 1).on_abort(fail):
        raise KeyError


def test_sigterm_is_an_exception_once_and_leaving_restores_the_handlers(start: Start) -> None:
    before = signal.getsignal(signal.SIGTERM)
    watch = start(0, 1, patience_s=60.0)
    with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
        signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGTERM)  # while cleaning up
    watch.stop()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_store_that_no_longer_answers_ends_the_process(
    start: Start, endings: list[tuple[int, int]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, host_is_back = start(1, 2, store_owner="rank 0 (or its host)"), threading.Event()
    monkeypatch.setattr(watch, "_look", host_is_back.wait)  # as a request to a host without power: no error, no answer
    wait_until(lambda: endings)
    host_is_back.set()
    assert endings == [(1, 1)]
    assert capsys.readouterr().err == "error: rank 0 (or its host) is gone\n"
