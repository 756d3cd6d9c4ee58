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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from data.files import read_json
from modules.checkpoint.manifest import MANIFEST_FILE, interrupted, read_manifest
from modules.checkpoint.sources import (
    CONFIG_FILE,
    EMBEDDINGS,
    HEAD,
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
from modules.families.family import Rename, Transpose
from modules.families.registry import FAMILIES, from_hf_config
from modules.shards import own_tensor, set_parameter, take_part

# The parameters that a tied head makes one.
TOKENS, LM_HEAD = "embeddings.tokens.weight", "lm_head.weight"
Device = torch.device | str
Prepare = Callable[[Decoder], None]


@dataclass(frozen=True)
class TensorLocation:
    """A tensor on disk: its part (one file per part), its key there, and whether the decoder holds the transpose."""

    part: str
    key: str
    transposed: bool = False


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


def parts(config: ModelConfig) -> list[str]:
    """The parts of a checkpoint in reading order: embeddings, one per layer, head."""
    return [EMBEDDINGS, *(str(layer_idx) for layer_idx in range(config.num_hidden_layers)), HEAD]


def tensor_locations(model: nn.Module, config: ModelConfig) -> dict[str, TensorLocation]:
    """Where each parameter of a decoder is found, keyed by its name in `named_parameters` (a tied head included)."""
    modules = _module_locations(config)
    located = {}
    for name, _ in model.named_parameters(remove_duplicate=False):
        module, kind = name.rsplit(".", 1)
        if module.startswith("half_blocks.") and module.count(".") == 1:  # HalfBlock.bias
            projection = "o_proj" if int(module.split(".")[1]) % 2 == 0 else "down_proj"
            owner = modules[f"{module}.block.{projection}"]
        else:
            owner = modules[module]
        transposed = owner.transposed and kind == "weight"
        located[name] = TensorLocation(owner.part, f"{owner.key}.{kind}", transposed)
    return located


def _module_locations(config: ModelConfig) -> dict[str, TensorLocation]:
    """Every module that may hold parameters -> part, name without `.weight`, whether its weight is turned."""
    family = FAMILIES[config.model_type]

    def located_in(part: str, prefix: str, rules: tuple[Rename, ...]) -> dict[str, TensorLocation]:
        return {prefix + rule.module: TensorLocation(part, rule.key, isinstance(rule, Transpose)) for rule in rules}

    located = located_in(EMBEDDINGS, "", family.embeddings) | located_in(HEAD, "", family.head)
    for layer_idx in range(config.num_hidden_layers):
        part = str(layer_idx)
        attention, mlp = f"half_blocks.{2 * layer_idx}", f"half_blocks.{2 * layer_idx + 1}"
        located |= located_in(part, f"{attention}.block.", family.attention)
        located |= located_in(part, f"{mlp}.block.", family.feed_forward)
        if config.pre_norm:
            # A half-block owns the norm that follows it, which is the next one's: see Decoder.
            before = "first_norm" if layer_idx == 0 else f"half_blocks.{2 * layer_idx - 1}.norm"
            located[before] = TensorLocation(part, family.attention_norm)
            located[f"{attention}.norm"] = TensorLocation(part, family.feed_forward_norm)
        else:
            located[f"{attention}.norm"] = TensorLocation(part, family.attention_norm)
            located[f"{mlp}.norm"] = TensorLocation(part, family.feed_forward_norm)
    if config.pre_norm:
        last = f"half_blocks.{2 * config.num_hidden_layers - 1}.norm"
        located[last] = TensorLocation(HEAD, family.final_norm)
    return located


def checkpoint_shapes(config: ModelConfig) -> Shapes:
    """part -> key -> shape on disk of every tensor that a checkpoint of this configuration must hold, and no other."""
    shapes: dict[str, dict[str, tuple[int, ...]]] = {part: {} for part in parts(config)}
    model = build_on_meta(config)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, location in tensor_locations(model, config).items():
        shape = tuple(parameters[name].shape)
        shapes[location.part][location.key] = shape[::-1] if location.transposed else shape
    return shapes


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
