"""`scripts.infer` on one rank with what only that rank meets: `{rank}` in an argument is its number, and where the
variable MAX_FILE_BYTES_RANK_<rank> is set, no file of this process grows beyond it (as on a full disk)."""

import os
import resource
import sys

from scripts.command_line import run_stage
from scripts.infer import Options, main

if __name__ == "__main__":
    rank = os.environ["RANK"]
    limit = os.environ.get(f"MAX_FILE_BYTES_RANK_{rank}")
    if limit is not None:  # Python ignores SIGXFSZ, so a write beyond it is an OSError
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), resource.RLIM_INFINITY))
    run_stage(main, Options, [argument.replace("{rank}", rank) for argument in sys.argv[1:]], distributed=True)
