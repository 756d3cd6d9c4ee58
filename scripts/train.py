"""Train predictors of active units from an activation store: scores, stand-ins, refinement, thresholds, metrics."""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from loguru import logger

from analysis.formatting import Table
from analysis.results import environment_stamp
from data.activation_store import ActivationStore
from data.files import check_sums, replace_file
from data.store_manifest import SPLITS
from modules.decoder import Decoder
from modules.sparsity import BLOCKS, Block
from scripts.command_line import progress, run_stage, show_step
from scripts.model_loading import resolve_device
from scripts.refinement import RefinementFlags, check_refinement, number, refine_neurons, refinement_text
from sparse_predictor.budgets import read_budget
from sparse_predictor.calibration import measure_statistics
from sparse_predictor.labels import LabelDefinition, default_definition
from sparse_predictor.methods.registry import all_statistics
from sparse_predictor.predictor import Predictor, PredictorStack, Rule, auto_rank, auto_standin_rank
from sparse_predictor.standin import fit_standins
from sparse_predictor.store import (
    AGAIN,
    PredictorManifest,
    check_store,
    finished_predictors,
    load_calibration,
    load_predictors,
    save_predictors,
    weights_sample,
)
from sparse_predictor.thresholds import calibrate_in_runs, calibrate_thresholds
from sparse_predictor.train import FitOptions, count_frequencies, fit_scores, validation_metrics
from sparse_predictor.training_data import TrainingRows, describe_store


@dataclass(frozen=True, kw_only=True)
class Options(RefinementFlags):
    """Train predictors of active units from an activation store."""

    activations: Path
    """Activation store written by scripts.collect."""
    output_dir: Path
    """Where predictors, calibration, manifest and metrics go; refused if it holds predictors of other options."""
    units: Literal["mlp", "attention", "both"] = "both"
    """What to train; the store must hold it."""
    lookahead: int = 0
    """Predict from the input so many layers earlier (0 or 1)."""
    predictor_rank: str = "auto"
    """Inner width; auto: about 5 % of the MLP's bytes."""
    loss: Literal["energy_bce", "bce", "magnitude"] = "energy_bce"
    """energy_bce, bce (Deja Vu's) or magnitude."""
    label_density: float = 0.3
    """Share of units labelled active, where the model has no exact zeros."""
    initialisation: Literal["closed_form", "random"] = "closed_form"
    """Start from a reduced-rank regression, or at random (Deja Vu's)."""
    rule: Rule = "threshold"
    """How neurons are chosen from scores: one threshold per layer, or topk per token (Deja Vu's)."""
    densities: tuple[float, ...] = (0.5, 0.3)
    """MLP densities to fit stand-ins and thresholds at; a run at another density uses the nearest stand-in."""
    density_budget: Path | None = None
    """What each layer keeps at the one density of --densities (a file of scripts.budget): stand-ins, refinement and
    thresholds are for that, and so are runs with these predictors at that density."""
    standin_rank: str = "auto"
    """Rank of the linear stand-in for skipped neurons; 0: none."""
    closed_form_rows: int | None = None
    """Tokens that the closed-form regressions look at; default 32768, on a CPU 6144."""
    standin_tokens: int | None = None
    """Training tokens on which stand-ins are fitted; default 65536, on a CPU 4096."""
    standin_error_share: float = 0.5
    """How much of what earlier layers lost a stand-in also repairs; 0: only its own skipped neurons."""
    steps: int | None = None
    """Gradient steps on stored activations; default 400, on a CPU 50."""
    batch_rows: int | None = None
    """Tokens per step (of every layer); default 2048, on a CPU 768."""
    learning_rate: float = 2e-3
    """Peak, of AdamW."""
    calibration_tokens: int | None = None
    """Held-out tokens on which thresholds are set, of predictors and other methods; default 16384, on a CPU 2048."""


