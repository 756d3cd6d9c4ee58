"""The ranks of one replica as threads of this process, with messages that are as late as they may be.

A send ends only when its message is received, and what is received is what the sender's buffer holds *then*: a loop
that works here neither counts on messages being buffered nor writes to a buffer too early.
"""

import queue
import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from pipeline_parallel import communication, exchange
from pipeline_parallel.mesh import ParallelMesh
from tests.modules.unit_shard_ranks import Ranks

PATIENCE_S = 20.0


@dataclass(frozen=True)
class ThreadGroup:
    """What stands for a process group; `ranks` where its members meet in collectives."""

    name: str
    ranks: Ranks
    place: int

    def size(self) -> int:
        return self.ranks.size


@dataclass(frozen=True)
class Work:
    """A send or receive under way."""

    end: Callable[[], object]

    def wait(self) -> None:
        self.end()


class ThreadNetwork:
    """Stands for torch.distributed in the modules that call it, for all threads of one replica."""

    def __init__(self) -> None:
        self._channels: dict[Any, queue.Queue[tuple[Tensor, threading.Event]]] = defaultdict(queue.Queue)
        self._lock = threading.Lock()
        self._here = threading.local()

    def enter(self, rank: int) -> None:
        """Say which rank this thread is."""
        self._here.rank = rank

    def isend(self, tensor: Tensor, dst: int, group: ThreadGroup | None = None, tag: int = 0) -> Work:
        received = threading.Event()
        self._channel(group, self._here.rank, dst, tag).put((tensor, received))

        def end() -> None:
            if not received.wait(PATIENCE_S):
                raise TimeoutError(f"rank {dst} does not receive what was sent to it (tag {tag})")

        return Work(end)

    def irecv(self, tensor: Tensor, src: int, group: ThreadGroup | None = None, tag: int = 0) -> Work:
        channel = self._channel(group, src, self._here.rank, tag)

        def end() -> None:
            sent, received = channel.get(timeout=PATIENCE_S)
            assert sent.shape == tensor.shape and sent.dtype == tensor.dtype
            tensor.copy_(sent)
            received.set()

        return Work(end)

    def recv(self, tensor: Tensor, src: int, group: ThreadGroup | None = None, tag: int = 0) -> None:
        self.irecv(tensor, src, group, tag).wait()

    def all_reduce(self, tensor: Tensor, group: ThreadGroup) -> None:
        tensor.copy_(torch.stack(group.ranks.exchange(group.place, tensor.clone())).sum(0))

    def all_gather(self, joined: Tensor, tensor: Tensor, group: ThreadGroup) -> None:
        joined.copy_(torch.cat(group.ranks.exchange(group.place, tensor.clone())))

    def is_quiet(self) -> bool:
        """Whether all that was sent has been received."""
        return all(channel.empty() for channel in self._channels.values())

    def _channel(self, group: ThreadGroup | None, source: int, target: int, tag: int) -> queue.Queue[Any]:
        with self._lock:
            return self._channels["world" if group is None else group.name, source, target, tag]


def on_threads(tp_size: int, pp_size: int, function: Callable[[ParallelMesh], Any]) -> list[Any]:
    """`function(mesh)` on every rank of one replica at once; what they return, in order of ranks."""
    network = ThreadNetwork()
    columns = [Ranks(tp_size) for _ in range(pp_size)]
    rows = [Ranks(pp_size) for _ in range(tp_size)]

    def run(rank: int) -> Any:
        network.enter(rank)
        pp_rank, tp_rank = divmod(rank, tp_size)
        tp_group: Any = ThreadGroup(f"stage {pp_rank}", columns[pp_rank], tp_rank)
        pp_group: Any = ThreadGroup(f"column {tp_rank}", rows[tp_rank], pp_rank)
        mesh = ParallelMesh(
            tp_rank=tp_rank,
            tp_size=tp_size,
            pp_rank=pp_rank,
            pp_size=pp_size,
            device=torch.device("cpu"),
            tp_group=tp_group,
            pp_group=pp_group,
        )
        return function(mesh)

    with (
        mock.patch.object(exchange, "dist", network),
        mock.patch.object(communication, "dist", network),
        mock.patch.object(communication, "_all_gather", network.all_gather),
        ThreadPoolExecutor(tp_size * pp_size) as threads,
    ):
        found = list(threads.map(run, range(tp_size * pp_size)))
    assert network.is_quiet()
    return found
