"""lm-eval's own command line with our engine as a model: every argument is lm-eval's.

    python -m scripts.lm_eval --model dejavu-lab --tasks arc_easy \\
        --model_args model=DIR,predictors=DIR,method=predictor,mlp_density=0.5

`--model_args` takes what `scripts.infer` takes as flags (with underscores); `sparse_phases` is `all` by default. Under
torchrun, `tp_size=` and `pp_size=` say how the model is cut; the first rank prints and writes.
"""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from pipeline_parallel.launch import current_launch
from scripts.command_line import run_stage
from scripts.lm_eval_tasks import OUR_TASKS, progress_bars, require_lm_eval


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """What the ranks have to know before lm-eval reads its arguments."""

    device: str = "auto"


def main(options: LaunchOptions) -> None:
    """Run lm-eval on `sys.argv`."""
    require_lm_eval()
    import lm_eval.tasks
    from lm_eval.__main__ import cli_evaluate

    import scripts.lm_eval_model  # noqa: F401  (registers the model)

    class TaskManager(lm_eval.tasks.TaskManager):
        """Knows our tasks by name, too."""

        def __init__(self, *args: Any, include_path: Any = None, **named: Any) -> None:
            theirs = include_path if isinstance(include_path, list | tuple) else [include_path]
            super().__init__(*args, include_path=[str(OUR_TASKS), *filter(None, theirs)], **named)

    current_launch().check_same({"the command line": shlex.join(sys.argv[1:])})
    rank = current_launch().rank
    if rank != 0:
        os.environ["LMEVAL_LOG_LEVEL"] = "ERROR"
        # lm-eval lets every LOCAL_RANK of 0 write the results: that of each host.
        os.environ["LOCAL_RANK"] = str(rank)
    ours, theirs = TaskManager, lm_eval.tasks.TaskManager
    silence = contextlib.nullcontext() if rank == 0 else contextlib.redirect_stdout(io.StringIO())
    lm_eval.tasks.TaskManager = ours
    try:
        with progress_bars(rank == 0), silence:
            cli_evaluate()
    except SystemExit as stop:
        if current_launch().world_size == 1:
            raise
        if stop.code:  # argparse has said why; for the launch it is bad input, not a fault of ours
            raise ValueError("lm-eval does not take these arguments (see above)") from None
    finally:
        lm_eval.tasks.TaskManager = theirs


def launch_device(arguments: Sequence[str]) -> str:
    """What `--device` means for the ranks of a launcher, which take a GPU each: cpu, else auto."""
    given = [after for before, after in pairwise(arguments) if before == "--device"]
    given += [word.partition("=")[2] for word in arguments if word.startswith("--device=")]
    return "cpu" if given and given[-1] == "cpu" else "auto"


if __name__ == "__main__":
    run_stage(main, LaunchOptions, ["--device", launch_device(sys.argv[1:])], distributed=True)
