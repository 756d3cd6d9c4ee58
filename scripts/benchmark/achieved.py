"""What a sparse model really computed and said on texts it has decoded, by one masked pass over them.

The pass selects for every token as decoding does (sparse phases `all`), so it tells, without asking the decode path
itself: the share of units each token computes, the share that any row of a batch computes at the same place (their
union, whose weights a step must read), and the log-probabilities that decoding must have had.

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
from modules.scoring import logprobs_at
from modules.sparsity import BLOCKS, ActiveSet, Block, SelectionContext, Selector
from modules.thinned_input import ThinnedInput


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
