"""One rank as a fork of a process that has imported what stages import: it then is `python ARGUMENTS...`."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Mapping, Sequence

IMPORTED = (
    "tests.pipeline_parallel.parity_cases",
    "tests.pipeline_parallel.toy_stage",
    "scripts.infer",
    "scripts.collect",
    "scripts.evaluate",
    "scripts.studies.drift",
    "scripts.train",
    "scripts.summarize",
    "convert_llama_checkpoint",
)
"""Modules that import nearly all that the ranks of tests do."""


def run(
    arguments: Sequence[str], environment: Mapping[str, str], folder: str, stdout_path: str, stderr_path: str
) -> None:
    """Become `python ARGUMENTS...` (-m MODULE ... or FILE ...) in `folder`, with nothing else in the environment, and
    with these files for what is printed."""
    for descriptor, path in ((1, stdout_path), (2, stderr_path)):
        file = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(file, descriptor)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    if arguments[0] == "-m":
        module, *rest = arguments[1:]
        sys.argv = [module, *rest]
        sys.modules.pop(module, None)  # it is run as __main__; runpy would warn of two
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(arguments)
        runpy.run_path(arguments[0], run_name="__main__")
