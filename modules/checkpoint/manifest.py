"""manifest.json of a converted folder: what it records of each file, and how a changed file is detected.

Loading compares what costs nothing: the configuration, the small files, sizes, and each part's table of contents, which
holds a CRC32 of every tensor. `--verify` and the converter read everything.
"""

import hashlib
import json
import shlex
import zipfile
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from loguru import logger

from data.files import changed_files, check_sums, read_json

MANIFEST_FILE = "manifest.json"
FORMAT_VERSION = 1
NumBytes = Annotated[int, msgspec.Meta(ge=0)]


class FileRecord(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What the manifest says of a file. Older manifests have no sums."""

    bytes: NumBytes
    sha256: str | None = None


class PartRecord(FileRecord, kw_only=True, omit_defaults=True):
    """What the manifest says of a part. `directory_sha256`: see `directory_sum`."""

    tensors: dict[str, list[int]] = {}
    directory_sha256: str | None = None


class Manifest(msgspec.Struct, kw_only=True):
    """What is read of a manifest; it says more, for people."""

    model_id: str
    config_hash: str
    dtype: Literal["float64", "float32", "float16", "bfloat16"]
    files: dict[str, PartRecord]
    other_files: dict[str, FileRecord] = {}
    source: str | None = None
    source_fingerprint: str | None = None
    requested_dtype: str | None = None

    @property
    def sums(self) -> dict[str, str]:
        """name -> sha256 of every file, empty in older manifests."""
        records: dict[str, FileRecord] = {**self.files, **self.other_files}
        return {name: record.sha256 for name, record in records.items() if record.sha256 is not None}

    def repair(self, directory: Path) -> str:
        """What to do about a damaged file, as messages say it."""
        if self.source is None:
            return "make the model again"
        command = ["python", "convert_llama_checkpoint.py", "--source", self.source, "--output-dir", str(directory)]
        if self.requested_dtype not in (None, "auto"):
            command += ["--dtype", str(self.requested_dtype)]
        return f"convert the model again, which writes what is damaged anew: {shlex.join(command)}"


class _Version(msgspec.Struct):
    format_version: int | None = None


def read_manifest(directory: Path) -> Manifest | None:
    """The manifest of a converted folder, or None where there is none; ValueError if it cannot be understood."""
    path = directory / MANIFEST_FILE
    if not path.exists():
        return None
    try:
        version = read_json(path, _Version).format_version
        if version != FORMAT_VERSION:
            raise ValueError(f"{path}: format_version {version!r} is not supported; supported: {FORMAT_VERSION}")
        return read_json(path, Manifest)
    except ValueError as error:
        raise ValueError(f"{error}; convert the model again with --overwrite") from error


def replaced_dir(directory: Path) -> Path:
    """Where a checkpoint is that is just being replaced by another: see write."""
    return directory.with_name(directory.name + ".replaced")


def interrupted(directory: Path) -> str:
    """For messages about a missing folder: whether a killed conversion is the reason, and what to do."""
    left = replaced_dir(directory)
    return f" ({left} was left by an interrupted conversion: give its command again)" if left.is_dir() else ""


def directory_sum(path: Path) -> str:
    """The sha256 of a .pt file's table of contents (its tail): name, place, size and CRC32 of each record."""
    records = [(record.filename, record.header_offset, record.file_size, record.CRC) for record in _records(path)]
    return hashlib.sha256(json.dumps(records).encode()).hexdigest()


def _records(path: Path) -> list[zipfile.ZipInfo]:
    try:
        with zipfile.ZipFile(path) as file:
            return file.infolist()
    except zipfile.BadZipFile as error:
        raise ValueError(f"{path}: cannot be read, truncated or not a tensor file: {error}") from error


def check_small_files(directory: Path, manifest: Manifest) -> None:
    """ValueError names a file beside the parts (a tokenizer's, say) that is not the one that was written."""
    recorded = {name: record.sha256 for name, record in manifest.other_files.items() if record.sha256 is not None}
    if changed := changed_files(directory, recorded):
        raise ValueError(
            f"{directory / changed[0]}: missing, or changed since the checkpoint was written; put it back, or "
            f"{manifest.repair(directory)}"
        )


def check_part_file(path: Path, manifest: Manifest) -> None:
    """ValueError if a part's file is not the one that the manifest records, as far as its table of contents shows."""
    recorded = {name: record.directory_sha256 for name, record in manifest.files.items()}
    if (expected := recorded.get(path.name)) is None:
        # Older manifests: torch.save puts the file's name, as it was written, before the names of all records.
        own = _records(path)[0].filename.partition("/")[0]
        is_right, whose = own == path.stem, f"{own}{path.suffix}"
    else:
        found = directory_sum(path)
        is_right, whose = found == expected, next((name for name, sum_ in recorded.items() if sum_ == found), "")
    if not is_right:
        what = f"it is {whose}" if whose else "it is of another checkpoint, or was changed"
        raise ValueError(f"{path}: not the file that the manifest records: {what}; {manifest.repair(path.parent)}")


def verify_checkpoint(directory: Path) -> None:
    """What `--verify` does: read every file of a checkpoint; ValueError names those that differ from the manifest's
    sums. Where there are none, a warning says so."""
    manifest = read_manifest(directory)
    if manifest is None or not manifest.sums:
        logger.warning(
            f"{directory}: --verify found no sums to compare its files with (a Hugging Face folder and older "
            "checkpoints have none); converting the model records them"
        )
        return
    check_sums(directory, manifest.sums, manifest.repair(directory))
