"""The families that there are, by `model_type`: a `config.json` read, and written for a model that we made ourselves.

A model of one of them is written as one, so that Hugging Face's classes run it. A mixture (a gated MLP with learned
positions, say) has no class there: its file holds `FlatFields` under their names.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin

from data.files import convert_json
from modules.config import FlatFields, ModelConfig, flat_fields
from modules.families.family import Family, activation, token_ids
from modules.families.llama import LLAMA
from modules.families.mistral import MISTRAL
from modules.families.opt import OPT
from modules.families.qwen2 import QWEN2
from modules.specs import RopeScaling

MIXTURE = "decoder"


def from_hf_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Read a `config.json`: Hugging Face's (hub files and transformers 5 spellings) or ours of a mixture.

    Raises ValueError for any architecture or option that the decoder would not compute faithfully.
    """
    if hf.get("quantization_config"):
        raise ValueError(
            "config: quantised checkpoints are not supported (quantization_config is set); convert the "
            "original bfloat16/float16 weights, or a GGUF file, which is dequantised"
        )
    model_type = hf.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ValueError(f"config: model_type {model_type!r} is not supported; supported: {', '.join(FAMILIES)}")
    try:
        return FAMILIES[model_type].parse(dict(hf))
    except ValueError as error:
        raise ValueError(f"config: {str(error).removeprefix('config: ')}") from error


def to_hf_config(config: ModelConfig) -> dict[str, Any]:
    """What `from_hf_config` reads as this configuration. ValueError for a family that would not compute it."""
    hf = FAMILIES[config.model_type].write(config)
    if (read := from_hf_config(hf)) != config:
        ours, theirs = flat_fields(config) or config, flat_fields(read)
        fields = (field.name for field in dataclasses.fields(ours))
        lost = (name for name in fields if getattr(theirs, name, None) != getattr(ours, name))
        raise ValueError(
            f"config: model_type {config.model_type!r} cannot have "
            f"{', '.join(f'{name}={getattr(ours, name)!r}' for name in lost)}; use model_type {MIXTURE!r}"
        )
    return hf


def in_family(config: ModelConfig) -> ModelConfig:
    """The same configuration as the family that computes it: its own, if it is one; of a mixture as `decoder`."""
    for model_type in sorted(FAMILIES, key=lambda name: (name == MIXTURE, name != config.model_type)):
        named = dataclasses.replace(config, model_type=model_type)
        try:
            fits = from_hf_config(FAMILIES[model_type].write(named)) == named
        except ValueError:  # a shape that this family does not allow
            fits = False
        if fits:
            return named
    raise ValueError("config: no family has layers that differ like these")


def _parse_mixture(hf: dict[str, Any]) -> ModelConfig:
    names = {field.name for field in dataclasses.fields(FlatFields)}
    known = {name: value for name, value in hf.items() if name in names}
    if "activation" in known:
        known["activation"] = activation(known["activation"])
    _check_choices(FlatFields, known)
    if isinstance(scaling := known.get("rope_scaling"), Mapping):
        _check_choices(RopeScaling, scaling)
        if unknown := scaling.keys() - {field.name for field in dataclasses.fields(RopeScaling)}:
            raise ValueError(f"rope_scaling has an unknown key {', '.join(sorted(unknown))}")
    ends = known.get("eos_token_ids")
    if not isinstance(ends, str):
        known["eos_token_ids"] = token_ids(ends)
    return convert_json(known, FlatFields, "config").config()


def _check_choices(owner: type, values: Mapping[str, Any]) -> None:
    for field in dataclasses.fields(owner):
        if get_origin(field.type) is Literal and (value := values.get(field.name)) not in (None, *get_args(field.type)):
            allowed = ", ".join(get_args(field.type))
            raise ValueError(f"{field.name} {value!r} is not supported; supported: {allowed}")


def _write_mixture(config: ModelConfig) -> dict[str, Any]:
    flat = flat_fields(config)
    if flat is None:
        raise ValueError(f"config: model_type {MIXTURE!r} needs layers that are alike, without a window")
    return {**dataclasses.asdict(flat), "eos_token_ids": list(config.eos_token_ids)}


FAMILIES: dict[str, Family] = {
    "llama": LLAMA,
    "opt": OPT,
    "qwen2": QWEN2,
    "mistral": MISTRAL,
    # Llama's names, and OPT's for what only OPT has.
    MIXTURE: dataclasses.replace(
        LLAMA, parse=_parse_mixture, write=_write_mixture, embeddings=OPT.embeddings, head=OPT.head, gguf=None
    ),
}
