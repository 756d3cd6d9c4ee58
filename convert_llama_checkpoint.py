"""Convert a checkpoint (Llama, OPT, Qwen2, Mistral) into the one-file-per-layer layout of `modules/checkpoint/`.

    python convert_llama_checkpoint.py --source HUB_ID_OR_DIR_OR_GGUF --output-dir D [--dtype bfloat16]

Weights are streamed: one shard open at a time, one layer in memory. A GGUF file is dequantised. What cannot be
converted faithfully is refused.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from loguru import logger
from tqdm import tqdm

from data.files import changed_files, console, disk_errors, only_writer, read_json, write_json
from modules.checkpoint.gguf import GgufFile
from modules.checkpoint.load import load_config, read_hf_config
from modules.checkpoint.manifest import Manifest, read_manifest
from modules.checkpoint.sources import (
    CONFIG_FILE,
    DTYPES,
    WEIGHT_FILES,
    Shapes,
    ShardFiles,
    TensorSource,
    is_converted,
    part_file,
)
from modules.checkpoint.tokenizer import TOKENIZER_FILES, check_tokenizer, open_tokenizer, write_gguf_tokenizer
from modules.checkpoint.write import CheckpointWriter, recover
from modules.config import ModelConfig

GENERATION_FILE = "generation_config.json"
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
INTERRUPTED = 130


@dataclass(frozen=True, kw_only=True)
class Options:
    """Convert a checkpoint (Llama, OPT, Qwen2, Mistral) into one file per layer."""

    source: str
    """A Hugging Face hub id, a folder with config.json and safetensors or .bin weights, or a .gguf file."""
    output_dir: Path
    """The folder to write. It appears only when it is complete."""
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    """Type to store the weights in; auto: the source's (float32 for GGUF)."""
    overwrite: bool = False
    """Convert anew whatever checkpoint is at output-dir, that of another model or dtype too."""
    quiet: bool = False
    """No progress bar."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """An opened source: the config as given, how to get its tensors, and how to add the other files to a folder."""

    model_id: str
    hf_config: dict[str, Any]
    tensors: Callable[[ModelConfig, Shapes], TensorSource]
    write_others: Callable[[Path, ModelConfig], None]


def main(options: Options) -> None:
    """Convert, unless the same conversion is already there and whole; what is damaged of it is written anew.

    Raises ValueError or OSError, one line each; BlockingIOError while another process writes there.
    """
    with only_writer(options.output_dir):
        convert(options)


def convert(options: Options) -> None:
    """As `main`, by the one who holds the output."""
    recover(Path(os.path.realpath(options.output_dir)))
    path = Path(options.source)
    existing = existing_manifest(options.output_dir, overwrite=options.overwrite)
    if not path.exists():
        asked = {"source": options.source, "requested_dtype": options.dtype}
        if existing is not None and is_same(existing, asked) and not damaged_files(options.output_dir, existing):
            print(f"{options.output_dir}: already converted from {options.source}")  # a hub id: no network needed
            return
        path = fetch(options.source)
    identity = {"source_fingerprint": fingerprint(path), "requested_dtype": options.dtype}
    kept, dtype = {}, DTYPES.get(options.dtype)
    if existing is not None and is_same(existing, identity):
        damaged = damaged_files(options.output_dir, existing)
        if not damaged:
            print(f"{options.output_dir}: already converted from {options.source}")
            return
        more = f" and {len(damaged) - 4} more" if len(damaged) > 4 else ""
        what = (
            f"{', '.join(damaged[:4])}{more} missing, damaged or unknown" if existing.sums else "written without sums"
        )
        logger.warning(f"{options.output_dir}: {what}: written anew")
        dtype = getattr(torch, existing.dtype)
        kept = {name: record for name, record in existing.files.items() if name not in damaged}
    elif existing is not None:
        raise ValueError(
            f"{options.output_dir}: holds {existing.model_id} ({existing.dtype}), converted from "
            f"{existing.source}; pass --overwrite to replace it"
        )
    source = open_gguf(path) if path.suffix == ".gguf" else open_folder(path)
    writer = CheckpointWriter(
        options.output_dir,
        source.hf_config,
        model_id=source.model_id,
        dtype=dtype,
        manifest=identity | {"source": options.source},
        kept=kept,
    )
    tensors = source.tensors(writer.config, writer.shapes)
    check_disk(writer, tensors)
    with writer:
        source.write_others(writer.partial_dir, writer.config)
        for _ in tqdm(writer.write_parts(tensors), total=len(writer.shapes), unit="part", disable=options.quiet):
            pass
    print(f"{options.output_dir}: {source.model_id}, {writer.config.num_hidden_layers} layers, {writer.dtype}")


def existing_manifest(output_dir: Path, *, overwrite: bool) -> Manifest | None:
    """The manifest of an earlier conversion, None if the place is free or to be overwritten; ValueError if something
    else is there."""
    if not output_dir.exists() or (output_dir.is_dir() and not any(output_dir.iterdir())):
        return None
    if not output_dir.is_dir() or not is_converted(output_dir):
        raise ValueError(f"{output_dir}: exists and is not a checkpoint that this command wrote; choose another folder")
    if overwrite:
        return None
    manifest = read_manifest(output_dir)
    if manifest is None:
        raise ValueError(f"{output_dir}: holds a checkpoint without a manifest; pass --overwrite to replace it")
    return manifest


def damaged_files(output_dir: Path, manifest: Manifest) -> list[str]:
    """Names of the files that are missing, not as they were written, or parts of nothing; all of them where an older
    version recorded no sums."""
    sums = manifest.sums
    unknown = [name for name in (*manifest.files, CONFIG_FILE) if name not in sums]
    extra = [path.name for path in output_dir.glob(part_file("*")) if path.name not in manifest.files]
    return unknown + changed_files(output_dir, sums) + extra


def is_same(manifest: Manifest, identity: dict[str, str]) -> bool:
    """Whether a manifest is that of the conversion that was asked for."""
    return all(getattr(manifest, key) == value for key, value in identity.items())


def fingerprint(path: Path, block: int = 1 << 16, num_blocks: int = 16) -> str:
    """Names a source by the name, size and evenly spaced blocks of each file that a conversion reads."""
    files = [path]
    if path.is_dir():
        read = [path / name for name in (CONFIG_FILE, *TOKENIZER_FILES, GENERATION_FILE)]
        files = sorted([*path.glob("*.safetensors"), *path.glob("*.bin"), *(file for file in read if file.exists())])
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as opened:
            for idx in range(num_blocks):
                opened.seek(max(0, size - block) * idx // (num_blocks - 1))
                digest.update(opened.read(block))
    return digest.hexdigest()[:16]


def check_disk(writer: CheckpointWriter, tensors: TensorSource) -> None:
    """OSError if the weights cannot fit; nothing has been written yet."""
    itemsize = (writer.dtype or next(iter(tensors.read_part("embs").values())).dtype).itemsize
    new = [part for name, part in writer.shapes.items() if part_file(name) not in writer.kept]
    needed = itemsize * sum(math.prod(shape) for part in new for shape in part.values())
    folder = writer.output_dir
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise OSError(f"{folder}: the checkpoint needs {needed / 1e9:.1f} GB, only {free / 1e9:.1f} GB are free")


def fetch(hub_id: str) -> Path:
    """Download (or find in the cache) a hub model's config, tokenizer and weights."""
    if Path(hub_id).suffix == ".gguf" or not HUB_ID.fullmatch(hub_id):
        raise FileNotFoundError(f"{hub_id}: no such folder or file, and not a Hugging Face hub id (OWNER/NAME)")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    patterns = ["*.json", "*.model", "*.txt", "*.jinja"]
    try:
        folder = Path(snapshot_download(hub_id, allow_patterns=[*patterns, "*.safetensors"], ignore_patterns=["*/*"]))
        if not any((folder / name).exists() for name in WEIGHT_FILES[:2]):
            snapshot_download(hub_id, allow_patterns=[*patterns, "*.bin"], ignore_patterns=["*/*"])
    except (OSError, RuntimeError, HFValidationError) as error:  # every hub and network error derives from these
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"{hub_id}: no such folder or file here, and not fetched from the Hugging Face hub "
            f"({type(error).__name__}: {reason}); check the name, the network, and `hf auth login` for gated models"
        ) from error
    return folder


