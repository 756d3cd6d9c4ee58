"""Writing a checkpoint folder, part by part, with the sums of all files. It gets its name only when it is complete.

Until then it is `<name>.partial`. An older folder of that name is renamed to `<name>.replaced` first, and removed
afterwards. `recover` repairs the state after a kill at any moment.
"""

import datetime
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import torch
from torch import Tensor

from data.files import disk_errors, only_writer, sha256_of, sync_folder, write_json
from modules.checkpoint.load import build_on_meta, checkpoint_shapes, parse_config, parts, tensor_locations
from modules.checkpoint.manifest import (
    FORMAT_VERSION,
    MANIFEST_FILE,
    FileRecord,
    PartRecord,
    directory_sum,
    replaced_dir,
)
from modules.checkpoint.sources import (
    CONFIG_FILE,
    EMBEDDINGS,
    HEAD,
    TensorSource,
    check_finite,
    check_part,
    check_tied,
    hf_name,
    is_converted,
    part_file,
)
from modules.decoder import Decoder
from modules.families.registry import to_hf_config
from modules.shards import own_tensor


class CheckpointWriter:
    """Writes a checkpoint folder, part by part; it appears under its name only when it is complete.

    Until then it is `<name>.partial`, which a later run replaces and an error removes. Used as a context manager:
    `with CheckpointWriter(...) as writer: writer.write_parts(source)`. `kept`: file name -> record of the parts that
    are taken as they are from the folder that is there.
    """

    def __init__(
        self,
        output_dir: str | Path,
        hf_config: Mapping[str, Any],
        *,
        model_id: str,
        dtype: torch.dtype | None = None,
        manifest: Mapping[str, Any] | None = None,
        kept: Mapping[str, PartRecord] | None = None,
    ) -> None:
        self.output_dir = Path(os.path.realpath(output_dir))  # what a link points at is replaced, never the link
        self.partial_dir = _partial(self.output_dir)
        self.hf_config = dict(hf_config)
        self.config = parse_config(hf_config, self.output_dir / CONFIG_FILE)
        self.shapes = checkpoint_shapes(self.config)
        self.dtype = dtype
        self.model_id = model_id
        self.extra_manifest = dict(manifest or {})
        self.kept = dict(kept or {})
        self._records: dict[str, Future[PartRecord]] = {}

    def __enter__(self) -> "CheckpointWriter":
        recover(self.output_dir)
        if self.output_dir.exists() and not is_converted(self.output_dir) and any(self.output_dir.iterdir()):
            raise ValueError(f"{self.output_dir}: exists and is not a converted checkpoint; choose another folder")
        self.partial_dir.mkdir(parents=True)
        self._summing = ThreadPoolExecutor(1)  # beside the next part's conversion
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                with disk_errors(self.partial_dir):
                    self._finish()
        finally:
            self._summing.shutdown(cancel_futures=True)
            shutil.rmtree(self.partial_dir, ignore_errors=True)  # on success it has been renamed

    def write_parts(self, source: TensorSource) -> Iterator[str]:
        """Write every part of `source`, yielding each part's name once it is written (for a progress bar)."""
        for part in parts(self.config):
            if part_file(part) in self.kept:
                self._keep(part_file(part))
                yield part
                continue
            tensors = check_part(source, part, self.shapes[part])
            if self.dtype is None:
                self.dtype = tensors["embed_tokens.weight"].dtype
            if part == HEAD and self.config.tie_word_embeddings:
                embeddings = source.read_part(EMBEDDINGS)["embed_tokens.weight"]
                check_tied(tensors["lm_head.weight"], embeddings, source.where(part, "lm_head.weight"))
                del embeddings
            self._write_part(part, tensors, source)
            del tensors
            yield part

    def _keep(self, name: str) -> None:
        there, here = self.output_dir / name, self.partial_dir / name
        try:
            os.link(there, here)
        except OSError:  # a file system without links
            shutil.copyfile(there, here)
        self._records[name] = self._summing.submit(lambda: self.kept[name])

    def _write_part(self, part: str, tensors: Mapping[str, Tensor], source: TensorSource) -> None:
        assert self.dtype is not None
        written = {}
        for key, tensor in tensors.items():
            # A copy: torch.save writes a view's whole storage, which may be a mapped file.
            written[key] = own_tensor(tensor.to(device="cpu", dtype=self.dtype), tensor)
            check_finite(written[key], tensor, source.where(part, key))
        path = self.partial_dir / part_file(part)
        save_tensors(path, written)
        shapes = {key: list(tensor.shape) for key, tensor in written.items()}
        self._records[path.name] = self._summing.submit(_part_record, path, shapes)

    def _finish(self) -> None:
        missing = [part for part in self.shapes if part_file(part) not in self._records]
        if missing:
            raise ValueError(f"{self.output_dir}: parts not written: {', '.join(missing)}")
        assert self.dtype is not None
        dtype = str(self.dtype).removeprefix("torch.")
        dtype_keys = {"dtype", "torch_dtype"} & self.hf_config.keys()  # transformers 5, older
        write_json(
            self.partial_dir / CONFIG_FILE,
            self.hf_config | dict.fromkeys(sorted(dtype_keys or ("dtype", "torch_dtype")), dtype),
            indent=2,
        )
        others = sorted(path for path in self.partial_dir.iterdir() if path.name not in self._records)
        manifest = {
            "format": "checkpoint",
            "format_version": FORMAT_VERSION,
            "model_id": self.model_id,
            "config_hash": self.config.config_hash(),
            "dtype": dtype,
            "num_hidden_layers": self.config.num_hidden_layers,
            "num_tensors": sum(len(keys) for keys in self.shapes.values()),
            "num_parameters": sum(parameter.numel() for parameter in build_on_meta(self.config).parameters()),
            "command_line": sys.argv,
            "git_commit": git_commit(),
            "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            **self.extra_manifest,
            "files": {name: msgspec.to_builtins(record.result()) for name, record in self._records.items()},
            "other_files": {path.name: msgspec.to_builtins(_file_record(path)) for path in others},
        }
        write_json(self.partial_dir / MANIFEST_FILE, manifest, indent=2)
        replaced = replaced_dir(self.output_dir)
        if self.output_dir.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            os.replace(self.output_dir, replaced)
        os.replace(self.partial_dir, self.output_dir)
        sync_folder(self.output_dir.parent)
        shutil.rmtree(replaced, ignore_errors=True)