# What flags that were not given are, on a GPU and on a CPU: there the GPU's would take hours, of a small model, too.
DEFAULTS = {
    "refine_steps": (800, 0),
    "closed_form_rows": (32768, 6144),
    "standin_tokens": (65536, 4096),
    "steps": (400, 50),
    "batch_rows": (2048, 768),
    "calibration_tokens": (16384, 2048),
}
LEAST = {"closed_form_rows": 16, "calibration_tokens": 1, "standin_tokens": 1}


def main(options: Options) -> PredictorManifest:
    """Train into `output_dir`, unless that is done already; the manifest is written last."""
    options = fit_to_device(options, resolve_device(options.device).type)
    check_options(options)
    kept = layer_densities(options)
    store = ActivationStore(options.activations, verify=options.verify)
    if store.layout.units not in ("both", options.units):
        raise ValueError(f"{options.activations} holds units {store.layout.units}, not {options.units}")
    training = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(options).items()}
    training["density_budget"] = kept  # what it says, not where it is; a run reads it here
    definitions = describe_store(store)
    finished = finished_predictors(options.output_dir, training, definitions)
    loaded = options.load()
    model, config = loaded.model, loaded.model.config
    if kept is not None and len(kept) != config.num_hidden_layers:
        raise ValueError(
            f"--density-budget {options.density_budget} is for {len(kept)} layers; this model has "
            f"{config.num_hidden_layers}"
        )
    check_store(store, model, loaded.model_id)
    if finished is not None and are_whole(options.output_dir, model):
        logger.info(f"{options.output_dir} holds the predictors of these options: nothing to do")
        return finished
    if not store.manifest.complete:
        logger.warning(f"{options.activations} was interrupted: training on the {store.num_rows} rows it has")
    missing = sorted(set(range(config.num_hidden_layers)) - set(store.layers))
    if missing and options.units != "attention":
        raise ValueError(f"{options.activations} lacks layers {missing}; neurons are trained on all of them")
    for split in SPLITS:
        if not store.row_ranges(split):
            raise ValueError(f"{options.activations}: no {split} rows; collect more documents")
    label = default_definition(config, options.label_density)
    rows = {
        block: TrainingRows(store, model, block, lookahead=options.lookahead, device=model.device)
        for block in BLOCKS
        if options.units in ("both", block)
    }
    # Now, so that text that is not to be had ends this before hours of fitting.
    text_to_refine_on = (
        refinement_text(options, loaded, rows["mlp"]) if "mlp" in rows and options.refine_steps else None
    )
    metrics: dict[str, Any] = {}
    stacks = {block: fit_block(options, rows[block], label, kept) for block in rows}
    if "mlp" in stacks:
        if stacks["mlp"].standin_in.numel():
            logger.info("fitting stand-ins")
        text = rows["mlp"].text("train", number(options.standin_tokens), options.refine_window)
        fit_standins(
            model,
            stacks["mlp"],
            store.layers,
            text,
            lookahead=options.lookahead,
            error_share=options.standin_error_share,
        )
        if text_to_refine_on is not None:
            metrics["refinement"] = refine_neurons(
                options,
                rows["mlp"],
                stacks["mlp"],
                text_to_refine_on,
                densities=options.densities,
                lookahead=options.lookahead,
                held_out_tokens=number(options.calibration_tokens),
                state_folder=options.output_dir,
                origin={
                    name: str(value)
                    for name, value in training.items()
                    if not name.startswith("refine_") and name != "verify"
                },
            )
    predictors: dict[tuple[int, Block], Predictor] = {}
    for block, stack in stacks.items():
        rule = options.rule if block == "mlp" else "topk"
        metrics[block] = validation_metrics(stack, rows[block], label, options.densities, rule)
        for layer, predictor in zip(store.layers, stack.to_predictors(), strict=True):
            predictors[layer, block] = predictor.to(model.device)
    held_out = next(iter(rows.values())).text("validation", number(options.calibration_tokens), options.refine_window)
    if "mlp" in stacks:
        neurons = {layer: predictor for (layer, block), predictor in predictors.items() if block == "mlp"}
        calibrate_thresholds(model, neurons, held_out, options.lookahead)
    calibration = {
        layer: count_frequencies(rows, index, label)
        for index, layer in enumerate(progress(store.layers, "calibrating baselines", quiet=options.quiet))
    }
    calibration = measure_statistics(model, all_statistics(), calibration, held_out)
    calibration = calibrate_in_runs(model, calibration, options.densities, held_out)
    manifest = PredictorManifest(
        model_id=loaded.model_id,
        config_hash=config.config_hash(),
        weights_sample=weights_sample(model),
        layers=list(store.layers),
        blocks=list(stacks),
        lookahead=options.lookahead,
        mlp_rule=options.rule,
        predictor_rank={block: stack.first.shape[1] for block, stack in stacks.items()},
        standin_rank=stacks["mlp"].standin_in.shape[2] if "mlp" in stacks else 0,
        densities=list(options.densities),
        definitions={"label": label.to_manifest(), "calibration_tokens": held_out.numel(), **definitions},
        training=training,
        provenance={"command_line": shlex.join(sys.argv), "git_commit": environment_stamp()["commit"]},
    )
    tables = [metrics_table(block, metrics[block]).to_markdown() for block in stacks]
    options.output_dir.mkdir(parents=True, exist_ok=True)
    replace_file(options.output_dir / "metrics.md", ("\n\n".join(tables) + "\n").encode())
    save_predictors(options.output_dir, predictors, calibration, metrics, manifest)
    report(metrics, options)
    return manifest


