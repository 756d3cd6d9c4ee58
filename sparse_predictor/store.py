"""Predictors on disk: one small safetensors file per layer and block, one manifest; strict in both directions.

    layer_{i}_mlp.safetensors  layer_{i}_attention.safetensors  calibration.safetensors  manifest.json  metrics.json

The manifest is written last: a directory without one is unfinished and is refused. It has the sha256 of each file.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save
from torch import Tensor

from data.activation_store import ActivationStore
from data.files import convert_json, differences, holder_of, read_json, replace_file, sha256_of, write_json
from modules.decoder import Decoder
from modules.sparsity import Block, Reduce
from sparse_predictor.calibration import LayerCalibration
from sparse_predictor.methods.registry import known_statistics
from sparse_predictor.predictor import Predictor, Rule

FORMAT_VERSION = 1
CALIBRATION_FILE = "calibration.safetensors"
AGAIN = "train again, with the same options into the same folder"
# Options of training that change nothing: where things are (what is read there is compared by itself) and are run.
PLACES = ("model", "activations", "output_dir", "device", "quiet", "tp_size", "pp_size", "verify")


Density = Annotated[float, Meta(gt=0.0, le=1.0)]
Layer = Annotated[int, Meta(ge=0, lt=2**16)]
Width = Annotated[int, Meta(ge=0, le=2**20)]


class PredictorManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a predictor directory is for, and how it came to be. `sums`: sha256 of each other file."""

    model_id: str
    config_hash: str
    weights_sample: Annotated[list[float], Meta(max_length=2**12)]
    layers: Annotated[list[Layer], Meta(max_length=2**12)]
    blocks: list[Block]
    lookahead: Annotated[int, Meta(ge=0, le=1)]
    mlp_rule: Rule
    predictor_rank: dict[Block, Width]
    standin_rank: Width
    densities: Annotated[list[Density], Meta(max_length=2**12)]
    definitions: dict[str, Any]
    training: dict[str, Any]
    provenance: dict[str, Any] = {}
    format_version: int = FORMAT_VERSION
    sums: dict[str, str] = {}

    def __post_init__(self) -> None:
        for name in ("layers", "blocks"):
            if len(set(getattr(self, name))) != len(getattr(self, name)):
                raise ValueError(f"`{name}` lists something twice")
        if missing := set(self.blocks) - set(self.predictor_rank):
            raise ValueError(f"`predictor_rank` lacks {', '.join(sorted(missing))}")


@dataclass(frozen=True)
class TensorFile:
    """What a file holds; `sha256` is of all its bytes."""

    path: Path
    tensors: dict[str, Tensor]
    metadata: dict[str, str]
    sha256: str

    def check(self, expected: Mapping[str, Tensor]) -> None:
        """ValueError names the tensor that is missing, not expected, of another shape or type, or not finite;
        thresholds may be -inf, where everything is kept."""
        for name in sorted(expected.keys() | self.tensors.keys()):
            if name not in self.tensors:
                raise ValueError(f"{self.path}: missing tensor {name}; {AGAIN}")
            if name not in expected:
                raise ValueError(f"{self.path}: unexpected tensor {name}; {AGAIN}")
            found, wanted = self.tensors[name], expected[name]
            if found.shape != wanted.shape:
                shapes = f"{list(found.shape)}, expected {list(wanted.shape)}"
                raise ValueError(f"{self.path}: size mismatch for {name}: {shapes}; {AGAIN}")
            if found.dtype != wanted.dtype:
                raise ValueError(f"{self.path}: {name} is of type {found.dtype}, expected {wanted.dtype}; {AGAIN}")
            usable = found.isfinite()
            if name.endswith("thresholds"):
                usable |= found == float("-inf")
            if not bool(usable.all()):
                what = "NaN" if bool(found.isnan().any()) else "infinite values"
                raise ValueError(f"{self.path}: {name} holds {what}; {AGAIN}")

    def check_sum(self, sums: Mapping[str, str]) -> None:
        """ValueError if the bytes are not those that the manifest was written with (older manifests have no sums)."""
        if sums and sums.get(self.path.name) != self.sha256:
            others = [name for name, value in sums.items() if value == self.sha256]
            what = f"it is {others[0]}" if others else "its sha256 differs from the manifest's"
            raise ValueError(f"{self.path}: not as it was written ({what}); {AGAIN}")


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """Replace a file whole; returns its sha256. OSError as `data.files.disk_errors`."""
    content = save({name: value.contiguous().cpu() for name, value in tensors.items()}, metadata=dict(metadata))
    replace_file(path, content)
    return hashlib.sha256(content).hexdigest()


