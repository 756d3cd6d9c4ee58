"""Prefill tokens/s of the engine: prompts of equal length run together, up to the first chosen token.

Under torchrun the ranks share the model (--tp-size, --pp-size); the same call times one rank alone and, if asked for,
Hugging Face on it. Where they share layers it also times every all-reduce with the tokens split in two, so that one
half computes while the other is added up.

`--tune-splits` measures how long prefills are best split in two (pipeline_parallel/overlap.py), on the ranks that will
do it. For each token count the whole pass is timed, then split ones: how much of the device the fused junction may take
beside attention and beside the MLP, then where the split is, each the best so far. Written is what is faster split than
whole, and so are all larger counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from loguru import logger
from torch import Tensor

from analysis.results import Record
from modules.families.registry import from_hf_config
from pipeline_parallel.all_reduce_choice import SplitPoint, write_split_points
from pipeline_parallel.engine import parallelise
from pipeline_parallel.fused_add_norm import FusedAddNorm, choose_all_reduce, describe_all_reduce
from pipeline_parallel.launch import current_launch
from pipeline_parallel.mesh import ParallelMesh
from pipeline_parallel.overlap import DEFAULT_PROGRAMS, Overlap, check_overlap_tokens, first_half, split_prefills
from scripts.benchmark.engine import Options as EngineOptions
from scripts.benchmark.engine import run
from scripts.benchmark.random_models import HF_CONFIGS, find_shape, random_weights
from scripts.benchmark.timing import time_function
from scripts.command_line import run_stage
from scripts.model_loading import resolve_device

COUNTS = tuple(1024 * 2**power for power in range(5))
PROGRAMS = (0, 8, 16, 32, 64, 128)  # 0: the copy engines
OFFSETS = (-512, -256, 0, 256, 512)
# ||split - apart|| / ||apart|| of all hidden states, where the halves of `apart` ran one after the other over a cache,
# by the junctions that they have in a split pass: the same products and sums. A whole pass has others, which round
# apart: random weights make 0.025 to 0.037 of it (Llama-3.1-8B in bfloat16 on two H200), and a bound on that would not
# tell a half that misses keys.
MAX_DIFFERENCE = 0.02


def tune_splits(options: EngineOptions) -> list[SplitPoint]:
    """Measure; rank 0 writes `options.output` where splitting pays anywhere. ValueError without tensor parallelism."""
    if options.tp_size < 2 or options.pp_size > 1:
        raise ValueError(
            f"--tune-splits needs ranks that share all layers, not --tp-size {options.tp_size} --pp-size "
            f"{options.pp_size}: start torchrun with 2 processes or more and --tp-size as many"
        )
    device = current_launch().device or resolve_device(options.device)
    mesh = ParallelMesh.from_process_group(options.tp_size, options.pp_size, device)
    shape = find_shape(options.shape)
    config = from_hf_config(HF_CONFIGS[shape])
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = random_weights(
        shape, config, seed=options.seed, dtype=dtype, device=device, prepare=lambda whole: parallelise(whole, mesh)
    )
    choose_all_reduce(model, mesh, options.all_reduce)
    split_prefills(model, 1, ())
    driver = model.prefill_driver
    assert isinstance(driver, Overlap)
    logger.info(f"all-reduce: {describe_all_reduce(model)}")
    generator, points = torch.Generator().manual_seed(options.seed), []
    for num_tokens in [count for count in COUNTS if count <= config.max_position_embeddings]:
        ids = torch.randint(3, config.vocab_size, (1, num_tokens), generator=generator).to(device)

        def run(point: SplitPoint | None, ids: Tensor = ids) -> Tensor:
            model.prefill_driver = None if point is None else driver
            driver.points = () if point is None else (point,)
            with torch.inference_mode():
                return model(ids).clone()

        def time(point: SplitPoint | None, run: Callable[[SplitPoint | None], Tensor] = run) -> float:
            timing = time_function(
                lambda: run(point), device=device, num_samples=max(3, options.repetitions), reduce_max=largest(mesh)
            )
            return timing.median_ms

        problem = problem_of(run(even_split(num_tokens)), in_two_passes(driver, ids))
        if any(problems := mesh.gather(problem)):
            raise ValueError(f"{num_tokens} tokens: {next(filter(None, problems))}; nothing is timed")
        whole_ms = time(None)
        point, split_ms = best_split(num_tokens, time, has_programs=isinstance(model.add_norm, FusedAddNorm))
        logger.info(f"{num_tokens} tokens: whole {whole_ms:.3f} ms, split {split_ms:.3f} ms with {point}")
        if split_ms < whole_ms:
            points.append(point)
        else:
            points.clear()
    if mesh.rank == 0:
        if points:
            write_split_points(options.output, points)
        else:
            logger.info(f"splitting does not pay here: {options.output} is not written")
    return points


def in_two_passes(driver: Overlap, ids: Tensor) -> Tensor:
    """States [1, T, D] of the halves of an even split, the second after the first."""
    model, (batch, tokens) = driver.model, ids.shape
    first, own = first_half(batch, tokens, 0), model.add_norm
    model.prefill_driver, cache, states = None, model.new_cache(batch, tokens), list[Tensor]()
    with torch.inference_mode():
        for junction, half in zip(driver.junctions, (ids[:, :first], ids[:, first:]), strict=True):
            if isinstance(junction, FusedAddNorm):
                junction = replace(junction, max_programs=DEFAULT_PROGRAMS)
            model.add_norm = junction
            states.append(model(half, cache=cache).clone())
    model.add_norm = own
    return torch.cat(states, dim=1)


def problem_of(split: Tensor, apart: Tensor) -> str | None:
    """What is wrong with the states [B, T, D] of a split pass, beside those of its halves apart."""
    found = float((split.float() - apart.float()).norm() / apart.float().norm())
    if found <= MAX_DIFFERENCE:  # never so if it is not a number
        return None
    return f"split states are {found:.3g} off those of the halves one after the other, and may be {MAX_DIFFERENCE}"


def even_split(num_tokens: int) -> SplitPoint:
    """Where nothing was measured."""
    return SplitPoint(
        num_tokens=num_tokens, attention_programs=DEFAULT_PROGRAMS, mlp_programs=DEFAULT_PROGRAMS, offset=0
    )


def best_split(num_tokens: int, time: Callable[[SplitPoint], float], *, has_programs: bool) -> tuple[SplitPoint, float]:
    """The fastest split found and its time, one value after the other; the same on all ranks if the times are.
    Programs are the fused junction's alone (`has_programs`)."""
    best = even_split(num_tokens)
    best_time = time(best)
    programs = PROGRAMS if has_programs else ()
    # Neither half may be empty.
    offsets = [offset for offset in OFFSETS if 2 * abs(offset) < num_tokens]
    for name, values in (("attention_programs", programs), ("mlp_programs", programs), ("offset", offsets)):
        known = getattr(best, name)
        for value in values:
            if value == known:
                continue
            candidate = replace(best, **{name: value})
            found = time(candidate)
            if found < best_time:
                best, best_time = candidate, found
    return best, best_time


