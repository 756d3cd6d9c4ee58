"""Tiny models of every supported kind, built with Hugging Face's own classes, every parameter drawn at random.

Biases and norms too: Hugging Face initialises those to zeros and ones, which hides a missing or misplaced one.
"""

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from data.files import only_writer
from modules.checkpoint.load import build_on_meta, checkpoint_shapes, load_weights
from modules.checkpoint.sources import Shapes, locate_hf_names
from modules.checkpoint.write import CheckpointWriter
from modules.config import ModelConfig
from modules.decoder import Decoder
from modules.families.registry import from_hf_config


def tiny_hf_model(hf_config: dict[str, Any], seed: int = 0) -> PreTrainedModel:
    """A Hugging Face model of this config, float32, all parameters random."""
    # A copy: transformers writes what it derives into the nested dictionaries, where our reader would find it.
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**deepcopy(hf_config))).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
            if "norm" in name and name.endswith("weight"):
                parameter.add_(1.0)
    return model.requires_grad_(False)


def tiny_decoder(hf_config: dict[str, Any], seed: int = 0, dtype: torch.dtype | None = None) -> Decoder:
    """Our decoder with the weights of `tiny_hf_model(hf_config, seed)`."""
    config = from_hf_config(hf_config)
    model = build_on_meta(config)
    weights = tiny_hf_model(hf_config, seed).state_dict()
    load_weights(model, StateDict(weights, config, checkpoint_shapes(config), "tiny"), dtype=dtype)
    return model


def save_hf_folder(directory: Path, hf_config: dict[str, Any], seed: int = 0, **options: Any) -> PreTrainedModel:
    """Write `tiny_hf_model` as a Hugging Face folder (`max_shard_size` shards it); returns the model."""
    model = tiny_hf_model(hf_config, seed)
    model.save_pretrained(directory, **options)
    return model


def same_weights(first: Decoder, second: Decoder) -> bool:
    """Whether two decoders have the same parameters, bit for bit."""
    pairs = zip(first.named_parameters(), second.named_parameters(), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


class StateDict:
    """A `TensorSource` of tensors in memory under Hugging Face's full names, as `model.state_dict()` gives them."""

    def __init__(self, tensors: Mapping[str, Tensor], config: ModelConfig, shapes: Shapes, name: str) -> None:
        self.tensors = tensors
        self.name = name
        self._name_of = locate_hf_names(dict.fromkeys(tensors, name), config, shapes)

    def read_part(self, part: str) -> dict[str, Tensor]:
        return {key: self.tensors[name] for (owner, key), name in self._name_of.items() if owner == part}

    def where(self, part: str, key: str) -> str:
        return f"{self.name}: {self._name_of[part, key]}"


def write_checkpoint(
    output_dir: str | Path,
    hf_config: Mapping[str, Any],
    state_dict: Mapping[str, Tensor],
    *,
    model_id: str,
    dtype: torch.dtype | None = None,
) -> None:
    """Write a checkpoint from tensors in memory under Hugging Face's full names (`model.state_dict()`)."""
    with only_writer(output_dir), CheckpointWriter(output_dir, hf_config, model_id=model_id, dtype=dtype) as writer:
        for _ in writer.write_parts(StateDict(state_dict, writer.config, writer.shapes, model_id)):
            pass
