"""Entry points: the only place that wires the other folders together, one module per stage."""

import os
import sys
from types import TracebackType

# Read when torch is imported, which is later: a thread that waits for the next piece of work sleeps after some 10 µs
# instead of spinning for milliseconds, which on busy cores takes the time of the thread that it waits for
# (GNU's OpenMP by rounds, LLVM's by milliseconds).
if not os.environ.get("OMP_WAIT_POLICY"):
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    os.environ.setdefault("KMP_BLOCKTIME", "1")


def _excepthook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Ctrl-C while a stage is still being imported, which takes seconds, is one line as it is later."""
    if issubclass(kind, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, traceback)


sys.excepthook = _excepthook
