"""Multi-step arithmetic in words: a generative task with answers that can be checked, made from seeds alone.

A short story gives a number of things and then one to four changes of it; the answer is an integer. Problems, the
worked solutions that few-shot examples show, and answers are pure functions of (steps, seed). One step has numbers
below ten, so that a small model solves some of them; four steps have numbers up to a hundred.

`scripts/tasks/arithmetic_words.yaml` makes lm-eval's task of it.
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from typing import Any

STEPS = (1, 2, 3, 4)
LARGEST = {1: 9, 2: 20, 3: 50, 4: 100}
TEST_SEED, FEWSHOT_SEED = 1, 3  # examples and tests share neither a seed nor a question
NUM_TESTS, NUM_EXAMPLES = 100, 16

NAMES = ("Ada", "Ben", "Chloe", "David", "Emma", "Farid", "Grace", "Hugo", "Iris", "Jonas", "Kira", "Liam", "Maya")
THINGS = ("apples", "books", "coins", "eggs", "marbles", "pencils", "shells", "stamps", "stones", "tickets")
GAINS = ("finds {} more", "buys {} more", "is given {} more", "picks up {} more")
LOSSES = ("gives away {} of them", "loses {} of them", "sells {} of them", "breaks {} of them")
FACTORS = {2: "doubles", 3: "triples"}


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One story; `reasoning` is one equation per step, and `answer` what the last one comes to."""

    question: str
    reasoning: str
    answer: int


def make_problem(steps: int, seed: int) -> Problem:
    """A problem of so many steps; ValueError if there are none such."""
    if steps not in STEPS:
        raise ValueError(f"arithmetic: steps must be one of {', '.join(map(str, STEPS))}, got {steps}")
    draw = random.Random(f"arithmetic/{steps}/{seed}")
    name, things, largest = draw.choice(NAMES), draw.choice(THINGS), LARGEST[steps]
    number = draw.randint(2, largest)
    sentences, equations = [f"{name} has {number} {things}."], []
    for step in range(steps):
        kinds = ["gain", "loss"] if number > 2 else ["gain"]
        if step > 0 and number <= largest:
            kinds.append("factor")
        kind = draw.choice(kinds)
        before = number
        if kind == "factor":
            change = draw.choice(sorted(FACTORS))
            number, sign = before * change, "*"
            sentences.append(f"Then the number of {things} {FACTORS[change]}.")
        else:
            # Something is always left: "how many" has an answer above zero.
            change = draw.randint(1, largest if kind == "gain" else min(before - 1, largest))
            number, sign = (before + change, "+") if kind == "gain" else (before - change, "-")
            action = draw.choice(GAINS if kind == "gain" else LOSSES).format(change)
            sentences.append(f"Then {name} {action}.")
        equations.append(f"{before} {sign} {change} = {number}.")
    sentences.append(f"How many {things} does {name} have now?")
    return Problem(question=" ".join(sentences), reasoning=" ".join(equations), answer=number)


def make_problems(steps: int, count: int, seed: int) -> list[Problem]:
    """The first `count` different problems of a seed."""
    found: dict[str, Problem] = {}
    number = 0
    while len(found) < count:
        problem = make_problem(steps, (seed << 32) + number)
        found.setdefault(problem.question, problem)
        number += 1
    return list(found.values())


def arithmetic_dataset(*, steps: int, **_: Any) -> dict[str, Any]:
    """lm-eval's `custom_dataset`: {"test": ..., "fewshot": ...} of one number of steps, as `datasets.Dataset`s.

    lm-eval also hands over the model's arguments, which the problems do not depend on.
    """
    from datasets import Dataset

    splits = {"test": (NUM_TESTS, TEST_SEED), "fewshot": (NUM_EXAMPLES, FEWSHOT_SEED)}
    return {
        split: Dataset.from_list([asdict(problem) for problem in make_problems(steps, count, seed)])
        for split, (count, seed) in splits.items()
    }
