"""Record the inputs and activations of every layer's MLP and attention, through forward hooks on the decoder.

Legend: B batch, T tokens, D hidden, F intermediate, N query heads, H head_dim.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from types import TracebackType
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from data.activation_store import ActivationStoreWriter
from data.corpora import TokenPiece
from data.store_manifest import StorePart
from modules.attention import Attention
from modules.decoder import Decoder
from modules.feed_forward import FeedForward, unit_norms
from modules.forward_pass import real_tokens
from modules.scoring import pad_right
from sparse_predictor.labels import LabelDefinition, true_active

Units = Literal["mlp", "attention", "both"]


class ActivationRecorder:
    """Context manager: while open, each forward pass puts its real tokens' rows into `rows`; `run` opens it itself.

    `rows[layer_idx]` maps `mlp_x`, `mlp_label`, `att_x`, `att_label` to arrays [real tokens of the batch, width],
    float16 (labels bool when a `label_definition` packs them), in row-major order of the batch. Values that float16
    cannot hold become infinite and are refused by the store, never clipped. Works for any forward pass, decoding
    included: whoever runs the pass decides what is recorded by opening the recorder around it.

    Where a model is cut, a rank records the blocks and columns that are here (`neuron_columns`, `head_columns`), and
    what blocks read only with `inputs`: it is the same on all tensor-parallel ranks.
    """

    def __init__(
        self,
        model: Decoder,
        layers: Sequence[int],
        units: Units,
        label_definition: LabelDefinition | None = None,
        *,
        inputs: bool = True,
    ) -> None:
        self.model = model
        self.layers = list(layers)
        self.units = units
        self.label_definition = label_definition
        self.inputs = inputs
        self.rows: dict[int, dict[str, np.ndarray]] = {layer: {} for layer in self.layers}
        self._keep: Tensor | None = None
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> "ActivationRecorder":
        self._handles.append(self.model.register_forward_pre_hook(self._note_padding, with_kwargs=True))
        for layer in self.layers:
            if self.units != "attention" and self.model.has_block(layer, "mlp"):
                if self.inputs:
                    self._watch(self.model.half_block(layer, "mlp").residual_in, layer, "mlp_x")
                self._watch_neurons(self.model.mlp(layer), layer)
            if self.units != "mlp" and self.model.has_block(layer, "attention"):
                if self.inputs:
                    self._watch(self.model.half_block(layer, "attention").residual_in, layer, "att_x")
                self._watch_heads(self.model.attention(layer), layer)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def run(self, token_ids: Tensor, num_tokens: Tensor | None = None) -> None:
        """One pass without a cache over right-padded token_ids [B, T]; padding rows are dropped. Unless the recorder is
        open, only this pass is recorded: what the model does between two batches (write the next document) is not."""
        with nullcontext() if self._handles else self, torch.inference_mode():
            self.model(token_ids, num_tokens=num_tokens)

    def _note_padding(self, module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
        token_ids, num_tokens = args[0] if args else kwargs["token_ids"], kwargs.get("num_tokens")
        self.rows = {layer: {} for layer in self.layers}
        self._keep = None
        if num_tokens is not None:
            self._keep = real_tokens(token_ids, num_tokens).flatten()

    def _watch_neurons(self, mlp: FeedForward, layer: int) -> None:
        definition = self.label_definition
        start, stop = neuron_columns(mlp)

        def label(rows: Tensor) -> Tensor:
            if definition is not None:
                rows = true_active(rows, unit_norms(mlp).to(rows.device), definition, mlp.unit_shard)
            return rows[:, : stop - start]  # padding stands last

        self._watch(mlp.activations, layer, "mlp_label", label)

    def _watch_heads(self, attention: Attention, layer: int) -> None:
        start, stop = head_columns(attention)
        self._watch(
            attention.head_outputs,
            layer,
            "att_label",
            lambda rows: torch.linalg.vector_norm(rows[:, : stop - start], dim=-1),
        )

    def _watch(
        self, point: nn.Module, layer: int, name: str, to_columns: Callable[[Tensor], Tensor] = lambda rows: rows
    ) -> None:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            rows = output.flatten(0, 1)
            columns = to_columns(rows if self._keep is None else rows[self._keep])
            if columns.dtype != torch.bool:
                columns = columns.to(torch.float16)
            self.rows[layer][name] = columns.cpu().numpy()

        self._handles.append(point.register_forward_hook(hook))


def neuron_columns(mlp: FeedForward) -> tuple[int, int]:
    """The neurons [start, stop) of the layer that this rank computes: all, or a tensor-parallel rank's."""
    if mlp.unit_shard is None:
        return 0, mlp.num_units
    real = mlp.unit_shard.local[mlp.unit_shard.real].tolist()
    first = real[0] if real else 0
    assert real == list(range(first, first + len(real)))  # or they would be no columns next to each other
    return first, first + len(real)


def head_columns(attention: Attention) -> tuple[int, int]:
    """The query heads [start, stop) of the layer that this rank computes."""
    return attention.query_heads or (0, attention.num_units * attention.queries_per_group)


def store_part(model: Decoder, layers: Sequence[int], **place: int) -> StorePart:
    """What this process records of `layers`; `place`: its ranks and the sizes, as in `StorePart`."""
    mlp_layers = [layer for layer in layers if model.has_block(layer, "mlp")]
    attention_layers = [layer for layer in layers if model.has_block(layer, "attention")]
    return StorePart(
        **place,
        mlp_layers=tuple(mlp_layers),
        attention_layers=tuple(attention_layers),
        neurons=neuron_columns(model.mlp(mlp_layers[0])) if mlp_layers else (0, 0),
        heads=head_columns(model.attention(attention_layers[0])) if attention_layers else (0, 0),
    )


def ragged_batches(
    pieces: Iterable[TokenPiece], *, batch_size: int, max_batch_tokens: int
) -> Iterator[list[TokenPiece]]:
    """Consecutive pieces, at most `batch_size` and (padding included) `max_batch_tokens` a batch."""
    batch: list[TokenPiece] = []
    longest = 0
    for piece in pieces:
        grown = max(longest, len(piece.token_ids))
        if batch and (len(batch) == batch_size or grown * (len(batch) + 1) > max_batch_tokens):
            yield batch
            batch, grown = [], len(piece.token_ids)
        batch.append(piece)
        longest = grown
    if batch:
        yield batch


def collect_documents(
    recorder: ActivationRecorder,
    writer: ActivationStoreWriter,
    pieces: Iterable[TokenPiece],
    *,
    batch_size: int,
    max_batch_tokens: int,
) -> Iterator[int]:
    """Run pieces of documents through the recorder into the store; yields the tokens of each batch once stored.

    Rows are stored in document order whatever the batching, and equal those of one document at a time. A batch
    becomes valid as a whole, so that a resumed run forms the same batches.
    """
    for batch in ragged_batches(pieces, batch_size=batch_size, max_batch_tokens=max_batch_tokens):
        token_ids, num_tokens = pad_right([piece.token_ids for piece in batch], recorder.model.device)
        ragged = len({len(piece.token_ids) for piece in batch}) > 1
        recorder.run(token_ids, num_tokens if ragged else None)
        start = 0
        for piece in batch:
            stop = start + len(piece.token_ids)
            rows = {
                layer: {name: array[start:stop] for name, array in arrays.items()}
                for layer, arrays in recorder.rows.items()
            }
            writer.append_document(piece.document_id, piece.token_ids, rows, may_flush=piece is batch[-1])
            start = stop
        yield start
