"""The manifest of an activation store: which rows of which documents are valid, and how they came to be."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import msgspec

from data.files import convert_json, parse_json
from data.store_layout import BIT_ORDER, ONE_PROCESS, NumRanks, StoreLayout, layout_differences

FORMAT = "dejavu-lab activation store"
FORMAT_VERSION = 1
VALIDATION_SHARE = 0.1
MAX_PROCESSES = 2**16
Row = Annotated[int, msgspec.Meta(ge=0, le=2**48)]
Sum = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


@dataclass(frozen=True, kw_only=True)
class DocumentRange:
    """Rows [start, stop) are consecutive tokens of one document; a long document may have several ranges."""

    document_id: str
    start: Row
    stop: Row
    split: Literal["train", "validation"]


def split_documents(document_ids: Iterable[str]) -> dict[str, Literal["train", "validation"]]:
    """Assign each document to `train` or `validation`: those of the lowest hashes validate.

    They are VALIDATION_SHARE of the documents, rounded, but at least one of two or more; a single document
    trains. All ranges of a document stay together, and the order in which documents come does not matter.
    """
    ranked = sorted(set(document_ids), key=lambda document_id: hashlib.sha256(document_id.encode()).digest())
    num_validation = max(1, math.floor(VALIDATION_SHARE * len(ranked) + 0.5)) if len(ranked) > 1 else 0
    return {document_id: "validation" if rank < num_validation else "train" for rank, document_id in enumerate(ranked)}


class _StoredRows(msgspec.Struct):
    """What a manifest says besides its layout. `sums`: sha256 of each file of a complete store; `samples`: of a few
    blocks of each. Stores of older versions have neither."""

    command_line: str
    git_commit: str | None
    num_rows: Row
    complete: bool
    documents: list[DocumentRange]
    files: dict[str, Any]
    sums: dict[str, Sum] = {}
    samples: dict[str, Sum] = {}


@dataclass(frozen=True, kw_only=True)
class StoreManifest:
    """`manifest.json`: the only word on which rows are valid. `complete`: the collection reached its end.

    `samples`: a hash of a few blocks of each file's valid rows (`store_files.sample_of`), which is checked whenever a
    store is opened; `sums`: the sha256 of each file once the store is complete, for `--verify`.
    """

    layout: StoreLayout
    command_line: str
    git_commit: str | None
    num_rows: int
    complete: bool
    documents: Sequence[DocumentRange]
    sums: Mapping[str, str] = field(default_factory=dict)
    samples: Mapping[str, str] = field(default_factory=dict)

    @property
    def file_shapes(self) -> dict[str, dict[str, Any]]:
        """dtype and shape of each data file's valid part."""
        return {
            name: {"dtype": file.dtype, "shape": file.shape(self.num_rows)} for name, file in self.layout.files.items()
        }

    def to_json(self) -> str:
        """The file's text; the same store always gives the same text."""
        record = {
            **_head(self.layout),
            "validation_share": VALIDATION_SHARE,
            "files": self.file_shapes,
            "command_line": self.command_line,
            "git_commit": self.git_commit,
            "num_rows": self.num_rows,
            "complete": self.complete,
            "sums": dict(self.sums),
            "samples": dict(self.samples),
            "documents": [vars(document) for document in self.documents],
        }
        return json.dumps(record, indent=1) + "\n"

    @classmethod
    def from_record(cls, record: Mapping[str, Any], where: Path) -> Self:
        """Check strictly: ValueError says what is wrong, and `where`."""
        rows = convert_json(record, _StoredRows, where)
        listed = rows.files
        manifest = cls(
            layout=convert_json(record, StoreLayout, where),
            **{name: getattr(rows, name) for name in _StoredRows.__struct_fields__ if name != "files"},
        )
        expected = manifest.file_shapes
        for name in sorted(expected.keys() | listed.keys()):
            if expected.get(name) != listed.get(name):
                raise ValueError(
                    f"{where}: {name} should be {expected.get(name)} by the layout, the manifest says "
                    f"{str(listed.get(name))[:100]}"
                )
        for key in ("sums", "samples"):
            if (found := getattr(rows, key)) and found.keys() != expected.keys():
                raise ValueError(f"{where}: `{key}` are of other files than the layout's")
        try:
            manifest.check_documents()
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        return manifest

    def check_documents(self) -> None:
        """Documents must cover [0, num_rows) without gap or overlap, and lie in one split each."""
        position = 0
        splits: dict[str, str] = {}
        for document in self.documents:
            if document.start != position or document.stop <= position:
                raise ValueError(f"bad row range {document} (expected rows from {position})")
            if splits.setdefault(document.document_id, document.split) != document.split:
                raise ValueError(f"document {document.document_id!r} is in both splits")
            position = document.stop
        if position != self.num_rows:
            raise ValueError(f"the documents hold {position} rows, num_rows says {self.num_rows}")


