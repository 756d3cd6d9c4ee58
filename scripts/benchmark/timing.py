"""The only timer of the project.

On a GPU: warm-up, device events, optionally a CUDA graph, and rotation over distinct argument sets, so that
weights come from memory and not from the L2 cache. On a CPU: `time.perf_counter`. Times are in milliseconds,
summed up as median, p10 and p90; under several ranks a reducer turns each sample into the maximum over ranks.
"""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

Function = Callable[..., object]
Reducer = Callable[[list[float]], list[float]]

MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Milliseconds per call; a sample is one pass over all argument sets, divided by their number."""

    median_ms: float
    p10_ms: float
    p90_ms: float
    num_samples: int
    num_argument_sets: int
    uses_cuda_graph: bool

    def achieved_gb_per_s(self, num_bytes: float) -> float:
        """Bandwidth (10^9 bytes per second) of a call that must move `num_bytes`."""
        return num_bytes / self.median_ms / 1e6

    def as_record_extra(self) -> dict[str, Any]:
        """For `make_record(..., timing=...)`."""
        return asdict(self)


def time_function(
    function: Function,
    argument_sets: Sequence[tuple[Any, ...]] = ((),),
    *,
    device: torch.device | str,
    num_warmup: int = 3,
    num_samples: int = 30,
    use_cuda_graph: bool = False,
    reduce_max: Reducer | None = None,
) -> Timing:
    """Times `function(*arguments)`, going round the argument sets.

    Args:
        argument_sets: distinct inputs of equal shapes; `num_cold_sets` says how many defeat the cache.
        num_warmup: untimed passes over all argument sets, at least 1.
        use_cuda_graph: capture one pass and replay it; leaves out the cost of launching. CUDA only.
        reduce_max: takes this rank's samples and returns the element-wise maximum over ranks.
    """
    device = torch.device(device)
    if not argument_sets or num_warmup < 1 or num_samples < 1:
        raise ValueError(
            f"timing needs argument sets, warm-up and samples, at least 1 each, not {len(argument_sets)}, "
            f"{num_warmup} and {num_samples}"
        )
    if use_cuda_graph and device.type != "cuda":
        raise ValueError(f"use_cuda_graph needs a CUDA device, not {device}")

    def run_pass() -> None:
        for arguments in argument_sets:
            function(*arguments)

    if device.type == "cuda":
        with torch.cuda.device(device):
            samples = _cuda_samples(run_pass, num_warmup, num_samples, use_cuda_graph)
    else:
        samples = _cpu_samples(run_pass, num_warmup, num_samples)
    if reduce_max is not None:
        samples = reduce_max(samples)
    p10, median, p90 = np.percentile(np.asarray(samples) / len(argument_sets), (10, 50, 90))
    return Timing(
        median_ms=float(median),
        p10_ms=float(p10),
        p90_ms=float(p90),
        num_samples=num_samples,
        num_argument_sets=len(argument_sets),
        uses_cuda_graph=use_cuda_graph,
    )


def _cpu_samples(run_pass: Callable[[], None], num_warmup: int, num_samples: int) -> list[float]:
    for _ in range(num_warmup):
        run_pass()
    samples = []
    for _ in range(num_samples):
        start = time.perf_counter()
        run_pass()
        samples.append((time.perf_counter() - start) * 1e3)
    return samples


def _cuda_samples(run_pass: Callable[[], None], num_warmup: int, num_samples: int, use_cuda_graph: bool) -> list[float]:
    # Warm-up on a side stream, as capture demands of whatever allocates or compiles on its first call.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(num_warmup):
            run_pass()
    torch.cuda.current_stream().wait_stream(stream)
    if use_cuda_graph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run_pass()
        run_pass = graph.replay
        run_pass()  # the first replay uploads the graph
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(num_samples)]
    torch.cuda.synchronize()
    for start, end in events:
        start.record()
        run_pass()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in events]


def num_cold_sets(num_bytes: int, device: torch.device | str) -> int:
    """How many argument sets of `num_bytes` each must take turns so that none is still in the L2 cache.

    On a CPU, whose cache sizes torch does not report, 256 MiB in all.
    """
    device = torch.device(device)
    on_gpu = device.type == "cuda"
    cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size if on_gpu else 64 * MIB
    return max(1, math.ceil(4 * cache_bytes / max(num_bytes, 1)))


def measure_read_ceiling(device: torch.device | str, *, num_bytes: int | None = None) -> float:
    """GB/s at which this device can read memory: the best of a plain sum and a matrix-vector product."""
    device = torch.device(device)
    num_columns = 4096
    num_rows = max(1, (num_bytes or _large(device)) // (4 * num_columns))
    matrix = torch.ones(num_rows, num_columns, device=device)
    vector = torch.ones(num_columns, device=device)
    output = torch.empty(num_rows, device=device)
    readers: list[Function] = [matrix.sum, lambda: torch.mv(matrix, vector, out=output)]
    timings = [time_function(reader, device=device, num_samples=_num_samples(device)) for reader in readers]
    return max(timing.achieved_gb_per_s(4 * matrix.numel()) for timing in timings)


def measure_matmul_ceiling(device: torch.device | str, dtype: torch.dtype, *, size: int | None = None) -> float:
    """TFLOP/s at which this device multiplies two large square matrices."""
    device = torch.device(device)
    size = size or (8192 if device.type == "cuda" else 512)
    # Random values: a GPU that multiplies zeros or ones draws less power and runs faster than any model does.
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    timing = time_function(torch.mm, [(left, right)], device=device, num_samples=_num_samples(device))
    return 2 * size**3 / timing.median_ms / 1e9


def _large(device: torch.device) -> int:
    """Bytes that no cache of the device holds."""
    return 1024 * MIB if device.type == "cuda" else 256 * MIB


def _num_samples(device: torch.device) -> int:
    return 30 if device.type == "cuda" else 7


def import_peer(place: str) -> Any:
    """What MODULE:FUNCTION names; ValueError if there is none such. What FUNCTION must take and return is said where
    the benchmark calls it."""
    module, _, name = place.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"--peer {place}: give MODULE:FUNCTION that can be imported ({error})") from error


def check_peer_name(peer: str | None, name: str) -> None:
    """ValueError for a name that its records could not be told by."""
    if peer is not None and not name.strip():
        raise ValueError(f"--peer-name {name!r}: give the name that tables call --peer by")
