"""Prefill tokens/s of the engine: prompts of equal length run together, up to the first chosen token.

Under torchrun the ranks share the model (--tp-size, --pp-size); the same call times one rank alone and, if asked for,
Hugging Face on it.
"""

from dataclasses import dataclass

from analysis.results import Record
from scripts.benchmark.engine import Options as EngineOptions
from scripts.benchmark.engine import run
from scripts.command_line import run_stage


@dataclass(frozen=True, kw_only=True)
class Options(EngineOptions):
    """Speed of prefill on random weights, beside one rank and Hugging Face in the same call."""

    batch_size: tuple[int, ...] = (8,)
    """Sequences run together; each is a measurement."""
    prompt_tokens: int = 1024
    """Tokens of each prompt."""
    new_tokens: int = 1
    """Tokens generated for each."""


def main(options: Options) -> list[Record]:
    """Append one record a batch size and baseline."""
    return run(options, "prefill", lambda timings: timings.prefill_tokens_per_s)


if __name__ == "__main__":
    run_stage(main, Options, distributed=True)
