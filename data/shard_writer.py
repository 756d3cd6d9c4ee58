"""The writer of one process's shard: all processes of a run agree where to continue before any of them writes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from data.activation_store import FLUSH_BYTES, ActivationStoreWriter, sound_documents
from data.store_files import check_free_space, read_manifest, write_manifest
from data.store_layout import MANIFEST_NAME, StoreLayout
from data.store_manifest import ShardedManifest, StoreManifest, check_resumable
from data.store_shards import shard_names

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
