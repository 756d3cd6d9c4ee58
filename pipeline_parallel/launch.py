"""Joins the ranks that torchrun, or a launcher that sets its variables, has started, and ends the group afterwards."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from typing import NoReturn

import torch
import torch.distributed as dist
from loguru import logger

from pipeline_parallel.watch import RankWatch

BAD_INPUT = 2
POLL_INTERVAL_S = 0.02


@dataclass(frozen=True, kw_only=True)
class Launch:
    """This process among all of them. One process without a launcher: rank 0 of 1, and the rest None."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    device: torch.device | None = None
    """Of this rank; its GPU is the current one."""
    store: dist.Store | None = None
    watch: RankWatch | None = None
    connect: Callable[[], dist.Store] | None = None
    """A new connection to the store, for a thread that must not wait for another's call."""
    _call_idx: Iterator[int] = field(default_factory=count, repr=False)

    def barrier(self) -> None:
        """Wait until all ranks are here, however long that takes: a collective has a timeout, and replicas may differ
        by hours. (A rank that dies meanwhile ends the wait, through the watch.)"""
        if self.store is None:
            return
        key = f"barrier{next(self._call_idx)}"
        self.store.add(key, 1)
        while self.store.add(key, 0) < self.world_size:
            time.sleep(POLL_INTERVAL_S)

    def check_same(self, options: Mapping[str, str]) -> None:
        """ValueError on each rank that was given other options than rank 0, naming the first that differs and both
        values. Ranks that disagree would compute wrong results together, or wait for each other forever."""
        if self.store is None:
            return
        key = f"options{next(self._call_idx)}"
        if self.rank == 0:
            self.store.set(key, json.dumps(options))
            return
        theirs = json.loads(self.store.get(key))
        for name in [*options, *theirs]:
            ours, other = options.get(name, "not given"), theirs.get(name, "not given")
            if ours != other:
                raise ValueError(f"{name} is {ours} here and {other} on rank 0; give all ranks the same options")


_current = Launch()


