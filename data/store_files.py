"""The files under an activation store: appended together, made durable together, strictly checked."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
from loguru import logger

from data.files import changed_files, disk_errors, replace_file, sha256_of
from data.store_manifest import (
    BIT_ORDER,
    MANIFEST_NAME,
    TOKEN_IDS_NAME,
    FileLayout,
    ShardedManifest,
    StoreLayout,
    StoreManifest,
    parse_manifest,
)

BUFFER_BYTES = 256 * 2**10
CHECKED_BYTES = 2**18  # float16 values are checked in blocks that stay in the cache
FLOAT16_MAX = 65504.0
FULL_DISK = "free space there, then continue with --resume"
# What is hashed of a file whenever it is opened: so many blocks, evenly spaced, the first and the last among them; of
# a store that is not complete the first alone, since it is hashed at each flush, and only the first never moves.
SAMPLED_BLOCKS, BLOCK_BYTES = 8, 4096
# Of a smaller store all is hashed whenever it is opened, which takes less than a second.
SMALL_BYTES = 2**28
HASHED_TOGETHER = min(8, os.cpu_count() or 1)


class AppendedFiles:
    """The data files of a store, opened behind `num_rows` valid rows; what lies behind these is cut off.

    `manifest`: put in place before that, where valid rows are to be dropped. `commit` makes everything appended so far
    durable and then puts a manifest in place, on a thread of its own, so that the caller computes meanwhile.
    FileNotFoundError or ValueError names a file that is missing or too short; OSError one that the disk refuses.
    """

    def __init__(
        self, directory: Path, layouts: Mapping[str, FileLayout], num_rows: int, manifest: StoreManifest | None = None
    ) -> None:
        self._directory = directory
        self._files: dict[str, BinaryIO] = {}
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="activation-store")
        self._pending: Future[None] | None = None
        try:
            if num_rows > 0:
                check_files(directory, layouts, num_rows, exact=False)
            if manifest is not None:
                write_manifest(directory, manifest)
            for name, layout in layouts.items():
                self._files[name] = open(directory / name, "ab", buffering=BUFFER_BYTES)  # noqa: SIM115
                self._files[name].truncate(num_rows * layout.row_bytes)
            for left in directory.glob(MANIFEST_NAME + ".*tmp"):  # by a run that was killed
                left.unlink()
        except BaseException:
            self.close()
            raise

    @property
    def is_open(self) -> bool:
        return bool(self._files)

    def append(self, rows: Mapping[str, np.ndarray]) -> int:
        """Append C-contiguous arrays to their files; returns the bytes."""
        for name, array in rows.items():
            with disk_errors(self._directory / name, FULL_DISK):
                self._files[name].write(array.data)
        return sum(array.nbytes for array in rows.values())

    def commit(self, manifest: StoreManifest) -> None:
        """Begin to make the appended rows durable, `manifest` last; first waits for the commit before."""
        self.wait()
        for name, file in self._files.items():
            with disk_errors(self._directory / name, FULL_DISK):
                file.flush()
        self._pending = self._executor.submit(self._make_durable, manifest)

    def wait(self) -> None:
        """Return when the last commit is on the disk; raises what went wrong with it."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _make_durable(self, manifest: StoreManifest) -> None:
        for name, file in self._files.items():
            with disk_errors(self._directory / name, FULL_DISK):
                os.fsync(file.fileno())
        write_manifest(self._directory, with_sums(self._directory, manifest))

    def close(self) -> None:
        """Close without a commit: rows since the last one are lost."""
        self._executor.shutdown(wait=True)
        for file in self._files.values():
            with contextlib.suppress(OSError):  # only rows that no manifest counts can be left in a buffer
                file.close()
        self._files = {}


class MappedFiles:
    """The data files of a store that one process wrote, mapped, not loaded.

    FileNotFoundError or ValueError names a file that is missing, truncated, too long, or not as it was written:
    `verify` compares all of each, else a few blocks.
    """

    def __init__(self, directory: Path, manifest: StoreManifest, *, verify: bool = False) -> None:
        self.directory = directory
        self.manifest = manifest
        check_files(directory, manifest.layout.files, manifest.num_rows, exact=manifest.complete)
        check_contents(directory, manifest, verify=verify)

    def array(self, name: str) -> np.ndarray:
        """One file's valid rows."""
        file = self.manifest.layout.files[name]
        dtype, shape = np.dtype(file.dtype).newbyteorder("<"), tuple(file.shape(self.manifest.num_rows))
        if 0 in shape:  # an empty file cannot be mapped
            return np.empty(shape, dtype)
        return np.memmap(self.directory / name, dtype=dtype, mode="r", shape=shape)