def fit_to_device(options: Options, device_type: str) -> Options:
    """The options with a number for each that was not given; says which ones a CPU makes smaller."""
    chosen: dict[str, Any] = {
        name: values[device_type == "cpu"] for name, values in DEFAULTS.items() if getattr(options, name) is None
    }
    if "refine_steps" in chosen and options.refine_corpus is not None:  # it was asked for
        chosen["refine_steps"] = DEFAULTS["refine_steps"][0]
    if device_type == "cpu" and chosen:
        told = [f"{name} {value}" if value else "no refinement" for name, value in chosen.items()]
        full = ", ".join(f"--{name.replace('_', '-')} {DEFAULTS[name][0]}" for name in chosen)
        logger.info(f"on a CPU: {', '.join(told)}; the full recipe is for a GPU: {full}")
    return replace(options, **chosen)


def check_options(options: Options) -> None:
    """ValueError for numbers that could not train anything, before anything is loaded."""
    for name, least in LEAST.items():
        if getattr(options, name) < least:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(options, name)}")
    if options.lookahead not in (0, 1):
        raise ValueError(f"--lookahead must be 0 or 1, got {options.lookahead}")
    if not 0.0 <= options.standin_error_share <= 1.0:
        raise ValueError(f"--standin-error-share must lie in [0, 1], got {options.standin_error_share}")
    check_refinement(options, refines=options.units != "attention")
    if not options.densities or len(set(options.densities)) != len(options.densities):
        raise ValueError(f"--densities: give at least one, each once; got {options.densities}")
    for density in (*options.densities, options.label_density):
        if not 0.0 < density <= 1.0:
            raise ValueError(f"--densities and --label-density must lie in (0, 1], got {density}")


def are_whole(directory: Path, model: Decoder) -> bool:
    """Whether finished predictors can be used as they are. If not, a warning says why, and they are trained again."""
    try:
        _, manifest = load_predictors(directory, model)
        load_calibration(directory, manifest.sums)
        check_sums(directory, manifest.sums, AGAIN)
    except (ValueError, FileNotFoundError) as problem:
        logger.warning(f"{problem}: training again")
        return False
    return True