def current_launch() -> Launch:
    """The `Launch` of the enclosing `distributed` block; outside of one, that of a single process."""
    return _current


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """What the launcher's variables say; ValueError if they contradict each other."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    host: str
    port: int
    agent_holds_store: bool

    @classmethod
    def from_environment(cls) -> Ranks:
        """From RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE (default: all ranks), MASTER_ADDR and MASTER_PORT."""
        missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
        if missing:
            raise ValueError(f"WORLD_SIZE is set but {' and '.join(missing)} is not; start the ranks with torchrun")
        rank, world_size = _integer("RANK"), _integer("WORLD_SIZE")
        local_world_size = _integer("LOCAL_WORLD_SIZE", world_size)
        local_rank = _integer("LOCAL_RANK", rank % local_world_size)
        for name, number, total in (("", rank, world_size), ("LOCAL_", local_rank, local_world_size)):
            if not 0 <= number < total:
                raise ValueError(f"{name}RANK {number} is outside [0, {name}WORLD_SIZE {total})")
        return cls(
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            local_world_size=local_world_size,
            host=os.environ["MASTER_ADDR"],
            port=_integer("MASTER_PORT"),
            agent_holds_store=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )

    def device(self, device_flag: str) -> torch.device:
        """Of this rank, for a `--device` of auto, cpu or cuda."""
        if device_flag not in ("auto", "cpu", "cuda"):
            raise ValueError(
                f"--device {device_flag!r}: with {self.world_size} ranks give auto, cpu or cuda; each takes its own GPU"
            )
        num_gpus = torch.cuda.device_count() if device_flag != "cpu" and torch.cuda.is_available() else 0
        if device_flag == "cpu" or (device_flag == "auto" and num_gpus == 0):
            return torch.device("cpu")
        if self.local_world_size > num_gpus:
            raise ValueError(
                f"{self.local_world_size} ranks on a host with {num_gpus} GPUs; "
                f"start at most one per GPU (--nproc-per-node {num_gpus}), or give --device cpu"
            )
        return torch.device("cuda", self.local_rank)

    def connect(self, timeout_s: float, *, is_host: bool = False) -> dist.Store:
        """A connection to the store, which `is_host` opens in this process. ConnectionError names the address."""
        try:
            store = dist.TCPStore(
                self.host,
                self.port,
                is_master=is_host,
                timeout=timedelta(seconds=timeout_s),
                wait_for_workers=False,
            )
        except dist.DistError as error:
            problem = "cannot listen on" if is_host else "cannot reach rank 0 at"
            reason = str(error).strip().partition("\n")[0]
            raise ConnectionError(f"rank {self.rank} {problem} {self.host}:{self.port}: {reason}") from error
        # torchrun's store lives on when it restarts the ranks, and must not show them the failure before.
        return dist.PrefixStore(f"attempt{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


def _integer(name: str, default: int | None = None) -> int:
    text = os.environ.get(name, default)
    try:
        return int(text)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise ValueError(f"the launcher's variable {name} must be an integer, got {text!r}") from None


@contextmanager
def distributed(
    device: str = "auto",
    *,
    timeout_s: float = 600.0,
    join_timeout_s: float = 300.0,
    interval_s: float = 1.0,
    patience_s: float = 15.0,
    explain: Callable[[BaseException], str] = str,
    advice: str = "",
) -> Iterator[Launch]:
    """Join the ranks, with NCCL for GPUs and gloo for CPUs; within the block `current_launch` is this rank's.

    An exception in the block ends all ranks, and this process with code 2 (ValueError, OSError), 1, or
    128 + signal. The first to fail prints one line `error: rank R: cause`, and a traceback if the fault is ours.
    One process without a launcher: nothing of all this.

    device: auto, cpu or cuda, the same on all ranks. timeout_s: of a collective; generous, since the watch ends a
    run whose rank is gone after `patience_s` (see RankWatch). explain: the cause in words. advice: what to do
    once a signal has ended the run.
    """
    global _current
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield _current
        return
    ranks = Ranks.from_environment()
    rank_device = ranks.device(device)
    holds_store = ranks.rank == 0 and not ranks.agent_holds_store
    store = ranks.connect(join_timeout_s, is_host=holds_store)
    first_of_host = ranks.rank - ranks.local_rank
    owner = "torchrun's agent" if ranks.agent_holds_store else "rank 0"
    watch = RankWatch(
        ranks.connect(join_timeout_s),
        ranks.rank,
        ranks.world_size,
        store_owner=f"{owner} (or its host, {ranks.host}:{ranks.port})",
        speaks_for_host=ranks.rank == (1 if first_of_host == 0 and not ranks.agent_holds_store else first_of_host),
        interval_s=interval_s,
        patience_s=patience_s,
        join_timeout_s=join_timeout_s,
    )
    try:
        if rank_device.type == "cuda":
            torch.cuda.set_device(rank_device)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if rank_device.type == "cuda" else "gloo",
            store=dist.PrefixStore("group", store),
            rank=ranks.rank,
            world_size=ranks.world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        _current = Launch(
            rank=ranks.rank,
            world_size=ranks.world_size,
            local_rank=ranks.local_rank,
            device=rank_device,
            store=store,
            watch=watch,
            connect=lambda: ranks.connect(join_timeout_s),
        )
        yield _current
        watch.finish()
        dist.destroy_process_group()
        watch.stop()
    except BaseException as error:
        _fail(watch, error, explain, advice)
    finally:
        _current = Launch()


def _fail(watch: RankWatch, error: BaseException, explain: Callable[[BaseException], str], advice: str) -> NoReturn:
    if isinstance(error, KeyboardInterrupt):
        name = str(error) or "SIGINT"
        if name == "SIGTERM":  # torchrun ends the other ranks so
            watch.wait_for_cause()
        watch.fail(f"ended by {name}{advice and '; '}{advice}", 128 + signal.Signals[name])
    if isinstance(error, ValueError | OSError):
        logger.opt(exception=error).debug("the traceback of the error below")
        watch.fail(explain(error), BAD_INPUT)
    if isinstance(error, dist.DistError) or "gloo" in str(error) or "NCCL" in str(error):
        watch.wait_for_cause()
    watch.fail(f"{type(error).__name__}: {explain(error)}", details="".join(traceback.format_exception(error)))


class Mailbox:
    """Messages from any rank to one, over the store: they arrive while the receiver is in a collective.

    Each object has a connection of its own, so that one thread does not wait for another's. One receiver.
    """

    def __init__(self, launch: Launch, name: str) -> None:
        assert launch.connect is not None
        self._store = dist.PrefixStore("mailbox", launch.connect())
        self._name = name
        self._lock = threading.Lock()

    def post(self, message: bytes) -> None:
        """Send. When it returns the message will arrive, whatever becomes of this process."""
        self._store.queue_push(self._name, message)
        self._store.queue_len(self._name)

    def drain(self) -> list[bytes]:
        """All messages that have arrived since the last call, in order for each sender; [] at once if none has."""
        with self._lock:
            return [self._store.queue_pop(self._name) for _ in range(self._store.queue_len(self._name))]
