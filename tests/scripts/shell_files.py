"""Runs a shell file of `scripts/` in a checkout that holds the shell files alone; a stub stands in for Python."""

import os
import shutil
import subprocess
from pathlib import Path

SHELL = Path(__file__).parents[2] / "scripts"
# Notes its arguments, and fails where they hold $FAILS.
STUB = """#!/usr/bin/env bash
printf '%s\\n' "$*" >>calls
case "$*" in *"${FAILS:-nothing}"*) exit 3 ;; esac
"""


def run_shell(
    checkout: Path, file: str, *arguments: str, stub: str = STUB, **variables: str
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """The process of `scripts/FILE`, and the lines that the stub's calls wrote."""
    (checkout / "scripts" / file).parent.mkdir(parents=True, exist_ok=True)
    for name in ("presets.sh", "usage.sh", file):
        shutil.copy(SHELL / name, checkout / "scripts" / name)
    (checkout / "stub").write_text(stub)
    (checkout / "stub").chmod(0o755)
    (checkout / "calls").write_text("")
    environment = {**os.environ, "PYTHON": "./stub", **variables}
    command = ["bash", str(checkout / "scripts" / file), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return done, (checkout / "calls").read_text().splitlines()
