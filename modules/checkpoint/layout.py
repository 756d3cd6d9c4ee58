"""Which tensor of a checkpoint is which parameter of the decoder, by the rules of its family."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from modules.config import ModelConfig
from modules.families.family import Rename, Transpose
from modules.families.registry import FAMILIES

EMBEDDINGS = "embs"
HEAD = "lm_head"
TOKENS, LM_HEAD = "embeddings.tokens.weight", "lm_head.weight"  # the parameters that a tied head makes one

# Old files carry these; the values follow from the config.
HARMLESS = re.compile(r"(.*\.)?rotary_emb\.inv_freq|(model\.)?decoder\.version")


@dataclass(frozen=True)
class TensorLocation:
    """A tensor on disk: its part (one file per part), its key there, and whether the decoder holds the transpose."""

    part: str
    key: str
    transposed: bool = False


# Output projections are held unit-major: turned once, at load. Their bias belongs to the half-block.
OUTPUT_PROJECTIONS = ("o_proj", "down_proj")


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


def expected_shapes(model: nn.Module, config: ModelConfig) -> dict[str, dict[str, tuple[int, ...]]]:
    """part -> key -> shape on disk, for every tensor that a checkpoint of this model must hold, and no other."""
    shapes: dict[str, dict[str, tuple[int, ...]]] = {part: {} for part in parts(config)}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, location in tensor_locations(model, config).items():
        shape = tuple(parameters[name].shape)
        shapes[location.part][location.key] = shape[::-1] if location.transposed else shape
    return shapes


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
