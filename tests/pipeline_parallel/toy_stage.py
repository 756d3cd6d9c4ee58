"""A stage for the tests of launch and failure: `python toy_stage.py --case CASE --folder FOLDER` on each rank.

Ranks leave a file `ready<rank>` in the folder before they do what the case says.
"""

from __future__ import annotations

import ctypes
import functools
import time
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from pipeline_parallel import launch
from scripts.command_line import run_stage
from tests.pipeline_parallel.launching import wait_for

PATIENCE_S = 3.0


@dataclass(frozen=True, kw_only=True)
class Options:
    case: str
    folder: Path
    device: str = "cpu"


def main(options: Options) -> None:
    here = launch.current_launch()
    assert here.watch is not None and here.device == torch.device("cpu")
    total = torch.ones(1)
    if options.case == "bad-input" and here.rank == 0:
        (options.folder / "prompts.jsonl").read_bytes()
    dist.all_reduce(total)
    assert total == here.world_size
    mailbox = launch.Mailbox(here, "answers")

    def write_answers() -> None:
        if here.rank == 0:
            for answer in mailbox.drain():
                print(answer.decode(), flush=True)

    with here.watch.on_abort(write_answers):
        for number in (1, 2):
            mailbox.post(f"answer {number} of rank {here.rank}".encode())
        (options.folder / f"ready{here.rank}").touch()
        if options.case == "unequal":
            time.sleep(here.rank * 1.5 * PATIENCE_S)
        elif options.case == "stuck":  # as in a collective that never returns: no Python code runs
            ctypes.CDLL(None).sleep(100)
        elif here.rank == 2:
            if options.case == "raise":
                for rank in range(here.world_size):
                    wait_for(options.folder / f"ready{rank}")
                raise ValueError("the disk\nis full")
            time.sleep(100)
        dist.all_reduce(total)
    write_answers()


if __name__ == "__main__":
    quick = functools.partial(launch.distributed, interval_s=0.1, patience_s=PATIENCE_S)
    with mock.patch.object(launch, "distributed", quick):
        run_stage(main, Options, distributed=True)
