"""The checkpoint on disk, written and read here: one file per layer, Hugging Face's names, loaded strictly.

    config.json          the Hugging Face config (its dtype is that of the files)
    manifest.json        what is here: sizes, names, shapes, where it came from
    pytorch_embs.pt      token embeddings; learned positions and the input projection where there are any
    pytorch_{i}.pt       layer i, names without the layer prefix
    pytorch_lm_head.pt   final norm, output projection, head (a tied head is a copy, once)
    tokenizer files and generation_config.json, as they came

The layout is that of the DejaVu tooling, whose folders (without a manifest) load too. Nothing ever falls back to
random weights: whatever is missing, extra, misshapen or not finite is an error that names it.
"""

import datetime
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from modules.checkpoint_files import (
    CONFIG_FILE,
    FORMAT_VERSION,
    MANIFEST_FILE,
    Shapes,
    StateDict,
    TensorSource,
    check_finite,
    check_part,
    check_tied,
    is_converted,
    open_source,
    part_file,
    read_json,
    write_json,
)
from modules.checkpoint_keys import EMBEDDINGS, HEAD, LM_HEAD, TOKENS, expected_shapes, parts, tensor_locations
from modules.config import ModelConfig
from modules.decoder import Decoder
from modules.shards import own_tensor, set_parameter, take_part

Device = torch.device | str
Prepare = Callable[[Decoder], None]


def load_config(source_dir: str | Path) -> ModelConfig:
    """The model configuration of a converted or Hugging Face folder (its `config.json`)."""
    return _parse_config(read_hf_config(source_dir), Path(source_dir) / CONFIG_FILE)


def read_hf_config(source_dir: str | Path) -> dict[str, Any]:
    """`config.json` of a folder, as Hugging Face spells it; FileNotFoundError if there is none."""
    directory = Path(source_dir)
    if not directory.is_dir():
        raise FileNotFoundError(f"{directory}: no such folder; a checkpoint folder was expected")
    path = directory / CONFIG_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{path}: missing; a converted or Hugging Face checkpoint folder has one")
    return read_json(path)


def _parse_config(hf_config: Mapping[str, Any], path: Path) -> ModelConfig:
    try:
        return ModelConfig.from_hf(hf_config)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path}: {error}") from error


def build_on_meta(config: ModelConfig, prepare: Prepare | None = None) -> Decoder:
    """A decoder without storage, cut by `prepare`: parameters have shapes only, until `load_weights` fills them."""
    with torch.device("meta"):
        model = Decoder(config)
    if prepare is not None:
        prepare(model)
    return model


def checkpoint_shapes(config: ModelConfig) -> Shapes:
    """part -> key -> shape of every tensor that a checkpoint of this configuration holds."""
    return expected_shapes(build_on_meta(config), config)


def load_model(
    source_dir: str | Path, *, dtype: torch.dtype | None = None, device: Device = "cpu", prepare: Prepare | None = None
) -> Decoder:
    """A decoder from a converted folder, or from a Hugging Face folder (safetensors or .bin) directly.

    `dtype` None keeps the checkpoint's (that of its token embeddings). `prepare` may cut the model while it is on
    `meta`: remove modules, shard parameters (`Decoder.shards`). What is left is filled tensor by tensor, reading
    nothing else, so peak memory is this model and little more. Weights do not require gradients; the model is in eval
    mode. Raises FileNotFoundError or ValueError, naming file and tensor, for anything but a complete, well-shaped,
    finite checkpoint (of a cut model: as far as its parts are concerned).
    """
    directory = Path(source_dir)
    config = load_config(directory)
    source = open_source(directory, config, checkpoint_shapes(config))
    model = build_on_meta(config, prepare)
    load_weights(model, source, dtype=dtype, device=device)
    return model


def load_weights(
    model: Decoder, source: TensorSource, *, dtype: torch.dtype | None = None, device: Device = "cpu"
) -> None:
    """Give every parameter of a decoder on `meta` its value, or its shard of it, from the parts that it needs."""
    config, shapes = model.config, checkpoint_shapes(model.config)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    locations = tensor_locations(model, config)
    for part in parts(config):
        here = {name: location for name, location in locations.items() if location.part == part}
        if not here and not (part == EMBEDDINGS and dtype is None):
            continue
        tensors = check_part(source, part, shapes[part])
        if dtype is None:  # also of a stage without embeddings: their type is in the file's header
            dtype = tensors["embed_tokens.weight"].dtype
        for name, location in here.items():
            tensor, where = tensors[location.key], source.where(part, location.key)
            # An output projection is turned last, in memory: the file is read in its own order.
            taken = take_part(tensor.t() if location.transposed else tensor, model.shards.get(name))
            value = own_tensor(taken.to(device=device, dtype=dtype), tensor)
            assert value.shape == parameters[name].shape, f"{name}: {value.shape}, held {parameters[name].shape}"
            check_finite(value, taken, where)
            del taken  # before the next one is read
            # A later stage holds a tied head without the embeddings: comparing would mean reading those as well.
            if name == LM_HEAD and config.tie_word_embeddings and TOKENS in parameters:
                check_tied(value, model.embeddings.tokens.weight, where)
                model.lm_head.weight = model.embeddings.tokens.weight
            else:
                set_parameter(model, name, value)
    model.eval()


