"""Writing a decoder that is in memory as a checkpoint folder, and its tensors under Hugging Face's names."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from data.files import disk_errors, only_writer
from modules.checkpoint_config import to_hf_config
from modules.checkpoint_keys import hf_name, tensor_locations
from modules.checkpoint_writer import CheckpointWriter
from modules.decoder import Decoder


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
        output_dir, to_hf_config(model.config), model_id=model_id, dtype=model.dtype, manifest=manifest
    )
    with only_writer(output_dir), writer:
        for path in other_files:
            with disk_errors(writer.partial_dir / path.name):
                shutil.copyfile(path, writer.partial_dir / path.name)
        for _ in writer.write_parts(DecoderTensors(model)):
            pass