def read_tensors(path: Path) -> TensorFile:
    """Read a file whole; FileNotFoundError, or ValueError where it is no safetensors file."""
    content = path.read_bytes()
    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
        tensors = load(content)
    except (SafetensorError, RuntimeError, KeyError, ValueError) as problem:
        raise ValueError(f"{path}: damaged ({' '.join(str(problem).split())[:200]}); {AGAIN}") from problem
    return TensorFile(path, tensors, metadata, hashlib.sha256(content).hexdigest())


def predictor_file(directory: Path, layer_idx: int, block: Block) -> Path:
    """The one place that spells a predictor's file name."""
    return directory / f"layer_{layer_idx}_{block}.safetensors"


def save_predictors(
    directory: Path,
    predictors: Mapping[tuple[int, Block], Predictor],
    calibration: dict[int, LayerCalibration],
    metrics: dict[str, Any],
    manifest: PredictorManifest,
) -> None:
    """Write everything, the manifest last, with the sums of what was written. An older manifest is removed first, so
    that a crash leaves none; saved states of the training that is now finished go too, also those set aside. OSError
    as `data.files.disk_errors`."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "manifest.json").unlink(missing_ok=True)
    for stale in directory.glob("layer_*.safetensors"):
        stale.unlink()
    sums = {}
    for (layer, block), predictor in predictors.items():
        path = predictor_file(directory, layer, block)
        sums[path.name] = write_tensors(path, predictor.state_dict(), {"of": f"layer {layer} {block}"})
    sums |= save_calibration(directory, calibration)
    write_json(directory / "metrics.json", metrics, sort_keys=True)
    sums |= {path.name: sha256_of(path) for path in sorted(directory.glob("metrics.*")) if path.suffix != ".tmp"}
    record = msgspec.to_builtins(msgspec.structs.replace(manifest, sums=sums))
    write_json(directory / "manifest.json", record, sort_keys=True)
    for left in (*directory.glob("training_*.pt*"), *directory.glob("*.tmp")):  # .tmp: by runs that were killed
        left.unlink()


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
    """A few dozen weights spread over the MLPs, which distinguish two models of one configuration in any dtype.

    NaN for those that this rank does not hold; with `reduce`, which sums over ranks, there are none.
    """
    hidden_size, num_layers = model.config.hidden_size, model.config.num_hidden_layers
    layers, places = range(0, num_layers, max(1, num_layers // 8)), list[tuple[int, int]]()
    for layer in layers:
        last = hidden_size * model.config.layers[layer].feed_forward.num_units - 1
        # float64: float32 does not hold every whole number beyond 2**24, and would round the last to one too many.
        places += [(layer, place) for place in torch.linspace(0, last, 4, dtype=torch.float64).round().long().tolist()]
    found = torch.zeros(2, len(places), dtype=torch.float64)  # values; whether they are here
    for idx, (layer, place) in enumerate(places):
        if model.has_block(layer, "mlp"):
            mlp, neuron = model.mlp(layer), place // hidden_size
            rows = [neuron] if mlp.unit_shard is None else (mlp.unit_shard.local == neuron).nonzero().flatten().tolist()
            for row in rows:
                found[0, idx] += mlp.down_proj.rows(torch.tensor([row]))[0, place % hidden_size].item()
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


def check_store(store: ActivationStore, model: Decoder, model_id: str) -> None:
    """ValueError if activations were not collected from this model, of which both sides are named."""
    layout, config, where = store.layout, model.config, store.directory
    if not config.has_hash(layout.config_hash):
        raise ValueError(
            f"{where} was collected from {layout.model} (config {layout.config_hash}), "
            f"not from {model_id} (config {config.config_hash()})"
        )
    for name in ("hidden_size", "intermediate_size", "num_attention_heads"):
        if getattr(layout, name) != getattr(config, name):
            raise ValueError(f"{where}: {name} is {getattr(layout, name)}, {getattr(config, name)} in {model_id}")
    if store.layers[-1] >= config.num_hidden_layers:
        raise ValueError(f"{where} holds layer {store.layers[-1]}; {model_id} has {config.num_hidden_layers} layers")
    sample = convert_json(layout.definitions.get("weights_sample", []), list[float], where)
    if not same_weights(weights_sample(model), sample):
        raise ValueError(f"{where} was collected from other weights of the same configuration")
    if store.num_rows and not 0 <= int(store.token_ids.min()) <= int(store.token_ids.max()) < config.vocab_size:
        raise ValueError(f"{where} holds token id {store.token_ids.max()}, beyond the vocabulary")


def parse_manifest(directory: Path) -> PredictorManifest:
    """The manifest by itself, which needs no model. FileNotFoundError, ValueError where it is something else's, or
    BlockingIOError where another process still trains into the directory."""
    path = directory / "manifest.json"
    if not path.is_file() and (writer := holder_of(directory)):
        raise BlockingIOError(f"{directory} is being written by {writer}; wait until that has ended")
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing: not a predictor directory, or its training did not finish; train: python -m "
            f"scripts.train --model DIR --activations DIR --output-dir {directory}"
        )
    try:
        values = read_json(path, dict[str, Any])
        if (version := values.get("format_version")) not in (FORMAT_VERSION, None):
            raise ValueError(f"{path}: format version {str(version)[:100]}, this code reads {FORMAT_VERSION}")
        return convert_json(values, PredictorManifest, path)
    except ValueError as problem:
        raise ValueError(
            f"not a predictor manifest ({problem}); give a directory that scripts.train wrote, or remove the file and "
            "train again"
        ) from problem


def read_manifest(directory: Path, model: Decoder) -> PredictorManifest:
    """The manifest, checked against the model it is to serve. FileNotFoundError, or ValueError with both sides."""
    manifest, config = parse_manifest(directory), model.config
    if not config.has_hash(manifest.config_hash):
        raise ValueError(
            f"{directory}: predictors of {manifest.model_id} (config {manifest.config_hash}) do not belong to this "
            f"model (config {config.config_hash()})"
        )
    if not same_weights(weights_sample(model), manifest.weights_sample):
        raise ValueError(
            f"{directory}: predictors of {manifest.model_id}; this model has the same configuration but other weights"
        )
    if beyond := [layer for layer in manifest.layers if layer >= config.num_hidden_layers]:
        raise ValueError(
            f"{directory}/manifest.json: `layers` has {beyond[:4]}, this model has layers 0 to "
            f"{config.num_hidden_layers - 1}"
        )
    return manifest


def load_predictors(directory: Path, model: Decoder) -> tuple[dict[tuple[int, Block], Predictor], PredictorManifest]:
    """Every predictor the manifest lists, for the layers that are here. A tensor that is missing, extra, of a wrong
    shape or type or not finite, and a file that is another's or not as it was written, is an error that names it."""
    manifest, config = read_manifest(directory, model), model.config
    predictors: dict[tuple[int, Block], Predictor] = {}
    for block in manifest.blocks:
        for layer in manifest.layers:
            with torch.device("meta"):  # what the file must hold, whatever sizes the manifest claims
                expected = Predictor(
                    config.hidden_size,
                    config.layers[layer].of(block).num_units,
                    manifest.predictor_rank[block],
                    densities=manifest.densities if block == "mlp" else (),
                    standin_rank=manifest.standin_rank if block == "mlp" else 0,
                )
            path = predictor_file(directory, layer, block)
            if not path.is_file():
                raise FileNotFoundError(f"{path} is missing, though the manifest lists layer {layer}; {AGAIN}")
            if not model.has_block(layer, block):
                continue
            file = read_tensors(path)
            whose = file.metadata.get("of", f"layer {layer} {block}")
            if whose != f"layer {layer} {block}":
                raise ValueError(f"{path}: written for {whose[:100]}, not for layer {layer} {block}; {AGAIN}")
            file.check(expected.state_dict())
            file.check_sum(manifest.sums)
            expected.load_state_dict(file.tensors, assign=True)
            predictors[layer, block] = expected
    return predictors, manifest


