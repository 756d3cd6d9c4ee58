"""Microseconds of a decode step's sparse kernels, weights cold, as part of a CUDA graph, beside the dense MLP.

`sparse_mlp` is one layer's MLP over a random set of active neurons, the norm before it included, against the library's
dense MLP (without the norm) and against the same kernel over all neurons. `thinned_rows` is TEAL's product: one matrix,
a share of its inputs kept. Each is compared with its equation in float32 before it is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from loguru import logger
from torch import Tensor
from torch.nn import functional as F

from analysis.results import Record, append_record, make_record
from modules.config import ModelConfig
from modules.families.registry import from_hf_config
from modules.kernels.arguments import ACTIVATION_FUNCTIONS
from modules.kernels.deferred_norm import DeferredNorm
from modules.kernels.sparse_mlp import sparse_mlp
from modules.kernels.thinned_rows import thinned_rows
from modules.sparsity import ActiveList, ActiveSet
from modules.specs import Dense
from scripts.benchmark.random_models import HF_CONFIGS, find_shape
from scripts.benchmark.timing import (
    Timing,
    check_peer_name,
    import_peer,
    measure_read_ceiling,
    num_cold_sets,
    time_function,
)
from scripts.command_line import run_stage
from scripts.model_loading import resolve_device

MAX_ERROR = {torch.float32: 1e-5, torch.bfloat16: 0.02, torch.float16: 0.02}  # ||ours - equation|| / ||equation||


@dataclass(frozen=True, kw_only=True)
class Options:
    """Time the sparse kernels of a decode step."""

    output: Path
    """JSON lines; records are appended."""
    operator: Literal["sparse_mlp", "thinned_rows"] = "sparse_mlp"
    """Which kernel."""
    shape: str = "Llama-3.1-8B"
    """Whose MLP (see scripts/benchmark/random_models.py)."""
    density: tuple[float, ...] = (1.0, 0.85, 0.5, 0.25, 0.1)
    """Share of neurons active (of thinned_rows: of inputs kept)."""
    batch_size: tuple[int, ...] = (1,)
    """Rows, each with a random set of its own; the kernel walks their union. thinned_rows takes one."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Type of the weights."""
    peer: str | None = None
    """Of thinned_rows: MODULE:FUNCTION of someone else's kernel, to time beside ours. FUNCTION(matrix [D, F]) prepares
    what takes (x [1, D], threshold) to the product [1, F], inputs below the threshold skipped."""
    peer_name: str = "peer"
    """What records and tables call it."""
    device: str = "auto"
    """cpu or cuda; auto: a GPU if there is one."""
    seed: int = 0
    """Of weights, states and sets."""
    quiet: bool = False
    """Warnings only."""


@dataclass(frozen=True)
class Weights:
    """One layer's matrices, each [F, D]."""

    gate: Tensor | None
    up: Tensor
    down: Tensor


