"""Predictors on disk: one safetensors file a layer and block, one manifest; strict in both directions.

    layer_{i}_mlp.safetensors  layer_{i}_attention.safetensors  calibration.safetensors  manifest.json  metrics.json

The manifest is written last: a directory without one is unfinished and is refused.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from modules.config import ModelConfig
from modules.sparsity import BLOCKS, Block
from sparse_predictor.predictor import Predictor, Rule

FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class PredictorManifest:
    """What a predictor directory is for, and how it came to be."""

    model_id: str
    config_hash: str
    layers: list[int]
    blocks: list[Block]
    lookahead: int
    mlp_rule: Rule
    predictor_rank: dict[str, int]
    standin_rank: int
    standin_densities: list[float]
    definitions: dict[str, Any]
    training: dict[str, Any]
    provenance: dict[str, Any] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION


def predictor_file(directory: Path, layer_idx: int, block: Block) -> Path:
    """The one place that spells a predictor's file name."""
    return directory / f"layer_{layer_idx}_{block}.safetensors"


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file atomically."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n")
    os.replace(partial, path)


def save_predictors(
    directory: Path, predictors: Mapping[tuple[int, Block], Predictor], manifest: PredictorManifest
) -> None:
    """Write every predictor, then the manifest. An older manifest is removed first, so a crash leaves none."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "manifest.json").unlink(missing_ok=True)
    for stale in directory.glob("layer_*.safetensors"):
        stale.unlink()
    for (layer, block), predictor in predictors.items():
        tensors = {name: value.contiguous().cpu() for name, value in predictor.state_dict().items()}
        save_file(tensors, predictor_file(directory, layer, block))
    write_json(directory / "manifest.json", asdict(manifest))


def read_manifest(directory: Path, config: ModelConfig) -> PredictorManifest:
    """The manifest, checked against the model it is to serve. FileNotFoundError, or ValueError with both sides."""
    path = directory / "manifest.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: not a predictor directory, or its training did not finish")
    try:
        manifest = PredictorManifest(**json.loads(path.read_text()))
    except (json.JSONDecodeError, TypeError) as problem:
        raise ValueError(f"{path}: not a predictor manifest ({problem})") from problem
    if manifest.format_version != FORMAT_VERSION:
        raise ValueError(f"{path}: format version {manifest.format_version}, this code reads {FORMAT_VERSION}")
    if manifest.config_hash != config.config_hash():
        raise ValueError(
            f"{directory}: predictors of {manifest.model_id} (config {manifest.config_hash}) do not belong to this "
            f"model (config {config.config_hash()})"
        )
    return manifest


def load_predictors(
    directory: Path, config: ModelConfig
) -> tuple[dict[tuple[int, Block], Predictor], PredictorManifest]:
    """Every predictor the manifest lists. A missing, extra or wrongly shaped tensor is an error that names it."""
    manifest = read_manifest(directory, config)
    num_units: dict[Block, int] = {"mlp": config.intermediate_size, "attention": config.num_key_value_heads}
    predictors: dict[tuple[int, Block], Predictor] = {}
    for block in manifest.blocks:
        if block not in BLOCKS:
            raise ValueError(f"{directory}: unknown block {block!r} in the manifest")
        for layer in manifest.layers:
            path = predictor_file(directory, layer, block)
            if not path.is_file():
                raise FileNotFoundError(f"{path} is missing, though the manifest lists layer {layer}")
            predictor = Predictor(
                config.hidden_size,
                num_units[block],
                manifest.predictor_rank[block],
                num_standins=len(manifest.standin_densities) if block == "mlp" else 0,
                standin_rank=manifest.standin_rank if block == "mlp" else 0,
            )
            try:
                predictor.load_state_dict(load_file(path), strict=True)
            except (SafetensorError, RuntimeError) as problem:
                raise ValueError(f"{path}: {problem}") from problem
            predictors[layer, block] = predictor
    return predictors, manifest