def save_calibration(directory: Path, layers: dict[int, LayerCalibration]) -> dict[str, str]:
    """Write CALIBRATION_FILE into a predictor directory; returns its sha256 by its name."""
    tensors = {
        f"{layer}.{name}": value
        for layer, calibration in layers.items()
        for name, value in calibration.statistics.items()
    }
    return {
        CALIBRATION_FILE: write_tensors(directory / CALIBRATION_FILE, tensors, {"layers": json.dumps(sorted(layers))})
    }


def load_calibration(directory: Path, sums: Mapping[str, str] | None = None) -> dict[int, LayerCalibration]:
    """Read what `save_calibration` wrote; `sums`: the manifest's. FileNotFoundError or ValueError name the file."""
    path = directory / CALIBRATION_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: {directory} is not a complete predictor directory; {AGAIN}")
    file = read_tensors(path)
    known, fields = known_statistics(), dict[int, dict[str, Tensor]]()
    for key, value in file.tensors.items():
        layer, _, name = key.partition(".")
        if not layer.isdecimal() or len(layer) > 5 or name not in known:
            raise ValueError(f"{path}: unexpected tensor {key[:100]}; {AGAIN}")
        fields.setdefault(int(layer), {})[name] = value
    types = {key: torch.float64 if key.endswith(".densities") else torch.float32 for key in file.tensors}
    file.check({key: torch.empty_like(value, dtype=types[key]) for key, value in file.tensors.items()})
    file.check_sum(sums or {})
    return {layer: LayerCalibration(values) for layer, values in fields.items()}
