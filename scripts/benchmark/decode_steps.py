"""Decode steps looked at one by one: what they compute, say, read and cost.

`measure_achieved`: what a sparse model really computed and said on texts it has decoded, by one masked pass over them
that selects for every token as decoding does (sparse phases `all`). It finds, without the decode path itself,
the share of units each token computes, the share that any row of a batch computes at the same place (their union, whose
weights a step must read), and the log-probabilities that decoding must have had.

`DecodingCheck` looks at what is decoded before it is timed: it must have the log-probabilities that a prefill of the
same text gives, of a sparse model a masked prefill in which every token selects for itself. In half precision a unit
near its threshold may flip, and a flip moves what follows; so a sparse model's mean difference is held narrowly and its
largest one loosely. Random weights make much of every flip, since random scores do not know which units matter: in half
precision two runs of the same sparse model end up 0.06 to 0.16 nats apart in the mean through two layers (H200) and
hardly related through 28 or 32 (0.6 to 1.2, H100; 0.02 without a flip). So the sparse path of a random model is held to
`SHALLOW`, in a float32 model of its shape with two layers, and loosely in the type that is timed; that of all layers is
reported.

`step_bytes`: bytes that a step cannot do without, weights at the density that was achieved and the cache.

`forced_likelihood`: perplexity through decode steps. The tokens of a text are forced one by one, where a prefill takes
them all at once; on a GPU through the captured graphs that generation replays, so the number belongs to what is timed.

`bare_step_ms`: what steps cost when nothing is read and nothing asked of the host. They are those of the timed
generation, from the same prompts with the same choices, so they compute the same units; what generation takes beyond
them is the host's.

Legend: B rows of a batch, T tokens, U units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor, nn

from modules.cache import Cache
from modules.decode_step import innermost
from modules.decoder import Decoder
from modules.feed_forward import MAX_FUSED_SPARSE_ROWS
from modules.generation import decode_one_token
from modules.graphs import DecodeGraphs, StepInputs, can_capture
from modules.kernels.thinned_rows import kept_entries
from modules.requests import GenerationRequest, GenerationResult
from modules.sampling import SamplingParams, greedy
from modules.scoring import Likelihood, Window, chosen_logprobs, logprobs_at, pad_right
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
    """Context in which `shares` receives what is computed for the tokens from place `start` on."""
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
        shares.add("mlp", kept_entries(module.compared(args[0]), module.threshold)[:, start:])

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
    selectors = (innermost(block.selector) for block in model.blocks.values())
    return sum(getattr(selector, "num_parameters_read", 0) for selector in selectors)


# One token [B] for each of the first rows, behind so many cached -> logits [B, V] of the next.
Step = Callable[[list[int], int], Tensor]


@torch.inference_mode()
def forced_likelihood(model: Decoder, windows: Iterable[Window], *, batch_size: int = 8) -> Likelihood:
    """As `windows_likelihood` of a model whose sparse phases are `all`, but decoding every token. ValueError if logits
    are not finite."""
    pending = sorted(windows, key=lambda piece: -len(piece.token_ids))
    if not pending:
        return Likelihood()
    cache = cache_for_graphs(model, min(batch_size, len(pending)), len(pending[0].token_ids))
    step = graph_step(DecodeGraphs(model, cache)) if can_capture(model) else eager_step(model, cache)
    queue, total = iter(pending), Likelihood()
    while batch := list(islice(queue, batch_size)):
        total += _batch_likelihood(step, batch, model.device)
    return total


def _batch_likelihood(step: Step, batch: list[Window], device: torch.device) -> Likelihood:
    """Of windows that run together, the longest first: a row that ends is the last one."""
    nll_sum = torch.zeros((), dtype=torch.float64, device=device)
    # All that a step needs is on the device beforehand, and none of its results is read: the host runs ahead.
    text, _ = pad_right([piece.token_ids for piece in batch], device)
    context = torch.tensor([piece.num_context for piece in batch], device=device)
    for place in range(len(batch[0].token_ids) - 1):
        rows = [piece for piece in batch if place + 1 < len(piece.token_ids)]
        logits = step([piece.token_ids[place] for piece in rows], place)
        targets, counted = text[: len(rows), place + 1], context[: len(rows)] <= place + 1
        nll_sum -= chosen_logprobs(logits, targets).double().masked_fill(~counted, 0.0).sum()
    if not bool(nll_sum.isfinite()):
        raise ValueError("logits of a decode step are not finite (NaN or inf), or a token of the text is impossible")
    return Likelihood(float(nll_sum), sum(len(piece.token_ids) - max(1, piece.num_context) for piece in batch))


def cache_for_graphs(model: Decoder, num_rows: int, num_positions: int) -> Cache:
    """Graphs look at the whole cache, in pieces of 64 positions."""
    return model.new_cache(num_rows, min(-(-num_positions // 64) * 64, model.config.max_position_embeddings))


def greedy_inputs(token_ids: list[int], length: int) -> StepInputs:
    """Of a step whose rows have `length` tokens cached."""
    count = len(token_ids)
    return StepInputs(token_ids, [length] * count, [1] * count, [SamplingParams()] * count)


def graph_step(graphs: DecodeGraphs) -> Step:
    """Through the captured graphs; what they choose themselves is not used."""

    def step(token_ids: list[int], length: int) -> Tensor:
        captured = graphs.filled(greedy_inputs(token_ids, length))
        captured.replay()
        assert captured.logits is not None, "the head is elsewhere"
        return captured.logits[: len(token_ids)]

    return step


def eager_step(model: Decoder, cache: Cache) -> Step:
    """Through the model as it is."""

    def step(token_ids: list[int], length: int) -> Tensor:
        lengths = torch.full((len(token_ids),), length, device=model.device)
        rows = cache.first_rows(len(token_ids), lengths, length)
        return decode_one_token(model, torch.tensor(token_ids, device=model.device), rows)

    return step


@torch.inference_mode()
def bare_step_ms(model: Decoder, requests: Sequence[GenerationRequest], repetitions: int) -> float | None:
    """Median milliseconds of a greedy decode step of these requests run together, prompts of equal length; None where
    steps are not CUDA graphs."""
    if not can_capture(model):
        return None
    prompts = torch.tensor([request.prompt_token_ids for request in requests], device=model.device)
    (count, length), steps = prompts.shape, requests[0].max_new_tokens - 1
    cache = cache_for_graphs(model, count, length + steps + 1)
    chosen = greedy(model.logits(model(prompts, cache=cache)[:, -1])).tolist()
    graphs = DecodeGraphs(model, cache)
    inputs = greedy_inputs(chosen, length)
    graphs.filled(inputs).replay()  # captured, and run once
    samples = []
    for _ in range(repetitions):
        step = graphs.filled(inputs)
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(model.device)
        began.record()
        for _ in range(steps):
            step.replay()
        ended.record()
        torch.cuda.synchronize(model.device)
        samples.append(began.elapsed_time(ended) / steps)
    return median(samples)
