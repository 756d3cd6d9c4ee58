"""Prefill tokens/s of the engine: prompts of equal length run together, up to the first chosen token.

Under torchrun the ranks share the model (--tp-size, --pp-size); the same call times one rank alone and, if asked for,
Hugging Face on it. Where they share layers it also times every all-reduce with the tokens split in two, so that one
half computes while the other is added up.
"""

from dataclasses import dataclass

from analysis.results import Record
from pipeline_parallel.overlap import check_overlap_tokens
from scripts.benchmark.engine import Options as EngineOptions
from scripts.benchmark.engine import run
from scripts.benchmark.split_tuning import tune_splits
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
