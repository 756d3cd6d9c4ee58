"""Decode tokens/s of the engine, end to end: model, choice of units, sampling and hand-offs; CUDA graphs on GPUs.

In one process: dense or sparse, random weights of a published shape or a trained model (then with the perplexity of the
same decode steps), beside our own dense model and Hugging Face in the same call (see one_gpu.py). Under torchrun the
ranks share the dense model (--tp-size, --pp-size), and the same call times one rank alone.
"""

from dataclasses import replace

from analysis.results import Record
from pipeline_parallel.launch import current_launch
from pipeline_parallel.mesh import ParallelMesh
from scripts.benchmark import engine, one_gpu
from scripts.benchmark.one_gpu import Options
from scripts.command_line import run_stage
from scripts.model_loading import resolve_device


def main(options: Options) -> list[Record]:
    """Append one record per batch size and baseline."""
    device = current_launch().device or resolve_device(options.device)
    if ParallelMesh.from_process_group(options.tp_size, options.pp_size, device).world_size == 1:
        return one_gpu.run(options)
    if options.method != "dense" or options.model is not None or options.baseline == "hf-compiled":
        raise ValueError(
            "under torchrun, decoding is timed dense, on random weights, beside --baseline hf-eager or none"
        )
    options = replace(options, hugging_face=options.baseline == "hf-eager")
    return engine.run(options, "decode", one_gpu.decode_speed)


if __name__ == "__main__":
    run_stage(main, Options, distributed=True)
