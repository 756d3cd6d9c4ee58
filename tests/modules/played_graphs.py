"""CUDA graphs without a GPU: the same contract, each replay runs the step's Python again."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from modules.cache import Cache
from modules.decoder import Decoder
from modules.graphs import CapturedStep, DecodeGraphs, StepInputs
from modules.sampling import SamplingParams


class PlayedGraphs:
    """What `play_graphs` has seen: the graphs of each cache, and how often a step was captured."""

    def __init__(self) -> None:
        self.made: list[DecodeGraphs] = []
        self.num_captured = 0

    def steps_ahead(self, kind: str) -> int:
        return sum(graphs.steps_ahead[kind] for graphs in self.made)


def play_graphs(monkeypatch: pytest.MonkeyPatch) -> PlayedGraphs:
    """From now on generation runs all its decode steps in played graphs."""
    seen = PlayedGraphs()

    def played(
        step: Callable[[], CapturedStep], device: torch.device, pool: Any
    ) -> tuple[Callable[[], None], CapturedStep]:
        """In the place of `capture`."""
        seen.num_captured += 1
        for _ in range(2):
            step()
        outputs = step()

        def replay() -> None:
            fresh = step()
            for old, new in ((outputs.logits, fresh.logits), (outputs.facts, fresh.facts)):
                assert old is not None and new is not None
                old.copy_(new)

        return replay, outputs

    def made(model: Decoder, cache: Cache) -> DecodeGraphs:
        seen.made.append(DecodeGraphs(model, cache))
        return seen.made[-1]

    monkeypatch.setattr("modules.graphs.capture", played)
    monkeypatch.setattr("modules.microbatch.DecodeGraphs", made)
    monkeypatch.setattr("modules.generation.can_capture", lambda model: True)
    return seen


def greedy_step(token_ids: list[int], lengths: list[int], step: int = 1) -> StepInputs:
    """Inputs of a step whose rows are all greedy."""
    count = len(token_ids)
    return StepInputs(token_ids, lengths, [step] * count, [SamplingParams()] * count)