@dataclass(frozen=True)
class Bench:
    """What is the same for all measurements of a call."""

    options: Options
    config: ModelConfig
    device: torch.device
    dtype: torch.dtype
    generator: torch.Generator
    ceiling: float

    @property
    def feed_forward(self) -> Dense:
        """That of the shape's layers, which are alike."""
        return self.config.layers[0].feed_forward

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Random numbers of the weights' type."""
        return (torch.randn(shape, generator=self.generator, device=self.device) * scale).to(self.dtype)

    def weights(self) -> Weights:
        """One layer."""
        width, units = self.config.hidden_size, self.feed_forward.num_units
        first = [self.normal(units, width, scale=width**-0.5) for _ in range(1 + self.feed_forward.gated)]
        return Weights(first[1] if self.feed_forward.gated else None, first[0], self.normal(units, width, scale=0.02))

    def states(self, rows: int) -> DeferredNorm:
        """As a half-block leaves them."""
        shape, size = (rows, self.config.hidden_size), self.config.hidden_size
        partial, residual = (torch.randn(shape, generator=self.generator, device=self.device) for _ in range(2))
        return DeferredNorm(
            partial=partial,
            residual=residual,
            weight=torch.ones(size, dtype=self.dtype, device=self.device),
            norm_bias=torch.zeros(size, dtype=self.dtype, device=self.device) if self.config.norm == "layer" else None,
            kind=self.config.norm,
            eps=self.config.norm_eps,
            dtype=self.dtype,
            new_residual=torch.empty_like(partial),
        )

    def time(self, function: Callable[..., object], arguments: Sequence[tuple[Any, ...]]) -> Timing:
        """Round the argument sets, in a graph where there are any."""
        return time_function(function, arguments, device=self.device, use_cuda_graph=self.device.type == "cuda")

    def record(self, labels: dict[str, Any], timing: Timing, num_bytes: int, **extras: Any) -> Record:
        """A kernel's time, bytes and share of the ceiling."""
        achieved = timing.achieved_gb_per_s(num_bytes)
        return make_record(
            "kernel",
            {
                "operator": self.options.operator,
                "shape": find_shape(self.options.shape),
                "weights": "random",
                "dtype": self.options.dtype,
                **labels,
            },
            "us",
            timing.median_ms * 1e3,
            "us",
            share_of_ceiling=achieved / self.ceiling,
            bytes_per_call=num_bytes,
            achieved_gb_per_s=achieved,
            ceiling_gb_per_s=self.ceiling,
            timing=timing.as_record_extra(),
            **extras,
        )


def main(options: Options) -> list[Record]:
    """Append one record per density, batch size and baseline."""
    device = resolve_device(options.device)
    config = from_hf_config(HF_CONFIGS[find_shape(options.shape)])
    generator = torch.Generator(device).manual_seed(options.seed)
    dtype = getattr(torch, options.dtype)
    bench = Bench(options, config, device, dtype, generator, measure_read_ceiling(device))
    check_peer_name(options.peer, options.peer_name)
    if options.peer is not None and options.operator != "thinned_rows":
        raise ValueError("--peer is timed beside --operator thinned_rows")
    for density in options.density:
        if not 0.0 < density <= 1.0:
            raise ValueError(f"--density must lie in (0, 1], got {density}")
    with torch.inference_mode():
        records = mlp_records(bench) if options.operator == "sparse_mlp" else thinned_records(bench)
    for record in records:
        append_record(options.output, record)
        labels, baseline = record["labels"], record["baseline"]
        logger.info(
            f"{labels['operator']} {labels['shape']} density {labels['density']} batch {labels['batch_size']}: "
            f"{record['value']:.1f} us, {100 * record['share_of_ceiling']:.0f} % of the ceiling"
            + (f", {record['ratio']:.2f}x {baseline['name']} ({baseline['value']:.1f} us)" if baseline else "")
        )
    return records


def mlp_records(bench: Bench) -> list[Record]:
    """sparse_mlp at every density and batch size, beside the library's dense MLP and its own."""
    return [record for rows in bench.options.batch_size for record in mlp_records_of(bench, rows)]


def mlp_records_of(bench: Bench, rows: int) -> list[Record]:
    """Of one batch size."""
    config, records = bench.config, []
    row_bytes = (2 + bench.feed_forward.gated) * config.hidden_size * bench.dtype.itemsize
    states = bench.states(rows)
    x = states.normed()
    cold = num_cold_sets(int(min(bench.options.density) * bench.feed_forward.num_units * row_bytes), bench.device)
    layers = [bench.weights() for _ in range(max(2, cold))]
    output = torch.zeros(rows, config.hidden_size, device=bench.device)

    def run(layer: Weights, active: ActiveList | None) -> Tensor:
        return sparse_mlp(
            states, layer.gate, layer.up, layer.down, active, activation=bench.feed_forward.activation, output=output
        )

    def library(layer: Weights) -> Tensor:
        return equation(config, x, layer, None)

    dense = bench.time(library, [(layer,) for layer in layers]).median_ms * 1e3
    own = bench.time(run, [(layer, None) for layer in layers]).median_ms * 1e3
    for density in bench.options.density:
        sets = [random_set(bench, rows, density) for _ in layers]
        output.zero_()
        check_close(run(layers[0], sets[0].listed()), equation(config, x, layers[0], sets[0].mask), bench.dtype)
        timing = bench.time(run, [(layer, chosen.listed()) for layer, chosen in zip(layers, sets, strict=True)])
        union = sum(int(chosen.mask.any(0).sum()) for chosen in sets) / len(sets)
        for name, value in (("library, dense", dense), ("same kernel, every neuron", own)):
            records.append(
                bench.record(
                    {"density": density, "batch_size": rows},
                    timing,
                    int(union * row_bytes),
                    union_density=union / bench.feed_forward.num_units,
                    baseline={"name": name, "value": value},
                    ratio=value / (timing.median_ms * 1e3),
                )
            )
    return records


