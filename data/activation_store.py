"""The activation store, written and read: see `data/store_manifest.py` for its files.

Appending is crash-safe. Rows go to the data files first; only when these are on the disk does a new manifest,
put in place atomically, say that the rows are valid. Whatever lies beyond the manifest's rows is ignored by
the reader and cut off by a resuming writer, which then goes on to write the very bytes an uninterrupted run
would have written. A resuming writer also repairs: documents that are not whole in every file are collected again.

One process at a time: the stage that writes holds `data.files.only_writer` of the folder. Of several processes each
writes a shard, and all agree where to continue before any of them writes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Self

import numpy as np
from loguru import logger

from data.files import holder_of
from data.store_files import AppendedFiles, check_free_space, document_rows, read_manifest, sound_rows, write_manifest
from data.store_manifest import (
    BIT_ORDER,
    MANIFEST_NAME,
    SPLITS,
    TOKEN_IDS_NAME,
    DocumentRange,
    ShardedManifest,
    StoreLayout,
    StoreManifest,
    check_resumable,
    split_documents,
)
from data.store_shards import JoinedArray, open_files, shard_names

# A kill loses at most this much: seconds of collecting, yet enough at a time for a disk's full speed.
FLUSH_BYTES = 256 * 2**20
TOLD_BYTES = 4 * 2**30  # a store from this size on takes so long to hash that it is logged


class ActivationStoreWriter:
    """Appends documents to a store in `directory`, which must not hold one unless `resume` is set.

    `expected_rows`: tokens the whole store will have, checked against the free disk space before anything is
    written. `keep_documents`: what a resumed store holds beyond so many is dropped. `verify`: before resuming read
    all of the files, to find what is not as it was written. `flush_bytes`: a flush starts
    once so many bytes were appended since the last; it runs beside the next appends. Used as a context manager it
    marks the store complete, unless an exception ends the block: then the documents appended so far are kept and the
    store stays incomplete.

    Raises FileExistsError (a store is there, no `resume`), ValueError (not enough disk; resuming a store of
    another layout, or one whose manifest is damaged) and FileNotFoundError (resuming files without a manifest).
    """

    def __init__(
        self,
        directory: str | Path,
        layout: StoreLayout,
        *,
        command_line: str = "",
        git_commit: str | None = None,
        expected_rows: int | None = None,
        resume: bool = False,
        keep_documents: int | None = None,
        verify: bool = False,
        flush_bytes: int = FLUSH_BYTES,
    ) -> None:
        self.directory = Path(directory)
        self.layout = layout
        self._provenance: dict[str, Any] = {"command_line": command_line, "git_commit": git_commit}
        self._flush_bytes = flush_bytes
        self._ranges: list[tuple[str, int, int]] = []
        self._num_unflushed_bytes = 0
        self._is_complete = False
        self._is_failed = False
        stored = self._stored_manifest(resume)
        if stored is not None:
            self._ranges = [(entry.document_id, entry.start, entry.stop) for entry in stored.documents]
            self._provenance = {"command_line": stored.command_line, "git_commit": stored.git_commit}
            self._is_complete = stored.complete
            sound = sound_documents(self.directory, stored, verify=verify)
            if sound < len(stored.documents):
                logger.warning(
                    f"{self.directory} is damaged: of its {len(stored.documents)} documents those from number {sound} "
                    "on are collected again"
                )
            keep_documents = sound if keep_documents is None else min(keep_documents, sound)
        surplus = self._ranges[keep_documents:]
        if surplus:
            del self._ranges[keep_documents:]
            self._is_complete = False
        self._num_stored = self._num_whole = len(self._ranges)
        self._num_skipped = 0
        if expected_rows is not None:
            check_free_space(self.directory, layout, expected_rows, self.num_rows)
        self.directory.mkdir(parents=True, exist_ok=True)
        if stored is None:
            # before the data files, so that a killed run never leaves any that no manifest accounts for
            write_manifest(self.directory, self._manifest())
        # What is dropped goes from the manifest first; a sum of what is kept is made when more is appended.
        self._files = AppendedFiles(
            self.directory, layout.files, self.num_rows, manifest=self._manifest() if surplus else None
        )
        self._is_unchanged = stored is not None and stored.complete and self._is_complete

    @property
    def num_rows(self) -> int:
        """Rows appended so far, those of a resumed store included."""
        return self._ranges[-1][2] if self._ranges else 0

    @property
    def num_documents(self) -> int:
        """Calls of append_document so far, those of a resumed store included."""
        return len(self._ranges)

    def skip_document(self, document_id: str, token_ids: np.ndarray | list[int]) -> bool:
        """True if this is the next document of the resumed store: it need not be collected again.

        Called for each document in turn, it answers False once all stored ones have come by (at once in a
        fresh store). ValueError if the corpus gives another document than the one stored at this place.
        """
        if self._num_skipped == self._num_stored:
            return False
        stored_id, start, stop = self._ranges[self._num_skipped]
        path = self.directory / TOKEN_IDS_NAME
        stored_ids = np.fromfile(path, dtype="<i4", count=stop - start, offset=4 * start)
        if stored_id != document_id or not np.array_equal(stored_ids, np.asarray(token_ids)):
            raise ValueError(
                f"cannot resume {self.directory}: document {document_id!r} of the corpus is not the stored "
                f"document {stored_id!r} (rows {start} to {stop}); the corpus or its tokenisation changed"
            )
        self._num_skipped += 1
        return True

    def append_document(
        self,
        document_id: str,
        token_ids: np.ndarray | list[int],
        activations: Mapping[int, Mapping[str, np.ndarray]],
        *,
        may_flush: bool = True,
    ) -> None:
        """Append a document, or a piece of one: `token_ids` [rows], and each layer's arrays [rows, width].

        Arrays are float16 (other floats are converted), a packed mlp_label is bool [rows, intermediate_size].
        `may_flush=False` for all but the last document of a batch makes a batch valid as a whole, so that a
        resumed run forms the same batches. ValueError, and nothing is written, for wrong layers, names or
        shapes and for values that are not finite as float16; OSError if the disk refuses: the store then
        keeps its last flush.
        """
        self._check_open()
        if self._num_skipped < self._num_stored:
            raise ValueError(
                f"{self.directory} already holds {self._num_stored} documents, of which "
                f"{self._num_skipped} were passed to skip_document: pass all of them before appending"
            )
        rows = document_rows(self.layout, document_id, token_ids, activations)
        self._is_failed, self._is_complete = True, False  # failed until all files have the rows
        self._is_unchanged = False
        self._num_unflushed_bytes += self._files.append(rows)
        self._is_failed = False
        self._ranges.append((document_id, self.num_rows, self.num_rows + len(token_ids)))
        if may_flush:
            self._num_whole = len(self._ranges)
            if self._num_unflushed_bytes >= self._flush_bytes:
                self._start_flush()

    def flush(self) -> None:
        """Make all appended documents valid on the disk; returns when they are."""
        self._check_open()
        self._start_flush()
        self._files.wait()

    def close(self, *, complete: bool = True) -> None:
        """Flush, mark the store complete (or leave it as it was), close the files; again: nothing."""
        if not self._files.is_open:
            return
        try:
            if self._is_unchanged:  # and keeps the sums that it was finished with
                return
            if complete and not self._is_failed:
                self._is_complete = True
                if (size := self.layout.estimate_bytes(self.num_rows)) > TOLD_BYTES:
                    logger.info(f"{self.directory}: reading {size / 1e9:.0f} GB once more, for the sums of its files")
            else:
                del self._ranges[self._num_whole :]  # the beginning of a batch
            self._start_flush()
            self._files.wait()
        finally:
            self._files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, exception_type: type[BaseException] | None, *rest: object) -> None:
        self.close(complete=exception_type is None)

    def _start_flush(self) -> None:
        self._files.commit(self._manifest())
        self._num_unflushed_bytes = 0

    def _check_open(self) -> None:
        if not self._files.is_open or self._is_failed:
            state = "failed in an earlier append" if self._is_failed else "is closed"
            raise ValueError(f"the writer of {self.directory} {state}; resume with a new one")

    def _manifest(self) -> StoreManifest:
        splits = split_documents(document_id for document_id, _, _ in self._ranges)
        documents = [
            DocumentRange(document_id=document_id, start=start, stop=stop, split=splits[document_id])
            for document_id, start, stop in self._ranges
        ]
        return StoreManifest(
            layout=self.layout,
            num_rows=self.num_rows,
            complete=self._is_complete,
            documents=documents,
            **self._provenance,
        )

    def _stored_manifest(self, resume: bool) -> StoreManifest | None:
        """The manifest to continue from, None for a fresh store."""
        has_manifest = (self.directory / MANIFEST_NAME).exists()
        if not has_manifest and not any(self.directory.glob("*.mmap")):
            return None
        if not resume:
            advice = "give --resume to continue it" if has_manifest else "remove it, since it lacks its manifest"
            raise FileExistsError(
                f"{self.directory} already holds an activation store: {advice}, or give another --output-dir"
            )
        manifest = read_manifest(self.directory)
        check_resumable(self.directory, manifest, self.layout)
        assert isinstance(manifest, StoreManifest)  # its sizes are this run's, and shards have manifests of their own
        return manifest


def sound_documents(directory: Path, manifest: StoreManifest, *, verify: bool) -> int:
    """How many documents, from the first one on, are whole in every file."""
    num_rows = sound_rows(directory, manifest, verify=verify)
    return sum(document.stop <= num_rows for document in manifest.documents)


class ActivationStore:
    """Reads a store; nothing is loaded before it is asked for, and then mapped, not copied.

    FileNotFoundError or ValueError names the file that is missing, truncated, not as it was written (`verify` reads all
    of it to find out; otherwise a few blocks are read, or all if the store is small), or of an unknown format version;
    BlockingIOError names the process that is still writing the store. A store whose collection was interrupted
    (`manifest.complete` is False) is read up to its last flush. A store in shards reads as the one that a single
    process would have written: its arrays are then joined as rows are taken from them (`JoinedArray`), where otherwise
    they are maps of the files.
    """

    def __init__(self, directory: str | Path, *, verify: bool = False) -> None:
        self.directory = Path(directory)
        writer = holder_of(self.directory)  # asked first: what is read after it has ended is whole
        try:
            self._files = open_files(self.directory, verify=verify)
        except (FileNotFoundError, ValueError) as error:
            raise self._being_written(writer) if writer else error from None
        self.manifest = self._files.manifest
        if writer and not self.manifest.complete:
            raise self._being_written(writer)
        self.layout = self.manifest.layout
        self._arrays: dict[str, np.ndarray | JoinedArray] = {}

    def _being_written(self, writer: str) -> BlockingIOError:
        return BlockingIOError(f"{self.directory} is being written by {writer}; wait until that has ended")

    @property
    def num_rows(self) -> int:
        """Valid rows: one per token."""
        return self.manifest.num_rows

    @property
    def layers(self) -> tuple[int, ...]:
        """The layer_idx that are stored, ascending."""
        return self.layout.layers

    @property
    def documents(self) -> Sequence[DocumentRange]:
        """The row range of each document, or piece of one, in row order."""
        return self.manifest.documents

    @property
    def token_ids(self) -> np.ndarray:
        """int32 [rows]"""
        token_ids = self._array(TOKEN_IDS_NAME)
        assert isinstance(token_ids, np.ndarray)  # joined at once: they are few bytes
        return token_ids

    def mlp_x(self, layer_idx: int) -> np.ndarray | JoinedArray:
        """float16 [rows, hidden_size]: the residual before the MLP's norm."""
        return self._layer_map("mlp_x", layer_idx)

    def mlp_label(self, layer_idx: int) -> np.ndarray | JoinedArray:
        """As stored: float16 [rows, intermediate_size], or uint8 [rows, ceil(intermediate_size / 8)]."""
        return self._layer_map("mlp_label", layer_idx)

    def att_x(self, layer_idx: int) -> np.ndarray | JoinedArray:
        """float16 [rows, hidden_size]: the residual before the attention's norm."""
        return self._layer_map("att_x", layer_idx)

    def att_label(self, layer_idx: int) -> np.ndarray | JoinedArray:
        """float16 [rows, num_attention_heads]: the L2 norm of each query head's output."""
        return self._layer_map("att_label", layer_idx)

    def read_mlp_label(self, layer_idx: int, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop), in memory: float16 [n, intermediate_size], or bool if the labels are packed."""
        if not 0 <= start <= stop <= self.num_rows:
            raise ValueError(f"rows [{start}, {stop}) are not within the store's {self.num_rows} rows")
        rows = self.mlp_label(layer_idx)[start:stop]
        if self.layout.label_format == "raw":
            return np.array(rows)
        bits = np.unpackbits(rows, axis=1, count=self.layout.intermediate_size, bitorder=BIT_ORDER)
        return bits.view(np.bool_)

    def row_ranges(self, split: str) -> list[tuple[int, int]]:
        """The row ranges [start, stop) of one split, one per document or piece, in row order."""
        if split not in SPLITS:
            raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
        return [(entry.start, entry.stop) for entry in self.documents if entry.split == split]

    def _layer_map(self, kind: str, layer_idx: int) -> np.ndarray | JoinedArray:
        if kind not in self.layout.kinds:
            raise ValueError(f"{self.directory} holds units {self.layout.units}, so it has no {kind}")
        if layer_idx not in self.layers:
            raise ValueError(f"{self.directory} has no layer {layer_idx}; it has {list(self.layers)}")
        return self._array(f"{kind}_{layer_idx}.mmap")

    def _array(self, name: str) -> np.ndarray | JoinedArray:
        if name not in self._arrays:
            self._arrays[name] = self._files.array(name)
        return self._arrays[name]


# Values of all processes, in the order of their ranks; returns when all have given theirs.
Gather = Callable[[Any], Sequence[Any]]
# A network file system may show a new file late.
VISIBLE_WITHIN_S = 60.0


@dataclass(frozen=True)
class ShardState:
    """What a shard holds that is valid."""

    num_documents: int = 0
    num_rows: int = 0
    complete: bool = False


def open_shard_writer(
    directory: Path,
    layout: StoreLayout,
    gather: Gather,
    *,
    command_line: str = "",
    git_commit: str | None = None,
    expected_rows: int | None = None,
    resume: bool = False,
    verify: bool = False,
    flush_bytes: int = FLUSH_BYTES,
) -> ActivationStoreWriter:
    """The writer of `layout.part`, opened by all processes together; arguments and errors as ActivationStoreWriter.

    The ranks of a replica run the same batches together, so they continue behind what the slowest of them has made
    valid: what the others have beyond that is dropped. `expected_rows`: of the whole store. ValueError too if the
    processes do not share the folder.
    """
    part = layout.part
    assert part is not None
    whole = replace(layout, part=None)
    # nothing is written until all have looked
    states = gather(shard_state(directory, layout, resume=resume, verify=verify))
    replica_size = part.pp_size * part.tp_size
    replicas = [states[start : start + replica_size] for start in range(0, len(states), replica_size)]
    if expected_rows is not None:
        num_stored = sum(min(state.num_rows for state in replica) for replica in replicas)
        check_free_space(directory, whole, expected_rows, num_stored)
    if part.rank == 0 and not (directory / MANIFEST_NAME).exists():
        directory.mkdir(parents=True, exist_ok=True)
        write_manifest(
            directory,
            ShardedManifest(layout=whole, sizes=part.sizes, command_line=command_line, git_commit=git_commit),
        )
    gather(None)
    _wait_until_visible(directory / MANIFEST_NAME)
    return ActivationStoreWriter(
        directory / part.name,
        layout,
        command_line=command_line,
        git_commit=git_commit,
        resume=True,
        keep_documents=min(state.num_documents for state in replicas[part.dp_rank]),
        verify=verify,
        flush_bytes=flush_bytes,
    )


def shard_state(directory: Path, layout: StoreLayout, *, resume: bool, verify: bool = False) -> ShardState:
    """What the shard of `layout.part` holds, if it is there; errors as for a writer that is to continue it."""
    assert layout.part is not None
    if not any(found for pattern in (MANIFEST_NAME, "*.mmap", "shard_*") for found in directory.glob(pattern)):
        return ShardState()
    if not resume:
        raise FileExistsError(
            f"{directory} already holds an activation store: give --resume to continue it, or another --output-dir"
        )
    check_resumable(directory, read_manifest(directory), layout)
    path = directory / layout.part.name
    if not (path / MANIFEST_NAME).is_file():
        return ShardState()
    manifest = read_manifest(path)
    check_resumable(path, manifest, layout)
    assert isinstance(manifest, StoreManifest)
    sound = sound_documents(path, manifest, verify=verify)
    num_rows = manifest.documents[sound - 1].stop if sound else 0
    return ShardState(sound, num_rows, manifest.complete and sound == len(manifest.documents))


def wait_for_shards(directory: Path, layout: StoreLayout) -> None:
    """Return once the shards of all processes are complete, however long the slowest replica takes."""
    assert layout.part is not None
    names = list(chain.from_iterable(shard_names(layout.part.sizes)))
    while not all(_is_complete(directory / name) for name in names):
        time.sleep(0.2)


def _is_complete(shard: Path) -> bool:
    if not (shard / MANIFEST_NAME).is_file():
        return False
    manifest = read_manifest(shard)
    return isinstance(manifest, StoreManifest) and manifest.complete


def _wait_until_visible(path: Path) -> None:
    deadline = time.monotonic() + VISIBLE_WITHIN_S
    while not path.is_file():
        if time.monotonic() > deadline:
            raise ValueError(f"{path}, written by the first process, is not visible here: the folder must be shared")
        time.sleep(0.1)
