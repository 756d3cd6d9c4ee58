"""What an activation store holds: its files and their shapes, and which part of them one process writes.

The files are raw little-endian arrays in C order without a header, one row per token:

    token_ids.mmap     int32    [rows]
    mlp_x_{i}.mmap     float16  [rows, hidden_size]           residual before the MLP's norm
    mlp_label_{i}.mmap float16  [rows, intermediate_size]     act(gate) * up, or what follows the activation
                       packed: uint8 [rows, ceil(intermediate_size / 8)], a bit per neuron, lowest bit first
    att_x_{i}.mmap     float16  [rows, hidden_size]           residual before the attention's norm
    att_label_{i}.mmap float16  [rows, num_attention_heads]   L2 norm of each query head's output

A store that several processes collected holds a folder of such files for each of them: see `data/store_shards.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

from msgspec import Meta

from data.differences import differences

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