def largest(mesh: ParallelMesh) -> Callable[[list[float]], list[float]]:
    """Of each sample, the maximum over ranks: all ranks so decide alike."""
    return lambda samples: [max(each) for each in zip(*mesh.gather(samples), strict=True)]


@dataclass(frozen=True, kw_only=True)
class Options(EngineOptions):
    """Speed of prefill on random weights, beside one rank and Hugging Face in the same call."""

    batch_size: tuple[int, ...] = (8,)
    """Sequences run together; each is a measurement."""
    prompt_tokens: int = 1024
    """Tokens of each prompt."""
    new_tokens: int = 1
    """Tokens generated for each."""
    overlap_tokens: int = 1024
    """Also time prefills split in two, from so many tokens on (see infer); 0: whole ones only."""
    tune_splits: bool = False
    """Instead measure how 1024 to 16384 tokens are best split, and write that to --output (a split file)."""


def main(options: Options) -> list[Record]:
    """Append one record per batch size and baseline."""
    check_overlap_tokens(options.overlap_tokens)
    if options.tune_splits:
        tune_splits(options)
        return []
    return run(options, "prefill", lambda timings: timings.prefill_tokens_per_s, overlap_tokens=options.overlap_tokens)


if __name__ == "__main__":
    run_stage(main, Options, distributed=True)
