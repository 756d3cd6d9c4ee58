"""Predictors on disk: one safetensors file a layer and block, one manifest; strict in both directions.

    layer_{i}_mlp.safetensors  layer_{i}_attention.safetensors  calibration.safetensors  manifest.json  metrics.json

The manifest is written last: a directory without one is unfinished and is refused.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from data.differences import differences
from modules.decoder import Decoder
from modules.sparsity import BLOCKS, Block, Reduce
from sparse_predictor.calibration import LayerCalibration, save_calibration
from sparse_predictor.predictor import Predictor, Rule

FORMAT_VERSION = 1
# Options of training that change nothing: where things are (what is read there is compared by itself) and are run.
PLACES = ("model", "activations", "output_dir", "device", "quiet", "tp_size", "pp_size")


@dataclass(frozen=True, kw_only=True)
class PredictorManifest:
    """What a predictor directory is for, and how it came to be."""

    model_id: str
    config_hash: str
    weights_sample: list[float]
    layers: list[int]
    blocks: list[Block]
    lookahead: int
    mlp_rule: Rule
    predictor_rank: dict[str, int]
    standin_rank: int
    densities: list[float]
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
    directory: Path,
    predictors: Mapping[tuple[int, Block], Predictor],
    calibration: dict[int, LayerCalibration],
    metrics: dict[str, Any],
    manifest: PredictorManifest,
) -> None:
    """Write everything, the manifest last. An older manifest is removed first, so that a crash leaves none; saved
    states of the training that is now finished go too."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "manifest.json").unlink(missing_ok=True)
    for stale in directory.glob("layer_*.safetensors"):
        stale.unlink()
    for (layer, block), predictor in predictors.items():
        tensors = {name: value.contiguous().cpu() for name, value in predictor.state_dict().items()}
        save_file(tensors, predictor_file(directory, layer, block), metadata={"of": f"layer {layer} {block}"})
    save_calibration(directory, calibration)
    write_json(directory / "metrics.json", metrics)
    write_json(directory / "manifest.json", asdict(manifest))
    for state in directory.glob("training_*.pt"):
        state.unlink()


def finished_predictors(
    directory: Path, training: Mapping[str, Any], definitions: Mapping[str, Any]
) -> PredictorManifest | None:
    """The manifest of what training with these options on these activations has left in a directory; None where it
    holds no finished predictors. FileExistsError if it holds others, and says how they differ."""
    if not (directory / "manifest.json").is_file():
        return None
    manifest = parse_manifest(directory)
    options, activations = json.loads(json.dumps([training, definitions]))  # a tuple comes back as a list
    there, now = (
        {name: value for name, value in one.items() if name not in PLACES} for one in (manifest.training, options)
    )
    found = differences(there, now, "there")
    if any(manifest.definitions.get(name) != value for name, value in activations.items()):
        found.append("they were trained on other activations")
    if found:
        raise FileExistsError(
            f"{directory} already holds predictors: {'; '.join(found)}; give another --output-dir, or remove this one "
            "first"
        )
    return manifest


