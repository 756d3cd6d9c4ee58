"""The ways in which the ranks of a layer add up its parts, measured one after the other in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from loguru import logger

from modules.decoder import Decoder
from pipeline_parallel.fused_add_norm import AllReduce, FusedAddNorm, choose_all_reduce, describe_all_reduce
from pipeline_parallel.mesh import ParallelMesh
from pipeline_parallel.overlap import Overlap, choose_overlap


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
