"""What a command says on its standard streams, whatever they are connected to."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator

OUTPUT_CLOSED = 141  # as of a process that SIGPIPE ends


@contextlib.contextmanager
def console() -> Iterator[None]:
    """Within the block a character that the terminal does not have is shown by its number; and once whoever reads our
    output has seen enough (`| head`), the process ends without a word."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            yield
        finally:
            sys.stdout.flush()  # so that a reader that has gone is noticed here, and not as the interpreter ends
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(OUTPUT_CLOSED) from None
