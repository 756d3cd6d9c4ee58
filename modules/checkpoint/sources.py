"""Reading tensors from files, one part at a time: a converted folder, or a Hugging Face folder as it is.

A part is the embeddings, one layer, or the head. Files are memory-mapped, so that whoever
needs only a slice of a tensor reads only that slice.
"""

import hashlib
import pickle
import re
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
from loguru import logger
from safetensors import SafetensorError, safe_open
from torch import Tensor

from data.files import read_json
from modules.checkpoint.manifest import MANIFEST_FILE, check_part_file, check_small_files, read_manifest
from modules.config import ModelConfig
from modules.families.registry import FAMILIES

CONFIG_FILE = "config.json"
EMBEDDINGS = "embs"
HEAD = "lm_head"
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
SAMPLED_BLOCKS, BLOCK_BYTES = 8, 4096  # of each weight file, for the fingerprint
# Old files carry these; the values follow from the config.
HARMLESS = re.compile(r"(.*\.)?rotary_emb\.inv_freq|(model\.)?decoder\.version")
POINTER = b"version https://git-lfs"
READABLE_DTYPES = (*DTYPES.values(), torch.float64)
# Preferred first. The names of shards come from the index, so a stray file in the folder is never read.
WEIGHT_FILES = (
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
)

Shapes = Mapping[str, Mapping[str, tuple[int, ...]]]


class TensorSource(Protocol):
    """Anything that returns a checkpoint's tensors by part, under Hugging Face's names without layer prefix."""

    def read_part(self, part: str) -> dict[str, Tensor]:
        """key -> tensor; a tensor may be a view of a mapped file, so copy what you keep."""
        ...

    def where(self, part: str, key: str) -> str:
        """File and name of a tensor, for messages."""
        ...


def part_file(part: str) -> str:
    """File name of a part in a converted folder."""
    return f"pytorch_{part}.pt"


def is_converted(directory: Path) -> bool:
    """Whether a folder is in the one-file-per-layer layout (ours, or the DejaVu tooling's, which has no manifest)."""
    return (directory / part_file("embs")).exists() or (directory / MANIFEST_FILE).exists()


def open_tensors(path: Path) -> Mapping[str, Any]:
    """The tensors of a .pt or .bin file, mapped, nothing but tensors unpickled; ValueError if it is damaged."""
    mapped = zipfile.is_zipfile(path)
    if not mapped and path.exists() and path.suffix == ".bin":
        logger.info(f"{path}: written in the old torch format, which cannot be mapped: read into memory instead")
    try:
        tensors = torch.load(path, map_location="cpu", mmap=mapped, weights_only=True)
    except (RuntimeError, EOFError, KeyError, pickle.UnpicklingError, zipfile.BadZipFile) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"{path}: cannot be read, truncated or not a tensor file: {reason}") from error
    if not isinstance(tensors, Mapping):
        raise ValueError(f"{path}: expected a dictionary of tensors, found {type(tensors).__name__}")
    return tensors


def refuse_pointer(path: Path) -> None:
    """ValueError for a Git LFS pointer, which stands in the place of a large file that was not fetched."""
    with path.open("rb") as file:
        if file.read(len(POINTER)) == POINTER:
            raise ValueError(f"{path}: a git-lfs pointer, not the file itself; fetch it (git lfs pull)")


class PartFiles:
    """A converted folder: one file per part."""

    def __init__(self, directory: Path, shapes: Shapes) -> None:
        self.directory = directory
        self.manifest = read_manifest(directory)
        recorded = self.manifest.files if self.manifest is not None else {}
        repair = f"; {self.manifest.repair(directory)}" if self.manifest is not None else ""
        for part in shapes:
            path = directory / part_file(part)
            if not path.is_file():
                raise FileNotFoundError(f"{path}: missing; the config asks for {len(shapes) - 2} layers{repair}")
            size = path.stat().st_size
            if path.name in recorded and size != recorded[path.name].bytes:
                raise ValueError(
                    f"{path}: {size} bytes, but the manifest says {recorded[path.name].bytes}: truncated or "
                    f"replaced{repair}"
                )
        known = {part_file(part) for part in shapes}
        for path in sorted(directory.glob("pytorch_*.pt")):
            if path.name not in known:
                raise ValueError(f"{path}: unexpected; the config asks for layers 0 to {len(shapes) - 3} only")
        if self.manifest is not None:
            check_small_files(directory, self.manifest)

    def read_part(self, part: str) -> dict[str, Tensor]:
        path = self.directory / part_file(part)
        if self.manifest is not None:
            check_part_file(path, self.manifest)
        return dict(open_tensors(path))

    def where(self, part: str, key: str) -> str:
        return f"{self.directory / part_file(part)}: {key}"


class _Index(msgspec.Struct):
    """`*.index.json`: tensor name -> file."""

    weight_map: dict[str, str]


