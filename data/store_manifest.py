"""The manifest of an activation store: which rows of which documents are valid, and how they came to be."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

from data.store_layout import BIT_ORDER, ONE_PROCESS, SPLITS, StoreLayout, StorePart, layout_differences

FORMAT = "dejavu-lab activation store"
FORMAT_VERSION = 1
VALIDATION_SHARE = 0.1


@dataclass(frozen=True, kw_only=True)
class DocumentRange:
    """Rows [start, stop) are consecutive tokens of one document; a long document may have several ranges."""

    document_id: str
    start: int
    stop: int
    split: str


def split_documents(document_ids: Iterable[str]) -> dict[str, str]:
    """Assign each document to `train` or `validation`: those of the lowest hashes validate.

    They are VALIDATION_SHARE of the documents, rounded, but at least one of two or more; a single document
    trains. All ranges of a document stay together, and the order in which documents come does not matter.
    """
    ranked = sorted(set(document_ids), key=lambda document_id: hashlib.sha256(document_id.encode()).digest())
    num_validation = max(1, math.floor(VALIDATION_SHARE * len(ranked) + 0.5)) if len(ranked) > 1 else 0
    return {document_id: "validation" if rank < num_validation else "train" for rank, document_id in enumerate(ranked)}


@dataclass(frozen=True, kw_only=True)
class StoreManifest:
    """`manifest.json`: the only word on which rows are valid. `complete`: the collection reached its end."""

    layout: StoreLayout
    command_line: str
    git_commit: str | None
    num_rows: int
    complete: bool
    documents: Sequence[DocumentRange]

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
            "documents": [vars(document) for document in self.documents],
        }
        return json.dumps(record, indent=1) + "\n"

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        """Check strictly: KeyError, TypeError or ValueError says what is wrong."""
        manifest = cls(
            layout=_layout(record),
            documents=[DocumentRange(**document) for document in record["documents"]],
            **{name: record[name] for name in ("command_line", "git_commit", "num_rows", "complete")},
        )
        expected, listed = manifest.file_shapes, dict(record["files"])
        for name in sorted(expected.keys() | listed.keys()):
            if expected.get(name) != listed.get(name):
                raise ValueError(
                    f"{name} should be {expected.get(name)} by the layout, the manifest says {listed.get(name)}"
                )
        manifest.check_documents()
        return manifest

    def check_documents(self) -> None:
        """Documents must cover [0, num_rows) without gap or overlap, and lie in one split each."""
        position = 0
        splits: dict[str, str] = {}
        for document in self.documents:
            is_known = document.split in SPLITS and isinstance(document.stop, int)
            if not is_known or document.start != position or document.stop <= position:
                raise ValueError(f"bad row range {document} (expected rows from {position})")
            if splits.setdefault(document.document_id, document.split) != document.split:
                raise ValueError(f"document {document.document_id!r} is in both splits")
            position = document.stop
        if position != self.num_rows:
            raise ValueError(f"the documents hold {position} rows, num_rows says {self.num_rows}")


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
    def from_record(cls, record: Mapping[str, Any]) -> Self:
        """Check strictly: KeyError, TypeError or ValueError says what is wrong."""
        sizes = {name: record["shards"][name] for name in ONE_PROCESS}
        if not all(isinstance(size, int) and size >= 1 for size in sizes.values()):
            raise ValueError(f"shards must give sizes >= 1, got {sizes}")
        return cls(
            layout=_layout(record), sizes=sizes, command_line=record["command_line"], git_commit=record["git_commit"]
        )


def parse_manifest(text: bytes, path: Path) -> StoreManifest | ShardedManifest:
    """The manifest in `text`; every ValueError names `path`."""
    try:
        record = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise ValueError(f"{path} is not the manifest of an activation store")
    if record.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"{path}: format_version {record.get('format_version')!r} is unknown; this program reads {FORMAT_VERSION}"
        )
    try:
        if record["bit_order"] != BIT_ORDER:
            raise ValueError(f"bit_order {record['bit_order']!r} is unknown; this program reads {BIT_ORDER}")
        return ShardedManifest.from_record(record) if "shards" in record else StoreManifest.from_record(record)
    except KeyError as error:
        raise ValueError(f"{path}: the manifest lacks {error}") from error
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


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


def _layout(record: Mapping[str, Any]) -> StoreLayout:
    values = {entry.name: record[entry.name] for entry in fields(StoreLayout) if entry.name != "part"}
    return StoreLayout(**values, part=StorePart(**record["part"]) if "part" in record else None)
