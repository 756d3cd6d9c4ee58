"""The records of one sweep: their labels, the densities that a run achieved, and the file they are appended to."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from loguru import logger

from analysis.results import Record, append_record, finished_records
from analysis.tables import quality_tables
from modules.checkpoint.manifest import read_manifest
from modules.checkpoint.sources import checkpoint_fingerprint
from modules.sparsity import SparsityStats
from pipeline_parallel.fused_add_norm import describe_all_reduce
from pipeline_parallel.mesh import ParallelMesh
from pipeline_parallel.overlap import overlap_tokens
from scripts.model_loading import LoadedModel, ModelOptions
from sparse_predictor.budgets import predictors_id
from sparse_predictor.cost import achieved, own_density
from sparse_predictor.methods.registry import find_method, needs_files
from sparse_predictor.selection import Selection
from sparse_predictor.store import parse_manifest

AFTERWARDS = ("execution",)  # what a label says only after the run


def model_labels(loaded: LoadedModel, options: ModelOptions, label: str | None = None) -> dict[str, Any]:
    """Of every record that is measured on this model with these flags; `label` is what --label calls the run."""
    mesh = loaded.mesh
    labels: dict[str, Any] = {
        "model": loaded.name,
        "batch_size": options.batch_size,
        "dtype": str(loaded.model.compute_dtype).removeprefix("torch."),
        "weights": "trained",
        "seed": options.seed,
        "label": label,
    }
    if (file := gguf_source(loaded.directory)) is not None:
        labels["converted_from"] = file
    if mesh.world_size > 1:
        labels |= {"tp_size": mesh.tp_size, "pp_size": mesh.pp_size, "dp_size": mesh.dp_size}
    if mesh.tp_size > 1:
        labels["all_reduce"] = describe_all_reduce(loaded.model)
        if split_from := overlap_tokens(loaded.model):
            labels["overlap_tokens"] = split_from
    return mesh.from_rank_0(lambda: labels)  # or the ranks might not agree on what is done already


def sources_of(loaded: LoadedModel, selection: Selection, documents: object = None) -> dict[str, str | None]:
    """What a run was made from, for its record: twelve hex digits that identify the checkpoint, and likewise the
    predictors, the budget and the text. Names can be equal, these are not. None where there is none (a collective
    call)."""

    def hashes() -> dict[str, str | None]:
        predictors, budget = selection.predictors, selection.budget()
        has_files = selection.method != "dense" and predictors is not None
        return {
            "checkpoint": checkpoint_fingerprint(loaded.directory)[:12],
            "predictors": predictors_id(predictors) if has_files and predictors is not None else None,
            "density_budget": None if budget is None else hash_of(repr(budget).encode()),
            "text": None if documents is None else hash_of(repr(documents).encode()),
        }

    return loaded.mesh.from_rank_0(hashes)


def hash_of(content: bytes) -> str:
    """Twelve hex digits."""
    return hashlib.sha256(content).hexdigest()[:12]


def selection_labels(selection: Selection, num_layers: int) -> dict[str, Any]:
    """Method, mean target densities and phase; a dense run computes everything in every phase."""
    if selection.method == "dense":
        return {"method": "dense", "mlp_density": 1.0, "head_density": 1.0, "phase": "all"}
    targets = selection.densities(num_layers)
    return {
        "method": selection.method,
        "mlp_density": round(mean(targets["mlp"]), 6),
        "head_density": round(mean(targets["attention"]), 6),
        "phase": selection.sparse_phases,
    }


def run_labels(selection: Selection, num_layers: int) -> dict[str, Any]:
    """`selection_labels`, and what distinguishes two runs of one method: the folder of predictors, the tokens that its
    thresholds were set on, the budget (`trained`: the one that the predictors were trained for), how far back the
    predictors look, and the rank of their stand-in."""
    labels = {**selection_labels(selection, num_layers), "predictors": None, "density_budget": None}
    if selection.method == "dense":
        return {**labels, "label": None}  # dense is dense, whatever the runs beside it are called
    if selection.predictors is not None and needs_files(selection.method):
        labels["predictors"] = selection.predictors.resolve().name
        manifest = parse_manifest(selection.predictors)
        if (calibrated := manifest.definitions.get("calibration_tokens")) is not None:
            labels["calibration_tokens"] = calibrated
        if find_method(selection.method).files == "predictors":
            labels |= {"lookahead": manifest.lookahead, "standin_rank": manifest.standin_rank}
    if selection.budget() is not None:
        budget = selection.density_budget
        labels["density_budget"] = budget.stem if isinstance(budget, Path) else "trained"
    return labels


def gguf_source(checkpoint: Path) -> str | None:
    """Name of the GGUF file that a checkpoint was converted from, None of another source: its weights have the values
    of that file's types, often of 4 bits, whatever they are stored as now."""
    manifest = read_manifest(checkpoint)
    source = manifest.source if manifest is not None else None
    return Path(source).name if source is not None and source.endswith(".gguf") else None


