"""Decode tokens/s of the engine, end to end: model, sampling and hand-offs, with CUDA graphs on GPUs.

Under torchrun the ranks share the model (--tp-size, --pp-size); the same call times one rank alone and, if asked for,
Hugging Face on it.
"""

from analysis.results import Record
from scripts.benchmark.engine import Options, run
from scripts.command_line import run_stage


def main(options: Options) -> list[Record]:
    """Append one record a batch size and baseline."""
    return run(options, "decode", lambda timings: timings.decode_tokens_per_s)


if __name__ == "__main__":
    run_stage(main, Options, distributed=True)
