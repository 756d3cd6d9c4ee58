"""Ends a run on all ranks within seconds after one of them fails, and reports which one and why.

A rank that was killed cannot report it, and the others wait for it in a collective, where no Python code runs. So each
rank has two threads. One writes a heartbeat to the store once per second, over its own connection, and looks at the
others' and for a posted failure. The other, which never waits for the store, ends the process: on a failure, on a
store that is gone or no longer answers, and on a signal that the main thread does not act on.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

from loguru import logger
from torch.distributed import PrefixStore, Store

NOT_JOINED = b"0"
SIGNALS = (signal.SIGINT, signal.SIGTERM)
STOP_TIMEOUT_S = 5.0  # for what each rank still has to do at the end
FAST_INTERVAL_S = 0.05  # of looks where somebody waits for them


class RankWatch:
    """Watches over all ranks from within one of them; starts with the object, ends with `stop` or the process.

    store: a connection to the store that all ranks share, used by this object alone.
    store_owner: the process that holds the store, in words, for the message after the store is lost.
    speaks_for_host: whether this rank prints that message; one rank per host.
    patience_s: how long a rank may show no heartbeat. A phase that holds the interpreter's lock (one long call
        of an extension that does not release it) stops the heartbeat, so this must be longer than any of those.
    join_timeout_s: how long a rank may take to show its first one.
    describe: what to call a rank, for instance with its place in the mesh; may be replaced later.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        *,
        store_owner: str = "rank 0",
        speaks_for_host: bool = True,
        interval_s: float = 1.0,
        patience_s: float = 15.0,
        join_timeout_s: float = 300.0,
        describe: Callable[[int], str] = "rank {}".format,
    ) -> None:
        self.describe = describe
        self._store = PrefixStore("watch", store)
        self._rank = rank
        self._keys = [f"rank{other}" for other in range(world_size)]
        self._store_owner, self._speaks_for_host = store_owner, speaks_for_host
        self._interval_s, self._patience_s, self._join_timeout_s = interval_s, patience_s, join_timeout_s
        self._evidence_s = patience_s / 3
        self._state = "running"  # done: this rank's work is; stopped: it will not use the store again
        self._beats = [NOT_JOINED] * world_size
        self._silent_s = [0.0] * world_size
        self._num_looks = 0
        self._failure = ""
        self._store_error = ""
        self._callbacks: list[Callable[[], None]] = []
        self._callback_lock, self._ending = threading.RLock(), threading.RLock()
        self._look_soon, self._all_done, self._stopped = threading.Event(), threading.Event(), threading.Event()
        for key in (*self._keys, "failure"):  # so that looking at them never waits
            self._store.compare_set(key, "", "" if key == "failure" else NOT_JOINED.decode())
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_writer, False)
        self._handlers = {number: signal.signal(number, self._interrupt) for number in SIGNALS}
        # The interpreter writes the number of a signal there even while the main thread is deep in C code.
        self._old_wakeup = signal.set_wakeup_fd(self._wake_writer, warn_on_full_buffer=False)
        self._threads = [
            threading.Thread(target=target, name=f"rank-watch-{target.__name__.strip('_')}", daemon=True)
            for target in (self._beat, self._guard)
        ]
        for thread in self._threads:
            thread.start()

    @contextmanager
    def on_abort(self, callback: Callable[[], None]) -> Iterator[None]:
        """Within the block, call `callback` if the run ends early: on an exception here, or on a failure elsewhere. In
        the second case it runs on the watch's thread, at any point of the main thread. Two calls never overlap. What it
        raises is logged, so that it does not hide why the run ends."""
        self._callbacks.append(callback)
        try:
            yield
        except BaseException:
            self._call(callback)
            raise
        finally:
            with self._callback_lock:
                self._callbacks.remove(callback)

    def report_failure(self, cause: str, rank: int | None = None, *, details: str = "") -> None:
        """Post why `rank` (None: this one) ends the run. Only the first report of all ranks counts, and is printed,
        after its `details`."""
        if self._failure:
            return
        line = f"{self.describe(self._rank if rank is None else rank)}: {cause}"
        posted = winner = f"{self._rank} {line}"
        try:
            winner = self._store.compare_set("failure", "", posted).decode()
        except RuntimeError as error:  # better said twice than not at all
            self._store_error = str(error)
        if winner == posted:
            _print_error(line, details)
            _tell_torchrun(line)
        self._failure = winner

    def fail(self, cause: str, exit_code: int = 1, *, details: str = "") -> NoReturn:
        """Report a failure of this rank and end the process; the others' end follows. For the main thread."""
        _ignore_signals()
        with self._ending:
            self.report_failure(cause, details=details)
            self._end(exit_code)

    def wait_for_cause(self) -> None:
        """Call when a collective failed or SIGTERM came: most likely another rank has failed, and this process ends
        in here, with that rank's cause. Returns after some seconds (less than half the patience, and a few looks) if
        nothing is known of one. For the main thread."""
        _ignore_signals()
        time.sleep(self._lower_patience())

    def _lower_patience(self) -> float:
        """Something has happened, so less silence will do as evidence; the seconds in which it will be in."""
        self._patience_s = self._evidence_s
        return self._patience_s + 3 * self._interval_s

    def finish(self) -> None:
        """Say that this rank's work is done, and wait until all ranks' is, however long that takes."""
        self._state = "done"
        self._look_soon.set()
        self._all_done.wait()

    def stop(self) -> None:
        """Stop watching, at the very end. Rank 0, whose process may hold the store, returns last."""
        self._stopped.set()
        self._look_soon.set()
        self._wake()
        for thread in self._threads:
            thread.join()
        signal.set_wakeup_fd(self._old_wakeup)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        os.close(self._wake_reader)
        os.close(self._wake_writer)
        self._release_store()

    def _release_store(self) -> None:
        self._state = "stopped"
        deadline = time.monotonic() + STOP_TIMEOUT_S
        try:
            self._look()
            while self._rank == 0 and not self._all_are("stopped") and time.monotonic() < deadline:
                time.sleep(FAST_INTERVAL_S)
                self._look()
        except RuntimeError as error:
            logger.debug(f"the store went before this rank: {error}")

    def _all_are(self, *states: str) -> bool:
        """Whether all ranks that show a heartbeat are in one of the states."""
        beats = zip(self._beats, self._silent_s, strict=True)
        return all(beat.decode().endswith(states) for beat, silent_s in beats if silent_s < self._patience_s)

    def _look(self) -> None:
        self._store.set(self._keys[self._rank], f"{self._num_looks} {self._state}")
        *beats, failure = self._store.multi_get([*self._keys, "failure"])
        self._num_looks += 1
        changed = [old != new for old, new in zip(self._beats, beats, strict=True)]
        self._silent_s = [0.0 if new else s for new, s in zip(changed, self._silent_s, strict=True)]
        self._beats = beats
        self._failure = failure.decode()

    def _check_silence(self, elapsed_s: float) -> None:
        """Report a rank that has been silent for too long; `elapsed_s`: since the last look."""
        self._silent_s = [silent_s + elapsed_s for silent_s in self._silent_s]
        for rank, (beat, silent_s) in enumerate(zip(self._beats, self._silent_s, strict=True)):
            if beat == NOT_JOINED and silent_s > self._join_timeout_s:
                self.report_failure(f"has not joined within {self._join_timeout_s:.0f} s", rank)
            elif beat != NOT_JOINED and not beat.endswith(b"stopped") and silent_s > self._patience_s:
                cause = f"has not been heard of for {silent_s:.0f} s (killed, or its host is gone)"
                self.report_failure(cause, rank)

    def _beat(self) -> None:
        looked_at = time.monotonic()
        try:
            while not self._stopped.is_set():
                self._look()
                # Where this very process stood still, silence says nothing about the others.
                elapsed_s = min(time.monotonic() - looked_at, 2 * self._interval_s)
                looked_at = time.monotonic()
                self._check_silence(elapsed_s)
                if self._failure:
                    self._wake()
                elif self._all_are("done", "stopped"):
                    self._all_done.set()
                self._look_soon.wait(self._interval_s if self._state == "running" else FAST_INTERVAL_S)
                self._look_soon.clear()
        except RuntimeError as error:
            self._store_error = str(error)
            self._wake()

    def _guard(self) -> None:
        num_looks, stalled_s, signal_number, deadline = 0, 0.0, 0, float("inf")
        while True:
            woken_at = time.monotonic()
            new_signal = self._wait_for_wake()
            elapsed_s = min(time.monotonic() - woken_at, 2 * self._interval_s)
            if self._stopped.is_set():
                return
            stalled_s = stalled_s + elapsed_s if num_looks == self._num_looks else 0.0
            num_looks = self._num_looks
            if self._failure:
                time.sleep(self._interval_s)  # so that torchrun, too, sees the rank that failed end first
                self._end(1)
            if self._store_error or stalled_s > self._patience_s:
                if self._speaks_for_host:
                    _print_error(f"{self._store_owner} is gone")
                logger.debug(self._store_error or f"the store has not answered for {stalled_s:.0f} s")
                self._store_error = self._store_error or "no answer"
                self._end(1)
            if new_signal and not signal_number:
                # The main thread may be unable to act on it; torchrun and schedulers wait 30 s before they kill.
                signal_number, deadline = new_signal, time.monotonic() + self._lower_patience()
            if time.monotonic() > deadline:
                self.report_failure(f"ended by {signal.Signals(signal_number).name}")
                self._end(128 + signal_number)

    def _wake(self) -> None:
        os.write(self._wake_writer, b"\0")

    def _wait_for_wake(self) -> int:
        """Sleep for an interval or until woken; the number of the signal that did it, else 0."""
        ready, _, _ = select.select([self._wake_reader], [], [], self._interval_s)
        # Every signal that Python handles is written there, a library's own (SIGUSR1, say) too.
        return (
            max((number for number in os.read(self._wake_reader, 4096) if number in SIGNALS), default=0) if ready else 0
        )

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        _ignore_signals()
        raise KeyboardInterrupt(signal.Signals(number).name)

    def _end(self, exit_code: int) -> NoReturn:
        # The timeout is for a thread that began to end this process and waits for a store that does not answer.
        self._ending.acquire(timeout=3 * STOP_TIMEOUT_S)
        if self._rank == 0 and not self._store_error:
            self._release_store()  # first, so that the callbacks find the others' last messages
        callbacks = threading.Thread(target=self._call_back, daemon=True)
        callbacks.start()
        callbacks.join(STOP_TIMEOUT_S)
        if self._rank != 0 and not self._store_error:
            self._release_store()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        # Not sys.exit: the main thread may be in a collective for good, and process groups wait when they are freed.
        os._exit(exit_code)

    def _call_back(self) -> None:
        with self._callback_lock:
            for callback in self._callbacks:
                self._call(callback)

    def _call(self, callback: Callable[[], None]) -> None:
        with self._callback_lock:
            try:
                callback()
            except Exception as error:
                logger.warning(f"while the run ends: {type(error).__name__}: {error}")


def _ignore_signals() -> None:
    """Once the end has begun: another one (torchrun sends it when the first rank has ended) would break that off."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _print_error(line: str, details: str = "") -> None:
    start = "\n" if sys.stderr.isatty() else ""  # off the line of a progress bar
    with suppress(OSError, ValueError):
        sys.stderr.write(f"{start}{details}error: {line}\n")
        sys.stderr.flush()


def _tell_torchrun(line: str) -> None:
    """torchrun's own report of a failure then says why, too (`error_file`; it asks for a message with these keys)."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is not None:
        extra = {"py_callstack": f"error: {line}", "timestamp": str(int(time.time()))}
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": line, "extraInfo": extra}}), encoding="utf-8")
