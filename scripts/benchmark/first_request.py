"""What the first request of a run pays beyond the later ones, without and with `--warmup`.

Each run is a fresh process's first use of the engine only once, so the one without warm-up comes first; what it sets up
for good (libraries, communicators, compiled kernels) the second run finds. Graphs are captured anew in each.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from loguru import logger

from analysis.results import Record, append_record, make_record
from modules.config import ModelConfig
from modules.requests import GenerationResult
from pipeline_parallel.engine import generate_on_mesh, parallelise
from pipeline_parallel.launch import current_launch
from pipeline_parallel.mesh import ParallelMesh
from scripts.benchmark.engine import Options as EngineOptions
from scripts.benchmark.engine import requests
from scripts.benchmark.shapes import HF_CONFIGS, find_shape, random_weights
from scripts.command_line import run_stage
from scripts.model_loading import resolve_device


@dataclass(frozen=True, kw_only=True)
class Options(EngineOptions):
    """Time from admission to the end of the first request and of later ones, one at a time."""

    num_requests: int = 6
    """Requests, one after the other."""
    new_tokens: int = 16
    """Tokens generated for each."""


def main(options: Options) -> list[Record]:
    """Append one record without and one with warm-up: milliseconds of the first request, the later ones' median as its
    baseline."""
    device = current_launch().device or resolve_device(options.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    mesh = ParallelMesh.from_process_group(options.tp_size, options.pp_size, device)
    shape = find_shape(options.shape)
    config = ModelConfig.from_hf(HF_CONFIGS[shape])
    model = random_weights(
        shape, config, seed=options.seed, dtype=dtype, device=device, prepare=lambda whole: parallelise(whole, mesh)
    )
    records = []
    for run, warm_up in (("first in the process", False), ("again", False), ("again", True)):
        heard: dict[int, GenerationResult] = {}
        generate_on_mesh(
            model,
            mesh,
            requests(options, config, options.num_requests),
            batch_size=1,
            eos_token_ids=(),
            on_finish=heard.__setitem__,
            warm_up=warm_up,
        )
        if mesh.rank > 0:
            continue
        first, *later = [duration_ms(heard[idx]) for idx in sorted(heard)]
        labels: dict[str, Any] = {
            "shape": shape,
            "tp_size": mesh.tp_size,
            "pp_size": mesh.pp_size,
            "prompt_tokens": options.prompt_tokens,
            "new_tokens": options.new_tokens,
            "run": run,
            "warm_up": warm_up,
        }
        baseline = {"name": "later requests", "value": median(later)}
        records.append(
            make_record("first_request", labels, "ms", first, "ms", baseline=baseline, ratio=median(later) / first)
        )
        append_record(options.output, records[-1])
        logger.info(f"{run}, warm-up {warm_up}: first request {first:.0f} ms, later {median(later):.0f} ms")
    return records


def duration_ms(result: GenerationResult) -> float:
    """From admission to the last token."""
    assert result.time_to_first_token_ms is not None and result.time_per_output_token_ms is not None
    return result.time_to_first_token_ms + result.time_per_output_token_ms * (len(result.token_ids) - 1)


if __name__ == "__main__":
    run_stage(main, Options, distributed=True)
