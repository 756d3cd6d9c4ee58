"""Whether a decode path computes what it should: looked at before it is timed.

What is decoded must have the log-probabilities that a prefill of the same text gives: of a sparse model a masked
prefill in which every token selects for itself. In half precision a unit near its threshold may flip, and a flip moves
what follows; so a sparse model's mean difference is held narrowly and its largest one loosely.

Random weights make much of every flip, since random scores do not know which units matter: in half precision two runs
of the same sparse model end up 0.06 to 0.16 nats apart in the mean through two layers (H200) and hardly related
through 28 or 32 (0.6 to 1.2, H100; 0.02 without a flip). So the sparse path of a random model is held to `SHALLOW`, in
a float32 model of its shape with two layers, and loosely in the type that is timed; that of all layers is reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import mean

import torch

from modules.decoder import Decoder
from modules.requests import GenerationRequest, GenerationResult
from pipeline_parallel.mesh import ParallelMesh
from scripts.benchmark.achieved import Achieved, measure_achieved

DENSITY_TOLERANCE = 0.02
SHALLOW_LAYERS = 2


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How far log-probabilities of the same tokens may differ: any of them, and their mean."""

    largest: float
    mean: float

    @staticmethod
    def of(dtype: torch.dtype, *, sparse: bool) -> Limits:
        """By type of the weights."""
        if dtype == torch.float64:
            return Limits(largest=1e-8, mean=1e-8)
        if dtype == torch.float32:
            return Limits(largest=0.5, mean=0.02) if sparse else Limits(largest=1e-3, mean=1e-4)
        return Limits(largest=3.0, mean=0.2) if sparse else Limits(largest=1.0, mean=0.1)

    def check(self, ours: Sequence[float], theirs: Sequence[float], what: str) -> tuple[float, float]:
        """(largest, mean) difference; ValueError if they are beyond the limits, or not a number."""
        differences = [abs(here - there) for here, there in zip(ours, theirs, strict=True)]
        largest, average = max(differences), mean(differences)
        # Written so that NaN fails; max() alone may not see it.
        if not (all(difference <= self.largest for difference in differences) and average <= self.mean):
            raise ValueError(
                f"{what}: log-probabilities of the same tokens differ by {average} in the mean (allowed {self.mean}) "
                f"and {largest} at most (allowed {self.largest}); it is not timed"
            )
        return largest, average


# With two layers in float32, where a score hardly ever lies so close to its threshold that the order of a sum matters:
# mostly 0.0000 to 0.0004 nats in the mean; one entry of TEAL's that flipped early in a text was 0.011.
SHALLOW = Limits(largest=0.25, mean=0.03)
# In half precision flips count; other neurons than the right ones are 3.5 to 5.5 nats away in the mean.
SHALLOW_HALF = Limits(largest=3.0, mean=0.5)
REPORTED = Limits(largest=float("inf"), mean=float("inf"))  # only what is not a number is refused


@dataclass
class DecodingCheck:
    """Looks at what a batch has decoded (see `engine.measure`) and remembers, by batch size, what was achieved.

    `expected`: density of MLPs and of heads that must come out, None if they are only reported. `limits`: None for
    those of the type.
    """

    sparse: bool
    expected: tuple[float, float] | None = None
    limits: Limits | None = None
    achieved: dict[int, Achieved] = field(default_factory=dict)
    differences: dict[int, tuple[float, float]] = field(default_factory=dict)

    def __call__(
        self, model: Decoder, mesh: ParallelMesh, batch: Sequence[GenerationRequest], heard: dict[int, GenerationResult]
    ) -> None:
        del mesh  # there is one process
        size = len(batch)
        texts = [[*request.prompt_token_ids, *heard[idx].token_ids] for idx, request in enumerate(batch)]
        found = measure_achieved(model, texts, len(batch[0].prompt_token_ids))
        limits = self.limits or Limits.of(model.dtype, sparse=self.sparse)
        decoded = [value for idx in range(size) for value in heard[idx].logprobs[1:]]
        masked = [value for row in found.logprobs for value in row]
        self.differences[size] = limits.check(decoded, masked, "decoding and a masked prefill")
        self.achieved[size] = found
        counted = (
            mean(heard[idx].mlp_density for idx in range(size)),
            mean(heard[idx].head_density for idx in range(size)),
        )
        reached = found.densities["mlp"], found.densities["attention"]
        for what, target in (("decode steps counted", counted), ("was asked for", self.expected)):
            if target is not None and max(map(_gap, reached, target)) > DENSITY_TOLERANCE:
                raise ValueError(
                    f"density of MLPs and heads in a masked prefill is {reached}, and {target} {what}; it is not timed"
                )


def _gap(here: float, there: float) -> float:
    return abs(here - there)