class ShardFiles:
    """A Hugging Face folder: safetensors or .bin, in shards or whole. At most one shard is open at a time."""

    def __init__(self, directory: Path, config: ModelConfig, shapes: Shapes) -> None:
        self.directory = directory
        self._open_name = ""
        self._open_names: list[str] = []
        self._open_get: Callable[[str], Tensor] | None = None
        self.shards, listed = _shards(directory)
        self._file_of: dict[str, str] = {}
        for shard in self.shards:
            for name in self._open(shard):
                if name in self._file_of:
                    raise ValueError(f"{directory}: {name} is in {self._file_of[name]} and in {shard}")
                self._file_of[name] = shard
        for name, shard in listed.items():
            if self._file_of.get(name) != shard:
                raise ValueError(f"{directory / shard}: {name} is missing, though the index lists it there")
        try:
            self._name_of = locate_hf_names(self._file_of, config, shapes)
        except ValueError as error:
            raise ValueError(f"{directory}: {error}") from error

    def read_part(self, part: str) -> dict[str, Tensor]:
        wanted = {key: name for (owner, key), name in self._name_of.items() if owner == part}
        tensors = {}
        for shard in sorted({self._file_of[name] for name in wanted.values()}):
            self._open(shard)
            assert self._open_get is not None
            for key, name in wanted.items():
                if self._file_of[name] == shard:
                    tensors[key] = self._open_get(name)
        return tensors

    def where(self, part: str, key: str) -> str:
        name = self._name_of[part, key]
        return f"{self.directory / self._file_of[name]}: {name}"

    def _open(self, shard: str) -> list[str]:
        """Make `shard` the open one (the previous is released); its tensor names."""
        if shard == self._open_name:
            return self._open_names
        self._open_get = None  # release the previous shard before mapping the next
        path = self.directory / shard
        if not path.is_file():
            raise FileNotFoundError(f"{path}: missing, though the index lists it")
        refuse_pointer(path)
        if path.suffix == ".safetensors":
            try:
                handle = safe_open(path, framework="pt", device="cpu")
            except SafetensorError as error:
                raise ValueError(f"{path}: cannot be read, truncated or not safetensors: {error}") from error
            names = list(handle.keys())
            self._open_get = handle.get_tensor
        else:
            tensors = open_tensors(path)
            names = list(tensors)
            self._open_get = tensors.__getitem__
        self._open_name, self._open_names = shard, names
        return names


def locate_hf_names(
    hf_names: Mapping[str, str], config: ModelConfig, shapes: Mapping[str, Mapping[str, tuple[int, ...]]]
) -> dict[tuple[str, str], str]:
    """Match the names of a Hugging Face checkpoint (name -> file, for messages) with (part, key) -> name.

    Raises ValueError naming every tensor that is missing, unknown, or there twice. A tied head may be absent.
    """
    found: dict[tuple[str, str], str] = {}
    unknown = []
    for name in hf_names:
        if HARMLESS.fullmatch(name):
            continue
        place = _place(name, config, shapes)
        if place is None:
            unknown.append(f"{name} ({hf_names[name]})")
        elif place in found:
            raise ValueError(f"{name} ({hf_names[name]}) and {found[place]} ({hf_names[found[place]]}) are one tensor")
        else:
            found[place] = name
    if config.tie_word_embeddings and (EMBEDDINGS, "embed_tokens.weight") in found:
        found.setdefault((HEAD, "lm_head.weight"), found[EMBEDDINGS, "embed_tokens.weight"])
    missing = [hf_name(part, key, config) for part in shapes for key in shapes[part] if (part, key) not in found]
    problems = []
    if missing:
        problems.append(f"missing {_listed(missing)}")
    if unknown:
        problems.append(f"unknown {_listed(unknown)}")
    if problems:
        raise ValueError(f"the tensors do not fit the config: {'; '.join(problems)}")
    return found


def _place(
    name: str, config: ModelConfig, shapes: Mapping[str, Mapping[str, tuple[int, ...]]]
) -> tuple[str, str] | None:
    for prefix in FAMILIES[config.model_type].prefixes:
        stem = name.removeprefix(prefix) if name.startswith(prefix) else None
        if stem is None:
            continue
        layer = re.fullmatch(r"layers\.(\d+)\.(.+)", stem)
        candidates = [(layer[1], layer[2])] if layer else [(EMBEDDINGS, stem), (HEAD, stem)]
        for part, key in candidates:
            if key in shapes.get(part, {}):
                return part, key
    return None


def hf_name(part: str, key: str, config: ModelConfig) -> str:
    """The full name that Hugging Face's class has for a key of a part."""
    if key == "lm_head.weight":
        return key
    layer = f"layers.{part}." if part not in (EMBEDDINGS, HEAD) else ""
    return f"{FAMILIES[config.model_type].prefixes[0]}{layer}{key}"


