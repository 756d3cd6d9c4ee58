"""What the generation loop asks of the processes that share a model, and the answer of one process that has it all."""

from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Protocol


class TokenExchange(Protocol):
    """How processes that each run a part of the model stay together (see pipeline_parallel.exchange)."""

    num_microbatches: int  # at most so many groups of rows take turns

    def order(self, num_microbatches: int) -> Iterator[int]:
        """The micro-batches in the order in which this process works on them, without end."""
        ...

    def publish(self, microbatch: int, message: list[float]) -> None:
        """Tell the others what was chosen (called where the head is)."""
        ...

    def receive(self, microbatch: int, size: int) -> list[float]:
        """What was chosen in the micro-batch's last turn."""
        ...

    def add_up(self, counts: list[float], report: Callable[[list[float]], None]) -> None:
        """Call `report` with the sum of `counts` over processes, now or later."""
        ...

    def meet(self) -> None:
        """Wait until all processes are here, ready for the first turn."""
        ...

    def finish(self) -> None:
        """Make the calls of `report` that are still owed."""
        ...


class OneProcess:
    """The exchange of a process that has the whole model."""

    num_microbatches = 1

    def __init__(self) -> None:
        self._message: list[float] = []

    def order(self, num_microbatches: int) -> Iterator[int]:
        """See TokenExchange."""
        return repeat(0)

    def publish(self, microbatch: int, message: list[float]) -> None:
        """See TokenExchange."""
        self._message = message

    def receive(self, microbatch: int, size: int) -> list[float]:
        """See TokenExchange."""
        return self._message

    def add_up(self, counts: list[float], report: Callable[[list[float]], None]) -> None:
        """See TokenExchange."""
        report(counts)

    def meet(self) -> None:
        """See TokenExchange."""

    def finish(self) -> None:
        """See TokenExchange."""
