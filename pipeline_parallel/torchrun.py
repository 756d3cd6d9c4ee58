"""torchrun, but an error ends with the one line that the failing rank printed: `python -m pipeline_parallel.torchrun`
takes what torchrun takes.

torchrun itself adds thirty lines: its own traceback, which does not name the cause. The exit code is that of
the rank that failed first.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def main(arguments: Sequence[str] | None = None) -> None:
    """Start the ranks and wait for them; SystemExit with a failed rank's code."""
    options = run.parse_args(list(sys.argv[1:] if arguments is None else arguments))
    logging.disable(logging.ERROR)  # of this process: "Sending process 123 closing signal SIGTERM", and the like
    try:
        run.run(options)
    except ChildFailedError as error:
        _, first = error.get_first_failure()
        raise SystemExit(first.exitcode if first.exitcode > 0 else 128 - first.exitcode) from None
    except SignalException as error:  # the ranks have been sent it, too, and have said so
        raise SystemExit(128 + error.sigval) from None


if __name__ == "__main__":
    main()
