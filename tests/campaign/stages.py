"""What the campaign runs: every stage on tiny models, each run in a forked process, its outcome judged.

A fork after the imports starts in milliseconds and is otherwise the process that `python -m` starts: the module runs as
`__main__` under its own command line, with its own memory limit, output files and process group.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import random
import re
import resource
import runpy
import select
import shlex
import shutil
import signal
import string
import sys
import time
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from pipeline_parallel.all_reduce_choice import CONFIGS_DIR
from tests.modules.tiny_kinds import LLAMA, OPT
from tests.modules.tiny_models import save_hf_folder
from tests.scripts.tiny_tasks import model_folder, task_folder

TRACEBACK = "Traceback (most recent call last)"
MEMORY_BYTES = 3 << 30  # on top of what the imports have mapped
MODELS = {"llama": LLAMA, "opt": OPT}
SPARSE = "--predictors predictors --mlp-density 0.5"

# Every stage's command, in an order in which each finds what it reads; `{out}` is what it writes.
COMMANDS = {
    "convert": "convert_llama_checkpoint --source hf --output-dir {out} --quiet",
    "collect": "scripts.collect --model tiny --corpus train.jsonl --output-dir {out} --max-tokens 1500"
    " --batch-size 4 --quiet",
    "train": "scripts.train --model tiny --activations store --output-dir {out} --steps 8 --batch-rows 64"
    " --refine-steps 30 --refine-window 32 --batch-size 2 --closed-form-rows 256 --standin-tokens 256"
    " --calibration-tokens 128 --quiet",
    "budget": f"scripts.budget --model tiny --method predictor {SPARSE} --corpus train.jsonl --output {{out}}"
    " --tokens 64 --check-tokens 64 --window 32 --quiet",
    "infer": f"scripts.infer --model tiny --input prompts.jsonl --output {{out}} --max-new-tokens 12"
    f" --batch-size 4 --method predictor {SPARSE} --density-budget budget.json --quiet",
    "evaluate": f"scripts.evaluate --model tiny --corpus test.jsonl --output {{out}} --window 32"
    f" --method dense predictor static {SPARSE} 0.3 --quiet",
    "write": "scripts.write_text --model tiny --output {out} --max-tokens 300 --num-words 0 --batch-size 2 --quiet",
    "export": "scripts.carried_tasks export --model tiny --tasks tiny_choices,tiny_texts --include-path tasks"
    " --output {out} --limit 4 --quiet",
    "answer": "scripts.carried_tasks answer --model tiny --requests requests.gz --output {out}"
    " --method dense oracle --mlp-density 0.5 0.3 --batch-size 2 --quiet",
    "fold": "scripts.carried_tasks fold --model tiny --answers carried.jsonl --include-path tasks"
    " --output {out} --quiet",
    "summarize": "scripts.summarize --results records.jsonl --output-dir {out} --quiet",
    "drift": "scripts.studies.drift --model tiny --corpus train.jsonl --output-dir {out} --window 32 --test-tokens 96"
    " --calibration-tokens 512 --max-lookahead 1 --quiet",
    "relufy": "scripts.studies.relufy --model tiny --corpus train.jsonl --test-corpus test.jsonl --output-dir {out}"
    " --output relu.jsonl --train-tokens 128 --window 32 --batch-windows 2 --calibration-tokens 512 --test-tokens 96"
    " --speed-densities --predictor-tokens 128 --quiet",
    "agreement": "scripts.benchmark.agreement --model tiny --corpus test.jsonl --output {out} --num-prompts 2"
    " --new-tokens 4 --quiet",
    "choices": "tests.campaign.read_tables --choices choices.json",
    "splits": "tests.campaign.read_tables --splits splits.json",
}
PRODUCTS = {
    "convert": "tiny", "collect": "store", "train": "predictors", "budget": "budget.json",
    "infer": "answers.jsonl", "evaluate": "records.jsonl", "write": "text.jsonl", "export": "requests.gz",
    "answer": "carried.jsonl", "fold": "folded.jsonl",
}  # fmt: skip
# What continues an interrupted run; the others are started again as they were.
RESUME = {stage: " --resume" for stage in ("collect", "infer", "evaluate", "write", "answer", "fold")}
# What a file says about its making, which no two runs share.
OF_THE_RUN = {"command_line", "git_commit", "environment", "timing", "provenance", "seconds", "created", "verify"}
OF_THE_RUN |= {"sums", "samples"}


@dataclass(frozen=True)
class Outcome:
    """How a run ended: exit code (-9: killed), its stderr, seconds, and whether it ran past its limit."""

    command: str
    code: int
    stderr: str
    seconds: float
    is_late: bool = False

    @property
    def verdict(self) -> str:
        """`done`, `refused` (one error line, or the box of a flag that does not parse), or what is wrong with it."""
        lines = [line for line in self.stderr.splitlines() if line.startswith("error: ")]
        if TRACEBACK in self.stderr:
            return "traceback"
        if self.is_late:
            return "runs on"
        if self.code == 2 and (len(lines) == 1 or (not lines and "╭─" in self.stderr)):
            return "refused"
        if self.code == 2:
            return f"{len(lines)} error lines"
        return "done" if self.code == 0 else f"exit {self.code}"

    @property
    def error(self) -> str:
        """The error line, else the end of stderr."""
        lines = [line for line in self.stderr.splitlines() if line.startswith("error: ")]
        return lines[-1] if lines else self.stderr[-1500:]


class Run:
    """A command that runs in a forked process, in `folder`."""

    def __init__(self, command: str | list[str], folder: Path) -> None:
        words = command.split() if isinstance(command, str) else command
        self.command, self.started_s = shlex.join(words), time.perf_counter()
        sys.stdout.flush()
        self.log = folder / f"stderr.{len(list(folder.glob('stderr.*')))}"
        self.log.touch()
        self.pid = os.fork()
        if not self.pid:
            os._exit(_run_module(words, folder, self.log))

    def wait(self, limit_s: float) -> Outcome:
        """Wait for the end, and kill what runs past the limit."""
        is_late = not self.ends_within(limit_s)
        if is_late:
            self.kill()
        status = os.waitpid(self.pid, 0)[1]
        stderr = self.log.read_text(errors="replace")
        self.log.unlink()
        code = os.waitstatus_to_exitcode(status)
        return Outcome(self.command, code, stderr, time.perf_counter() - self.started_s, is_late)

    def ends_within(self, seconds: float) -> bool:
        """Whether it ends by itself in that time."""
        descriptor = os.pidfd_open(self.pid)
        try:
            return bool(select.select([descriptor], [], [], seconds)[0])
        finally:
            os.close(descriptor)

    def kill(self) -> None:
        """SIGKILL, to the process only: whatever it started has to notice."""
        os.kill(self.pid, signal.SIGKILL)


def run(command: str | list[str], folder: Path, limit_s: float = 60.0) -> Outcome:
    """Run a command to its end."""
    return Run(command, folder).wait(limit_s)


def _run_module(words: list[str], folder: Path, log: Path) -> int:
    """In the child: the module named by the first word, as `python -m` runs it; returns the exit code."""
    try:
        os.setsid()
        os.chdir(folder)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(os.open(folder / "stdout", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        os.dup2(os.open(log, os.O_WRONLY), 2)
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY_BYTES,) * 2)
        sys.argv = words
        sys.modules.pop(words[0], None)
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        if isinstance(leaving.code, str):
            print(leaving.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        code = code or 120
    return code


def build(folder: Path, config: dict[str, Any], seed: int) -> dict[str, float]:
    """Make a tiny model and everything that the stages make of it, in `folder`; seconds of every stage."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    model_folder(folder / "hf", context=128)
    (folder / "hf/model.safetensors").unlink()
    config = config | {"max_position_embeddings": 128, "bos_token_id": 0, "eos_token_id": 1}
    save_hf_folder(folder / "hf", config, seed, max_shard_size="60KB")
    settings = {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9, "bos_token_id": 0, "eos_token_id": 1}
    (folder / "hf/generation_config.json").write_text(json.dumps(settings))
    task_folder(folder / "tasks")
    draw = random.Random(seed)
    for name, num_documents in (("train.jsonl", 40), ("test.jsonl", 12)):
        texts = (
            "".join(draw.choices(string.ascii_lowercase + " ", k=draw.randint(20, 70))) for _ in range(num_documents)
        )
        _write_lines(folder / name, ({"text": text} for text in texts))
    prompts: list[dict[str, Any]] = [{"prompt": "".join(draw.choices("abc ", k=5 + i))} for i in range(10)]
    prompts[3] |= {"id": "three", "temperature": 0.7, "seed": 5, "top_k": 4, "top_p": 0.9}
    prompts[4] = {"prompt_token_ids": [5, 6, 7], "max_new_tokens": 3, "stop": ["e", "xy"]}
    _write_lines(folder / "prompts.jsonl", prompts)
    shutil.copyfile(CONFIGS_DIR / "nvidia_h200.json", folder / "choices.json")
    splits = {str(size): {"attention_ctas": 8, "mlp_ctas": 4, "chunk_offset": 16} for size in (64, 256)}
    (folder / "splits.json").write_text(json.dumps(splits))
    seconds = {}
    for stage, product in PRODUCTS.items():
        done = run(COMMANDS[stage].format(out=product), folder, 600.0)
        if done.verdict != "done":
            raise SystemExit(f"{stage} does not run: {done.stderr}")
        seconds[stage] = done.seconds
    return seconds


