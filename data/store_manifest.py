"""What an activation store holds: its files and their shapes, and which part of them one process writes.

The files are raw little-endian arrays in C order without a header, one row per token:

    token_ids.mmap     int32    [rows]
    mlp_x_{i}.mmap     float16  [rows, hidden_size]           residual before the MLP's norm
    mlp_label_{i}.mmap float16  [rows, intermediate_size]     act(gate) * up, or what follows the activation
                       packed: uint8 [rows, ceil(intermediate_size / 8)], a bit per neuron, lowest bit first
    att_x_{i}.mmap     float16  [rows, hidden_size]           residual before the attention's norm
    att_label_{i}.mmap float16  [rows, num_attention_heads]   L2 norm of each query head's output

A store that several processes collected holds a folder of such files for each of them: see `data/store_shards.py`. The
manifest says which rows of which documents are valid, and how they came to be.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import msgspec
from msgspec import Meta

from data.files import convert_json, differences, parse_json

MANIFEST_NAME = "manifest.json"
TOKEN_IDS_NAME = "token_ids.mmap"
UNITS = ("mlp", "attention", "both")
LABEL_FORMATS = ("raw", "packed")
SPLITS = ("train", "validation")
BIT_ORDER: Literal["little"] = "little"
ONE_PROCESS = {"dp_size": 1, "pp_size": 1, "tp_size": 1}
# What a manifest may say: more is a damaged one, and would only take memory before a file is missed.
Rank = Annotated[int, Meta(ge=0, lt=2**16)]
NumRanks = Annotated[int, Meta(ge=1, le=2**16)]
Width = Annotated[int, Meta(ge=1, le=2**30)]
Layers = Annotated[tuple[Annotated[int, Meta(ge=0, lt=2**16)], ...], Meta(max_length=2**12)]
Columns = tuple[Annotated[int, Meta(ge=0, le=2**30)], Annotated[int, Meta(ge=0, le=2**30)]]


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
class StorePart:
    """What one of dp_size * pp_size * tp_size processes writes of a store, as its *shard*.

    `mlp_layers`, `attention_layers`: the stored layers whose blocks its pipeline stage runs. `neurons`, `heads`: the
    columns [start, stop) of the labels that its tensor-parallel rank computes. Inputs are the same on all ranks of a
    stage: the first one writes them. Pieces of documents are dealt to the replicas in turn: replica dp_rank has
    pieces dp_rank, dp_rank + dp_size, ...
    """

    dp_rank: Rank
    dp_size: NumRanks
    pp_rank: Rank
    pp_size: NumRanks
    tp_rank: Rank
    tp_size: NumRanks
    mlp_layers: Layers
    attention_layers: Layers
    neurons: Columns
    heads: Columns

    def __post_init__(self) -> None:
        for name in ("neurons", "heads"):
            start, stop = getattr(self, name)
            if start > stop:
                raise ValueError(f"part: {name} [{start}, {stop}) end before they begin")

    @property
    def name(self) -> str:
        """The shard's folder."""
        return shard_name(self.dp_rank, self.pp_rank, self.tp_rank)

    @property
    def rank(self) -> int:
        """The place of this process among all."""
        return (self.dp_rank * self.pp_size + self.pp_rank) * self.tp_size + self.tp_rank

    @property
    def sizes(self) -> dict[str, int]:
        """dp_size, pp_size, tp_size by name."""
        return {name: getattr(self, name) for name in ONE_PROCESS}


def shard_name(dp_rank: int, pp_rank: int, tp_rank: int) -> str:
    """The one place that spells a shard's folder."""
    return f"shard_dp{dp_rank}_pp{pp_rank}_tp{tp_rank}"


@dataclass(frozen=True, kw_only=True)
class StoreLayout:
    """What is collected, from which model; a resumed store must have the same layout in every field.

    `dtype`: the model's. `layers`: the layer_idx that are stored. `units`: mlp | attention | both.
    `label_format`: raw | packed (of the MLP labels). `definitions`: anything else that decides the numbers
    (corpus, max_tokens, the rule that makes a packed label active, ...); must be JSON. `part`: what a shard holds of
    all this (None: everything).
    """

    model: str
    config_hash: str
    dtype: str
    layers: Layers
    hidden_size: Width
    intermediate_size: Width
    num_attention_heads: Width
    units: str = "both"
    label_format: str = "raw"
    definitions: Mapping[str, Any] = field(default_factory=dict)
    part: StorePart | None = None

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
    def num_neurons(self) -> int:
        """Columns of the MLP labels, before packing: all neurons, or a shard's."""
        return self.intermediate_size if self.part is None else self.part.neurons[1] - self.part.neurons[0]

    @property
    def num_heads(self) -> int:
        """Columns of the attention labels: all query heads, or a shard's."""
        return self.num_attention_heads if self.part is None else self.part.heads[1] - self.part.heads[0]

    @property
    def kinds(self) -> dict[str, FileLayout]:
        """The arrays of one layer: mlp_x and mlp_label, att_x and att_label, as far as `units` has them."""
        x = FileLayout(dtype="float16", width=self.hidden_size)
        label = FileLayout(dtype="float16", width=self.num_neurons)
        if self.label_format == "packed":
            label = FileLayout(dtype="uint8", width=math.ceil(self.num_neurons / 8))
        kinds: dict[str, FileLayout] = {}
        if self.units != "attention":
            kinds.update(mlp_x=x, mlp_label=label)
        if self.units != "mlp":
            kinds.update(att_x=x, att_label=FileLayout(dtype="float16", width=self.num_heads))
        if self.part is not None and self.part.tp_rank > 0:
            return {kind: file for kind, file in kinds.items() if not kind.endswith("_x")}
        return kinds

    def layer_kinds(self, layer_idx: int) -> dict[str, FileLayout]:
        """`kinds`, without the blocks of the layer that another pipeline stage runs."""
        if self.part is None:
            return self.kinds
        here = {"mlp": layer_idx in self.part.mlp_layers, "att": layer_idx in self.part.attention_layers}
        return {kind: file for kind, file in self.kinds.items() if here[kind[:3]]}

    @property
    def files(self) -> dict[str, FileLayout]:
        """All data files by name, token ids first."""
        layer_files = {
            f"{kind}_{layer_idx}.mmap": file
            for layer_idx in self.layers
            for kind, file in self.layer_kinds(layer_idx).items()
        }
        return {TOKEN_IDS_NAME: FileLayout(dtype="int32", width=None), **layer_files}

    def estimate_bytes(self, num_rows: int) -> int:
        """Bytes of all data files for `num_rows` tokens (exact; the manifest comes on top)."""
        return num_rows * sum(file.row_bytes for file in self.files.values())


def layout_differences(stored: StoreLayout, wanted: StoreLayout) -> list[str]:
    """One phrase for each field in which the layouts differ; `definitions` and `part` entry by entry."""

    def flat(layout: StoreLayout) -> dict[str, Any]:
        record = asdict(layout)
        return record | record.pop("definitions") | (record.pop("part") or {})

    return differences(flat(stored), flat(wanted), "in the store")


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
