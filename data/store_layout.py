"""What an activation store holds: its files and their shapes, its documents, its manifest.

The files are raw little-endian arrays in C order without a header, one row a token:

    token_ids.mmap     int32    [rows]
    mlp_x_{i}.mmap     float16  [rows, hidden_size]           residual before the MLP's norm
    mlp_label_{i}.mmap float16  [rows, intermediate_size]     act(gate) * up, or what follows the activation
                       packed: uint8 [rows, ceil(intermediate_size / 8)], a bit a neuron, lowest bit first
    att_x_{i}.mmap     float16  [rows, hidden_size]           residual before the attention's norm
    att_label_{i}.mmap float16  [rows, num_attention_heads]   L2 norm of each query head's output
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, Self

FORMAT = "dejavu-lab activation store"
FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
TOKEN_IDS_NAME = "token_ids.mmap"
UNITS = ("mlp", "attention", "both")
LABEL_FORMATS = ("raw", "packed")
SPLITS = ("train", "validation")
BIT_ORDER: Literal["little"] = "little"
VALIDATION_SHARE = 0.1


@dataclass(frozen=True, kw_only=True)
class FileLayout:
    """One file: `dtype` (NumPy's name) and `width`, the values in a row (None: the file is [rows])."""

    dtype: str
    width: int | None

    @property
    def row_bytes(self) -> int:
        itemsize = {"float16": 2, "int32": 4, "uint8": 1}[self.dtype]
        return itemsize * (1 if self.width is None else self.width)

    def shape(self, num_rows: int) -> list[int]:
        return [num_rows] if self.width is None else [num_rows, self.width]


@dataclass(frozen=True, kw_only=True)
class StoreLayout:
    """What is collected, from which model; a resumed store must have the same layout in every field.

    `dtype`: the model's. `layers`: the layer_idx that are stored. `units`: mlp | attention | both.
    `label_format`: raw | packed (of the MLP labels). `definitions`: anything else that decides the numbers
    (corpus, max_tokens, the rule that makes a packed label active, ...); must be JSON.
    """

    model: str
    config_hash: str
    dtype: str
    layers: tuple[int, ...]
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    units: str = "both"
    label_format: str = "raw"
    definitions: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # through JSON and back, so that a layout equals the one its manifest gives
        object.__setattr__(self, "definitions", json.loads(json.dumps(dict(self.definitions))))
        object.__setattr__(self, "layers", tuple(self.layers))
        if not self.layers or list(self.layers) != sorted(set(self.layers)) or self.layers[0] < 0:
            raise ValueError(f"layers must be distinct, ascending and >= 0, got {list(self.layers)}")
        for name in ("hidden_size", "intermediate_size", "num_attention_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        if self.units not in UNITS:
            raise ValueError(f"units must be one of {', '.join(UNITS)}, got {self.units!r}")
        if self.label_format not in LABEL_FORMATS:
            allowed = ", ".join(LABEL_FORMATS)
            raise ValueError(f"label_format must be one of {allowed}, got {self.label_format!r}")

    @property
    def kinds(self) -> dict[str, FileLayout]:
        """The arrays of one layer: mlp_x and mlp_label, att_x and att_label, as far as `units` has them."""
        x = FileLayout(dtype="float16", width=self.hidden_size)
        kinds: dict[str, FileLayout] = {}
        if self.units != "attention":
            label = FileLayout(dtype="float16", width=self.intermediate_size)
            if self.label_format == "packed":
                label = FileLayout(dtype="uint8", width=math.ceil(self.intermediate_size / 8))
            kinds.update(mlp_x=x, mlp_label=label)
        if self.units != "mlp":
            kinds.update(att_x=x, att_label=FileLayout(dtype="float16", width=self.num_attention_heads))
        return kinds

    @property
    def files(self) -> dict[str, FileLayout]:
        """All data files by name, token ids first."""
        layer_files = {
            f"{kind}_{layer_idx}.mmap": file for layer_idx in self.layers for kind, file in self.kinds.items()
        }
        return {TOKEN_IDS_NAME: FileLayout(dtype="int32", width=None), **layer_files}

    def estimate_bytes(self, num_rows: int) -> int:
        """Bytes of all data files for `num_rows` tokens (exact; the manifest comes on top)."""
        return num_rows * sum(file.row_bytes for file in self.files.values())


def layout_differences(stored: StoreLayout, wanted: StoreLayout) -> list[str]:
    """One phrase for each field in which the layouts differ; `definitions` entry by entry."""

    def flat(layout: StoreLayout) -> dict[str, Any]:
        record = asdict(layout)
        return record | record.pop("definitions")

    old, new = flat(stored), flat(wanted)
    return [
        f"{name} is {old.get(name)!r} in the store, {new.get(name)!r} now"
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    ]


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
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            **asdict(self.layout),
            "bit_order": BIT_ORDER,
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
    def from_json(cls, text: bytes, path: Path) -> Self:
        """Parse strictly; every ValueError names `path`."""
        try:
            record = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{path}: not JSON ({error})") from error
        if not isinstance(record, dict) or record.get("format") != FORMAT:
            raise ValueError(f"{path} is not the manifest of an activation store")
        if record.get("format_version") != FORMAT_VERSION:
            raise ValueError(
                f"{path}: format_version {record.get('format_version')!r} is unknown; "
                f"this program reads {FORMAT_VERSION}"
            )
        try:
            layout = StoreLayout(**{entry.name: record[entry.name] for entry in fields(StoreLayout)})
            manifest = cls(
                layout=layout,
                documents=[DocumentRange(**document) for document in record["documents"]],
                **{name: record[name] for name in ("command_line", "git_commit", "num_rows", "complete")},
            )
            listed = dict(record["files"])
            bit_order = record["bit_order"]
        except KeyError as error:
            raise ValueError(f"{path}: the manifest lacks {error}") from error
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from error
        if bit_order != BIT_ORDER:
            raise ValueError(f"{path}: bit_order {bit_order!r} is unknown; this program reads {BIT_ORDER}")
        expected = manifest.file_shapes
        for name in sorted(expected.keys() | listed.keys()):
            if expected.get(name) != listed.get(name):
                raise ValueError(
                    f"{path}: {name} should be {expected.get(name)} by the layout, the manifest says {listed.get(name)}"
                )
        manifest.check_documents(path)
        return manifest

    def check_documents(self, path: Path) -> None:
        """Documents must cover [0, num_rows) without gap or overlap, and lie in one split each."""
        position = 0
        splits: dict[str, str] = {}
        for document in self.documents:
            is_known = document.split in SPLITS and isinstance(document.stop, int)
            if not is_known or document.start != position or document.stop <= position:
                raise ValueError(f"{path}: bad row range {document} (expected rows from {position})")
            if splits.setdefault(document.document_id, document.split) != document.split:
                raise ValueError(f"{path}: document {document.document_id!r} is in both splits")
            position = document.stop
        if position != self.num_rows:
            raise ValueError(f"{path}: the documents hold {position} rows, num_rows says {self.num_rows}")
