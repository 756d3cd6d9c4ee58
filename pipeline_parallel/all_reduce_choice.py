"""Which all-reduce + add + norm is the fastest for a number of tokens, as measured; and TokenWeave's files of splits.

A choice file is one JSON object, measured and written by `python -m scripts.benchmark.communication --tune --output
FILE`; `pipeline_parallel/configs/*.json` are shipped:

    {"choices": [{"device": "NVIDIA H200", "ranks": 2, "hidden_size": 4096, "transport": "p2p",
                  "fastest": {"1": "one-shot", "64": "one-shot", "128": "two-shot"}}]}

device: as torch names it. transport: "p2p" or "multimem", what one-shot and two-shot were measured with. fastest:
token counts, rising, each with the fastest method there: "one-shot", "two-shot" (both of kernels/all_reduce_norm.py)
or "nccl" (`ReducingAddNorm`: NCCL's all-reduce in float32, then the fused add + norm). No two tables of a file have the
same first four values.
Measured in bfloat16; float16 moves as many bytes.

A split file is TokenWeave's own (Gond et al. 2025, github.com/microsoft/tokenweave, vllm/tokenweave_configs): one JSON
object from token counts to how that many tokens are best split for overlap,

    {"1024": {"attention_ctas": 4, "mlp_ctas": 8, "chunk_offset": 0}, ...}

with `split_offset` in place of `chunk_offset` in newer files, and sometimes `baseline_ctas`, of their kernel without
overlap, which is not read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import msgspec
from loguru import logger
from msgspec import Meta

from data.files import convert_json, replace_file

Method = Literal["one-shot", "two-shot", "nccl"]
Transport = Literal["p2p", "multimem"]
METHODS: tuple[str, ...] = get_args(Method)
TRANSPORTS: tuple[str, ...] = get_args(Transport)
CONFIGS_DIR = Path(__file__).parent / "configs"
MAX_DIGITS = 12
OFFSET_NAMES = ("chunk_offset", "split_offset")
Kind = TypeVar("Kind")


class ChoiceTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fastest method at rising token counts, on one kind of device, among so many ranks, for one hidden size."""

    device: Annotated[str, Meta(min_length=1)]
    ranks: Annotated[int, Meta(ge=2, le=2**16)]
    hidden_size: Annotated[int, Meta(ge=1, le=2**30)]
    transport: Transport
    fastest: dict[str, Method]
    """By token count, as digits; rising."""

    def __post_init__(self) -> None:
        check_rising([count_of(key) for key in self.fastest])

    @property
    def key(self) -> tuple[str, int, int, str]:
        """What no two tables of a file have in common."""
        return self.device, self.ranks, self.hidden_size, self.transport


class _ChoiceFile(msgspec.Struct, forbid_unknown_fields=True):
    choices: list[ChoiceTable]


def choose(table: ChoiceTable, num_tokens: int) -> str:
    """The method measured as fastest at the count nearest in ratio to `num_tokens` (the smaller of two as near).

    A pure function of its arguments, so that all ranks choose alike.
    """
    if type(num_tokens) is not int or num_tokens < 0:
        raise ValueError(f"num_tokens must be an integer, at least 0, not {num_tokens!r}")
    return table.fastest[min(table.fastest, key=lambda count: ratio(int(count), max(num_tokens, 1)))]


def ratio(one: int, other: int) -> float:
    """How many times the smaller of two positive numbers fits into the larger."""
    return max(one, other) / min(one, other)


def read_choice_tables(path: str | os.PathLike[str]) -> list[ChoiceTable]:
    """All tables of a choice file. FileNotFoundError, or a ValueError that names the file and what is wrong there."""
    tables: dict[tuple[str, int, int, str], ChoiceTable] = {}
    for place, table in enumerate(_read(path, _ChoiceFile).choices):
        if table.key in tables:
            raise ValueError(f"{path}: table {place}: there is one already for {describe(*table.key)}")
        tables[table.key] = table
    return list(tables.values())


