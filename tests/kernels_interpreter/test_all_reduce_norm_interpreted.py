"""The all-reduce on a CPU: ranks are processes that share memory, the kernel runs under Triton's interpreter."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from modules.kernels.add_norm import KINDS
from pipeline_parallel.kernels import all_reduce_norm as operator
from pipeline_parallel.kernels.all_reduce_norm import STRATEGIES, all_reduce_norm
from pipeline_parallel.kernels.barrier import begin
from pipeline_parallel.kernels.workspace import STREAM_BARRIERS
from scripts.benchmark.all_reduce_stress import reading_late
from tests.pipeline_parallel.kernels import simulated_multicast
from tests.pipeline_parallel.kernels.all_reduce_norm_cases import OPTIONS, Call, assert_right, handed_over
from tests.pipeline_parallel.kernels.shared_ranks import SharedMemory, run_ranks

pytestmark = [
    pytest.mark.skipif(operator.triton is None, reason="triton is not installed"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"),
]

MAX_TOKENS = 13
MAX_PROGRAMS = 3  # so that a program takes several rows
PAUSE_S = 0.01  # long enough for the others to go on; a call takes about as long


def token_counts(world_size: int) -> list[int]:
    return [0, 1, world_size - 1, world_size + 1, MAX_TOKENS]


def run_calls(
    calls: list[Call],
    world_size: int,
    hidden_size: int,
    dtype: torch.dtype,
    directory: Path,
    *,
    max_tokens: int = MAX_TOKENS,
    begins: tuple[int, ...] = (),
    slow_rank: int | None = None,
    multicast: bool = False,
    copies: bool = False,
) -> None:
    """Run `calls` back to back on all ranks and check each; `begin` goes before those in `begins`.

    `slow_rank` comes late to every third call, and reads late in all of them, partial sums as well as results, long
    after the others have gone on as far as they may. With `multicast` every rank has a multicast address; with `copies`
    every other two-shot call is made of copies.
    """
    pad_bytes = 4 * world_size * (MAX_PROGRAMS + STREAM_BARRIERS)
    memory = SharedMemory(world_size, max_tokens, hidden_size, dtype, pad_bytes)

    def on_rank(rank: int) -> list[Any]:
        workspace = memory.workspace(rank)
        is_slow = rank == slow_rank
        if multicast:
            workspace.multicast_address = simulated_multicast.ADDRESS
            simulated_multicast.multicast_over(workspace.partial_pointers.tolist(), dtype).start()
        results = []
        for call in calls:
            if call.index in begins:
                begin(workspace)
            if is_slow and call.index % 3 == 0:
                time.sleep(3 * PAUSE_S)
            own = handed_over(call, workspace, call.partial(rank, hidden_size, dtype))
            arguments = call.arguments(rank, world_size, hidden_size, dtype)
            programs = 0 if copies and call.may_be_copies else MAX_PROGRAMS
            with read_late() if is_slow else nullcontext():
                hidden, new_residual = all_reduce_norm(workspace, **arguments, own=own, max_programs=programs)
            if is_slow:
                time.sleep(PAUSE_S)
            results.append((hidden.clone(), new_residual))
        return results

    found = run_ranks(world_size, on_rank, directory)
    for call, results in zip(calls, zip(*found, strict=True), strict=True):
        rounds_sum = multicast and call.strategy == "two-shot"
        assert_right(
            call,
            list(results),
            hidden_size,
            dtype,
            truncates=dtype == torch.bfloat16,
            rounds_sum=rounds_sum,
            own_first=copies and call.may_be_copies,
        )
    memory.assert_guards_intact()


@contextmanager
def read_late() -> Iterator[None]:
    """In here, sleep in this process behind every wait at entry: of the kernel, and of calls made of copies."""
    wait = operator.wait

    def late_wait(*arguments: Any) -> None:
        wait(*arguments)
        time.sleep(PAUSE_S)

    with mock.patch.object(operator, "wait", late_wait), reading_late(lambda: time.sleep(PAUSE_S)):
        yield


@pytest.mark.parametrize(("world_size", "dtype"), [(2, torch.float16), (4, torch.bfloat16)])
def test_equation_holds_for_any_number_of_tokens(world_size: int, dtype: torch.dtype, tmp_path: Path) -> None:
    pairs = [(count, strategy) for count in token_counts(world_size) for strategy in STRATEGIES]
    calls = [
        Call(index=index, num_tokens=num_tokens, strategy=strategy)
        for index, (num_tokens, strategy) in enumerate(pairs)
    ]
    run_calls(calls, world_size, 24, dtype, tmp_path)


@pytest.mark.parametrize(("world_size", "dtype"), [(2, torch.bfloat16), (4, torch.float16)])
def test_copies_leave_what_the_kernel_leaves(world_size: int, dtype: torch.dtype, tmp_path: Path) -> None:
    counts = [count for count in token_counts(world_size) for _ in range(2)]
    calls = [
        Call(index=index, num_tokens=count, strategy="two-shot", kind=KINDS[index % 3])
        for index, count in enumerate(counts)
    ]
    run_calls(calls, world_size, 24, dtype, tmp_path, copies=True)


def test_no_row_is_lost_among_many(tmp_path: Path) -> None:
    """Some 10 a program, of blocks of which the last is shorter."""
    pairs = [(77, "two-shot"), (40, "one-shot")]
    calls = [Call(index=index, num_tokens=count, strategy=strategy) for index, (count, strategy) in enumerate(pairs)]
    run_calls(calls, 3, 8, torch.float16, tmp_path, max_tokens=77)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_equation_holds_with_any_options(strategy: str, tmp_path: Path) -> None:
    present = [OPTIONS, (), *((option,) for option in OPTIONS), *(OPTIONS[:i] + OPTIONS[i + 1 :] for i in range(4))]
    pairs = [(kind, options) for kind in KINDS for options in present]
    calls = [
        Call(index=index, num_tokens=3, strategy=strategy, kind=kind, present=options)
        for index, (kind, options) in enumerate(pairs)
    ]
    run_calls(calls, 2, 40, torch.bfloat16, tmp_path)


@pytest.mark.parametrize(("world_size", "dtype"), [(2, torch.bfloat16), (4, torch.float16)])
def test_multimem_adds_up_and_stores_every_element(world_size: int, dtype: torch.dtype, tmp_path: Path) -> None:
    pairs = [(count, strategy) for count in token_counts(world_size) for strategy in STRATEGIES]
    calls = [Call(index=index, num_tokens=count, strategy=strategy) for index, (count, strategy) in enumerate(pairs)]
    run_calls(calls, world_size, 40, dtype, tmp_path, multicast=True)


def test_a_late_rank_never_sees_the_next_call(tmp_path: Path) -> None:
    counts = [1, 13, 2, 13, 1, 1, 5, 0, 3, 13, 13, 1]
    calls = [
        Call(index=index, num_tokens=count, strategy=STRATEGIES[index // 2 % 2]) for index, count in enumerate(counts)
    ]
    run_calls(calls, 4, 24, torch.float16, tmp_path, begins=(0, 5, 6), slow_rank=3)


@pytest.mark.parametrize(("world_size", "slow_rank"), [(2, 0), (4, 2)])
def test_a_late_reader_among_copies_sees_its_own_call_and_no_other(
    world_size: int, slow_rank: int, tmp_path: Path
) -> None:
    """Pairs of copies between pairs of the kernel's, of one-shot, which has no barrier at its end, and of two-shot."""
    counts = [13, 13, 13, 1, 5, 13, 2, 13, 13, 12, 0, 13]
    pairs = ["two-shot", "two-shot", "one-shot", "one-shot", *["two-shot"] * 5, "two-shot", "one-shot", "two-shot"]
    calls = [
        Call(index=index, num_tokens=count, strategy=strategy)
        for index, (count, strategy) in enumerate(zip(counts, pairs, strict=True))
    ]
    run_calls(calls, world_size, 24, torch.float16, tmp_path, begins=(0, 5, 6), slow_rank=slow_rank, copies=True)