def layer_densities(options: Options) -> list[float] | None:
    """What each MLP keeps, where a budget says it; ValueError if that is not of the one density to be trained."""
    if options.density_budget is None:
        return None
    if options.units == "attention" or len(options.densities) != 1:
        raise ValueError(f"--density-budget is for neurons, at one density of --densities; got {options.densities}")
    return read_budget(options.density_budget).of_mlps(options.densities[0])


def fit_block(
    options: Options, rows: TrainingRows, label: LabelDefinition, kept: Sequence[float] | None
) -> PredictorStack:
    """Stage A: the scores of one kind of block."""
    config = rows.model.config
    layer = config.layers[0]  # a store has one width for all layers
    share = auto_rank(layer.of(rows.block), config.hidden_size)
    rank = parse_rank(options.predictor_rank, share, "--predictor-rank", 1)
    share = auto_standin_rank(layer.feed_forward, config.hidden_size)
    standin_rank = parse_rank(options.standin_rank, share, "--standin-rank", 0)
    if standin_rank > config.hidden_size:
        raise ValueError(f"--standin-rank must be at most hidden_size={config.hidden_size}, got {standin_rank}")
    stack = PredictorStack(
        len(rows.layers),
        config.hidden_size,
        rows.num_units,
        rank,
        densities=options.densities if rows.block == "mlp" else (),
        layer_densities=None if kept is None or rows.block != "mlp" else {options.densities[0]: kept},
        standin_rank=standin_rank if rows.block == "mlp" else 0,
        device=rows.device,
        seed=options.seed,
    )
    fit = FitOptions(
        loss=options.loss,
        label=label,
        initialisation=options.initialisation,
        steps=number(options.steps),
        batch_rows=number(options.batch_rows),
        learning_rate=options.learning_rate,
        seed=options.seed,
        closed_form_rows=number(options.closed_form_rows),
    )
    with progress((), f"fitting {rows.block}", quiet=options.quiet, total=options.steps, unit="step") as bar:
        fit_scores(
            stack,
            rows,
            fit,
            state_path=options.output_dir / f"training_{rows.block}.pt",
            on_step=lambda step, loss: show_step(bar, step, loss),
        )
    return stack


def parse_rank(text: str, automatic: int, flag: str, least: int) -> int:
    """`auto`, or a whole number of at least `least`."""
    if text == "auto":
        return automatic
    if not text.isdecimal() or int(text) < least:
        raise ValueError(f"{flag} must be auto or a whole number of at least {least}, got {text!r}")
    return int(text)


def metrics_table(block: Block, metrics: dict[str, Any]) -> Table:
    """Recall and precision of every layer at every density, as in metrics.json."""
    keys = [(density, name) for density in metrics["at"] for name in ("recall", "precision")]
    rows = [
        (str(layer), *(f"{metrics['at'][density][name][index]:.3f}" for density, name in keys))
        for index, layer in enumerate(metrics["layers"])
    ]
    columns = ("layer", *(f"{name} at {density}" for density, name in keys))
    return Table(title=f"{block}: held-out documents, {metrics['rows']} tokens", columns=columns, rows=tuple(rows))


def report(metrics: dict[str, Any], options: Options) -> None:
    """One line per kind of block and density; the layers are in metrics.json."""
    for block in BLOCKS:
        for density, found in metrics.get(block, {}).get("at", {}).items():
            recall, precision, chosen = (float(np.mean(found[key])) for key in ("recall", "precision", "density"))
            logger.info(f"{block} at {density}: recall {recall:.3f}, precision {precision:.3f}, density {chosen:.3f}")
    if "refinement" in metrics:
        refinement = metrics["refinement"]
        start = refinement["held_out_divergence"][0][1]
        logger.info(
            f"refinement: divergence {start:.4f} -> {refinement['best']:.4f} nats per token, on the text that chose "
            "the best state"
        )
    logger.info(f"predictors, and metrics.md with every layer, are in {options.output_dir}")


if __name__ == "__main__":
    run_stage(main, Options)
