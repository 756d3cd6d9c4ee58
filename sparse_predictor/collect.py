"""Record what every layer's MLP and attention saw and did, through forward hooks on the decoder's named points.

Legend: B batch, T tokens, D hidden, F intermediate, N query heads, H head_dim.
"""

from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from data.activation_store import ActivationStoreWriter
from data.corpora import TokenPiece
from modules.decoder import Decoder
from modules.forward_pass import real_tokens
from modules.mlp import unit_norms
from modules.scoring import pad_right
from sparse_predictor.labels import LabelDefinition, true_active

Units = Literal["mlp", "attention", "both"]


class ActivationRecorder:
    """Context manager: while open, each forward pass leaves its real tokens' rows in `rows`.

    `rows[layer_idx]` maps `mlp_x`, `mlp_label`, `att_x`, `att_label` to arrays [real tokens of the batch, width],
    float16 (labels bool when a `label_definition` packs them), in row-major order of the batch. Values that float16
    cannot hold become infinite and are refused by the store, never clipped. Works for any forward pass, decoding
    included: whoever runs the pass decides what is recorded by opening the recorder around it.
    """

    def __init__(
        self, model: Decoder, layers: Sequence[int], units: Units, label_definition: LabelDefinition | None = None
    ) -> None:
        self.model = model
        self.layers = list(layers)
        self.units = units
        self.label_definition = label_definition
        self.rows: dict[int, dict[str, np.ndarray]] = {layer: {} for layer in self.layers}
        self._keep: Tensor | None = None
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> "ActivationRecorder":
        self._handles.append(self.model.register_forward_pre_hook(self._note_padding, with_kwargs=True))
        for layer in self.layers:
            if self.units in ("mlp", "both"):
                half_block = self.model.half_block(layer, "mlp")
                self._watch(half_block.residual_in, layer, "mlp_x")
                self._watch(self.model.mlp(layer).activations, layer, "mlp_label")
            if self.units in ("attention", "both"):
                half_block = self.model.half_block(layer, "attention")
                self._watch(half_block.residual_in, layer, "att_x")
                self._watch(self.model.attention(layer).head_outputs, layer, "att_label")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def run(self, token_ids: Tensor, num_tokens: Tensor | None = None) -> None:
        """One pass without a cache over right-padded token_ids [B, T]; padding rows are dropped."""
        with torch.inference_mode():
            self.model(token_ids, num_tokens=num_tokens)

    def _note_padding(self, module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
        token_ids, num_tokens = args[0] if args else kwargs["token_ids"], kwargs.get("num_tokens")
        self.rows = {layer: {} for layer in self.layers}
        self._keep = None
        if num_tokens is not None:
            self._keep = real_tokens(token_ids, num_tokens).flatten()

    def _watch(self, point: nn.Module, layer: int, name: str) -> None:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            self.rows[layer][name] = self._to_rows(output, layer, name)

        self._handles.append(point.register_forward_hook(hook))

    def _to_rows(self, states: Tensor, layer: int, name: str) -> np.ndarray:
        rows = states.flatten(0, 1)
        if self._keep is not None:
            rows = rows[self._keep]
        if name == "att_label":
            rows = torch.linalg.vector_norm(rows, dim=-1)
        if name == "mlp_label" and self.label_definition is not None:
            norms = unit_norms(self.model.mlp(layer)).to(rows.device)
            return true_active(rows, norms, self.label_definition).cpu().numpy()
        return rows.to(torch.float16).cpu().numpy()


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
