"""Runs the few PTX instructions of a barrier on a CPU, one thread an instruction at a time, in any interleaving.

Memory is a dict of 4- and 8-byte values by address, and every access is seen by all at once: this checks the protocol
(who waits for whom, what is left behind), not the memory order that release and acquire stand for.
"""

import random
import re
from collections.abc import Callable, Generator, Iterator
from typing import Any

Memory = dict[int, int]


class Trapped(Exception):
    """A thread came to `trap`."""


Instruction = tuple[str | None, str, list[str]]


def parse(assembly: str) -> tuple[list[Instruction], dict[str, int]]:
    """(guard, operation, operands) of each instruction, and where labels point."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in re.split(r"[;\n]", assembly.strip().removeprefix("{").removesuffix("}")):
        line = line.strip()
        if line.endswith(":"):
            labels[line[:-1]] = len(instructions)
        elif line and not line.startswith(".reg"):
            found = re.fullmatch(r"(?:@(!?%\w+)\s+)?([\w.]+)\s*(.*)", line)
            assert found, line
            operands = [one.strip(" []") for one in found[3].split(",")] if found[3] else []
            instructions.append((found[1], found[2], operands))
    return instructions, labels


def run(assembly: str, memory: Memory, thread: int, arguments: list[int]) -> Generator[None, None, int]:
    """One thread; it yields after each instruction and returns $0. `arguments` are $1 and on."""
    instructions, labels = parse(assembly)
    values = {f"${index}": value for index, value in enumerate(arguments, 1)} | {"%tid.x": thread}

    def get(operand: str) -> int:
        return values[operand] if operand in values else int(operand)

    def compare_and_swap(place: int, compared: int, new: int) -> int:
        found = memory[place]
        if found == compared:
            memory[place] = new
        return found

    operations: dict[str, Callable[..., Any]] = {
        "mov": lambda a: a,
        "setp.ge": lambda a, b: a >= b,
        "setp.eq": lambda a, b: a == b,
        "setp.ne": lambda a, b: a != b,
        "or": lambda a, b: a or b,
        "add": lambda a, b: a + b,
        "mul": lambda a, b: a * b,
        "mad": lambda a, b, c: a * b + c,
        "ld": lambda a: memory[a],
        "atom": compare_and_swap,
    }
    at = 0
    while at < len(instructions):
        guard, operation, operands = instructions[at]
        at += 1
        taken = guard is None or bool(get(guard.removeprefix("!"))) != guard.startswith("!")
        kind = operation.split(".")[0]
        if taken and kind == "trap":
            raise Trapped
        if taken and kind == "bra":
            at = labels[operands[0]]
        elif taken:
            name = ".".join(operation.split(".")[:2]) if kind == "setp" else kind
            values[operands[0]] = operations[name](*map(get, operands[1:]))
        yield
    return values["$0"]


def interleave(threads: list[Iterator[None]], chance: random.Random, max_steps: int) -> None:
    """Run all to their end, a random one at a time. TimeoutError after `max_steps` instructions: they wait for ever."""
    alive = list(threads)
    for _ in range(max_steps):
        if not alive:
            return
        thread = chance.choice(alive)
        for _ in range(chance.choice((1, 1, 3, 20))):  # some are slow for a while
            try:
                next(thread)
            except StopIteration:
                alive.remove(thread)
                break
    raise TimeoutError(f"{len(alive)} threads are still waiting")