def open_folder(directory: Path) -> Source:
    """A Hugging Face folder."""
    if directory.is_file():
        raise ValueError(f"{directory}: not a folder and not a .gguf file")
    if is_converted(directory):
        raise ValueError(f"{directory}: is already a converted checkpoint; the source must be a Hugging Face one")
    hf_config = read_hf_config(directory)
    load_config(directory)  # refuse other architectures before looking for weights

    def write_others(target: Path, config: ModelConfig) -> None:
        tokenizer = open_tokenizer(directory)
        if tokenizer is not None:
            check_tokenizer(tokenizer, config.vocab_size, directory)
        if (directory / GENERATION_FILE).is_file():
            read_json(directory / GENERATION_FILE, dict)
        for name in (*TOKENIZER_FILES, GENERATION_FILE):
            if (directory / name).is_file():
                with disk_errors(target / name):
                    shutil.copyfile(directory / name, target / name)

    return Source(
        model_id=hub_name(directory) or str(hf_config.get("_name_or_path") or directory.resolve().name),
        hf_config=hf_config,
        tensors=lambda config, shapes: ShardFiles(directory, config, shapes),
        write_others=write_others,
    )


def hub_name(directory: Path) -> str | None:
    """OWNER/NAME of a folder in the hub's cache, else None."""
    match = re.search(r"models--([^/]+?)--([^/]+)/snapshots/", directory.as_posix() + "/")
    return f"{match[1]}/{match[2]}" if match else None


def open_gguf(path: Path) -> Source:
    """A GGUF file, dequantised."""
    file = GgufFile(path)

    def write_others(target: Path, config: ModelConfig) -> None:
        keys = ("bos_token_id", "eos_token_id", "pad_token_id")
        write_json(target / GENERATION_FILE, {key: file.hf_config[key] for key in keys}, indent=2)
        tokenizer = write_gguf_tokenizer(file.field, path, target)
        if tokenizer is None:
            logger.warning(f"{path}: has no tokenizer; only token ids can be given to this model")
        else:
            check_tokenizer(tokenizer, config.vocab_size, path)

    return Source(
        model_id=path.stem, hf_config=file.hf_config, tensors=lambda config, shapes: file, write_others=write_others
    )


def run(args: list[str] | None = None) -> None:
    """The command line: bad input is one line on stderr and exit code 2."""
    with console():
        options = tyro.cli(Options, args=args, description=__doc__, config=(tyro.conf.FlagCreatePairsOff,))
        try:
            main(options)
        except BrokenPipeError:
            raise
        except (ValueError, OSError) as error:
            message = str(error)
            if isinstance(error, OSError) and error.strerror and error.filename is not None:
                message = f"{error.filename}: {error.strerror}"
            print(f"error: {' '.join(message.split())}", file=sys.stderr)
            raise SystemExit(2) from None
        except KeyboardInterrupt:
            print("interrupted; give the same command again", file=sys.stderr)
            raise SystemExit(INTERRUPTED) from None


if __name__ == "__main__":
    run()