def random_model(
    config: ModelConfig,
    *,
    seed: int = 0,
    std: float = 0.02,
    dtype: torch.dtype = torch.float32,
    device: Device = "cpu",
    prepare: Prepare | None = None,
) -> Decoder:
    """A decoder of random weights, for tests and benchmarks that say so ("weights": "random").

    Every parameter is N(0, std) (norm weights 1 + N(0, std)), biases included, so that no term of the model is
    absent or neutral. Drawn on the device: a seed gives one model per kind of device. `prepare` as in `load_model`:
    each parameter is drawn whole, from a generator of its own, so the model of a seed is one however it is cut.
    """
    model = build_on_meta(config, prepare)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in parameters.items():
        tied = name == LM_HEAD and config.tie_word_embeddings
        if tied and TOKENS in parameters:
            model.lm_head.weight = model.embeddings.tokens.weight  # named before the head, so drawn
            continue
        shard = model.shards.get(name)
        shape = tuple(parameter.shape) if shard is None else shard.full_shape(tuple(parameter.shape))
        digest = hashlib.sha256(f"{seed}/{TOKENS if tied else name}".encode()).digest()
        generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little"))
        value = torch.randn(shape, generator=generator, device=device).mul_(std)
        if name.endswith("norm.weight"):
            value += 1.0
        set_parameter(model, name, take_part(value, shard).to(dtype))
    return model.eval()


class CheckpointWriter:
    """Writes a checkpoint folder, part by part; it appears under its name only when it is complete.

    Until then it is `<name>.partial`, which a later run replaces and an error removes. Used as a context manager:
    `with CheckpointWriter(...) as writer: writer.write_parts(source)`.
    """

    def __init__(
        self,
        output_dir: str | Path,
        hf_config: Mapping[str, Any],
        *,
        model_id: str,
        dtype: torch.dtype | None = None,
        manifest: Mapping[str, Any] | None = None,
    ) -> None:
        self.output_dir = Path(os.path.abspath(output_dir))
        self.partial_dir = self.output_dir.with_name(self.output_dir.name + ".partial")
        self.hf_config = dict(hf_config)
        self.config = _parse_config(hf_config, self.output_dir / CONFIG_FILE)
        self.shapes = checkpoint_shapes(self.config)
        self.dtype = dtype
        self.model_id = model_id
        self.extra_manifest = dict(manifest or {})
        self._files: dict[str, Any] = {}

    def __enter__(self) -> "CheckpointWriter":
        if self.output_dir.exists() and not is_converted(self.output_dir) and any(self.output_dir.iterdir()):
            raise ValueError(f"{self.output_dir}: exists and is not a converted checkpoint; choose another folder")
        if self.partial_dir.is_dir():
            shutil.rmtree(self.partial_dir)  # left by a run that was killed
        self.partial_dir.mkdir(parents=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            shutil.rmtree(self.partial_dir, ignore_errors=True)  # on success it has been renamed

    def write_parts(self, source: TensorSource) -> Iterator[str]:
        """Write every part of `source`, yielding each part's name once it is written (for a progress bar)."""
        for part in parts(self.config):
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

    def _write_part(self, part: str, tensors: Mapping[str, Tensor], source: TensorSource) -> None:
        assert self.dtype is not None
        written = {}
        for key, tensor in tensors.items():
            # A copy: torch.save writes a view's whole storage, which may be a mapped file.
            written[key] = own_tensor(tensor.to(device="cpu", dtype=self.dtype), tensor)
            check_finite(written[key], tensor, source.where(part, key))
        path = self.partial_dir / part_file(part)
        torch.save(written, path)
        self._files[path.name] = {
            "bytes": path.stat().st_size,
            "tensors": {key: list(tensor.shape) for key, tensor in written.items()},
        }

    def _finish(self) -> None:
        missing = [part for part in self.shapes if part_file(part) not in self._files]
        if missing:
            raise ValueError(f"{self.output_dir}: parts not written: {', '.join(missing)}")
        assert self.dtype is not None
        dtype = str(self.dtype).removeprefix("torch.")
        dtype_key = "dtype" if "dtype" in self.hf_config else "torch_dtype"  # transformers 5, older
        write_json(self.partial_dir / CONFIG_FILE, self.hf_config | {dtype_key: dtype})
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
            "files": self._files,
        }
        write_json(self.partial_dir / MANIFEST_FILE, manifest)
        replaced = self.output_dir.with_name(self.output_dir.name + ".replaced")
        if self.output_dir.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            os.replace(self.output_dir, replaced)
        os.replace(self.partial_dir, self.output_dir)
        shutil.rmtree(replaced, ignore_errors=True)


def write_checkpoint(
    output_dir: str | Path,
    hf_config: Mapping[str, Any],
    state_dict: Mapping[str, Tensor],
    *,
    model_id: str,
    dtype: torch.dtype | None = None,
) -> None:
    """Write a checkpoint from tensors in memory under Hugging Face's full names (`model.state_dict()`)."""
    with CheckpointWriter(output_dir, hf_config, model_id=model_id, dtype=dtype) as writer:
        for _ in writer.write_parts(StateDict(state_dict, writer.config, writer.shapes, model_id)):
            pass


def git_commit() -> str | None:
    """The commit of this code, with "+dirty" if it was changed; None outside a checkout."""
    folder = Path(__file__).resolve().parent
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty=+dirty", "--abbrev=12", "--exclude=*"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return result.stdout.strip() or None