def write_manifest(directory: Path, manifest: StoreManifest | ShardedManifest) -> None:
    """Put the manifest in place, atomically and durably."""
    replace_file(directory / MANIFEST_NAME, manifest.to_json().encode(), FULL_DISK)


def read_manifest(directory: Path) -> StoreManifest | ShardedManifest:
    """Read and check the manifest; FileNotFoundError if there is none, ValueError if it is not right."""
    path = directory / MANIFEST_NAME
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist: {directory} is no activation store; collect first: python -m scripts.collect "
            f"--model DIR --corpus SPEC --output-dir {directory}"
        )
    return parse_manifest(path.read_bytes(), path)


def check_files(directory: Path, layouts: Mapping[str, FileLayout], num_rows: int, *, exact: bool) -> None:
    """Check that these files, and no other .mmap, are there with `num_rows` rows, or more unless `exact`."""
    for name, layout in layouts.items():
        path = directory / name
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing from the activation store; collect again with --resume")
        expected, found = num_rows * layout.row_bytes, path.stat().st_size
        if found < expected or (exact and found > expected):
            problem = "truncated" if found < expected else "too long"
            raise ValueError(
                f"{path} is {problem}: {num_rows} rows take {expected} bytes, it has {found}; collect again with "
                "--resume"
            )
    extra = sorted({path.name for path in directory.glob("*.mmap")} - set(layouts))
    if extra:
        raise ValueError(
            f"{directory / extra[0]} does not belong to the store: its manifest does not list it; remove it"
        )


