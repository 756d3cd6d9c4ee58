"""A store that several processes collected, read as the one that a single process would have written.

    manifest.json                 what all of it is, and dp_size, pp_size, tp_size; it counts no rows
    shard_dp{d}_pp{p}_tp{t}/      a store of its own: the part that its layout's `StorePart` says

Piece j of the collection (a document, or a piece of one) is in the shards of replica j % dp_size, whole: every rank of
that replica has its token ids and the rows of its own layers and columns. What is read is what all ranks have made
valid: of each replica the pieces that its slowest rank has, of the store the pieces before the first missing one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np

from data.store_files import MappedFiles, read_manifest
from data.store_manifest import (
    BIT_ORDER,
    MANIFEST_NAME,
    TOKEN_IDS_NAME,
    DocumentRange,
    ShardedManifest,
    StoreLayout,
    StoreManifest,
    describe_sizes,
    layout_differences,
    shard_name,
    split_documents,
)

# Rows joined at a time: bounds what a read takes beside its result.
BLOCK_ROWS = 4096


def open_files(directory: Path, *, verify: bool = False) -> MappedFiles | JoinedShards:
    """The files of the store in `directory`, joined if they are shards; errors as `ActivationStore`."""
    manifest = read_manifest(directory)
    if isinstance(manifest, ShardedManifest):
        return JoinedShards(directory, manifest, verify=verify)
    if manifest.layout.part is not None:
        raise ValueError(f"{directory} is one shard of a store; open the folder above it")
    return MappedFiles(directory, manifest, verify=verify)


class JoinedRows:
    """Where the joined rows come from: piece j is rows `sources[j]` onwards of replica j % dp_size."""

    def __init__(self, pieces: Sequence[Sequence[DocumentRange]]) -> None:
        """`pieces`: each replica's, in order; those behind the first missing piece are left out."""
        self.dp_size = len(pieces)
        num_pieces = min(len(own) * self.dp_size + replica for replica, own in enumerate(pieces))
        dealt = [pieces[number % self.dp_size][number // self.dp_size] for number in range(num_pieces)]
        lengths = [piece.stop - piece.start for piece in dealt]
        self._bounds = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        self._sources = np.array([piece.start for piece in dealt], np.int64)
        self.num_rows = int(self._bounds[-1])
        splits = split_documents(piece.document_id for piece in dealt)
        self.documents = [
            replace(piece, start=int(start), stop=int(stop), split=splits[piece.document_id])
            for piece, (start, stop) in zip(dealt, pairwise(self._bounds), strict=True)
        ]

    def locate(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """int64 [n] joined rows -> (replica, row within that replica), each [n]."""
        piece = np.searchsorted(self._bounds, rows, side="right") - 1
        return piece % self.dp_size, rows - self._bounds[piece] + self._sources[piece]


class JoinedArray:
    """One array of a sharded store, [rows, width]: indexed like a NumPy array, it reads the rows asked for.

    `parts[replica]`: the arrays of its tensor-parallel ranks, columns in order. `bits`: their columns where they are
    packed (else None); ranks then end in the middle of a byte, and the joined rows are packed anew.
    """

    ndim = 2

    def __init__(
        self, rows: JoinedRows, parts: Sequence[Sequence[np.ndarray]], bits: Sequence[int] | None = None
    ) -> None:
        self._rows = rows
        self._parts = parts
        self._bits = bits
        width = -(-sum(bits) // 8) if bits is not None else sum(part.shape[1] for part in parts[0])
        self.shape = (rows.num_rows, width)
        self.dtype = parts[0][0].dtype

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: Any) -> np.ndarray:
        row_key, column_keys = (key[0], key[1:]) if isinstance(key, tuple) else (key, ())
        if row_key is None:
            raise IndexError("an array of several shards has no new axis")
        if isinstance(row_key, list) and not row_key:
            row_key = np.zeros(0, np.int64)  # an empty list has floats
        rows = np.arange(len(self))[row_key]  # so that NumPy says what a key means, and which there is not
        found = self._read(rows.reshape(-1))
        if isinstance(row_key, slice) or row_key is Ellipsis:
            return found[(slice(None), *column_keys)]
        return found[(np.arange(rows.size).reshape(rows.shape), *column_keys)]

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[row] for row in range(len(self)))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("the rows of several shards can only be copied together")
        return self[:] if dtype is None else self[:].astype(dtype, copy=False)

    def _read(self, rows: np.ndarray) -> np.ndarray:
        found = np.empty((len(rows), self.shape[1]), self.dtype)
        for start in range(0, len(rows), BLOCK_ROWS):
            block = found[start : start + BLOCK_ROWS]
            replicas, sources = self._rows.locate(rows[start : start + BLOCK_ROWS])
            for replica in np.unique(replicas):
                here = replicas == replica
                block[here] = self._joined([part[sources[here]] for part in self._parts[replica]])
        return found

    def _joined(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        if len(parts) == 1:
            return parts[0]
        if self._bits is None:
            return np.concatenate(parts, axis=1)
        bits = [
            np.unpackbits(part, axis=1, count=count, bitorder=BIT_ORDER)
            for part, count in zip(parts, self._bits, strict=True)
        ]
        return np.packbits(np.concatenate(bits, axis=1), axis=1, bitorder=BIT_ORDER)


class JoinedShards:
    """The shards of one store, checked against each other and joined; `manifest` is that of the whole.

    FileNotFoundError or ValueError names the shard that is missing or does not fit.
    """

    def __init__(self, directory: Path, manifest: ShardedManifest, *, verify: bool = False) -> None:
        self._layout = manifest.layout
        names = shard_names(manifest.sizes)
        self._replicas = [
            [_open_shard(directory / name, manifest, verify=verify) for name in replica] for replica in names
        ]
        for path in sorted(directory.glob("shard_*")):
            if not any(path.name in replica for replica in names):
                raise ValueError(f"{path} does not belong to the store of {describe_sizes(manifest.sizes)}")
        for shards in self._replicas:
            for block in ("mlp", "attention"):
                if self._layout.units in ("both", block):
                    _check_columns(self._layout, block, shards)
        is_complete = all(shard.manifest.complete for shards in self._replicas for shard in shards)
        self._rows = JoinedRows([_common_pieces(shards) for shards in self._replicas])
        if is_complete:
            self._check_dealt()
        self.manifest = StoreManifest(
            layout=manifest.layout,
            command_line=manifest.command_line,
            git_commit=manifest.git_commit,
            num_rows=self._rows.num_rows,
            complete=is_complete,
            documents=self._rows.documents,
        )

    def array(self, name: str) -> np.ndarray | JoinedArray:
        """One file's rows: token ids in memory, the others joined as they are read."""
        if name == TOKEN_IDS_NAME:
            return self._token_ids()
        # by those ranks of one stage that compute columns of it
        held = [[shard for shard in shards if _width(shard, name)] for shards in self._replicas]
        is_packed = name.startswith("mlp_label") and self._layout.label_format == "packed"
        bits = [shard.manifest.layout.num_neurons for shard in held[0]] if is_packed else None
        return JoinedArray(self._rows, [[shard.array(name) for shard in shards] for shards in held], bits)

    def _token_ids(self) -> np.ndarray:
        replicas, sources = self._rows.locate(np.arange(self._rows.num_rows))
        token_ids = np.empty(self._rows.num_rows, "<i4")
        for replica, shards in enumerate(self._replicas):
            here = replicas == replica
            token_ids[here] = shards[0].array(TOKEN_IDS_NAME)[sources[here]]
        return token_ids

    def _check_dealt(self) -> None:
        """Once all is collected, every shard holds all its replica's pieces, and each replica its turns."""
        num_pieces = sum(len(shards[0].manifest.documents) for shards in self._replicas)
        for replica, shards in enumerate(self._replicas):
            dealt = len(range(replica, num_pieces, len(self._replicas)))
            for shard in shards:
                held = len(shard.manifest.documents)
                if held != dealt:
                    raise ValueError(
                        f"{shard.directory} holds {held} pieces of documents, but {num_pieces} pieces "
                        f"dealt to {len(self._replicas)} replicas in turn give it {dealt}; collect again"
                    )


def shard_names(sizes: Mapping[str, int]) -> list[list[str]]:
    """The shards' folders, by replica."""
    places = list(product(range(sizes["pp_size"]), range(sizes["tp_size"])))
    return [[shard_name(replica, *place) for place in places] for replica in range(sizes["dp_size"])]


def _width(shard: MappedFiles, name: str) -> int:
    file = shard.manifest.layout.files.get(name)
    return 0 if file is None else file.width or 0


def _open_shard(path: Path, whole: ShardedManifest, *, verify: bool) -> MappedFiles:
    if not (path / MANIFEST_NAME).is_file():
        raise FileNotFoundError(
            f"{path} is missing from the store, which was collected with {describe_sizes(whole.sizes)}; "
            "give --resume to collect it"
        )
    manifest = read_manifest(path)
    part = manifest.layout.part
    if not isinstance(manifest, StoreManifest) or part is None or part.name != path.name or part.sizes != whole.sizes:
        raise ValueError(f"{path} holds no shard of this name of a store of {describe_sizes(whole.sizes)}")
    if differences := layout_differences(whole.layout, replace(manifest.layout, part=None)):
        raise ValueError(f"{path} is a shard of another store: {'; '.join(differences)}")
    return MappedFiles(path, manifest, verify=verify)


def _check_columns(layout: StoreLayout, block: str, shards: Sequence[MappedFiles]) -> None:
    """Of one replica: its stages must hold every layer once, and the ranks of each all columns, in order."""
    size = layout.intermediate_size if block == "mlp" else layout.num_attention_heads
    noun = "neurons" if block == "mlp" else "heads"
    layers: list[int] = []
    position = 0
    for shard in shards:
        part = shard.manifest.layout.part
        assert part is not None
        own = part.mlp_layers if block == "mlp" else part.attention_layers
        start, stop = part.neurons if block == "mlp" else part.heads
        if part.tp_rank == 0:
            layers += own
            stage_layers, position = own, 0
        if own != stage_layers:
            raise ValueError(
                f"{shard.directory} holds {block} of layers {list(own)}, its stage that of {list(stage_layers)}"
            )
        if own and start < stop:
            if start != position:
                raise ValueError(f"{shard.directory} holds {noun} from {start}, expected from {position}")
            position = stop
        if own and part.tp_rank == part.tp_size - 1 and position != size:
            raise ValueError(f"{shard.directory}: {noun} end at {position}, of {size}")
    if sorted(layers) != list(layout.layers):
        raise ValueError(
            f"{shards[0].directory} and its other stages hold {block} of layers {sorted(layers)}, "
            f"not of {list(layout.layers)}"
        )


def _common_pieces(shards: Sequence[MappedFiles]) -> Sequence[DocumentRange]:
    """The pieces that all ranks of a replica have; ValueError if they are not the same ones."""
    slowest = min(shards, key=lambda shard: len(shard.manifest.documents))
    pieces = slowest.manifest.documents
    for shard in shards:
        for piece, found in zip(pieces, shard.manifest.documents, strict=False):
            if (piece.document_id, piece.stop) != (found.document_id, found.stop):
                raise ValueError(
                    f"{shard.directory} holds document {found.document_id!r} up to row {found.stop} where "
                    f"{slowest.directory} holds {piece.document_id!r} up to {piece.stop}; collect again"
                )
    return pieces