def achieved_on_mesh(loaded: LoadedModel, selection: Selection, own_stats: SparsityStats) -> dict[str, Any]:
    """What a run really did, of all ranks together (a collective call), and what each of several had to compute."""
    model, mesh = loaded.model, loaded.mesh
    done = achieved(model, selection, own_stats, mesh.sum)
    if mesh.world_size > 1:
        done = {"mlp_density_per_rank": mesh.gather(own_density(model, selection, own_stats)), **done}
    if selection.method != "dense" and selection.sparse_phases == "all" and not done["sparse_calls"]:
        logger.warning(f"method {selection.method}: no call took the sparse path, so this is the dense model's result")
    return done


def execution_of(done: Mapping[str, Any]) -> str:
    """The label for how the sparse blocks of a run were computed, from what it achieved."""
    return next((path for path in ("mask", "gather") if done["executions"][path]), "dense")


class RecordFile:
    """The file that a sweep appends to, and what it holds already (known to all ranks), which with `resume` is not run
    again.

    Records are written in the order of the runs, so an interrupted sweep that is resumed leaves the file that an
    uninterrupted one does. ValueError if the file holds anything but records.
    """

    def __init__(self, path: Path, mesh: ParallelMesh, *, resume: bool) -> None:
        self.path, self.mesh, self.resume = path, mesh, resume
        self.known: list[Record] = mesh.from_rank_0(lambda: finished_records(path))
        self._has_warned = False

    def find(self, name: str, labels: Mapping[str, Any], *, unknown: Sequence[str] = (), **parts: Any) -> list[Record]:
        """Records to keep, with this name, these labels (but for `unknown` ones, and those known only after a run) and
        these top-level parts. Without `resume` none, but a warning if there are any."""
        left_out = {*AFTERWARDS, *unknown}
        wanted = {label: setting for label, setting in labels.items() if label not in left_out}
        found = [
            record
            for record in self.known
            if record["name"] == name
            and {label: setting for label, setting in record["labels"].items() if label not in left_out} == wanted
            and all(record.get(part) == value for part, value in parts.items())
        ]
        if self.resume or not found:
            return found
        if not self._has_warned and self.mesh.rank == 0:
            logger.warning(
                f"{self.path} holds records of this very run already: it is run and recorded again, and tables take "
                "the newest; --resume keeps the records that are there and does the rest"
            )
        self._has_warned = True
        return []

    def write(self, records: Sequence[Record]) -> list[Record]:
        """Append those that are not kept (on rank 0); returns the run's records as the file has them."""
        kept = []
        for record in records:
            there = [known for known in self.known if _identity(known) == _identity(record)]
            if there and self.resume:
                kept.append(there[-1])
                continue
            kept.append(record)
            if self.mesh.rank == 0:
                append_record(self.path, record)
        return kept


def _identity(record: Record) -> tuple[Any, ...]:
    parts = ("name", "metric", "labels", "run", "sources", "training")
    return tuple(record.get(part) for part in parts)


def print_tables(records: Sequence[Record], path: Path, *, quiet: bool) -> None:
    """What a run ends with: its tables on stdout, and where its records are. For the first rank."""
    for table in () if quiet else quality_tables(records):
        print(table.to_text(), end="\n\n")
    logger.info(f"{len(records)} records in {path}; scripts.summarize makes tables and plots of all that it holds")
