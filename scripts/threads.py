"""How many threads a stage on a CPU takes: all cores that are idle when it starts.

A step of decoding is hundreds of parallel regions of some 10 µs each, and every one ends when its slowest thread does.
On busy cores one thread of them is always waiting for its turn, and the others spin: two threads on two cores with four
other jobs wrote 5 to 34 tokens/s where one wrote 75 to 150. `scripts/__init__.py` keeps the spinning short, for work
that begins later.
"""

from __future__ import annotations

import os
import time
from functools import cache
from pathlib import Path

import torch
from loguru import logger

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
LOAD = Path("/proc/loadavg")
NUM_SAMPLES, SAMPLE_S = 10, 0.01


@cache
def share_cores() -> int:
    """Set torch's number of threads once per process, unless a variable names it, and return it."""
    threads = torch.get_num_threads()
    if threads == 1 or any(os.environ.get(name) for name in THREAD_VARIABLES):
        return threads
    cores, busy = os.cpu_count() or threads, busy_cores()
    chosen = idle_threads(threads, cores, busy)
    if chosen < threads:
        logger.info(
            f"{chosen} of {threads} threads: about {busy:.0f} threads of other work want the {cores} cores; "
            f"{THREAD_VARIABLES[0]} sets another number"
        )
        torch.set_num_threads(chosen)
    return chosen


def idle_threads(threads: int, cores: int, busy: float) -> int:
    """At most `threads`, and no more than cores are idle; at least 1."""
    return max(1, min(threads, round(cores - busy)))


def busy_cores() -> float:
    """Threads of others that are running or want to, over a tenth of a second; 0 where the system does not say."""
    seen = []
    for _ in range(NUM_SAMPLES):
        try:
            # "0.20 0.18 0.12 3/404 1234": three threads want to run, this one among them.
            seen.append(int(LOAD.read_text().split()[3].partition("/")[0]) - 1)
        except (OSError, ValueError, IndexError):
            return 0.0
        time.sleep(SAMPLE_S)
    return sum(seen) / len(seen)
