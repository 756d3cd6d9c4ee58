"""The drift study: how far embeddings move from layer to layer, and whether that is what predictors fail by.

Measures the residual stream, what a predictor of active units loses to distance, and how sparse the neurons are by
themselves; then answers, from the records of all three, what explains a predictor's losses. Under torchrun the ranks
measure the stream of a model that is cut among them.

python -m scripts.studies.drift --model outputs/smollm2/checkpoint --corpus wikitext --output-dir outputs/smollm2/drift
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from loguru import logger

from analysis.drift import verdict
from analysis.report import all_figures, build_report, save_figures
from analysis.results import Record
from analysis.tables import summary_markdown
from data.activation_store import ActivationStore
from data.corpora import parse_corpus
from data.files import disk_errors, replace_file
from modules.checkpoint.load import load_config
from modules.config import ModelConfig
from scripts.command_line import run_stage
from scripts.model_loading import LoadedModel, ModelOptions, resolve_device, resolve_model
from scripts.studies.drift_records import PARTS, DriftSettings, Part, drift_measure_records, drift_records
from scripts.studies.drift_sources import StoredStates, check_calibration, read_texts
from sparse_predictor.store import check_store


@dataclass(frozen=True, kw_only=True)
class Options(DriftSettings, ModelOptions):
    """How far embeddings move from layer to layer, and whether that is what predictors fail by."""

    output_dir: Path
    """For drift.jsonl, verdict.md, summary.md, report.html and the plots, in plots/; those of an earlier run are
    replaced."""
    model: str = ""
    """Converted folder, Hugging Face folder or hub id; may be left out with --activations."""
    corpus: str = "wikitext"
    """wikitext[:SPLIT], c4[:SPLIT], a .txt, .jsonl or .jsonl.gz file, or self[:SEED]; the test side by default."""
    calibration_corpus: str | None = None
    """Text to fit predictors on; by default the training side of --corpus (of a file its first part)."""
    activations: Path | None = None
    """Measure drift in this activation store (see scripts.collect) instead of running the model for it; the other parts
    run the model, where one is given."""
    window: int = 256
    """Tokens per window; windows (or the store's documents) are what intervals are drawn over."""
    test_tokens: int = 16384
    """Tokens to measure on."""
    calibration_tokens: int = 65536
    """Tokens to fit predictors on."""

    def check(self) -> None:
        """As `DriftSettings.check`; ValueError also for flags that do not go together."""
        super().check()
        for name in ("test_tokens", "calibration_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")
        if not self.model and self.activations is None:
            raise ValueError("give --model, or --activations to measure drift in a store without running the model")
        if not self.model and set(self.parts) not in ({"drift"}, set(PARTS)):
            raise ValueError(f"--parts {' '.join(self.parts)}: without --model there is only drift, from the store")
        if self.activations is not None and os.environ.get("WORLD_SIZE", "1") != "1":
            raise ValueError("--activations: a store is read by one process; leave out torchrun (NUM_GPUS=1)")


def main(options: Options) -> list[Record]:
    """Measure, write everything into `output_dir` (on the first of all processes), and return the records."""
    options.check()
    parse_corpus(options.corpus, side="test")  # an unknown one fails before anything is loaded
    store = None if options.activations is None else ActivationStore(options.activations, verify=options.verify)
    if options.model:
        check_amounts(options, load_config(resolve_model(options.model)))  # before the weights are read
    loaded = options.load() if options.model else None
    parts, records = set(options.parts), []
    if store is not None and "drift" in parts:
        records += records_of_store(store, loaded, options)
        parts.remove("drift")
    if loaded is not None and parts:
        records += records_of_model(loaded, options, [part for part in options.parts if part in parts])
    if loaded is None or loaded.mesh.rank == 0:
        write_study(records, options.output_dir)
        print(verdict(records))
        logger.info(f"{len(records)} records, plots, report.html and verdict.md in {options.output_dir}")
    return records


def check_amounts(options: Options, config: ModelConfig) -> None:
    """ValueError for windows and text that do not fit the model."""
    context, parts = config.max_position_embeddings, set(options.parts)
    if options.activations is not None:
        parts.discard("drift")
    if parts and not 2 <= options.window <= context:
        raise ValueError(f"--window must lie between 2 and the model's context of {context}, got {options.window}")
    if "distance" in parts and os.environ.get("WORLD_SIZE", "1") == "1":
        check_calibration(options.calibration_tokens, options.window, config.hidden_size)


def records_of_model(loaded: LoadedModel, options: Options, parts: Sequence[Part]) -> list[Record]:
    """Of the parts that run the model."""
    mesh = loaded.mesh
    fits = "distance" in parts and mesh.world_size == 1
    calibration, test = read_texts(
        loaded,
        options.corpus,
        options.calibration_corpus,
        window=options.window,
        test_tokens=options.test_tokens,
        calibration_tokens=options.calibration_tokens if fits else None,
        quiet=options.quiet,
    )
    labels: dict[str, Any] = {
        "model": loaded.model_id,
        "dtype": str(loaded.model.compute_dtype).removeprefix("torch."),
        "seed": options.seed,
        "corpus": parse_corpus(options.corpus, side="test").label,
        "window": options.window,
    }
    if mesh.world_size > 1:
        labels |= {"tp_size": mesh.tp_size, "pp_size": mesh.pp_size, "dp_size": mesh.dp_size}
    return drift_records(
        loaded.model,
        calibration,
        test,
        labels=labels,
        settings=replace(options.settings(), parts=tuple(parts)),
        batch_size=options.batch_size,
        seed=options.seed,
        mesh=mesh,
        quiet=options.quiet,
    )


def records_of_store(store: ActivationStore, loaded: LoadedModel | None, options: Options) -> list[Record]:
    """Drift measures of what `scripts.collect` stored. ValueError if that is of another model than `loaded`."""
    layout = store.layout
    if loaded is not None:
        check_store(store, loaded.model, f"--model {options.model}")
    states = StoredStates(
        store,
        num_layers=max(store.layers) + 1 if loaded is None else loaded.model.config.num_hidden_layers,
        max_rows=options.test_tokens,
        device=resolve_device(options.device) if loaded is None else loaded.model.device,
    )
    labels = {
        "model": layout.model if loaded is None else loaded.model_id,
        "dtype": layout.dtype,
        "seed": options.seed,
        "corpus": layout.definitions.get("corpus"),
    }
    return drift_measure_records(states, options.max_lookahead, labels=labels, seed=options.seed, quiet=options.quiet)


def write_study(records: Sequence[Record], output_dir: Path) -> None:
    """Records, verdict, tables, the report and, in a folder of their own, plots; those of an earlier run are replaced,
    plots that these records cannot fill included."""
    plots_dir = output_dir / "plots"
    with disk_errors(output_dir):
        plots_dir.mkdir(parents=True, exist_ok=True)
        for path in plots_dir.glob("*.png"):
            path.unlink()
        plots = save_figures(all_figures(records).items(), plots_dir)
        texts = {
            "drift.jsonl": "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records),
            "verdict.md": verdict(records) + "\n",
            "summary.md": summary_markdown(records),
            "report.html": build_report(records, title="The drift study", figures=plots),
        }
        for name, text in texts.items():
            replace_file(output_dir / name, text.encode())


if __name__ == "__main__":
    run_stage(main, Options, distributed=True)