def recover(output_dir: Path) -> None:
    """Repair the state after a writer was killed. Between its two renames the new folder is complete, and gets its
    name; an incomplete folder is removed."""
    partial, replaced = _partial(output_dir), replaced_dir(output_dir)
    if replaced.is_dir() and not output_dir.exists():
        # The manifest is written last.
        os.replace(partial if (partial / MANIFEST_FILE).is_file() else replaced, output_dir)
    for left in (partial, replaced):
        if left.is_dir():
            shutil.rmtree(left)


def _partial(output_dir: Path) -> Path:
    return output_dir.with_name(output_dir.name + ".partial")


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """`torch.save`; OSError as `disk_errors`, where torch itself says RuntimeError."""
    with disk_errors(path):
        try:
            torch.save(dict(tensors), path)
        except RuntimeError as error:
            with open(path, "ab", buffering=0) as file:
                file.write(bytes(1 << 16))  # fails again, and then as the system says it
            raise OSError(f"{path}: cannot be written: {str(error).partition(chr(10))[0]}") from error


def _file_record(path: Path) -> FileRecord:
    """The record of a file, which is made durable."""
    _sync(path)
    return FileRecord(bytes=path.stat().st_size, sha256=sha256_of(path))


def _part_record(path: Path, shapes: dict[str, list[int]]) -> PartRecord:
    with disk_errors(path):
        _sync(path)
    return PartRecord(
        bytes=path.stat().st_size, sha256=sha256_of(path), directory_sha256=directory_sum(path), tensors=shapes
    )


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def write_model(
    model: Decoder,
    output_dir: str | Path,
    *,
    model_id: str,
    manifest: Mapping[str, Any] | None = None,
    other_files: Sequence[Path] = (),
) -> None:
    """Write a checkpoint folder of a whole decoder, with copies of `other_files` (its tokenizer's) beside it."""
    writer = CheckpointWriter(
        output_dir, to_hf_config(model.config), model_id=model_id, dtype=model.compute_dtype, manifest=manifest
    )
    with only_writer(output_dir), writer:
        for path in other_files:
            with disk_errors(writer.partial_dir / path.name):
                shutil.copyfile(path, writer.partial_dir / path.name)
        for _ in writer.write_parts(DecoderTensors(model)):
            pass


class DecoderTensors:
    """A whole decoder's parameters as a checkpoint has them (a `TensorSource`); ValueError for a part of a model."""

    def __init__(self, model: Decoder) -> None:
        if model.links is not None or model.shards:
            raise ValueError("only a whole model can be written as a checkpoint, and this rank holds a part of one")
        self.parameters = dict(model.named_parameters(remove_duplicate=False))
        self.locations = tensor_locations(model, model.config)

    def read_part(self, part: str) -> dict[str, Tensor]:
        """key -> tensor, a view of the parameter."""
        return {place.key: self.tensor(name) for name, place in self.locations.items() if place.part == part}

    def tensor(self, name: str) -> Tensor:
        """A parameter as the checkpoint has it."""
        value = self.parameters[name].detach()
        return value.t() if self.locations[name].transposed else value

    def where(self, part: str, key: str) -> str:
        """For messages."""
        return f"the model in memory: {part} {key}"


def hf_state_dict(model: Decoder) -> dict[str, Tensor]:
    """The model's tensors under the full names that Hugging Face's class has for them."""
    tensors = DecoderTensors(model)
    return {
        hf_name(place.part, place.key, model.config): tensors.tensor(name) for name, place in tensors.locations.items()
    }


def git_commit() -> str | None:
    """The commit of this code, with "+dirty" if it was changed; None outside a checkout."""
    folder = Path(__file__).resolve().parent
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty=+dirty", "--abbrev=12", "--exclude=*"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return result.stdout.strip() or None
