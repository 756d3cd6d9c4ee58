"""Collections by several processes, played by threads: each writes its part of documents that are always the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from data.activation_store import ActivationStoreWriter, Gather, open_shard_writer
from data.store_manifest import StoreLayout, StorePart
from tests.modules.unit_shard_ranks import Ranks

MakeDocument = Callable[..., Any]
# Pieces of documents as (document_id, tokens): a long document has several.
Pieces = Sequence[tuple[str, int]]


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How a store is cut: `neurons`, `heads`: where each rank's columns begin, and their end; `stages`: layers."""

    dp_size: int
    neurons: tuple[int, ...]
    heads: tuple[int, ...]
    stages: tuple[tuple[int, ...], ...]

    def parts(self) -> list[StorePart]:
        """Of all ranks, in their order."""
        tp_size, pp_size = len(self.neurons) - 1, len(self.stages)
        columns = list(zip(pairwise(self.neurons), pairwise(self.heads), strict=True))
        return [
            StorePart(
                dp_rank=dp_rank,
                dp_size=self.dp_size,
                pp_rank=pp_rank,
                pp_size=pp_size,
                tp_rank=tp_rank,
                tp_size=tp_size,
                mlp_layers=self.stages[pp_rank],
                attention_layers=self.stages[pp_rank],
                neurons=columns[tp_rank][0],
                heads=columns[tp_rank][1],
            )
            for dp_rank, pp_rank, tp_rank in product(range(self.dp_size), range(pp_size), range(tp_size))
        ]


def on_ranks(parts: Sequence[StorePart], run: Callable[[StorePart, Gather], Any]) -> list[Any]:
    """What `run(part, gather)` returns on each rank, or the error of one."""
    ranks = Ranks(len(parts))
    return ranks.run(lambda rank: run(parts[rank], partial(ranks.exchange, rank)))


def columns_of(layout: StoreLayout, arrays: dict[int, dict[str, Any]], part: StorePart) -> dict[int, dict[str, Any]]:
    """What one rank records of whole arrays."""
    columns = {"mlp_label": slice(*part.neurons), "att_label": slice(*part.heads)}
    own = replace(layout, part=part)
    return {
        layer: {kind: found[kind][:, columns.get(kind, slice(None))] for kind in own.layer_kinds(layer)}
        for layer, found in arrays.items()
    }


def append_pieces(
    writer: ActivationStoreWriter, layout: StoreLayout, make_document: MakeDocument, pieces: Pieces, part: StorePart
) -> int:
    """Write those of this rank's pieces that are not there yet; returns how many were."""
    num_skipped = 0
    for number, (document_id, num_tokens) in enumerate(pieces):
        if number % part.dp_size == part.dp_rank:
            token_ids, arrays = make_document(layout, f"{document_id} {number}", num_tokens)
            if writer.skip_document(document_id, token_ids):
                num_skipped += 1
            else:
                writer.append_document(document_id, token_ids, columns_of(layout, arrays, part))
    return num_skipped


def collect_sharded(
    directory: Path,
    layout: StoreLayout,
    cut: Cut,
    make_document: MakeDocument,
    pieces: Pieces,
    *,
    killed_after: Sequence[int] | None = None,
    **options: Any,
) -> list[int]:
    """A run of all ranks; returns how many pieces each skipped. `killed_after`: each rank's pieces on the disk then."""

    def run(part: StorePart, gather: Gather) -> int:
        writer = open_shard_writer(directory, replace(layout, part=part), gather, **options)
        own = pieces
        if killed_after is not None:
            own = pieces[: part.dp_size * killed_after[part.rank]]
        num_skipped = append_pieces(writer, layout, make_document, own, part)
        writer.close(complete=killed_after is None)
        return num_skipped

    return on_ranks(cut.parts(), run)


def collect_whole(
    directory: Path, layout: StoreLayout, make_document: MakeDocument, pieces: Pieces, *, complete: bool = True
) -> None:
    """The same documents by one process."""
    writer = ActivationStoreWriter(directory, layout)
    for number, (document_id, num_tokens) in enumerate(pieces):
        writer.append_document(document_id, *make_document(layout, f"{document_id} {number}", num_tokens))
    writer.close(complete=complete)
