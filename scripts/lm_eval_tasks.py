"""Which lm-eval tasks there are: its own, those of `--include-path`, ours in `scripts/tasks`; and names for several."""

from __future__ import annotations

import functools
import logging
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

OUR_TASKS = Path(__file__).parent / "tasks"
# Task and number of examples before each question; None: as the task says.
PRESETS: dict[str, dict[str, int | None]] = {
    "zero-shot": dict.fromkeys(
        ("boolq", "winogrande", "rte", "arc_easy", "arc_challenge", "hellaswag", "openbookqa"), 0
    ),
    "few-shot": {"mmlu": 5, "gpqa_main_n_shot": 5, "medmcqa": 5},
}
# lm-eval's own default seeds: examples and shuffled choices are those of its command line.
RANDOM_SEED, FEWSHOT_SEED = 0, 1234
MOST_TEMPLATES = 1024


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """One name of `--tasks`: a task, a group or a tag of lm-eval, loaded. `num_fewshot` None: as each task says."""

    name: str
    num_fewshot: int | None
    loaded: dict[str, Any]

    @property
    def tasks(self) -> dict[str, Any]:
        """The tasks that are run, by name."""
        return self.loaded["tasks"]

    @property
    def reported(self) -> list[str]:
        """What gets records of its own: the name, and its direct members (of a tag: its tasks)."""
        members = self.loaded.get("group_map", {}).get(self.name, list(self.tasks))
        return list(dict.fromkeys([self.name, *members]))

    def leaves(self, name: str) -> list[str]:
        """The tasks below a group; a task's own name."""
        group = self.loaded.get("groups", {}).get(name)
        return [name] if group is None else [task.task_name for task in group.get_all_tasks()]

    @property
    def is_generated(self) -> bool:
        """Whether the model writes answers (of all tasks; else likelihoods are compared)."""
        return all(task.OUTPUT_TYPE == "generate_until" for task in self.tasks.values())

    def reset_seeds(self) -> None:
        """As before the first run, so that all runs see the same examples."""
        _seed_generators()
        for task in self.tasks.values():
            task.set_fewshot_seed(seed=FEWSHOT_SEED)


@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """Which tasks, and how much of each."""

    tasks: str
    """Comma-separated: names of lm-eval tasks, arithmetic_words, zero-shot, few-shot."""
    include_path: Path | None = None
    """Folder with more lm-eval task files."""
    num_fewshot: int | None = None
    """Examples before each question; as the task or preset says by default."""
    limit: int | None = None
    """Questions of each task at most."""

    def task_names(self) -> list[str]:
        """Those of --tasks; ValueError if there are none, or if the numbers are not possible."""
        names = [name for name in self.tasks.split(",") if name]
        if not names:
            raise ValueError(f"--tasks {self.tasks!r}: give perplexity, a preset or names of lm-eval tasks")
        for flag, least in (("limit", 1), ("num_fewshot", 0)):
            if (value := getattr(self, flag)) is not None and value < least:
                raise ValueError(f"--{flag.replace('_', '-')} must be at least {least}, got {value}")
        return names


def require_lm_eval() -> None:
    """ValueError if lm-eval is not installed."""
    try:
        import lm_eval  # noqa: F401
    except ImportError as error:
        raise ValueError("lm-eval is not installed; get it with: pip install -e .[eval]") from error


def expand_presets(names: Sequence[str], num_fewshot: int | None) -> dict[str, int | None]:
    """Task names, each with its number of examples, which a given one overrides."""
    found: dict[str, int | None] = {}
    for name in names:
        found.update(PRESETS.get(name, {name: None}))
    return {name: shots if num_fewshot is None else num_fewshot for name, shots in found.items()}


def load_benchmarks(names: dict[str, int | None], include_path: Path | None) -> list[Benchmark]:
    """Every name's tasks with their data (from the hub, unless the task says otherwise). ValueError names one that
    is unknown, with the nearest that are not, or whose data is not to be had."""
    if not names:
        return []
    require_lm_eval()
    if include_path is not None and not include_path.is_dir():
        raise ValueError(f"--include-path {include_path}: no such folder")
    manager = task_manager(include_path, with_defaults=False)
    if not set(names) <= set(manager.all_tasks):
        manager = task_manager(include_path, with_defaults=True)  # reading lm-eval's thousands of files takes seconds
    check_names(list(names), manager.all_tasks)
    return [_load(manager, name, num_fewshot) for name, num_fewshot in names.items()]


@functools.cache
def task_manager(include_path: Path | None, *, with_defaults: bool) -> Any:
    """lm-eval's index of our tasks and those of the given folder, and (`with_defaults`) of its own."""
    from lm_eval.tasks import TaskManager

    folders = [OUR_TASKS, *([] if include_path is None else [include_path])]
    return TaskManager(include_path=[str(folder) for folder in folders], include_defaults=with_defaults)


def check_names(names: Sequence[str], known: Sequence[str]) -> None:
    """ValueError for the first name that is not known, with the nearest that are."""
    for name in names:
        if name not in known:
            nearest = list(
                dict.fromkeys([f"{name}_local"] * (f"{name}_local" in known) + get_close_matches(name, known, 5))
            )
            hint = f"; the nearest are {', '.join(nearest)}" if nearest else ""
            raise ValueError(
                f"--tasks {name}: no such task{hint} (besides lm-eval's tasks: perplexity, {', '.join(PRESETS)}, and "
                "those of --include-path)"
            )


def _load(manager: Any, name: str, num_fewshot: int | None) -> Benchmark:
    logger = logging.getLogger("lm_eval")
    level = logger.level
    _seed_generators()
    try:
        logger.setLevel(logging.ERROR)  # it warns of every task whose data is made in place
        loaded = manager.load([name])
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(
            f"--tasks {name}: its data is not to be had ({reason[:200]}); without the hub, give tasks that read local "
            "files with --include-path"
        ) from error
    finally:
        logger.setLevel(level)
    for task in loaded["tasks"].values():
        own = task.get_config("num_fewshot")
        if own != 0 and (num_fewshot is not None or own is None):  # lm-eval never overrides a task's own zero
            task.set_config(key="num_fewshot", value=num_fewshot or 0)
    return Benchmark(name=name, num_fewshot=num_fewshot, loaded=loaded)


def _seed_generators() -> None:
    import numpy as np

    random.seed(RANDOM_SEED)  # tasks shuffle choices with the global generators
    np.random.seed(FEWSHOT_SEED)


@contextmanager
def progress_bars(shown: bool) -> Iterator[None]:
    """lm-eval has no flag for its bars: without `shown` there are none."""
    import lm_eval.api.task

    theirs = lm_eval.api.task.tqdm
    if not shown:
        lm_eval.api.task.tqdm = functools.partial(theirs, disable=True)
    try:
        yield
    finally:
        lm_eval.api.task.tqdm = theirs


@contextmanager
def templates_kept() -> Iterator[None]:
    """lm-eval compiles the same few templates again for each question, which takes most of its time: here once."""
    import lm_eval.utils

    environment = lm_eval.utils.env
    environment.from_string = functools.lru_cache(MOST_TEMPLATES)(environment.from_string)
    try:
        yield
    finally:
        del environment.from_string  # the method of its class again