def _listed(names: list[str], limit: int = 4) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def open_source(directory: Path, config: ModelConfig, shapes: Shapes) -> PartFiles | ShardFiles:
    """The tensors of a converted or a Hugging Face folder; FileNotFoundError/ValueError says what is wrong with it."""
    if is_converted(directory):
        return PartFiles(directory, shapes)
    return ShardFiles(directory, config, shapes)


def _shards(directory: Path) -> tuple[list[str], dict[str, str]]:
    """Names of the weight files, and the index (name -> file; empty when there is one file)."""
    for name in WEIGHT_FILES:
        path = directory / name
        if not path.exists():
            continue
        if not name.endswith(".index.json"):
            return [name], {}
        listed = read_json(path, _Index).weight_map
        if outside := [shard for shard in listed.values() if shard in ("", "..") or Path(shard).name != shard]:
            raise ValueError(f"{path}: weight_map names {outside[0]!r}; only names of files in this folder are read")
        return sorted(set(listed.values())), listed
    ggufs = sorted(file.name for file in directory.glob("*.gguf"))
    hint = f"; it holds {', '.join(ggufs)}: convert that file by its path" if ggufs else ""
    raise FileNotFoundError(f"{directory}: no weights; looked for {', '.join(WEIGHT_FILES)}{hint}")


def checkpoint_fingerprint(directory: str | Path) -> str:
    """A hash that shows whether ranks were given the same checkpoint, from a few blocks of each file.

    It covers config.json, the weight files' names and sizes, and SAMPLED_BLOCKS of each, first and last among them.
    The last holds check sums that torch.save writes: a .pt or .bin file written anew with one other weight is seen.
    Not seen, outside those blocks: a bit that flipped in place, a changed weight in a safetensors file; nor the
    tokenizer. FileNotFoundError if there are no weights.
    """
    directory = Path(directory)
    names = [path.name for path in directory.glob("pytorch_*.pt")] if is_converted(directory) else _shards(directory)[0]
    digest = hashlib.sha256((directory / CONFIG_FILE).read_bytes())
    for name in sorted(names):
        size = (directory / name).stat().st_size
        digest.update(f"/{name}:{size}/".encode())
        with (directory / name).open("rb", buffering=0) as file:
            for block in range(SAMPLED_BLOCKS):
                file.seek(max(0, size - BLOCK_BYTES) * block // (SAMPLED_BLOCKS - 1))
                digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()


def check_part(source: TensorSource, part: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Read a part strictly: exactly the expected keys, shapes as expected, unquantised types."""
    tensors = source.read_part(part)
    missing = sorted(shapes.keys() - tensors.keys())
    extra = sorted(key for key in tensors.keys() - shapes.keys() if not re.search(r"rotary_emb\.inv_freq$", key))
    if missing or extra:
        problems = [f"missing {', '.join(missing)}"] if missing else []
        problems += [f"unknown {', '.join(extra)}"] if extra else []
        file = source.where(part, (missing + extra)[0]).rpartition(": ")[0]
        raise ValueError(f"{file}: the tensors do not fit the config: {'; '.join(problems)}")
    for key, shape in shapes.items():
        tensor = tensors[key]
        where = source.where(part, key)
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{where}: expected a tensor, found {type(tensor).__name__}")
        if tensor.dtype not in READABLE_DTYPES:
            raise ValueError(
                f"{where}: type {tensor.dtype} is not supported (quantised?); supported: float32, float16, bfloat16"
            )
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{where}: shape {tuple(tensor.shape)}, but the config asks for {shape}")
    return {key: tensors[key] for key in shapes}


def check_finite(value: Tensor, original: Tensor, where: str) -> None:
    """ValueError if a weight is NaN or infinite in the file, or became infinite in a narrower type."""
    # One sum is a cheap witness: it is finite only if every term is. (It may overflow without a bad term: look.) In the
    # weights' own type: for another, torch first converts all of them, which took about half of the time of a load.
    if torch.isfinite(value.sum()):
        return
    bad = int((~torch.isfinite(original)).sum())
    if bad:
        raise ValueError(
            f"{where}: {bad} of {original.numel()} weights are NaN or infinite: the file is damaged (convert it "
            "again, or fetch the source again), or the model was saved so"
        )
    if not torch.isfinite(value).all():
        raise ValueError(f"{where}: too large for {value.dtype}; use bfloat16 or float32")


def check_tied(head: Tensor, embeddings: Tensor, where: str) -> None:
    """ValueError if a head that the config calls tied is not the token embeddings (of both, the same part)."""
    if not torch.equal(head, embeddings):
        raise ValueError(
            f"{where}: differs from the token embeddings, although the config says tie_word_embeddings=true; "
            "set it to false if the head is the model's own"
        )
