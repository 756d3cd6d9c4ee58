"""What prefill.py and decode.py share: speeds of a random model on all ranks, on one, and in Hugging Face."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from loguru import logger

from analysis.results import Record, append_record, make_record
from modules.config import ModelConfig
from modules.decoder import Decoder
from modules.families.registry import from_hf_config
from modules.linear import bytes_held
from modules.requests import GenerationRequest, GenerationResult, GenerationTimings
from modules.sparsity import BLOCKS
from pipeline_parallel.engine import generate_on_mesh, parallelise
from pipeline_parallel.fused_add_norm import AllReduce, FusedAddNorm, choose_all_reduce, describe_all_reduce
from pipeline_parallel.launch import current_launch
from pipeline_parallel.mesh import ParallelMesh
from pipeline_parallel.overlap import Overlap, choose_overlap
from scripts.benchmark.hugging_face import echoed_by_hugging_face, hugging_face_model, measure_hugging_face
from scripts.benchmark.random_models import HF_CONFIGS, find_shape, random_weights
from scripts.benchmark.timing import measure_matmul_ceiling, measure_read_ceiling
from scripts.model_loading import resolve_device

NUM_CHECKED = 4  # prompts whose log-probabilities are compared before anything is timed
# Hugging Face rounds its logits to bfloat16: between 16 and 32 these are 0.125 apart.
LOGPROB_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.1}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Speed of the dense engine on random weights, beside one rank and Hugging Face in the same call."""

    output: Path
    """JSON lines; records are appended."""
    shape: str = "Llama-3.1-8B"
    """Whose shape the random model has: Llama-3.2-3B, Llama-3.1-8B or -70B-8-layers, OPT-6.7B, SmolLM2 or tiny."""
    batch_size: tuple[int, ...] = (1,)
    """Sequences run together; each is a measurement."""
    prompt_tokens: int = 512
    """Tokens of each prompt."""
    new_tokens: int = 64
    """Tokens generated for each."""
    repetitions: int = 5
    """Timed runs of each, of which the median counts; one more warms up."""
    tp_size: int = 1
    """Ranks that share each layer."""
    pp_size: int = 1
    """Pipeline stages."""
    all_reduce: AllReduce = "auto"
    """How ranks that share layers add up (see infer); what is not NCCL's is timed beside it."""
    hugging_face: bool = False
    """Also time transformers' `generate` on the first rank, with the same weights."""
    device: str = "auto"
    """cpu or cuda; auto: a GPU if there is one."""
    seed: int = 0
    """Of weights and prompts."""
    quiet: bool = False
    """Warnings only."""


Speed = Callable[[GenerationTimings], float]
Speeds = dict[int, list[float]]  # tokens/s of each repetition, by batch size
Requests = Sequence[GenerationRequest]


def requests(options: Options, config: ModelConfig, count: int) -> list[GenerationRequest]:
    """`count` prompts of random tokens; of more prompts these are the first."""
    generator = torch.Generator().manual_seed(options.seed)
    ids = torch.randint(3, config.vocab_size, (count, options.prompt_tokens), generator=generator).tolist()
    return [GenerationRequest(prompt_token_ids=row, max_new_tokens=options.new_tokens) for row in ids]