def equation(config: ModelConfig, x: Tensor, layer: Weights, mask: Tensor | None) -> Tensor:
    """The MLP by the library: dense (mask None) as a model would run it, else in float32 with the others zeroed."""
    activate = ACTIVATION_FUNCTIONS[config.layers[0].feed_forward.activation]
    cast = (lambda weight: weight) if mask is None else Tensor.float
    values = F.linear(cast(x), cast(layer.up))
    values = activate(values) if layer.gate is None else activate(F.linear(cast(x), cast(layer.gate))) * values
    return (values if mask is None else values.masked_fill(~mask, 0)) @ cast(layer.down)


def random_set(bench: Bench, rows: int, density: float) -> ActiveSet:
    """As many random neurons per row as the density asks for."""
    units = bench.feed_forward.num_units
    scores = torch.rand(rows, units, generator=bench.generator, device=bench.device)
    return ActiveSet.from_scores(scores, max(1, int(density * units + 0.5)))


def thinned_records(bench: Bench) -> list[Record]:
    """thinned_rows on one matrix [D, F], the shape of TEAL's kernel, beside the library's dense product and a peer's
    kernel."""
    return [record for density in bench.options.density for record in thinned_records_of(bench, density)]


def thinned_records_of(bench: Bench, density: float) -> list[Record]:
    """Of one share of inputs kept."""
    options = bench.options
    inputs, outputs = bench.config.hidden_size, bench.feed_forward.num_units
    kept = max(1, int(density * inputs + 0.5))
    cold = num_cold_sets(kept * outputs * bench.dtype.itemsize, bench.device)
    matrices = [bench.normal(1, inputs, outputs, scale=0.02) for _ in range(max(2, cold))]
    x = bench.normal(1, inputs)
    threshold = float(x.float().abs().flatten().sort(descending=True).values[kept - 1])
    counter = torch.zeros(1, dtype=torch.int32, device=bench.device)
    output = torch.zeros(1, outputs, device=bench.device)

    def run(matrix: Tensor) -> Tensor:
        return thinned_rows(DeferredNorm.plain(x), matrix, thresholds=[threshold], counters=counter, output=output)

    expected = x.float().masked_fill(x.float().abs() < threshold, 0) @ matrices[0][0].float()
    check_close(run(matrices[0]), expected, bench.dtype)
    num_bytes = int(counter) * outputs * bench.dtype.itemsize
    timing = bench.time(run, [(matrix,) for matrix in matrices])
    beside = {"library, dense": bench.time(lambda matrix: x @ matrix[0], [(matrix,) for matrix in matrices])}
    if options.peer is not None:
        prepared = [import_peer(options.peer)(matrix[0]) for matrix in matrices]
        check_close(prepared[0](x, threshold), expected, bench.dtype)
        beside[options.peer_name] = bench.time(lambda peer: peer(x, threshold), [(one,) for one in prepared])
    labels = {"density": density, "batch_size": 1}
    return [
        bench.record(
            labels,
            timing,
            num_bytes,
            baseline={"name": name, "value": theirs.median_ms * 1e3},
            ratio=theirs.median_ms / timing.median_ms,
        )
        for name, theirs in beside.items()
    ]


def check_close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """ValueError if the kernel does not follow its equation; NaN never passes."""
    error = float((found.float() - expected.float()).norm() / expected.float().norm())
    if not error <= MAX_ERROR[dtype]:
        raise ValueError(f"the kernel is off by {error} of what its equation gives; it is not timed")


if __name__ == "__main__":
    run_stage(main, Options)
