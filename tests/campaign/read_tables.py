"""The tables that only ranks read, read by one process: `--choices FILE`, `--splits FILE`."""

from dataclasses import dataclass
from pathlib import Path

from pipeline_parallel.all_reduce_choice import read_choice_tables, read_split_points
from scripts.command_line import run_stage


@dataclass(frozen=True, kw_only=True)
class Options:
    """Read a choice file or a split file."""

    choices: Path | None = None
    splits: Path | None = None


def main(options: Options) -> None:
    """ValueError or FileNotFoundError names the file."""
    if options.choices is not None:
        read_choice_tables(options.choices)
    if options.splits is not None:
        read_split_points(options.splits)


if __name__ == "__main__":
    run_stage(main, Options)