def _write_lines(path: Path, lines: Any) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def case_folder(base: Path, folder: Path, *copied: str, without: str | None = None) -> Path:
    """A folder that links to everything in `base`, but holds copies of `copied` (and their manifests)."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for path in base.iterdir():
        name = path.name.removesuffix(".manifest.json")
        if name == without or path.name.startswith("std"):
            continue
        if name not in copied:
            (folder / path.name).symlink_to(path)
        elif path.is_dir():
            shutil.copytree(path, folder / path.name)
        else:
            shutil.copyfile(path, folder / path.name)
    return folder


def content(path: Path) -> dict[str, Any]:
    """What an artefact holds, by file: JSON as values, tensors as arrays, everything else as bytes."""
    beside = path.with_name(path.name + ".manifest.json")
    files = [*path.rglob("*")] if path.is_dir() else [path, beside]
    return {
        str(file.relative_to(path.parent)): _content_of(file)
        for file in files
        if file.is_file() and not file.name.endswith((".tmp", ".lock"))
    }


def left_over(path: Path) -> list[str]:
    """Names of unfinished files and locks in and beside an artefact."""
    found = [*path.parent.glob(f"{path.name}.*"), *(path.rglob("*") if path.is_dir() else ())]
    return sorted(file.name for file in found if re.search(r"\.(tmp|lock|partial\w*)$", file.name))


def _content_of(file: Path) -> Any:
    raw = file.read_bytes()
    if file.suffix == ".gz":
        return json.loads(gzip.decompress(raw))
    if file.suffix == ".mmap":
        return np.frombuffer(raw, np.float16) if re.match(r"(mlp|att)_", file.name) else raw
    if file.suffix == ".safetensors":
        return load_file(file)
    if file.suffix not in (".json", ".jsonl"):
        return raw
    lines = raw.splitlines() if file.suffix == ".jsonl" else [raw]
    try:
        values = [json.loads(line) for line in lines]
    except (ValueError, RecursionError):
        return raw
    for value in values:
        if isinstance(value, dict) and value.get("name") == "answers":
            del value["value"]  # seconds
    return values


def same(first: Any, second: Any) -> bool:
    """Whether two contents are equal: numbers to the rounding of another batch, what is of the run left out."""
    if isinstance(first, dict) and isinstance(second, dict):
        keys = first.keys() | second.keys()
        return all(same(first.get(key), second.get(key)) for key in keys if key not in OF_THE_RUN)
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, np.ndarray) and isinstance(second, np.ndarray):
        return first.shape == second.shape and np.allclose(first, second, rtol=1e-2, atol=1e-2, equal_nan=True)
    if isinstance(first, float) and isinstance(second, float):
        return math.isclose(first, second, rel_tol=1e-3, abs_tol=1e-3)
    return type(first) is type(second) and first == second


def differing(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    """Files in which two contents differ."""
    return sorted(name for name in first.keys() | second.keys() if not same(first.get(name), second.get(name)))


def with_output(outcome: Outcome, folder: Path) -> Outcome:
    """An outcome whose stderr carries stdout, too (where a stage prints its help)."""
    return replace(outcome, stderr=outcome.stderr + (folder / "stdout").read_text())
