"""Decode tokens/s of the engine, end to end: model, choice of units, sampling and hand-offs; CUDA graphs on GPUs.

In one process: dense or sparse, random weights of a published shape or a trained model (then with the perplexity of the
same decode steps), beside our own dense model and Hugging Face in the same call. Before anything is timed,
`DecodingCheck` has looked at it. Under torchrun the
ranks share the dense model (--tp-size, --pp-size), and the same call times one rank alone.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
from loguru import logger

from analysis.results import Record, append_record, make_record
from modules.config import ModelConfig
from modules.graphs import can_capture
from modules.requests import GenerationRequest, GenerationResult, GenerationTimings
from modules.scoring import Likelihood, windows_likelihood
from pipeline_parallel.engine import generate_on_mesh
from pipeline_parallel.launch import current_launch
from pipeline_parallel.mesh import ParallelMesh
from scripts.benchmark import engine
from scripts.benchmark.decode_steps import (
    REPORTED,
    SHALLOW,
    SHALLOW_HALF,
    SHALLOW_LAYERS,
    DecodingCheck,
    Limits,
    bare_step_ms,
    forced_likelihood,
    step_bytes,
)
from scripts.benchmark.engine import NUM_CHECKED, Speeds, bytes_of_weights, echoed, measure, release
from scripts.benchmark.hugging_face import (
    echoed_by_hugging_face,
    hugging_face_model,
    measure_compiled,
    measure_hugging_face,
)
from scripts.benchmark.random_models import Sizes, attach_random
from scripts.benchmark.subject import Subject, SubjectOptions, load_subject
from scripts.benchmark.timing import measure_read_ceiling
from scripts.command_line import run_stage
from scripts.evaluate import Score, compared
from scripts.model_loading import Dtype, resolve_device
from scripts.run_records import run_labels, sources_of
from scripts.train import parse_rank
from sparse_predictor.cost import achieved
from sparse_predictor.methods.registry import find_method, needs_files
from sparse_predictor.predictor import auto_rank, auto_standin_rank
from sparse_predictor.selection import Selection, attach_selection, remove_sparsity

OUR_DENSE = "our dense"
HF_NAMES = {"hf-compiled": "Hugging Face compiled", "hf-eager": "Hugging Face eager"}


@dataclass(frozen=True, kw_only=True)
class Options(SubjectOptions):
    """Speed of decoding, dense or sparse, beside our dense model and Hugging Face in the same call."""

    method: Literal["dense", "predictor", "cats", "teal", "static", "random"] = "dense"
    """Who chooses the active units."""
    mlp_density: float = 0.5
    """Share of MLP neurons kept, in (0, 1]."""
    head_density: float = 1.0
    """Share of key-value groups of heads kept, in (0, 1]."""
    predictors: Path | None = None
    """Of a trained model: directory written by scripts.train. Random weights get random predictors."""
    density_budget: Path | None = None
    """Of a trained model: JSON file with one density per layer (see scripts.budget)."""
    label: str | None = None
    """Of a trained model: what tables call this run, beside the method."""
    lookahead: Literal[0, 1] = 0
    """Of random predictors: how many layers back they look."""
    predictor_rank: str = "auto"
    """Of random predictors: inner width; auto: what training would take."""
    standin_rank: str = "auto"
    """Of random predictors: inner width of the stand-in, 0 for none; auto: what training would take."""
    baseline: Literal["hf-compiled", "hf-eager", "none"] = "none"
    """Hugging Face with the same weights: static cache and compiled (first --batch-size only, as it takes a minute to
    compile), or its plain `generate`."""


def check_shallow(options: Options, device: torch.device) -> None:
    """ValueError if a sparse random model of this shape, with two layers, decodes what its masked prefill does not:
    in float32, and in the half precision that is timed, whose kernels are tiled differently."""
    logger.info(f"first, {SHALLOW_LAYERS} layers: whether {options.method} decodes what a masked prefill does")
    cases: list[tuple[Dtype, Limits]] = [("float32", SHALLOW)]
    if options.dtype in ("bfloat16", "float16") or (options.dtype == "auto" and device.type == "cuda"):
        cases.append((options.dtype, SHALLOW_HALF))
    for dtype, limits in cases:
        subject = load_subject(replace(options, dtype=dtype), device, num_layers=SHALLOW_LAYERS)
        check_model(options, subject.model.config)
        model, mesh, check = subject.model, ParallelMesh.single(device), DecodingCheck(sparse=True, limits=limits)
        batches = {size: subject.requests(size, options.new_tokens) for size in options.batch_size}
        with tempfile.TemporaryDirectory() as folder:
            attach(options, subject, mesh, Path(folder), batches[max(batches)])
            measure(model, mesh, batches, decode_speed, 1, check)
        found = {size: f"{mean:.1e}" for size, (_, mean) in check.differences.items()}
        logger.info(
            f"{SHALLOW_LAYERS} layers, {model.compute_dtype}: decoding and a masked prefill differ by {found} nats"
        )


def decode_speed(timings: GenerationTimings) -> float:
    """What is measured."""
    return timings.decode_tokens_per_s


def run(options: Options) -> list[Record]:
    """Measure dense, Hugging Face and the sparse model, one after the other; append and return the records."""
    device = resolve_device(options.device)
    check_options(options)
    if options.model is None and options.method != "dense":
        check_shallow(options, device)
    subject = load_subject(options, device)
    model, mesh = subject.model, ParallelMesh.single(device)
    check_model(options, model.config)
    sizes = options.batch_size
    batches = {size: subject.requests(size, options.new_tokens) for size in sizes}
    if options.method != "dense" and subject.is_trained:  # what does not fit fails now, not after the dense run
        attach_selection(model, selection_of(options, options.predictors))
        remove_sparsity(model)
    dense_bytes = bytes_of_weights(model)
    check = DecodingCheck(sparse=False)
    quality = Quality.of(subject, Selection(), options) if subject.is_trained else None
    logger.info("timing our dense model")
    speeds = measure(model, mesh, batches, decode_speed, options.repetitions, check)
    baselines: dict[str, Speeds] = {}
    if options.baseline != "none":
        logger.info(f"timing {HF_NAMES[options.baseline]}")
        baselines[HF_NAMES[options.baseline]] = time_hugging_face(options, subject)
    ceiling = measure_read_ceiling(device)
    labels: dict[str, Any] = {**subject.labels, "method": options.method, "mlp_density": 1.0, "head_density": 1.0}
    with tempfile.TemporaryDirectory() as folder:
        if options.method != "dense":
            baselines = {OUR_DENSE: speeds, **baselines}
            logger.info(f"timing {options.method}; first it is attached, and calibrated if the weights are random")
            labels |= attach(options, subject, mesh, Path(folder), batches[max(sizes)])
            if quality is not None:  # of what is attached now, and is timed next
                quality = Quality.of(subject, selection_of(options, options.predictors), options, quality)
            expected = None if subject.is_trained else (options.mlp_density, options.head_density)
            check = DecodingCheck(sparse=True, expected=expected, limits=None if subject.is_trained else REPORTED)
            speeds = measure(model, mesh, batches, decode_speed, options.repetitions, check)
    labels |= {
        "execution": "graph" if can_capture(model) else "eager",
        "prompt_tokens": options.prompt_tokens,
        "new_tokens": options.new_tokens,
        "seed": options.seed,
    }
    records = []
    for size in sizes:
        mean_length = options.prompt_tokens + options.new_tokens / 2
        moved = step_bytes(
            model,
            options.method,
            check.achieved[size],
            batch_size=size,
            mean_length=mean_length,
            dense_bytes=dense_bytes,
        )
        speed = median(speeds[size])
        extras = moved.to_record(speed / size, ceiling)
        extras |= achieved_extras(check, size)
        extras |= {} if quality is None else quality.to_record()
        extras |= {"step_ms": 1000.0 * size / speed}
        extras |= {"bare_step_ms": bare_step_ms(model, batches[size], options.repetitions)}
        beside = {name: values[size] for name, values in baselines.items() if size in values}
        for name, theirs in beside.items() or [("", [])]:
            records.append(
                make_record(
                    "decode",
                    {**labels, "batch_size": size},
                    "tokens_per_s",
                    speed,
                    "tokens/s",
                    baseline={"name": name, "value": median(theirs)} if name else None,
                    timing={"samples": speeds[size], "baseline_samples": theirs},
                    **extras,
                )
            )
            append_record(options.output, records[-1])
            logger.info(line(records[-1]))
    return records


def check_options(options: Options) -> None:
    """ValueError for flags that do not go together."""
    if options.new_tokens < 2 or options.repetitions < 1:
        raise ValueError("--new-tokens must be at least 2 (the prefill gives the first), --repetitions at least 1")
    if options.model is None and options.predictors is not None:
        raise ValueError("--predictors goes with --model: random weights get random predictors")
    if options.model is None and (options.density_budget is not None or options.label is not None):
        raise ValueError("--density-budget and --label go with --model")
    for name, least in (("max_windows", 1), ("decoded_windows", 0)):
        if (value := getattr(options, name)) is not None and value < least:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, got {value}")
    for name in ("mlp_density", "head_density"):
        if not 0.0 < getattr(options, name) <= 1.0:
            raise ValueError(f"--{name.replace('_', '-')} must lie in (0, 1], got {getattr(options, name)}")
    if options.model is not None:
        selection_of(options, options.predictors).check()


def check_model(options: Options, config: ModelConfig) -> None:
    """ValueError for a method that does not fit the model, before anything is timed."""
    if options.method != "dense":
        find_method(options.method).check(config, chooses_heads=options.head_density < 1.0, is_cut=False)
    needed = options.prompt_tokens + options.new_tokens
    if needed > config.max_position_embeddings:
        raise ValueError(f"{needed} tokens do not fit the context of {config.max_position_embeddings}")


def selection_of(options: Options, predictors: Path | None) -> Selection:
    """As `attach_selection` wants it. Every token selects, so that a prefill has the decode steps' log-probabilities;
    a decode step costs the same either way."""
    return Selection(
        method=options.method,
        predictors=predictors,
        mlp_density=options.mlp_density,
        head_density=options.head_density,
        sparse_phases="all",
        density_budget=options.density_budget,
        seed=options.seed,
    )


def attach(
    options: Options, subject: Subject, mesh: ParallelMesh, folder: Path, batch: Sequence[GenerationRequest]
) -> dict[str, Any]:
    """Make the model sparse; returns what records say about it."""
    model, config = subject.model, subject.model.config
    labels: dict[str, Any] = {"mlp_density": options.mlp_density, "head_density": options.head_density, "phase": "all"}
    if subject.is_trained:
        selection = selection_of(options, options.predictors)
        attach_selection(model, selection)
        return run_labels(selection, config.num_hidden_layers) | {"label": options.label}
    sizes = Sizes(
        predictor_rank=parse_rank(
            options.predictor_rank, auto_rank(config.layers[0].feed_forward, config.hidden_size), "--predictor-rank", 1
        ),
        standin_rank=parse_rank(
            options.standin_rank,
            auto_standin_rank(config.layers[0].feed_forward, config.hidden_size),
            "--standin-rank",
            0,
        ),
        lookahead=options.lookahead,
    )

    def write() -> list[list[int]]:
        heard: dict[int, GenerationResult] = {}
        generate_on_mesh(model, mesh, batch, batch_size=len(batch), eos_token_ids=(), on_finish=heard.__setitem__)
        return [[*request.prompt_token_ids, *heard[idx].token_ids] for idx, request in enumerate(batch)]

    prompts = torch.tensor([request.prompt_token_ids for request in batch], device=model.device)
    attach_random(model, selection_of(options, folder), sizes, prompts, write)
    release()
    if needs_files(options.method) and find_method(options.method).files == "predictors":
        labels |= vars(sizes)
    return labels


def time_hugging_face(options: Options, subject: Subject) -> Speeds:
    """tokens/s of each repetition by batch size; ValueError if its log-probabilities are not ours."""
    model, sizes = subject.model, options.batch_size
    theirs = hugging_face_model(model, subject.hf_config)
    prompts = subject.prompts[:NUM_CHECKED]
    # Hugging Face's norms are float32 at best.
    limits = Limits.of(torch.float32 if model.compute_dtype == torch.float64 else model.compute_dtype, sparse=False)
    ours = echoed(model, ParallelMesh.single(model.device), prompts)
    for here, there in zip(ours, echoed_by_hugging_face(theirs, prompts), strict=True):
        limits.check(here, there, "ours and Hugging Face")
    how = {"new_tokens": options.new_tokens, "repetitions": options.repetitions}
    if options.baseline == "hf-compiled":
        found = {sizes[0]: measure_compiled(theirs, subject.prompts[: sizes[0]], **how)}
    else:
        batches = {size: subject.prompts[:size] for size in sizes}
        found = measure_hugging_face(theirs, batches, **how, decode=True)
    del theirs
    release()
    return found


@dataclass(frozen=True, kw_only=True)
class Quality:
    """What a trained model, as it is now, says of the whole text, every token selecting for itself. `density`: of MLPs
    and heads on that text. `decoded`: perplexity of the first windows through decode steps and by scoring."""

    score: Score
    dense: Score
    density: dict[str, float]
    decoded: dict[str, float]
    sources: dict[str, str | None]

    @staticmethod
    def of(subject: Subject, selection: Selection, options: Options, dense: Quality | None = None) -> Quality:
        """Of a selection that is attached and has computed nothing yet; `dense`: what it is compared with."""
        model, heard, started = subject.model, list[Likelihood](), time.perf_counter()
        assert subject.loaded is not None
        logger.info(f"scoring {len(subject.windows)} windows, {selection.method}")
        windows_likelihood(model, subject.windows, batch_size=8, on_window=lambda _, found: heard.append(found))
        score, stats = Score(heard, time.perf_counter() - started), model.stats
        density = {"mlp_density": 1.0, "head_density": 1.0}
        if stats is not None and selection.method != "dense":
            done = achieved(model, selection, stats)
            density = {name: done[name] for name in density}
        decoded: dict[str, float] = {}
        if count := min(options.decoded_windows, len(subject.windows)):
            batch_size = min(8, max(options.batch_size))
            forced = forced_likelihood(model, subject.windows[:count], batch_size=batch_size)
            by_scoring = sum(heard[:count], Likelihood())
            decoded = {"num": count, "perplexity": forced.perplexity, "by_scoring": by_scoring.perplexity}
        texts = [piece.token_ids for piece in subject.windows]
        return Quality(
            score=score,
            dense=score if dense is None else dense.score,
            density=density,
            decoded=decoded,
            sources=sources_of(subject.loaded, selection, texts),
        )

    def to_record(self) -> dict[str, Any]:
        """For a record of the speed of the very same."""
        return {
            "perplexity": self.score.perplexity,
            "dense_perplexity": self.dense.perplexity,
            **compared(self.score, self.dense),
            "windows": self.score.to_record(),
            "text_achieved": self.density,
            "decoded_windows": self.decoded,
            "sources": self.sources,
        }


def achieved_extras(check: DecodingCheck, size: int) -> dict[str, Any]:
    """What a record says about what was computed while generating."""
    found = check.achieved[size]
    return {
        "achieved": {
            "mlp_density": found.densities["mlp"],
            "head_density": found.densities["attention"],
            "union_mlp_density": found.unions["mlp"],
            "union_head_density": found.unions["attention"],
        },
        "largest_logprob_difference": check.differences[size][0],
        "mean_logprob_difference": check.differences[size][1],
    }


def line(record: Record) -> str:
    """For the log."""
    labels, baseline = record["labels"], record["baseline"]
    ratio = f", {record['ratio']:.2f}x {baseline['name']}" if baseline else ""
    quality = f", perplexity {record['perplexity']:.2f}" if "perplexity" in record else ""
    bare = record["bare_step_ms"]
    alone = f", {record['step_ms']:.3f} ms per step, its graph alone {bare:.3f}" if bare is not None else ""
    return (
        f"{labels.get('shape') or labels.get('model')} {labels['method']} batch {labels['batch_size']}: "
        f"{record['value']:.1f} tokens/s, {record['achieved_gb_per_s']:.0f} GB/s, "
        f"{100 * record['share_of_ceiling']:.0f} % of the ceiling{ratio}{alone}{quality}; achieved {record['achieved']}"
    )


def main(options: Options) -> list[Record]:
    """Append one record per batch size and baseline."""
    device = current_launch().device or resolve_device(options.device)
    if ParallelMesh.from_process_group(options.tp_size, options.pp_size, device).world_size == 1:
        return run(options)
    if options.method != "dense" or options.model is not None or options.baseline == "hf-compiled":
        raise ValueError(
            "under torchrun, decoding is timed dense, on random weights, beside --baseline hf-eager or none"
        )
    options = replace(options, hugging_face=options.baseline == "hf-eager")
    return engine.run(options, "decode", decode_speed)


if __name__ == "__main__":
    run_stage(main, Options, distributed=True)
