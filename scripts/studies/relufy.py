"""ReLU-fication (Mirzadeh et al. 2023): a model's activation replaced by ReLU, trained on briefly; what that changes.

Two models are trained on from the same weights, on the same text, windows and order: one with its own activation
(variant `silu`), the other with ReLU (`relu`). So what training itself changes is not taken for an effect of ReLU.
Records of the same names before training have the variants `silu before training` and `relu before training`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from loguru import logger

import scripts.collect
import scripts.train
from analysis.effects import RELUFICATION, VARIANTS
from analysis.results import Record, make_record
from data.files import replace_file
from modules.checkpoint.load import build_on_meta, checkpoint_shapes, load_config, load_model, load_weights
from modules.checkpoint.sources import checkpoint_fingerprint, open_source
from modules.decoder import Decoder
from pipeline_parallel.mesh import ParallelMesh
from scripts.benchmark import decode
from scripts.command_line import run_stage
from scripts.model_loading import model_name, resolve_device, resolve_model
from scripts.run_records import RecordFile, selection_labels
from scripts.studies.drift_records import DriftSettings, drift_records
from scripts.studies.drift_sources import check_calibration
from scripts.studies.trained_models import (
    TrainedStudyOptions,
    TrainingText,
    complete_records,
    keep_records,
    loss_record,
    perplexity_record,
    prepare_text,
    score,
    train_once,
    training_identity,
)
from scripts.studies.training import TrainingOptions
from sparse_predictor.selection import Selection, attach_selection

# What ReLU changes is what neurons do and how well they are predicted; drift and far look-aheads are for `drift`.
SETTINGS = DriftSettings(parts=("distance", "activation"), max_lookahead=4, distance_layers=8, perplexity_lookaheads=())


@dataclass(frozen=True, kw_only=True)
class Options(TrainedStudyOptions):
    """Replace a model's SiLU by ReLU, train it on briefly, and compare with the same model trained on without that.

    Safe to run again: what is there is kept.
    """

    model: str
    """A gated SiLU model: converted folder, Hugging Face folder or hub id."""
    train_tokens: int = 8_388_608
    window: int = 1024
    batch_windows: int = 16
    learning_rate: float = 3e-4
    speed_densities: tuple[float, ...] = (0.5, 0.2)
    """Share of the neurons computed where decoding is timed, with predictors of the two trained models; none: not."""
    predictor_tokens: int = 131072
    """Of the training text, those that the predictors are trained on."""
    prompt_tokens: int = 128
    """Of the text that is continued for the time."""
    decode_tokens: int = 256
    """Tokens decoded for the time."""
    seed: int = 0
    """Of the order of the text."""


def main(options: Options) -> list[Record]:
    """Train and study what is not there yet; returns all records."""
    directory = resolve_model(options.model)
    config = load_config(directory)
    if config.activation != "silu":
        raise ValueError(f"--model {options.model}: its activation is {config.activation}; one with SiLU is needed")
    if min(options.predictor_tokens, options.prompt_tokens, options.decode_tokens) < 2:
        raise ValueError("--predictor-tokens, --prompt-tokens and --decode-tokens must be at least 2")
    if options.speed_densities and options.prompt_tokens + options.decode_tokens > config.max_position_embeddings:
        raise ValueError(
            f"--prompt-tokens and --decode-tokens do not fit the context of {config.max_position_embeddings} together"
        )
    for density in options.speed_densities:
        Selection(mlp_density=density).densities(1)
    plan, training = options.text_plan(tokenizer_dir=str(directory)), options.training(options.seed)
    plan.check()
    check_calibration(options.calibration_tokens, options.window, config.hidden_size)
    text = prepare_text(options.output_dir / "text", plan, quiet=options.quiet)
    output = RecordFile(options.output, ParallelMesh.single(resolve_device(options.device)), resume=True)
    records = [
        record for variant in VARIANTS for record in run_variant(options, directory, text, training, output, variant)
    ]
    # Last, since it may refuse to time what does not decode as it should.
    for variant in (name for name, (_, is_trained_on) in VARIANTS.items() if is_trained_on):
        identity = identity_of(directory, text, training, variant)
        for density in options.speed_densities:
            records += run_sparse(options, text, output, variant, density, identity)
    return records


def labels_of(options: Options, variant: str) -> dict[str, Any]:
    """Of all records of a variant."""
    activation = VARIANTS[variant][0]
    return {
        "model": model_name(options.model),
        "variant": variant,
        "activation": "silu gated" if activation == "silu" else activation,
        "seed": options.seed,
        "dtype": str(options.study_dtype()).removeprefix("torch."),
    }


def identity_of(directory: Path, text: TrainingText, training: TrainingOptions, variant: str) -> dict[str, Any]:
    """What a variant's weights depend on, as manifests and records have it."""
    activation, is_trained_on = VARIANTS[variant]
    source = {"text": text.identity, "source": checkpoint_fingerprint(directory)[:12], "activation": activation}
    return {**source, **training_identity(training, text)} if is_trained_on else source


