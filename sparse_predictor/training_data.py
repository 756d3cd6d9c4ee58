"""Batches of all layers at once, read from an activation store in blocks of rows; the store may exceed memory.

Legend: L layers, n rows, D hidden, U units, F neurons, G key-value groups.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.activation_store import ActivationStore
from modules.decoder import Decoder
from modules.feed_forward import unit_norms
from modules.normalization import residual_dtype
from modules.sparsity import Block
from sparse_predictor.store import weights_sample

Ranges = list[tuple[int, int]]

# Consecutive rows read together: long enough for one disk access a layer, short enough to mix documents in a batch.
BLOCK_ROWS = 128


@dataclass(frozen=True)
class TrainingBatch:
    """`inputs` [L, n, D]: what predictors see: the blocks' own inputs, or with look-ahead those of earlier blocks.

    `activations` [L, n, U]: float (signed activations of neurons; norms of key-value groups), or bool where the
    store keeps packed labels only. `contributions` [L, n, U] >= 0: what each unit writes, |a_j| * ||down_j|| or the
    group's norm; None with packed labels.
    """

    inputs: Tensor
    activations: Tensor
    contributions: Tensor | None


def describe_store(store: ActivationStore) -> dict[str, Any]:
    """What a manifest says of the activations: how they were defined, of which layers, how many, and a hash of
    their text."""
    text = np.ascontiguousarray(store.token_ids)
    return {
        "store": dict(store.layout.definitions),
        "layers": list(store.layers),
        "rows": store.num_rows,
        "text": hashlib.sha256(text.tobytes()).hexdigest(),
    }


class TrainingRows:
    """The rows of one kind of block, for every layer of the store; `lookahead` as in design: own input for layers
    that have nothing that far back."""

    def __init__(
        self, store: ActivationStore, model: Decoder, block: Block, *, lookahead: int, device: torch.device
    ) -> None:
        self.store = store
        self.model = model
        self.block = block
        self.device = device
        self.layers = list(store.layers)
        self.source_layers = [layer - lookahead if layer >= lookahead else layer for layer in self.layers]
        missing = sorted(set(self.source_layers) - set(self.layers))
        if missing:
            raise ValueError(f"look-ahead {lookahead} reads layers {missing}, which {store.directory} does not hold")
        self.num_units = model.config.layers[0].of(block).num_units  # a store has one width for all layers
        # ||down_j|| [L, 1, F]: what makes activations of different neurons comparable. Head norms already are.
        self.unit_norms: Tensor | None = None
        if block == "mlp":
            norms = [unit_norms(model.mlp(layer)) for layer in self.layers]
            self.unit_norms = torch.stack(norms).to(device)[:, None]

    def token_ids(self, split: str) -> np.ndarray:
        """The tokens of one side's documents, one after another: int32 [rows]."""
        return np.concatenate([self.store.token_ids[start:stop] for start, stop in self.store.row_ranges(split)])

    def text(self, split: str, max_tokens: int, window: int) -> Tensor:
        """About `max_tokens` of one side's tokens as windows int64 [B, T], T at most `window` and the context."""
        tokens = self.token_ids(split)
        window = min(window, len(tokens), self.model.config.max_position_embeddings)
        count = max(1, min(len(tokens), max_tokens) // window)
        return torch.from_numpy(tokens[: count * window].reshape(count, window).astype(np.int64)).to(self.device)

    def identity(self) -> dict[str, Any]:
        """What identifies this training data: model, layers read, text."""
        return {
            "config_hash": self.store.layout.config_hash,
            "weights": weights_sample(self.model),
            "block": self.block,
            "source_layers": self.source_layers,
            "layers": self.layers,
            "text": describe_store(self.store)["text"],
        }

    def blocks(self, split: str) -> Ranges:
        """Row ranges of at most BLOCK_ROWS; neighbouring documents of the split are joined first."""
        joined: Ranges = []
        for start, stop in self.store.row_ranges(split):
            if joined and joined[-1][1] == start:
                joined[-1] = (joined[-1][0], stop)
            elif stop > start:
                joined.append((start, stop))
        return [
            (first, min(first + BLOCK_ROWS, stop)) for start, stop in joined for first in range(start, stop, BLOCK_ROWS)
        ]

    def batches(self, split: str, batch_rows: int, *, seed: int, skip: int = 0) -> Iterator[Ranges]:
        """Endless shuffled batches of at least `batch_rows` rows; a function of `seed` alone, so that training
        resumes exactly after `skip` batches. ValueError for an empty split."""
        blocks = self.blocks(split)
        if not blocks:
            raise ValueError(f"{self.store.directory}: no {split} rows; collect more documents")
        generator = np.random.default_rng(seed)
        chosen: Ranges = []
        while True:
            for place in generator.permutation(len(blocks)):
                chosen.append(blocks[place])
                if sum(stop - start for start, stop in chosen) >= batch_rows:
                    if skip:
                        skip -= 1
                    else:
                        yield chosen
                    chosen = []

    def sample(self, split: str, max_rows: int, *, seed: int = 0) -> Ranges:
        """Blocks drawn without replacement, about `max_rows` rows in all, in row order."""
        blocks = self.blocks(split)
        order = np.random.default_rng(seed).permutation(len(blocks))
        chosen: Ranges = []
        for place in order:
            if sum(stop - start for start, stop in chosen) >= max_rows:
                break
            chosen.append(blocks[place])
        return sorted(chosen)

    def load(self, ranges: Ranges) -> TrainingBatch:
        """Read row ranges of every layer onto the device, as float32."""
        return self._load(range(len(self.layers)), ranges)

    def layer_rows(self, index: int, ranges: Ranges) -> TrainingBatch:
        """As `load`, for the layer at one place of `layers` only; L = 1."""
        return self._load([index], ranges)

    def _load(self, places: Sequence[int], ranges: Ranges) -> TrainingBatch:
        inputs = torch.stack([self._inputs(self.source_layers[place], ranges) for place in places])
        activations = torch.stack([self._activations(self.layers[place], ranges) for place in places])
        contributions = None
        if activations.dtype != torch.bool:
            contributions = activations.abs()
            if self.unit_norms is not None:
                contributions *= self.unit_norms[list(places)]
        return TrainingBatch(inputs, activations, contributions)

    def _inputs(self, layer: int, ranges: Ranges) -> Tensor:
        residual = self.store.mlp_x(layer) if self.block == "mlp" else self.store.att_x(layer)
        states = self._to_device(np.concatenate([residual[start:stop] for start, stop in ranges]))
        # The store keeps the residual before the norm; serving sees the normed state. One norm does both.
        norm = self.model.norm_before(layer, self.block)
        dtype = self.model.compute_dtype
        with torch.no_grad():
            return states if norm is None else norm(states.to(residual_dtype(dtype))).to(dtype).float()

    def _activations(self, layer: int, ranges: Ranges) -> Tensor:
        if self.block == "mlp":
            rows = np.concatenate([self.store.read_mlp_label(layer, start, stop) for start, stop in ranges])
            return torch.from_numpy(rows).to(self.device) if rows.dtype == np.bool_ else self._to_device(rows)
        norms = self.store.att_label(layer)
        heads = self._to_device(np.concatenate([norms[start:stop] for start, stop in ranges]))
        groups = heads.unflatten(-1, (self.num_units, -1))
        return torch.linalg.vector_norm(groups, dim=-1)

    def _to_device(self, rows: np.ndarray) -> Tensor:
        return torch.from_numpy(rows).to(self.device).float()
