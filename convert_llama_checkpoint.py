"""Convert a Llama or OPT checkpoint into the one-file-a-layer layout of `modules/checkpoint.py`.

    python convert_llama_checkpoint.py --source HUB_ID_OR_DIR_OR_GGUF --output-dir D [--dtype bfloat16]

Weights are streamed: one shard open at a time, one layer in memory. A GGUF file is dequantised. What cannot be
converted faithfully is refused.
"""

from __future__ import annotations

import hashlib
import math
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro
from loguru import logger
from tqdm import tqdm

from modules.checkpoint import CheckpointWriter, load_config, read_hf_config
from modules.checkpoint_files import (
    CONFIG_FILE,
    DTYPES,
    WEIGHT_FILES,
    Shapes,
    ShardFiles,
    TensorSource,
    is_converted,
    read_manifest,
)
from modules.checkpoint_gguf import GgufFile
from modules.config import ModelConfig

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")

# How a GGUF's byte-level tokenizer cuts text before merging (`tokenizer.ggml.pre`). transformers gives all of them
# GPT-2's rule; these two differ from it on digits.
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Convert a Llama or OPT checkpoint into one file per layer."""

    source: str
    """A Hugging Face hub id, a folder with config.json and safetensors or .bin weights, or a .gguf file."""
    output_dir: Path
    """The folder to write. It appears only when it is complete."""
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    """Type to store the weights in; auto: the source's (float32 for GGUF)."""
    overwrite: bool = False
    """Replace a converted checkpoint of another model or dtype at output-dir."""
    quiet: bool = False
    """No progress bar."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """An opened source: the config as given, how to get its tensors, and how to add its tokenizer to a folder."""

    model_id: str
    hf_config: dict[str, Any]
    tensors: Callable[[ModelConfig, Shapes], TensorSource]
    copy_tokenizer: Callable[[Path], None]


def main(options: Options) -> None:
    """Convert, unless the same conversion is already there. Raises ValueError or OSError, one line each."""
    path = Path(options.source)
    existing = existing_manifest(options.output_dir)
    identity = {"source": options.source, "requested_dtype": options.dtype}
    if not path.exists() and is_same(existing, identity):  # a hub id: no network needed
        print(f"{options.output_dir}: already converted from {options.source}")
        return
    if not path.exists():
        path = fetch(options.source)
    identity = {"source_fingerprint": fingerprint(path), "requested_dtype": options.dtype}
    if is_same(existing, identity):
        print(f"{options.output_dir}: already converted from {options.source}")
        return
    if existing and not options.overwrite:
        raise ValueError(
            f"{options.output_dir}: holds {existing.get('model_id')} ({existing.get('dtype')}), converted from "
            f"{existing.get('source')}; pass --overwrite to replace it"
        )
    source = open_gguf(path) if path.suffix == ".gguf" else open_folder(path)
    writer = CheckpointWriter(
        options.output_dir,
        source.hf_config,
        model_id=source.model_id,
        dtype=DTYPES.get(options.dtype),
        manifest=identity | {"source": options.source},
    )
    tensors = source.tensors(writer.config, writer.shapes)
    check_disk(writer, tensors)
    with writer:
        source.copy_tokenizer(writer.partial_dir)
        for _ in tqdm(writer.write_parts(tensors), total=len(writer.shapes), unit="part", disable=options.quiet):
            pass
    print(f"{options.output_dir}: {source.model_id}, {writer.config.num_hidden_layers} layers, {writer.dtype}")


def existing_manifest(output_dir: Path) -> dict[str, Any]:
    """The manifest of an earlier conversion, {} if the place is free; ValueError if something else is there."""
    if not output_dir.exists() or (output_dir.is_dir() and not any(output_dir.iterdir())):
        return {}
    manifest = read_manifest(output_dir) if output_dir.is_dir() else None
    if manifest is None:
        raise ValueError(f"{output_dir}: exists and is not a checkpoint that this command wrote; choose another folder")
    return manifest


def is_same(manifest: dict[str, Any], identity: dict[str, str]) -> bool:
    """Whether a manifest is that of the conversion that was asked for."""
    return bool(manifest) and all(manifest.get(key) == value for key, value in identity.items())


def fingerprint(path: Path, block: int = 1 << 16, num_blocks: int = 16) -> str:
    """Names a source by the name, size and evenly spaced blocks of each file that a conversion reads."""
    files = [path]
    if path.is_dir():
        read = [path / CONFIG_FILE, *(path / name for name in TOKENIZER_FILES)]
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
    needed = itemsize * sum(math.prod(shape) for part in writer.shapes.values() for shape in part.values())
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

    def copy_tokenizer(target: Path) -> None:
        for name in TOKENIZER_FILES:
            if (directory / name).is_file():
                shutil.copyfile(directory / name, target / name)

    return Source(
        model_id=hub_name(directory) or str(hf_config.get("_name_or_path") or directory.resolve().name),
        hf_config=hf_config,
        tensors=lambda config, shapes: ShardFiles(directory, config, shapes),
        copy_tokenizer=copy_tokenizer,
    )


def hub_name(directory: Path) -> str | None:
    """OWNER/NAME of a folder in the hub's cache, else None."""
    match = re.search(r"models--([^/]+?)--([^/]+)/snapshots/", directory.as_posix() + "/")
    return f"{match[1]}/{match[2]}" if match else None


def open_gguf(path: Path) -> Source:
    """A GGUF file of a Llama, dequantised."""
    file = GgufFile(path)

    def copy_tokenizer(target: Path) -> None:
        from transformers import AutoTokenizer

        if file.field("tokenizer.ggml.model") is None:
            logger.warning(f"{path}: has no tokenizer; only token ids can be given to this model")
            return
        try:
            tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        except Exception as error:  # tokenizers raises plain Exception for a vocabulary it cannot build
            raise ValueError(f"{path}: its tokenizer cannot be read: {error}") from error
        set_pre_tokenizer(tokenizer, file.field("tokenizer.ggml.model"), file.field("tokenizer.ggml.pre"))
        tokenizer.save_pretrained(target)

    return Source(
        model_id=path.stem, hf_config=file.hf_config, tensors=lambda config, shapes: file, copy_tokenizer=copy_tokenizer
    )


def set_pre_tokenizer(tokenizer: Any, model: str | None, rule: str | None) -> None:
    """Give a byte-level tokenizer read from GGUF the cutting rule that it was trained with."""
    from tokenizers import Regex, pre_tokenizers

    if model != "gpt2" or rule in (None, "default", "gpt-2"):
        return
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule == "smollm")
    if rule == "smollm":
        first: Any = pre_tokenizers.Digits(individual_digits=True)
    elif rule in ("llama-bpe", "llama3", "llama-v3"):
        first = pre_tokenizers.Split(Regex(LLAMA3_SPLIT), behavior="isolated")
        tokenizer.backend_tokenizer.model.ignore_merges = True  # a piece that is a token needs no merging
    else:
        logger.warning(f"GGUF pre-tokenizer {rule!r} is not known here: text is cut as GPT-2 does")
        return
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([first, byte_level])


def run(args: list[str] | None = None) -> None:
    """The command line: bad input is one line on stderr and exit code 2."""
    options = tyro.cli(Options, args=args, description=__doc__, config=(tyro.conf.FlagCreatePairsOff,))
    try:
        main(options)
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    run()
