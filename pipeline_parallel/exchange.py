"""Messages between the processes of one replica while they generate: chosen tokens, and the counts of each process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from modules.generation import TokenExchange
from pipeline_parallel.mesh import ParallelMesh
from pipeline_parallel.schedule import stage_order

COUNTS_TAG = 1 << 20  # messages of a micro-batch have its number as their tag


@dataclass
class _PendingReport:
    """A report that waits for the other ranks' counts."""

    step: int
    total: Tensor
    arriving: list[tuple[Tensor, dist.Work]]
    report: Callable[[list[float]], None]


class ReplicaExchange(TokenExchange):
    """The exchange of the processes of one replica. Messages are a few bytes for the hosts, so they go over gloo.

    Each rank of the last stage sends the chosen tokens to the ranks of the same tp_rank in the other stages (all ranks
    of a stage choose alike). Counts are summed on the replica's leader. It reports a sum when all counts have come, at
    most one round of steps late; other ranks report their own counts.
    """

    def __init__(self, mesh: ParallelMesh) -> None:
        self.mesh = mesh
        self.num_microbatches = mesh.pp_size
        self._own: dict[int, list[float]] = {}
        self._sends: dict[int, list[dist.Work]] = {}
        self._count_sends: list[tuple[Tensor, dist.Work]] = []
        self._pending: deque[_PendingReport] = deque()
        self._step = self._round = 0

    def order(self, num_microbatches: int) -> Iterator[int]:
        """See TokenExchange."""
        self._round = num_microbatches
        for _, microbatch in stage_order(self.mesh.pp_size, num_microbatches, self.mesh.pp_rank):
            self._step += 1
            self._report(before=self._step - self._round)
            yield microbatch

    def publish(self, microbatch: int, message: list[float]) -> None:
        """See TokenExchange."""
        for work in self._sends.pop(microbatch, []):
            work.wait()
        self._own[microbatch] = message
        payload = torch.tensor(message, dtype=torch.float64)
        self._sends[microbatch] = [
            _sent(payload, self.mesh.rank_at(pp_rank=stage), microbatch, self.mesh.pp_group)
            for stage in range(self.mesh.pp_size - 1)
        ]

    def receive(self, microbatch: int, size: int) -> list[float]:
        """See TokenExchange."""
        if microbatch in self._own:
            return self._own[microbatch]
        buffer = torch.empty(size, dtype=torch.float64)
        dist.recv(buffer, self.mesh.rank_at(pp_rank=self.mesh.pp_size - 1), self.mesh.pp_group, microbatch)
        return buffer.tolist()

    def add_up(self, counts: list[float], report: Callable[[list[float]], None]) -> None:
        """See TokenExchange."""
        own = torch.tensor(counts, dtype=torch.float64)
        leader, *others = self.mesh.replica_ranks()
        if self.mesh.rank != leader:
            self._count_sends.append((own, _sent(own, leader, COUNTS_TAG, None)))
            report(counts)
            return
        arriving = []
        for rank in others:
            buffer = torch.empty_like(own)
            work = dist.irecv(buffer, rank, tag=COUNTS_TAG)
            assert work is not None
            arriving.append((buffer, work))
        self._pending.append(_PendingReport(self._step, own, arriving, report))

    def barrier(self) -> None:
        """See TokenExchange."""
        dist.all_reduce(torch.zeros(1), group=self.mesh.pp_group)  # of a tensor on the CPU: over gloo, without the GPU

    def finish(self) -> None:
        """See TokenExchange."""
        self._report(before=self._step + 1)
        for works in self._sends.values():
            for work in works:
                work.wait()
        for _, work in self._count_sends:
            work.wait()
        self._own.clear()
        self._sends.clear()
        self._count_sends.clear()

    def _report(self, before: int) -> None:
        # A round later all stages have been where the counts were sent, so this hardly waits.
        while self._pending and self._pending[0].step < before:
            pending = self._pending.popleft()
            for buffer, work in pending.arriving:
                work.wait()
                pending.total += buffer
            pending.report(pending.total.tolist())


def _sent(payload: Tensor, rank: int, tag: int, group: dist.ProcessGroup | None) -> dist.Work:
    work = dist.isend(payload, rank, group, tag)
    assert work is not None
    return work