def weights_sample(model: Decoder, reduce: Reduce = lambda found: found) -> list[float]:
    """A few dozen weights spread over the MLPs: tells two models of one configuration apart, whatever their dtype.

    NaN for those that this rank does not hold; with `reduce`, which sums over ranks, there are none.
    """
    hidden_size, num_layers = model.config.hidden_size, model.config.num_hidden_layers
    # float64: float32 does not hold every whole number beyond 2**24, and would round the last place to one too many.
    last = hidden_size * model.config.intermediate_size - 1
    places = torch.linspace(0, last, 4, dtype=torch.float64).round().long().tolist()
    layers = range(0, num_layers, max(1, num_layers // 8))
    found = torch.zeros(2, len(layers) * len(places), dtype=torch.float64)  # values; whether they are here
    for idx, (layer, place) in enumerate(product(layers, places)):
        if model.has_block(layer, "mlp"):
            mlp, neuron = model.mlp(layer), place // hidden_size
            rows = [neuron] if mlp.units is None else (mlp.units.local == neuron).nonzero().flatten().tolist()
            for row in rows:
                found[0, idx] += mlp.down_proj.weight[row, place % hidden_size].item()
                found[1, idx] += 1
    values, held = reduce(found)
    return (values / held).tolist()


def same_weights(sample: Sequence[float], other: Sequence[float]) -> bool:
    """Whether two `weights_sample`s are of one model, as far as `sample` goes (NaN: not here). bfloat16 rounds by up to
    0.4 %; other weights of the same shape differ by as much as they are large."""
    return len(sample) == len(other) and all(
        math.isnan(here) or abs(here - there) <= 0.01 * abs(there) + 1e-6
        for here, there in zip(sample, other, strict=True)
    )


def parse_manifest(directory: Path) -> PredictorManifest:
    """The manifest by itself, which needs no model. FileNotFoundError, or ValueError where it is something else's."""
    path = directory / "manifest.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: not a predictor directory, or its training did not finish")
    try:
        values = json.loads(path.read_text())
    except ValueError as problem:
        raise ValueError(f"{path}: not a predictor manifest (not JSON: {problem})") from problem
    if not isinstance(values, dict):
        raise ValueError(f"{path}: not a predictor manifest (no JSON object)")
    known = fields(PredictorManifest)
    needed = [entry.name for entry in known if entry.default is entry.default_factory is MISSING]
    wrong = [f"no {name}" for name in needed if name not in values]
    wrong += [f"an unknown {name}" for name in values if name not in {entry.name for entry in known}]
    if wrong:
        raise ValueError(
            f"{path}: not a predictor manifest (it has {wrong[0]}); give a directory that scripts.train wrote"
        )
    manifest = PredictorManifest(**values)
    if manifest.format_version != FORMAT_VERSION:
        raise ValueError(f"{path}: format version {manifest.format_version}, this code reads {FORMAT_VERSION}")
    is_known = manifest.mlp_rule in ("topk", "threshold") and manifest.lookahead in (0, 1)
    lists = (manifest.layers, manifest.blocks, manifest.densities, manifest.weights_sample)
    objects = (manifest.definitions, manifest.training)
    are_right = all(isinstance(one, list) for one in lists) and all(isinstance(one, dict) for one in objects)
    if not is_known or not are_right:
        names = "mlp_rule, lookahead, layers, blocks, densities, weights_sample, definitions or training"
        raise ValueError(f"{path}: {names} is no valid value")
    return manifest


def read_manifest(directory: Path, model: Decoder) -> PredictorManifest:
    """The manifest, checked against the model it is to serve. FileNotFoundError, or ValueError with both sides."""
    manifest, config = parse_manifest(directory), model.config
    if manifest.config_hash != config.config_hash():
        raise ValueError(
            f"{directory}: predictors of {manifest.model_id} (config {manifest.config_hash}) do not belong to this "
            f"model (config {config.config_hash()})"
        )
    if not same_weights(weights_sample(model), manifest.weights_sample):
        raise ValueError(
            f"{directory}: predictors of {manifest.model_id}; this model has the same configuration but other weights"
        )
    return manifest


def load_predictors(directory: Path, model: Decoder) -> tuple[dict[tuple[int, Block], Predictor], PredictorManifest]:
    """Every predictor the manifest lists, for the layers that are here. A missing, extra or wrongly shaped tensor is an
    error that names it."""
    manifest, config = read_manifest(directory, model), model.config
    num_units: dict[Block, int] = {"mlp": config.intermediate_size, "attention": config.num_key_value_heads}
    predictors: dict[tuple[int, Block], Predictor] = {}
    for block in manifest.blocks:
        if block not in BLOCKS or block not in manifest.predictor_rank:
            raise ValueError(f"{directory}: unknown block {block!r} in the manifest, or one without predictor_rank")
        for layer in manifest.layers:
            path = predictor_file(directory, layer, block)
            if not path.is_file():
                raise FileNotFoundError(f"{path} is missing, though the manifest lists layer {layer}")
            if not model.has_block(layer, block):
                continue
            predictor = Predictor(
                config.hidden_size,
                num_units[block],
                manifest.predictor_rank[block],
                densities=manifest.densities if block == "mlp" else (),
                standin_rank=manifest.standin_rank if block == "mlp" else 0,
            )
            try:
                with safe_open(path, framework="pt") as file:
                    whose = (file.metadata() or {}).get("of", f"layer {layer} {block}")
                if whose != f"layer {layer} {block}":
                    raise ValueError(f"{path}: written for {whose}, not for layer {layer} {block}")
                predictor.load_state_dict(load_file(path), strict=True)
            except (SafetensorError, RuntimeError) as problem:
                raise ValueError(f"{path}: {problem}") from problem
            spoiled = [name for name, value in predictor.state_dict().items() if bool(value.isnan().any())]
            if spoiled:
                raise ValueError(f"{path}: {', '.join(spoiled)} holds NaN; train again")
            predictors[layer, block] = predictor
    return predictors, manifest
