"""The barrier's assembly, run instruction by instruction: nobody passes early, nobody waits for ever, pads end as 0."""

import random
from collections.abc import Generator, Iterator

import pytest

from pipeline_parallel.kernels import barrier
from tests.pipeline_parallel.kernels.assembly_threads import Memory, Trapped, interleave, run

pytestmark = pytest.mark.skipif(barrier.triton is None, reason="triton is not installed")

NUM_THREADS = 10  # of a program, more than ranks
TABLE, PADS = 10_000, 20_000
PROGRAMS = 3


def pads_of(world_size: int) -> Memory:
    """Zeroed pads, and the table of their addresses."""
    slots = PROGRAMS * world_size
    table = {TABLE + 8 * rank: PADS + 1000 * rank for rank in range(world_size)}
    return table | {pad + 4 * slot: 0 for pad in table.values() for slot in range(slots)}


class Rank:
    """One program of one rank, in several barriers; `passed` counts those behind it."""

    def __init__(self, rank: int, world_size: int, program: int, tags: list[int], memory: Memory) -> None:
        self.rank, self.world_size, self.program, self.memory = rank, world_size, program, memory
        self.tags = tags
        self.entered = self.passed = 0

    def run(self, chance: random.Random) -> Iterator[None]:
        for tag in self.tags:
            self.entered += 1
            arguments = [TABLE, self.program, self.rank, self.world_size, tag]
            found = yield from self.threads(barrier.SIGNAL.value, [arguments] * NUM_THREADS, chance)
            with_found = [[*arguments, one] for one in found]
            yield from self.threads(barrier.WAIT.value, with_found, chance)
            self.passed += 1

    def threads(
        self, assembly: str, arguments: list[list[int]], chance: random.Random
    ) -> Generator[None, None, list[int]]:
        """All threads of the program through one piece of assembly; what each returns."""
        alive = {i: run(assembly, self.memory, i, arguments[i]) for i in range(NUM_THREADS)}
        found = [0] * NUM_THREADS
        while alive:
            thread = chance.choice(list(alive))
            try:
                yield next(alive[thread])
            except StopIteration as end:
                found[thread] = end.value
                del alive[thread]
        return found


def watched(rank: Rank, everybody: list[Rank], chance: random.Random) -> Iterator[None]:
    """`rank`'s instructions; an AssertionError once it has passed a barrier that another has not entered."""
    for _ in rank.run(chance):
        assert rank.passed <= min(other.entered for other in everybody)
        yield


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_barriers_hold_in_any_interleaving_and_leave_zeros(world_size: int) -> None:
    for seed in range(12 if world_size < 8 else 3):
        chance = random.Random(seed)
        memory = pads_of(world_size)
        tags = [chance.choice((1, 2, 2**31 - 1)) for _ in range(6)]
        ranks = [Rank(rank, world_size, seed % PROGRAMS, tags, memory) for rank in range(world_size)]
        interleave([watched(rank, ranks, chance) for rank in ranks], chance, max_steps=300_000)
        assert all(rank.passed == len(tags) for rank in ranks)
        assert not any(value for place, value in memory.items() if place >= PADS)


def test_a_signal_waits_for_a_peer_that_has_not_taken_the_one_before() -> None:
    memory = pads_of(2)
    fast, slow = (Rank(rank, 2, 0, [5, 7], memory) for rank in range(2))
    chance = random.Random(0)
    slow_run = slow.run(chance)
    while memory[PADS + 4] == 0:  # its signal is out; it takes none yet
        next(slow_run)
    fast_run = fast.run(chance)
    for _ in range(2000):
        next(fast_run)
    assert (fast.passed, fast.entered) == (1, 2)
    assert memory[PADS + 1000] == 5  # the second signal has not run over the first
    interleave([fast_run, slow_run], chance, max_steps=100_000)
    assert (fast.passed, slow.passed) == (2, 2)


def test_ranks_that_run_different_calls_trap_instead_of_waiting() -> None:
    for seed in range(5):
        memory = pads_of(2)
        chance = random.Random(seed)
        threads = [Rank(rank, 2, 0, [tag], memory).run(chance) for rank, tag in enumerate((5, 7))]
        with pytest.raises(Trapped):
            interleave(threads, chance, max_steps=100_000)
