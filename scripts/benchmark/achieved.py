"""What a sparse model really computed and said on texts it has decoded, by one masked pass over them.

The pass selects for every token as decoding does (sparse phases `all`), so it tells, without asking the decode path
itself: the share of units each token computes, the share that any row of a batch computes at the same place (their
union, whose weights a step must read), and the log-probabilities that decoding must have had.

`DecodingCheck` looks at what is decoded before it is timed: it must have the log-probabilities that a prefill of the
same text gives, of a sparse model a masked prefill in which every token selects for itself. In half precision a unit
near its threshold may flip, and a flip moves what follows; so a sparse model's mean difference is held narrowly and its
largest one loosely.

Random weights make much of every flip, since random scores do not know which units matter: in half precision two runs
of the same sparse model end up 0.06 to 0.16 nats apart in the mean through two layers (H200) and hardly related
through 28 or 32 (0.6 to 1.2, H100; 0.02 without a flip). So the sparse path of a random model is held to `SHALLOW`, in
a float32 model of its shape with two layers, and loosely in the type that is timed; that of all layers is reported.

`step_bytes`: bytes that a decode step cannot do without: weights at the density that was achieved, and the cache.

Legend: B rows of a batch, T tokens, U units.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn

from modules.decoder import Decoder
from modules.feed_forward import MAX_FUSED_SPARSE_ROWS
from modules.requests import GenerationRequest, GenerationResult
from modules.scoring import logprobs_at
from modules.sparsity import BLOCKS, ActiveSet, Block, SelectionContext, Selector
from modules.thinned_input import ThinnedInput
from pipeline_parallel.mesh import ParallelMesh
from sparse_predictor.methods.registry import find_method
from sparse_predictor.selection import MethodName


@dataclass(frozen=True, kw_only=True)
class Achieved:
    """Means over layers and decode steps. `densities`: of a row; `unions`: of the batch. Of an MLP whose inputs are
    thinned out (TEAL) both are shares of its weights. `logprobs` [B][n]: of the tokens that decode steps chose."""

    densities: dict[Block, float]
    unions: dict[Block, float]
    logprobs: list[list[float]]


@dataclass
class Shares:
    """Of each block or matrix that was watched: density of a row, of the union."""

    rows: dict[Block, list[float]] = field(default_factory=lambda: {"attention": [], "mlp": []})
    unions: dict[Block, list[float]] = field(default_factory=lambda: {"attention": [], "mlp": []})

    def add(self, block: Block, mask: Tensor) -> None:
        """`mask` bool [B, T, U]: units computed."""
        self.rows[block].append(float(mask.float().mean()))
        self.unions[block].append(float(mask.any(0).float().mean()))


@torch.inference_mode()
def measure_achieved(model: Decoder, texts: Sequence[Sequence[int]], num_prompt: int) -> Achieved:
    """`texts`: of each row of a batch `num_prompt` tokens of a prompt and at least two that followed, all of one
    length. The model is sparse in all phases, or dense."""
    token_ids = torch.tensor(texts, device=model.device)
    shares = Shares()
    with watched(model, num_prompt, shares):
        hidden_states = model(token_ids[:, :-1])
    logprobs = logprobs_at(model, hidden_states[:, num_prompt:].flatten(0, 1), token_ids[:, num_prompt + 1 :].flatten())
    return Achieved(
        densities={block: mean(shares.rows[block] or [1.0]) for block in BLOCKS},
        unions={block: mean(shares.unions[block] or [1.0]) for block in BLOCKS},
        logprobs=logprobs[0].view(len(texts), -1).tolist(),
    )


@contextmanager
def watched(model: Decoder, start: int, shares: Shares) -> Iterator[None]:
    """While it lasts, `shares` hears what is computed for the tokens from place `start` on."""
    holders: list[tuple[Any, Selector]] = []
    hooks: list[Any] = []
    for layer_idx in model.layers:
        for block in BLOCKS:
            holder = model.half_block(layer_idx, block).block
            if holder.selector is not None:
                holders.append((holder, holder.selector))
                holder.selector = WatchedSelector(holder.selector, start, shares)
        mlp = model.mlp(layer_idx)
        for part in (mlp.gate_proj, mlp.up_proj, mlp.down_proj):
            if isinstance(part, ThinnedInput):
                hooks.append(part.register_forward_pre_hook(_watch_inputs(start, shares)))
    try:
        yield
    finally:
        for holder, selector in holders:
            holder.selector = selector
        for hook in hooks:
            hook.remove()


@dataclass(frozen=True)
class WatchedSelector:
    """A selector whose choices are counted."""

    inner: Selector
    start: int
    shares: Shares

    @property
    def lookahead(self) -> int:
        """As the selector inside."""
        return self.inner.lookahead

    def select(self, hidden_states: Tensor, context: SelectionContext) -> ActiveSet | None:
        active = self.inner.select(hidden_states, context)
        if active is not None:
            self.shares.add(context.block, active.mask.view(*hidden_states.shape[:2], -1)[:, self.start :])
        return active


def _watch_inputs(start: int, shares: Shares) -> Any:
    def count(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        assert isinstance(module, ThinnedInput)
        used = (args[0].abs() >= module.threshold) & ((args[0] != 0) | (module.threshold == float("-inf")))
        shares.add("mlp", used[:, start:])

    return count


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
        limits = self.limits or Limits.of(model.compute_dtype, sparse=self.sparse)
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


@dataclass(frozen=True, kw_only=True)
class StepBytes:
    """Of one step of a batch. `weights`: the model's own; `predictor`: of scores and stand-ins; `cache`: keys and
    values read."""

    weights: int
    predictor: int
    cache: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.predictor + self.cache

    def to_record(self, steps_per_s: float, ceiling: float) -> dict[str, Any]:
        """What a record says about bandwidth; `ceiling` in GB/s."""
        achieved = steps_per_s * self.total / 1e9
        return {
            "share_of_ceiling": achieved / ceiling,
            "bytes_per_step": self.total,
            "bytes": vars(self),
            "achieved_gb_per_s": achieved,
            "ceiling_gb_per_s": ceiling,
        }


def step_bytes(
    model: Decoder, method: MethodName, achieved: Achieved, *, batch_size: int, mean_length: float, dense_bytes: int
) -> StepBytes:
    """Of a step with `mean_length` cached positions per row. Weights are read once for all rows of the batch (the union
    of their units; all of an MLP's where more rows than `MAX_FUSED_SPARSE_ROWS` take a mask); an inactive group's keys
    and values are not read, each row for itself. `dense_bytes`: what a dense step reads of the weights."""
    itemsize, skipped, cached = model.compute_dtype.itemsize, 0.0, model.new_cache(1, 1).num_bytes
    union = achieved.unions if batch_size <= MAX_FUSED_SPARSE_ROWS else {**achieved.unions, "mlp": 1.0}
    mlp_share = union["mlp"] if method == "dense" else find_method(method).mlp_share(union["mlp"])
    for (block, _), holder in model.blocks.items():
        share = mlp_share if block == "mlp" else union["attention"]
        skipped += holder.bytes_read(1.0) - holder.bytes_read(share)
    return StepBytes(
        weights=round(dense_bytes - skipped),
        predictor=predictor_parameters(model) * itemsize,
        cache=round(cached * mean_length * batch_size * achieved.densities["attention"]),
    )


def predictor_parameters(model: Decoder) -> int:
    """Weights that a token's scores and stand-ins read, over all blocks."""
    count = 0
    for layer_idx in model.layers:
        for block in BLOCKS:
            selector: object = model.half_block(layer_idx, block).block.selector
            while hasattr(selector, "inner"):
                selector = selector.inner
            count += getattr(selector, "num_parameters_read", 0)
    return count