def run_variant(
    options: Options, directory: Path, text: TrainingText, training: TrainingOptions, output: RecordFile, variant: str
) -> list[Record]:
    """Train one of the two, if it is to be, unless it is there; append its records, unless they are."""
    device = resolve_device(options.device)
    activation, is_trained_on = VARIANTS[variant]
    dtype = options.study_dtype()
    identity = identity_of(directory, text, training, variant)
    labels = labels_of(options, variant)
    made = {"training": identity}
    if (finished := complete_records(output, RELUFICATION, labels, made)) is not None:
        logger.info(f"{variant}: its records are in {options.output}")
        return finished
    if is_trained_on:
        folder = options.output_dir / activation
        train_once(
            lambda: with_activation(directory, activation, torch.float32, device),
            folder,
            text,
            training,
            identity,
            title=f"training {variant}",
            quiet=options.quiet,
        )
        model = load_model(folder, dtype=dtype, device=device)
    else:
        model = with_activation(directory, activation, dtype, device)
    loss, records = score(RELUFICATION, labels, model, text, options.test_corpus)
    records += drift_records(
        model, text.calibration, text.held_out, labels=labels, name=RELUFICATION, settings=SETTINGS, quiet=options.quiet
    )
    return keep_records(output, [*records, loss], made)


def with_activation(directory: Path, activation: str, dtype: torch.dtype, device: torch.device) -> Decoder:
    """The checkpoint's weights in a model with this activation."""
    config = load_config(directory)
    source = open_source(directory, config, checkpoint_shapes(config))
    layers = (
        replace(layer, feed_forward=replace(layer.feed_forward, activation=activation))  # type: ignore[arg-type]
        for layer in config.layers
    )
    model = build_on_meta(replace(config, layers=tuple(layers)))
    load_weights(model, source, dtype=dtype, device=device)
    return model


def run_sparse(
    options: Options, text: TrainingText, output: RecordFile, variant: str, density: float, identity: dict[str, Any]
) -> list[Record]:
    """Decoding at batch 1 and held-out perplexity with trained predictors of the neurons, against the dense model."""
    folder = options.output_dir / VARIANTS[variant][0]
    predictors = folder.with_name(f"{folder.name}-predictors")
    selection = Selection(
        method="predictor",
        predictors=predictors,
        mlp_density=density,
        sparse_phases="all",
    )
    num_layers = load_config(folder).num_hidden_layers
    labels = {**labels_of(options, variant), **selection_labels(selection, num_layers), "batch_size": 1}
    amounts = {name: getattr(options, name) for name in ("predictor_tokens", "prompt_tokens", "decode_tokens")}
    made = {"training": identity, "amounts": amounts}
    if (finished := complete_records(output, RELUFICATION, labels, made, last="tokens_per_s")) is not None:
        return finished
    train_predictors(options, text, folder, predictors, labels["dtype"])
    model = load_model(folder, dtype=options.study_dtype(), device=resolve_device(options.device))
    dense = loss_record(RELUFICATION, labels, model, text.held_out)["value"]
    attach_selection(model, selection)
    quality = perplexity_record(loss_record(RELUFICATION, labels, model, text.held_out), dense)
    del model
    (timed,) = decode.run(
        decode.Options(
            model=str(folder),
            corpus=options.test_corpus,
            output=options.output_dir / "decode.jsonl",
            method="predictor",
            predictors=predictors,
            mlp_density=density,
            prompt_tokens=options.prompt_tokens,
            new_tokens=options.decode_tokens,
            window=options.window,
            max_windows=8,
            dtype=labels["dtype"],
            device=options.device,
            quiet=options.quiet,
        )
    )
    extras = {name: timed[name] for name in ("achieved", "bytes_per_step", "achieved_gb_per_s", "ceiling_gb_per_s")}
    speed = make_record(
        RELUFICATION,
        labels,
        "tokens_per_s",
        timed["value"],
        timed["unit"],
        baseline={**timed["baseline"], "name": "dense"},
        **extras,
    )
    return keep_records(output, [quality, speed], made)


def train_predictors(options: Options, text: TrainingText, folder: Path, predictors: Path, dtype: str) -> None:
    """Collect activations of a trained model and train predictors of its neurons. Both stages see by themselves whether
    that is done, and whether what is there is of this model and these options."""
    activations = folder.with_name(f"{folder.name}-activations")
    # From the training stream: the corpora themselves also hold the text that is tested on.
    corpus = options.output_dir / "predictor-text.jsonl"
    windows = text.train[: options.predictor_tokens].split(options.window)
    lines = "".join(json.dumps({"token_ids": window.tolist()}) + "\n" for window in windows)
    replace_file(corpus, lines.encode())
    how: dict[str, Any] = {"model": str(folder), "dtype": dtype, "device": options.device, "quiet": options.quiet}
    scripts.collect.main(
        scripts.collect.Options(
            **how,
            corpus=str(corpus),
            output_dir=activations,
            max_tokens=options.predictor_tokens,
            units="mlp",
            resume=True,
        )
    )
    scripts.train.main(
        scripts.train.Options(
            **how,
            activations=activations,
            output_dir=predictors,
            units="mlp",
            densities=options.speed_densities,
            refine_steps=0,
        )
    )


if __name__ == "__main__":
    run_stage(main, Options)