def sample_of(path: Path, num_bytes: int, num_blocks: int) -> str:
    """sha256 of a few blocks of a file's first `num_bytes` bytes: of all of them where that is no more."""
    digest, last = hashlib.sha256(), num_bytes - BLOCK_BYTES
    starts = [last * place // max(1, num_blocks - 1) for place in range(num_blocks)]
    if num_bytes <= num_blocks * BLOCK_BYTES:
        starts = list(range(0, num_bytes, BLOCK_BYTES))
    with open(path, "rb", buffering=0) as file:
        for start in starts:
            digest.update(os.pread(file.fileno(), min(BLOCK_BYTES, num_bytes - start), start))
    return digest.hexdigest()


def samples_of(directory: Path, manifest: StoreManifest) -> dict[str, str]:
    """`sample_of` every file of a store; none without rows, whose files may still be missing."""
    if manifest.num_rows == 0:
        return {}
    num_blocks = SAMPLED_BLOCKS if manifest.complete else 1
    files = manifest.layout.files
    with ThreadPoolExecutor(HASHED_TOGETHER) as pool:
        found = pool.map(
            lambda name: sample_of(directory / name, files[name].row_bytes * manifest.num_rows, num_blocks), files
        )
        return dict(zip(files, found, strict=True))


def with_sums(directory: Path, manifest: StoreManifest) -> StoreManifest:
    """The manifest with the sums of what is in the files; of a complete store all of them is read."""
    sums: dict[str, str] = {}
    if manifest.complete:
        with ThreadPoolExecutor(HASHED_TOGETHER) as pool:
            names = list(manifest.layout.files)
            sums = dict(zip(names, pool.map(lambda name: sha256_of(directory / name), names), strict=True))
    return replace(manifest, samples=samples_of(directory, manifest), sums=sums)


def check_contents(directory: Path, manifest: StoreManifest, *, verify: bool) -> None:
    """ValueError names the files whose rows are not those that were collected (older stores have no sums)."""
    found = samples_of(directory, manifest) if manifest.samples else {}
    changed, flags = [name for name in found if found[name] != manifest.samples[name]], "--resume"
    if not changed and manifest.layout.estimate_bytes(manifest.num_rows) <= SMALL_BYTES:
        changed = changed_files(directory, manifest.sums)
    elif verify and not changed:
        changed, flags = changed_files(directory, manifest.sums), "--resume --verify"
    if verify and not manifest.sums:
        logger.warning(
            f"{directory}: --verify found no sums to compare its files with (an older store, or one that is not "
            "complete, has none)"
        )
    if changed:
        more = f" and {len(changed) - 4} more" if len(changed) > 4 else ""
        raise ValueError(
            f"{directory}: {', '.join(changed[:4])}{more}: not as collected (changed, damaged, or another "
            f"file's rows); collect again with {flags}"
        )


def sound_rows(directory: Path, manifest: StoreManifest, *, verify: bool) -> int:
    """How many of the valid rows are there, whole: what a repair keeps. None of those of a store with rows that are not
    as collected, since a sum does not say which these are."""
    num_rows, long_enough = manifest.num_rows, []
    for name, layout in manifest.layout.files.items():
        path = directory / name
        if not path.is_file():
            return 0
        if layout.row_bytes:  # a rank may have files of no columns
            num_there = path.stat().st_size // layout.row_bytes
            num_rows = min(num_rows, num_there)
            long_enough += [name] * (num_there >= manifest.num_rows)
    if num_rows < manifest.num_rows:
        # A short file may have lost its end, or be another one: nothing says which. What can be compared must fit.
        num_blocks = SAMPLED_BLOCKS if manifest.complete else 1
        for name in long_enough if manifest.samples else ():
            num_bytes = manifest.layout.files[name].row_bytes * manifest.num_rows
            if sample_of(directory / name, num_bytes, num_blocks) != manifest.samples[name]:
                return 0
        return 0 if verify and manifest.sums else num_rows
    try:
        check_contents(directory, manifest, verify=verify)
    except ValueError:
        return 0
    return manifest.num_rows


def check_free_space(directory: Path, layout: StoreLayout, num_rows: int, num_stored_rows: int = 0) -> None:
    """ValueError if the rows yet to be written do not fit on the disk of `directory` (existing or not)."""
    needed = layout.estimate_bytes(max(0, num_rows - num_stored_rows))
    existing = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise ValueError(
            f"{num_rows} tokens need {needed / 1e9:.2f} GB in {directory}, but {free / 1e9:.2f} GB are free; "
            "take fewer tokens (--max-tokens), fewer layers (--layers), --label-format packed "
            "or another --output-dir"
        )


def float16_rows(array: np.ndarray, where: str) -> np.ndarray:
    """Floats [rows, width] as C-contiguous float16; ValueError says `where` if a value does not fit.

    float16 input is the fast path. NaN and infinities, and values that become infinite as float16, are never
    stored.
    """
    if array.dtype.kind != "f":
        raise ValueError(f"{where}: expected floats, got {array.dtype}")
    with np.errstate(over="ignore"):  # reported just below, with its place
        rows = np.ascontiguousarray(array, dtype="<f2")
    bits = rows.reshape(-1).view(np.uint16)
    block = CHECKED_BYTES // bits.itemsize
    for start in range(0, bits.size, block):
        # all exponent bits set: infinite or NaN
        if np.max(bits[start : start + block] & 0x7FFF, initial=0) >= 0x7C00:
            row, column = np.argwhere(~np.isfinite(rows))[0]
            value = float(array[row, column])
            problem = f"{value} is beyond float16's {FLOAT16_MAX:g}" if np.isfinite(value) else f"{value}"
            raise ValueError(
                f"{where}: value {problem} (row {row}, unit {column}); the store is float16 and clips nothing"
            )
    return rows


def document_rows(
    layout: StoreLayout,
    document_id: str,
    token_ids: np.ndarray | list[int],
    activations: Mapping[int, Mapping[str, np.ndarray]],
) -> dict[str, np.ndarray]:
    """The rows to append to each file of the store; ValueError if they are not what it holds."""
    token_array = np.asarray(token_ids)
    if token_array.ndim != 1 or token_array.size == 0 or token_array.dtype.kind not in "iu":
        raise ValueError(f"document {document_id!r}: token_ids must be a non-empty list of integers")
    if set(activations) != set(layout.layers):
        raise ValueError(f"expected the layers {list(layout.layers)}, got {sorted(activations)}")
    rows = {TOKEN_IDS_NAME: np.ascontiguousarray(token_array, dtype="<i4")}
    for layer_idx in layout.layers:
        arrays, kinds = activations[layer_idx], layout.layer_kinds(layer_idx)
        if set(arrays) != set(kinds):
            raise ValueError(f"layer {layer_idx}: expected {sorted(kinds)}, got {sorted(arrays)}")
        for kind, file in kinds.items():
            where = f"{kind} of layer {layer_idx}, document {document_id!r}"
            is_packed = kind == "mlp_label" and layout.label_format == "packed"
            width = layout.num_neurons if is_packed else file.width
            array = arrays[kind]
            if array.shape != (len(token_array), width):
                raise ValueError(f"{where}: expected shape {(len(token_array), width)}, got {array.shape}")
            if is_packed and array.dtype != np.bool_:
                raise ValueError(f"{where}: a packed label is made of bool, got {array.dtype}")
            rows[f"{kind}_{layer_idx}.mmap"] = (
                np.packbits(array, axis=1, bitorder=BIT_ORDER) if is_packed else float16_rows(array, where)
            )
    return rows
