"""One engine for one process and many: cut a model to this rank's part, and generate with all ranks together.

Data parallel: replica r answers every dp_size-th request. Within a replica all ranks run `modules.generation.generate`
over the same requests. Finished answers come to rank 0 as they are made.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict

from modules.decoder import Decoder
from modules.generation import generate
from modules.requests import Decode, GenerationRequest, GenerationResult, GenerationTimings
from pipeline_parallel.exchange import ReplicaExchange
from pipeline_parallel.launch import Mailbox, current_launch
from pipeline_parallel.mesh import ParallelMesh
from pipeline_parallel.stage import StageLinks, apply_pipeline
from pipeline_parallel.tensor_parallel import apply_tensor_parallel

COLLECT_INTERVAL_S = 0.1


def parallelise(model: Decoder, mesh: ParallelMesh) -> None:
    """Cut a decoder on `meta` to what this rank computes: first its stage's layers, then its share of each of them.

    ValueError if there are more stages than layers or more ranks per layer than heads.
    """
    apply_pipeline(model, mesh)
    apply_tensor_parallel(model, mesh)


def check_same_everywhere(mesh: ParallelMesh, what: str, value: str) -> None:
    """ValueError on all ranks, naming those whose value differs from rank 0's (a collective call)."""
    values = mesh.gather(value)
    others = [str(rank) for rank, found in enumerate(values) if found != values[0]]
    if others:
        raise ValueError(f"{what} of rank {', '.join(others)} is not that of rank 0")


def exchange_of(mesh: ParallelMesh) -> ReplicaExchange | None:
    """What `modules.generation.generate` needs on a rank that is not its whole replica."""
    return ReplicaExchange(mesh) if mesh.pp_size * mesh.tp_size > 1 else None


def generate_on_mesh(
    model: Decoder,
    mesh: ParallelMesh,
    requests: Sequence[GenerationRequest],
    *,
    batch_size: int = 8,
    eos_token_ids: Sequence[int] | None = None,
    decode: Decode | None = None,
    on_finish: Callable[[int, GenerationResult], None] | None = None,
    timings: GenerationTimings | None = None,
    warm_up: bool = False,
) -> None:
    """`modules.generation.generate` with all ranks (a collective call; the arguments are those of every rank).

    `batch_size` is that of a replica, in `pp_size` micro-batches. `on_finish` is called on rank 0 only, for every
    request, as soon as it has ended, and for all before this returns. `timings` ends as that of all ranks: tokens of
    all replicas over the time of the slowest.
    """
    timings = GenerationTimings() if timings is None else timings
    eos = model.config.eos_token_ids if eos_token_ids is None else tuple(eos_token_ids)
    # Ranks that disagree would wait for each other forever; flags were compared before (`Launch.check_same`).
    check_same_everywhere(mesh, "what ends a text (generation_config.json)", repr(eos))
    mine = range(mesh.dp_rank, len(requests), mesh.dp_size)
    with ExitStack() as stack:
        collector = _AnswerCollector(mesh, len(requests), on_finish)
        if collector.mailbox is not None and mesh.rank == 0:
            watch = current_launch().watch
            assert watch is not None
            stack.enter_context(watch.on_abort(collector.collect))

        generate(
            model,
            [requests[idx] for idx in mine],
            batch_size=batch_size,
            eos_token_ids=eos,
            decode=decode,
            on_token=lambda place, token_id, logprob: collector.collect_if_due(),
            on_finish=(lambda place, result: collector.add(mine[place], result)) if mesh.is_leader else None,
            timings=timings,
            exchange=exchange_of(mesh),
            warm_up=warm_up,
        )
        if isinstance(model.links, StageLinks):
            model.links.finish()
        collector.wait_for_all()
    if mesh.dp_size > 1:
        current_launch().barrier()
    _add_up_timings(mesh, timings)


class _AnswerCollector:
    """Takes the answers of this replica and, through the mailbox, of the others, and passes them on."""

    def __init__(
        self, mesh: ParallelMesh, num_requests: int, on_finish: Callable[[int, GenerationResult], None] | None
    ) -> None:
        self.mesh, self.on_finish = mesh, on_finish
        self.mailbox = Mailbox(current_launch(), "answers") if mesh.dp_size > 1 and mesh.is_leader else None
        self._num_remote = num_requests - len(range(0, num_requests, mesh.dp_size))
        self._arrived: deque[bytes] = deque()
        self._collected_s = time.monotonic()
        self._lock = threading.Lock()  # the watch's thread collects, too, when a run is cut short

    def add(self, request_idx: int, result: GenerationResult) -> None:
        """An answer of this replica."""
        if self.mesh.rank != 0:
            assert self.mailbox is not None
            self.mailbox.post(json.dumps([request_idx, asdict(result)]).encode())
        else:
            with self._lock:
                self._deliver(request_idx, result)

    def collect(self) -> None:
        """Take in what other replicas have posted."""
        if self.mailbox is None or self.mesh.rank != 0:
            return
        with self._lock:
            self._arrived += self.mailbox.drain()
            while self._arrived:  # taken off only when it is on the disk: whoever collects next goes on from there
                request_idx, result = json.loads(self._arrived[0])
                self._deliver(request_idx, GenerationResult(**result))
                self._num_remote -= 1
                self._arrived.popleft()

    def _deliver(self, request_idx: int, result: GenerationResult) -> None:
        if self.on_finish is None:
            return
        try:
            self.on_finish(request_idx, result)
        except Exception:
            self.on_finish = None  # a full disk stays full: trying the next answer would only say so again
            raise

    def collect_if_due(self) -> None:
        """`collect`, if it is some time ago."""
        if time.monotonic() - self._collected_s > COLLECT_INTERVAL_S:
            self.collect()
            self._collected_s = time.monotonic()

    def wait_for_all(self) -> None:
        """On rank 0, until every request is answered."""
        while self.mesh.rank == 0 and self._num_remote > 0:
            self.collect()
            if self._num_remote > 0:
                time.sleep(COLLECT_INTERVAL_S / 10)


def _add_up_timings(mesh: ParallelMesh, timings: GenerationTimings) -> None:
    found = mesh.gather(timings)
    leaders = [found[replica * mesh.pp_size * mesh.tp_size] for replica in range(mesh.dp_size)]
    timings.prefill_tokens = sum(each.prefill_tokens for each in leaders)
    timings.decode_tokens = sum(each.decode_tokens for each in leaders)
    timings.prefill_s = max(each.prefill_s for each in leaders)
    timings.decode_s = max(each.decode_s for each in leaders)