class _Sizes(msgspec.Struct):
    dp_size: NumRanks
    pp_size: NumRanks
    tp_size: NumRanks


class _Shards(msgspec.Struct):
    shards: _Sizes
    command_line: str
    git_commit: str | None


@dataclass(frozen=True, kw_only=True)
class ShardedManifest:
    """`manifest.json` above the shards of several processes: what they hold together; each counts its own rows.

    `sizes`: dp_size, pp_size, tp_size, by name.
    """

    layout: StoreLayout
    sizes: Mapping[str, int]
    command_line: str
    git_commit: str | None

    def to_json(self) -> str:
        """The file's text."""
        record = {
            **_head(self.layout),
            "shards": dict(self.sizes),
            "command_line": self.command_line,
            "git_commit": self.git_commit,
        }
        return json.dumps(record, indent=1) + "\n"

    @classmethod
    def from_record(cls, record: Mapping[str, Any], where: Path) -> Self:
        """Check strictly: ValueError says what is wrong, and `where`."""
        shards = convert_json(record, _Shards, where)
        sizes = msgspec.structs.asdict(shards.shards)
        if math.prod(sizes.values()) > MAX_PROCESSES:
            raise ValueError(f"{where}: `shards`: {describe_sizes(sizes)} are more than {MAX_PROCESSES} processes")
        return cls(
            layout=convert_json(record, StoreLayout, where),
            sizes=sizes,
            command_line=shards.command_line,
            git_commit=shards.git_commit,
        )


def parse_manifest(text: bytes, path: Path) -> StoreManifest | ShardedManifest:
    """The manifest in `text`; every ValueError names `path`, and what to do if that is damaged."""
    try:
        record = parse_json(text, dict[str, Any], path)
        if record.get("format") != FORMAT:
            raise ValueError(f"{path} is not the manifest of an activation store")
        if record.get("format_version") != FORMAT_VERSION or isinstance(record["format_version"], bool):
            found = str(record.get("format_version"))[:100]
            raise ValueError(f"{path}: format_version {found} is unknown; this program reads {FORMAT_VERSION}")
        if record.get("bit_order") != BIT_ORDER:
            found = repr(record.get("bit_order"))[:100]
            raise ValueError(f"{path}: bit_order {found} is unknown; this program reads {BIT_ORDER}")
        return (ShardedManifest if "shards" in record else StoreManifest).from_record(record, path)
    except ValueError as error:
        raise ValueError(f"{error}; if it is damaged, remove {path.parent} and collect again") from error


def check_resumable(directory: Path, stored: StoreManifest | ShardedManifest, layout: StoreLayout) -> None:
    """ValueError if a run with `layout` cannot continue what is stored in `directory`."""
    old = stored.sizes if isinstance(stored, ShardedManifest) else _sizes(stored.layout)
    if old != _sizes(layout):
        raise ValueError(
            f"cannot resume {directory}: collected with {describe_sizes(old)}, this run has "
            f"{describe_sizes(_sizes(layout))}; give the same sizes, or another --output-dir"
        )
    wanted = replace(layout, part=None) if isinstance(stored, ShardedManifest) else layout
    if differences := layout_differences(stored.layout, wanted):
        raise ValueError(f"cannot resume {directory}: {'; '.join(differences)}")


def describe_sizes(sizes: Mapping[str, int]) -> str:
    """`dp_size=2 pp_size=1 tp_size=4`"""
    return " ".join(f"{name}={size}" for name, size in sizes.items())


def _sizes(layout: StoreLayout) -> dict[str, int]:
    return ONE_PROCESS if layout.part is None else layout.part.sizes


def _head(layout: StoreLayout) -> dict[str, Any]:
    record = asdict(layout)
    if layout.part is None:
        del record["part"]
    return {"format": FORMAT, "format_version": FORMAT_VERSION, **record, "bit_order": BIT_ORDER}
