"""Barriers of stream operations, in random interleavings: nobody passes early or waits for ever, pads end as 0."""

import random
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch

from pipeline_parallel.kernels import barrier, copied_two_shot
from pipeline_parallel.kernels.copied_two_shot import ENTRY, EXIT, stream_barrier
from pipeline_parallel.kernels.workspace import STREAM_BARRIERS, Workspace, workspace_of

PROGRAMS = 3
PAD_BYTES = 4096  # between the pads' addresses
Operation = tuple[str, int, int]  # write or wait, address, value; or passed, number of barriers, 0


def workspace_on(rank: int, world_size: int) -> Workspace:
    buffers = [torch.zeros(3, 8, dtype=torch.bfloat16) for _ in range(world_size)]
    pad = torch.zeros((PROGRAMS + STREAM_BARRIERS) * world_size, dtype=torch.int32)
    addresses = [PAD_BYTES * (1 + peer) for peer in range(world_size)]
    return workspace_of(buffers, pad, rank=rank, signal_addresses=addresses, num_multiprocessors=4)


def operations_of(
    rank: int, world_size: int, barriers: list[tuple[Literal[0, 1], int]], monkeypatch: pytest.MonkeyPatch
) -> list[Operation]:
    """What a rank queues for barriers (place, tag)."""
    queued: list[Operation] = []
    workspace = workspace_on(rank, world_size)
    monkeypatch.setattr(copied_two_shot, "check_launch", lambda programs, workspace: None)
    monkeypatch.setattr(copied_two_shot, "is_interpreted", lambda: False)
    monkeypatch.setattr(
        copied_two_shot,
        "_operations",
        lambda device: (
            lambda address, value: queued.append(("write", address, value)),
            lambda address, value: queued.append(("wait", address, value)),
        ),
    )
    for count, (place, tag) in enumerate(barriers, start=1):
        queued.append(("entered", count, 0))
        stream_barrier(workspace, place, tag)
        queued.append(("passed", count, 0))
    return queued


def run_in_some_order(queues: list[list[Operation]], chance: random.Random) -> dict[int, int]:
    """Memory after all operations; AssertionError where nobody can go on, or somebody passes too early."""
    memory: dict[int, int] = {}
    places, entered = [0] * len(queues), [0] * len(queues)
    while any(place < len(queue) for place, queue in zip(places, queues, strict=True)):
        able = [
            rank
            for rank, queue in enumerate(queues)
            if places[rank] < len(queue)
            and (queue[places[rank]][0] != "wait" or memory.get(queue[places[rank]][1], 0) == queue[places[rank]][2])
        ]
        assert able, "all ranks wait"
        rank = chance.choice(able)
        kind, address, value = queues[rank][places[rank]]
        places[rank] += 1
        if kind == "write":
            memory[address] = value
        elif kind == "entered":
            entered[rank] = address
        elif kind == "passed":
            assert min(entered) >= address, "a rank has passed a barrier that another has not entered"
    return memory


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_barriers_hold_in_any_interleaving_and_leave_zeros(world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    barriers = [barrier for tag in (12, 8, 12, 12, 4) for barrier in ((ENTRY, tag), (EXIT, tag))]
    queues = [operations_of(rank, world_size, barriers, monkeypatch) for rank in range(world_size)]
    for seed in range(100):
        memory = run_in_some_order(queues, random.Random(seed))
        assert len(memory) == 2 * world_size * (world_size - 1) and set(memory.values()) == {0}


def test_a_call_of_copies_meets_at_entry_then_at_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    met: list[tuple[int, int]] = []
    monkeypatch.setattr(copied_two_shot, "stream_barrier", lambda workspace, place, tag: met.append((place, tag)))
    monkeypatch.setattr(copied_two_shot, "fused_add_norm", lambda *arguments, out, **options: (out, None))
    for num_tokens in (1, 0):
        copied_two_shot.copied_two_shot(
            workspace_on(0, 2), num_tokens, range(num_tokens), None, None, None, None, kind="none", eps=0.0
        )
    assert met == [(ENTRY, 4), (EXIT, 4), (ENTRY, 2), (EXIT, 2)]


def test_ranks_that_differ_wait_so_a_pass_begins_with_what_tells_them_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    queues = [operations_of(rank, 2, [(ENTRY, 4 + 2 * rank)], monkeypatch) for rank in range(2)]
    with pytest.raises(AssertionError, match="all ranks wait"):
        run_in_some_order(queues, random.Random(0))
    tags: list[int] = []
    monkeypatch.setattr(barrier, "run_barrier", lambda workspace, tag: tags.append(tag))
    workspace = workspace_on(0, 2)
    for num_tokens in range(4):
        for copies in (False, True):
            workspace.partial_idx = 1
            barrier.begin(workspace, num_tokens, copies=copies)
            assert workspace.partial_idx == 0
    assert len(set(tags)) == 8 and min(tags) > 2 * 2**20 + 2, "nor are they those of calls"


def test_without_a_driver_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(copied_two_shot.ctypes, "CDLL", missing)
    with pytest.raises(RuntimeError, match="no CUDA driver with stream memory operations"):
        copied_two_shot._driver.__wrapped__()


def test_the_places_have_to_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    queues = [operations_of(rank, 2, [(ENTRY, 12), (ENTRY, 8)], monkeypatch) for rank in range(2)]
    with pytest.raises(AssertionError, match="all ranks wait|passed a barrier"):
        for seed in range(100):
            run_in_some_order(queues, random.Random(seed))


def test_slots_are_the_last_of_the_pads_and_no_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {
        address - PAD_BYTES
        for rank in range(2)
        for kind, address, _ in operations_of(rank, 2, [(ENTRY, 12), (EXIT, 12)], monkeypatch)
        if kind in ("write", "wait") and address < 2 * PAD_BYTES
    }
    assert found == {4 * (2 * PROGRAMS + 1), 4 * (2 * PROGRAMS + 3)}, "of rank 0's pad, where rank 1 signals"
    workspace_on(0, 2).check_programs(PROGRAMS)
    with pytest.raises(ValueError, match="4 programs on 2 ranks need a signal pad of 48 bytes, this one has 40"):
        workspace_on(0, 2).check_programs(PROGRAMS + 1)


def test_the_driver_is_asked_in_the_current_stream_and_its_refusal_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    driver = SimpleNamespace(
        cuStreamWriteValue32_v2=lambda stream, *values: calls.append(("write", stream.value, *values)) or 0,
        cuStreamWaitValue32_v2=lambda stream, *values: calls.append(("wait", stream.value, *values)) or 801,
    )
    monkeypatch.setattr(copied_two_shot, "check_launch", lambda programs, workspace: None)
    monkeypatch.setattr(copied_two_shot, "is_interpreted", lambda: False)
    monkeypatch.setattr(copied_two_shot, "_driver", lambda: driver)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=77))
    with pytest.raises(RuntimeError, match=r"cuStreamWaitValue32 failed \(CUDA driver error 801\)"):
        stream_barrier(workspace_on(0, 2), ENTRY, -5)
    theirs, mine = 2 * PAD_BYTES + 4 * 2 * PROGRAMS, PAD_BYTES + 4 * (2 * PROGRAMS + 1)
    assert calls == [("write", 77, theirs, 2**32 - 5, 0), ("wait", 77, mine, 2**32 - 5, 1)]
