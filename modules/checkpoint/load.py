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

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from data.files import read_json
from modules.checkpoint.layout import EMBEDDINGS, LM_HEAD, TOKENS, expected_shapes, parts, tensor_locations
from modules.checkpoint.manifest import MANIFEST_FILE, interrupted, read_manifest
from modules.checkpoint.sources import (
    CONFIG_FILE,
    Shapes,
    TensorSource,
    check_finite,
    check_part,
    check_tied,
    is_converted,
    open_source,
)
from modules.config import ModelConfig
from modules.decoder import Decoder
from modules.families.registry import from_hf_config
from modules.shards import own_tensor, set_parameter, take_part

Device = torch.device | str
Prepare = Callable[[Decoder], None]


def load_config(source_dir: str | Path) -> ModelConfig:
    """The model configuration of a converted or Hugging Face folder (its `config.json`); ValueError if it is not the
    one that a converted folder was written with."""
    path = Path(source_dir) / CONFIG_FILE
    try:
        config = parse_config(read_hf_config(source_dir), path)
    except (ValueError, FileNotFoundError) as error:
        if not is_converted(path.parent):
            raise
        kind = FileNotFoundError if isinstance(error, FileNotFoundError) else ValueError
        raise kind(f"{error}; convert the model again") from error
    manifest = read_manifest(path.parent)
    if manifest is not None and not config.has_hash(manifest.config_hash):
        raise ValueError(
            f"{path}: changed since the checkpoint was written (configuration {config.config_hash()}, "
            f"{MANIFEST_FILE} has {manifest.config_hash}); put it back, or {manifest.repair(path.parent)}"
        )
    return config


def read_hf_config(source_dir: str | Path) -> dict[str, Any]:
    """`config.json` of a folder, as Hugging Face spells it; FileNotFoundError if there is none."""
    directory = Path(source_dir)
    if not directory.is_dir():
        raise FileNotFoundError(
            f"{directory}: no such folder; a checkpoint folder was expected{interrupted(directory)}"
        )
    path = directory / CONFIG_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{path}: missing; a converted or Hugging Face checkpoint folder has one")
    return read_json(path, dict)


def parse_config(hf_config: Mapping[str, Any], path: Path) -> ModelConfig:
    """`from_hf_config`, whose ValueError then names the file."""
    try:
        return from_hf_config(hf_config)
    except ValueError as error:
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
                model.tie_head()
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
            model.tie_head()  # the embeddings are named before the head, so drawn
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