def echoed(model: Decoder, mesh: ParallelMesh, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
    """Log-probabilities of the tokens of each prompt but its first, on rank 0 (a collective call)."""
    heard: dict[int, GenerationResult] = {}
    scored = [GenerationRequest(prompt_token_ids=prompt, max_new_tokens=0, echo=True) for prompt in prompts]
    generate_on_mesh(model, mesh, scored, batch_size=NUM_CHECKED, on_finish=heard.__setitem__)
    return [[float(value or 0.0) for value in (heard[idx].prompt_logprobs or [])[1:]] for idx in sorted(heard)]


def measure(
    model: Decoder,
    mesh: ParallelMesh,
    batches: Mapping[int, Requests],
    speed: Speed,
    repetitions: int,
    check: Callable[[Decoder, ParallelMesh, Requests, dict[int, GenerationResult]], object] | None = None,
) -> Speeds:
    """Measured on the mesh (a collective call). Before a batch is timed, `check` looks at what it decodes; by default
    that must have the log-probabilities that a prefill of the same text gives."""
    speeds: Speeds = {}
    for batch_size, batch in batches.items():
        logger.info(
            f"batch {batch_size}: one run to check and {repetitions} to time, of {len(batch[0].prompt_token_ids)} "
            f"prompt tokens and {batch[0].max_new_tokens} new ones per sequence"
        )
        found = []
        for repetition in range(repetitions + 1):
            heard: dict[int, GenerationResult] = {}
            timings = GenerationTimings()
            generate_on_mesh(
                model,
                mesh,
                batch,
                batch_size=batch_size,
                eos_token_ids=(),
                on_finish=heard.__setitem__,
                timings=timings,
                warm_up=True,
            )
            found.append(speed(timings))
            if repetition == 0:
                (check or check_decoding)(model, mesh, batch, heard)
        speeds[batch_size] = found[1:]
        release()
    return speeds


def check_decoding(model: Decoder, mesh: ParallelMesh, batch: Requests, heard: dict[int, GenerationResult]) -> None:
    """ValueError if generated tokens have other log-probabilities than in a prefill (a collective call)."""
    checked = range(min(NUM_CHECKED, len(batch)))
    texts = mesh.from_rank_0(lambda: [[*batch[idx].prompt_token_ids, *heard[idx].token_ids] for idx in checked])
    for idx, logprobs in enumerate(echoed(model, mesh, texts)):
        decoded = heard[idx].logprobs
        check_close(decoded, logprobs[-len(decoded) :], model.compute_dtype, "decoding and prefill")


def release() -> None:
    """Give freed memory back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def check_close(ours: Sequence[float], theirs: Sequence[float], dtype: torch.dtype, what: str) -> None:
    """ValueError if two lists of log-probabilities of the same tokens are not close."""
    largest = max(abs(here - there) for here, there in zip(ours, theirs, strict=True))
    if not all(abs(here - there) <= LOGPROB_TOLERANCE[dtype] for here, there in zip(ours, theirs, strict=True)):
        raise ValueError(f"{what}: log-probabilities of the same tokens differ by {largest}; it is not timed")


def bytes_of_weights(model: Decoder) -> int:
    """Bytes of all weights but the embedding tables, of which a step reads a few rows (unless one is the head, too)."""
    embeddings, whole = model.embeddings, bytes_held(model)
    if not model.config.tie_word_embeddings:
        whole -= bytes_held(embeddings.tokens)
    return whole - bytes_held(embeddings.positions)


def prefill_flops(config: ModelConfig, prompt_tokens: int) -> float:
    """Of the matrix products that one prompt needs: every layer for every token (causal attention: half of the
    square), the head for the last."""
    per_token = 0.0
    for layer in config.layers:
        weights = sum(layer.of(block).num_weights(config.hidden_size) for block in BLOCKS)
        query_size = layer.attention.num_attention_heads * layer.attention.head_dim
        attended = 2 * query_size * (prompt_tokens + 1) / 2  # scores and weighted values, mean over tokens
        per_token += 2 * (weights + attended)
    return prompt_tokens * per_token + 2 * config.vocab_size * config.word_embed_proj_dim


def run(options: Options, name: str, speed: Speed, *, overlap_tokens: int = 0) -> list[Record]:
    """Measure one rank, Hugging Face and the mesh, in each of its ways, one after the other; rank 0 appends and returns
    the records. `overlap_tokens`: also with prefills split from so many tokens on."""
    device = current_launch().device or resolve_device(options.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    mesh = ParallelMesh.from_process_group(options.tp_size, options.pp_size, device)
    shape = find_shape(options.shape)
    config = from_hf_config(HF_CONFIGS[shape])
    prompts = [request.prompt_token_ids for request in requests(options, config, NUM_CHECKED)]
    baselines: dict[str, Speeds] = {}
    expected: list[list[float]] = []
    ceiling, peak, num_bytes = 0.0, 0.0, 0
    sizes = options.batch_size
    if mesh.rank == 0:
        model = random_weights(shape, config, seed=options.seed, dtype=dtype, device=device)
        num_bytes = bytes_of_weights(model)
        single = ParallelMesh.single(device)
        expected = echoed(model, single, prompts)
        baselines["one rank"] = measure(
            model, single, {size: requests(options, config, size) for size in sizes}, speed, options.repetitions
        )
        if options.hugging_face:
            theirs = hugging_face_model(model, HF_CONFIGS[shape])
            for here, there in zip(expected, echoed_by_hugging_face(theirs, prompts), strict=True):
                check_close(here, there, dtype, "ours and Hugging Face")
            batches = {size: [row.prompt_token_ids for row in requests(options, config, size)] for size in sizes}
            baselines["Hugging Face, one rank"] = measure_hugging_face(
                theirs, batches, new_tokens=options.new_tokens, repetitions=options.repetitions, decode=name == "decode"
            )
            del theirs
        ceiling = measure_read_ceiling(device)
        peak = measure_matmul_ceiling(device, dtype) if name == "prefill" else 0.0
        del model
        release()
    mesh.gather(None)  # the others wait until rank 0 has the device to itself no longer
    if mesh.world_size == 1:
        ways = [Way(name="one rank", speeds=baselines.pop("one rank"))]
    else:
        model = random_weights(
            shape, config, seed=options.seed, dtype=dtype, device=device, prepare=lambda whole: parallelise(whole, mesh)
        )
        # Data parallel: each replica has a batch of its own.
        many = {size: requests(options, config, size * mesh.dp_size) for size in sizes}

        def check() -> None:
            for here, there in zip(echoed(model, mesh, prompts), expected, strict=False):  # on rank 0
                check_close(here, there, dtype, "this mesh and one rank")

        def measure_size(size: int) -> list[float]:
            return measure(model, mesh, {size: many[size]}, speed, options.repetitions)[size]

        ways = measure_ways(model, mesh, options.all_reduce, overlap_tokens, sizes, check, measure_size)
    records = []
    if mesh.rank == 0:
        labels: dict[str, Any] = {
            "shape": shape,
            "method": "dense",
            "weights": "random",
            "dtype": str(dtype).removeprefix("torch."),
            "tp_size": mesh.tp_size,
            "pp_size": mesh.pp_size,
            "dp_size": mesh.dp_size,
            "prompt_tokens": options.prompt_tokens,
            "new_tokens": options.new_tokens,
        }
        for way, batch_size, samples in [(one, *measured) for one in ways for measured in one.speeds.items()]:
            value = median(samples)
            # A stage reads its weights once for each micro-batch.
            reads_per_s = value / batch_size / mesh.dp_size * min(mesh.pp_size, batch_size)
            achieved = reads_per_s * num_bytes / 1e9 / mesh.pp_size / mesh.tp_size
            extras: dict[str, Any] = {}
            if name == "decode":
                extras = {
                    "share_of_ceiling": achieved / ceiling if batch_size == 1 else None,
                    "bytes_per_step": num_bytes,
                    "achieved_gb_per_s_each": achieved,
                    "ceiling_gb_per_s_each": ceiling,
                }
            else:
                flops = prefill_flops(config, options.prompt_tokens) / options.prompt_tokens * value / 1e12
                extras = {
                    "tflops_each": flops / mesh.world_size,
                    "ceiling_tflops_each": peak,
                    "share_of_ceiling": flops / mesh.world_size / peak,
                }
            earlier = {other.name: other.speeds for other in ways[: ways.index(way)]}
            compared = {
                what: speeds[batch_size] for what, speeds in (baselines | earlier).items() if batch_size in speeds
            }
            if name == "prefill":
                labels["overlap_tokens"] = way.overlap_tokens
            for what, theirs in compared.items() or [("", [])]:
                records.append(
                    make_record(
                        name,
                        {**labels, "batch_size": batch_size, "all_reduce": way.all_reduce},
                        "tokens_per_s",
                        value,
                        "tokens/s",
                        baseline={"name": what, "value": median(theirs)} if what else None,
                        timing={"samples": samples, "baseline_samples": theirs},
                        **extras,
                    )
                )
                append_record(options.output, records[-1])
        for line in table(records):
            logger.info(line)
    return records


def table(records: Sequence[Record]) -> list[str]:
    """One line per record."""
    return [
        f"{record['name']} tp {record['labels']['tp_size']} pp {record['labels']['pp_size']} "
        f"dp {record['labels']['dp_size']} batch {record['labels']['batch_size']}, "
        f"{record['labels']['all_reduce']}{', split' if record['labels'].get('overlap_tokens') else ''}: "
        f"{record['value']:.1f} tokens/s"
        + (f", {record['ratio']:.2f}x {record['baseline']['name']}" if record["baseline"] else "")
        for record in records
    ]


@dataclass(frozen=True, kw_only=True)
class Way:
    """One of them, and what the ranks reached with it."""

    name: str
    """As a baseline: "NCCL", "fused", "fused, split"."""
    all_reduce: str = "none"
    """As records label it (see `describe_all_reduce`)."""
    overlap_tokens: int = 0
    """From how many tokens on prefills were split; 0: whole."""
    speeds: dict[int, list[float]] = field(default_factory=dict)
    """tokens/s of each repetition by batch size; without those at which nothing was split."""


def measure_ways(
    model: Decoder,
    mesh: ParallelMesh,
    all_reduce: AllReduce,
    overlap_tokens: int,
    batch_sizes: Sequence[int],
    check: Callable[[], object],
    measure: Callable[[int], list[float]],
) -> list[Way]:
    """The unfused junction first, then what `all_reduce` asks for if it is another; each whole and, with
    `overlap_tokens`, split (a collective call). `check` comes before a way is measured; `measure` takes a batch size.
    """
    found = _whole_and_split(model, mesh, overlap_tokens, batch_sizes, check, measure)
    choose_all_reduce(model, mesh, all_reduce)
    if isinstance(model.add_norm, FusedAddNorm):
        found += _whole_and_split(model, mesh, overlap_tokens, batch_sizes, check, measure)
    return found


def _whole_and_split(
    model: Decoder,
    mesh: ParallelMesh,
    overlap_tokens: int,
    batch_sizes: Sequence[int],
    check: Callable[[], object],
    measure: Callable[[int], list[float]],
) -> list[Way]:
    label = describe_all_reduce(model)
    name = "fused" if isinstance(model.add_norm, FusedAddNorm) else label.upper()
    model.prefill_driver = None
    check()
    whole = Way(name=name, all_reduce=label, speeds={size: measure(size) for size in batch_sizes})
    choose_overlap(model, mesh, overlap_tokens)
    driver = model.prefill_driver
    if not isinstance(driver, Overlap):
        return [whole]
    check()
    split = Way(name=f"{name}, split", all_reduce=label, overlap_tokens=overlap_tokens)
    for size in batch_sizes:
        before = driver.num_split
        speed = measure(size)
        if driver.num_split > before:
            split.speeds[size] = speed
        else:
            logger.info(f"batch {size}: nothing was long enough to be split")
    model.prefill_driver = None
    return [whole, split]