def write_choice_tables(path: str | os.PathLike[str], tables: Iterable[ChoiceTable]) -> None:
    """Put tables into a choice file: they replace those of the same key, and the others that it holds stay."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    merged = {table.key: table for table in (read_choice_tables(path) if path.exists() else [])}
    merged |= {table.key: table for table in tables}
    rows = [json.dumps(msgspec.structs.asdict(merged[key])) for key in sorted(merged)]
    replace_file(path, ('{"choices": [\n  ' + ",\n  ".join(rows) + "\n]}\n").encode())


def find_choice_table(
    device: str, ranks: int, hidden_size: int, transport: str, paths: Sequence[Path] | None = None
) -> ChoiceTable | None:
    """The table of this device, number of ranks and transport whose hidden size is the nearest in ratio.

    None if none was measured; a warning, given once, if only for another hidden size. `paths`: choice files, by default
    the shipped ones; of two files with a table for the same key the later counts.
    """
    paths = sorted(CONFIGS_DIR.glob("*.json")) if paths is None else paths
    tables = {table.key: table for path in paths for table in read_choice_tables(path)}
    fitting = [
        table for table in tables.values() if (table.device, table.ranks, table.transport) == (device, ranks, transport)
    ]
    unknown = f"which all-reduce is the fastest was not measured for {describe(device, ranks, hidden_size, transport)}"
    if not fitting:
        return None
    nearest = min(fitting, key=lambda table: (ratio(table.hidden_size, hidden_size), table.hidden_size))
    if nearest.hidden_size != hidden_size:
        warn_once(f"{unknown}: what was for hidden size {nearest.hidden_size} counts")
    return nearest


def describe(device: str, ranks: int, hidden_size: int, transport: str) -> str:
    """The key of a table, for messages."""
    return f"{ranks} x {device}, hidden size {hidden_size}, {transport}"


@cache
def warn_once(message: str) -> None:
    """Log a warning unless it was logged before."""
    logger.warning(message)


@dataclass(frozen=True, kw_only=True)
class SplitPoint:
    """How `num_tokens` tokens are best split in two so that one half computes while the other is reduced."""

    num_tokens: int
    attention_programs: int
    """Programs (thread blocks) that reduce while the other half is in attention; the rest of the GPU computes. 0: the
    copy engines (TokenWeave's files have at least 1)."""
    mlp_programs: int
    """The same, while the other half is in the MLP."""
    offset: int
    """Tokens that the first half has more than an even split."""


def read_split_points(path: str | os.PathLike[str]) -> list[SplitPoint]:
    """TokenWeave's file, rising token counts. FileNotFoundError, or a ValueError that names the file and the entry."""
    points = []
    for key, value in _read(path, dict[str, Any]).items():
        entry = convert_json(value, _SplitEntry, f"{path}: {key[:100]} tokens")
        try:
            num_tokens = count_of(key)
            offsets = {name: value for name in OFFSET_NAMES if (value := getattr(entry, name)) is not None}
            if len(offsets) != 1:
                found = " and ".join(offsets) or "neither"
                raise ValueError(f"expected one of {' and '.join(OFFSET_NAMES)}, found {found}")
            ((name, offset),) = offsets.items()
            # From -num_tokens / 2 to num_tokens / 2, both excluded: neither half may be empty.
            least, most = (-num_tokens) // 2 + 1, (num_tokens - 1) // 2
            if not least <= offset <= most:
                raise ValueError(f"{name} must be an integer, from {least} to {most}, not {offset}")
        except ValueError as error:
            raise ValueError(f"{path}: {key[:100]} tokens: {error}") from error
        points.append(
            SplitPoint(
                num_tokens=num_tokens,
                attention_programs=entry.attention_ctas,
                mlp_programs=entry.mlp_ctas,
                offset=offset,
            )
        )
    try:
        check_rising([point.num_tokens for point in points])
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return points


class _SplitEntry(msgspec.Struct, forbid_unknown_fields=True):
    attention_ctas: Annotated[int, Meta(ge=0, le=2**20)]
    mlp_ctas: Annotated[int, Meta(ge=0, le=2**20)]
    chunk_offset: int | None = None
    split_offset: int | None = None
    baseline_ctas: Any = None


def write_split_points(path: str | os.PathLike[str], points: Sequence[SplitPoint]) -> None:
    """A split file of these points, of rising token counts; what the file held before is gone."""
    check_rising([point.num_tokens for point in points])
    rows = [
        f'"{point.num_tokens}": {{"attention_ctas": {point.attention_programs}, "mlp_ctas": {point.mlp_programs}, '
        f'"split_offset": {point.offset}}}'
        for point in points
    ]
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, ("{\n  " + ",\n  ".join(rows) + "\n}\n").encode())


def nearest_split_point(points: Sequence[SplitPoint], num_tokens: int) -> SplitPoint:
    """The point nearest to `num_tokens`, by difference as in TokenWeave (the smaller of two as near)."""
    return min(points, key=lambda point: abs(point.num_tokens - num_tokens))


def _read(path: str | os.PathLike[str], kind: type[Kind]) -> Kind:
    """A file's content as a value of `kind`; a key that stands twice in one object is an error, too."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        content = json.loads(path.read_bytes(), object_pairs_hook=_without_repetition)
    except RecursionError as error:
        raise ValueError(f"{path}: nested too deeply to be read") from error
    except ValueError as error:  # of JSON and of UTF-8 too
        raise ValueError(f"{path}: {error}") from error
    return convert_json(content, kind, path)


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"{next(key for key in keys if keys.count(key) > 1)!r} stands twice in one object")
    return found


def count_of(key: str) -> int:
    """A token count from a key of JSON, written without sign or leading zeros; ValueError otherwise."""
    if not key.isascii() or not key.isdigit() or key[0] == "0" or len(key) > MAX_DIGITS:
        raise ValueError(f"{key[:100]!r} is not a token count")
    return int(key)


def check_rising(counts: Sequence[int]) -> None:
    """ValueError unless there are token counts, each larger than the one before."""
    if not counts:
        raise ValueError("there is no token count")
    for before, after in zip(counts, counts[1:], strict=False):
        if after <= before:
            raise ValueError(f"token counts must rise, and {after} comes after {before}")
