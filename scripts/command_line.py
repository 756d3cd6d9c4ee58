"""What every entry point shares: flags from a dataclass, errors as one line, logging and progress bars."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from types import UnionType
from typing import Any, ClassVar, TypeVar, cast, overload

import tyro
from loguru import logger
from tqdm import tqdm

from data.files import AGAIN, NO_SPACE, console, only_writer

Options = TypeVar("Options")
Item = TypeVar("Item")

BAD_INPUT = 2
INTERRUPTED = 130


def run_stage(
    main: Callable[[Options], object],
    options_class: type[Options] | UnionType,
    args: Sequence[str] | None = None,
    *,
    distributed: bool = False,
    shares_output: bool = False,
) -> None:
    """Runs `main(options)`, where the options come from the command line (or `args`); of a union of classes the first
    word says which.

    A field `mlp_density` is the flag `--mlp-density`; a boolean that is false by default is a flag without a
    value; an unknown flag exits with code 2. A ValueError or an OSError (bad flags, bad files) is one line on
    stderr and exit code 2, its traceback shown with LOGURU_LEVEL=DEBUG only. Any other exception is a fault
    of ours and keeps its traceback.

    distributed: `main` knows how to share the work with the ranks that torchrun started (`current_launch`), and runs
    on each of them. Then an error on one ends all, as `pipeline_parallel.launch` says, and options that are not the
    same on all of them are refused.

    Fields `output` and `output_dir` are what one run at a time may write, and a second one fails at once;
    shares_output: runs of this stage write there side by side.
    """
    with console():
        _run(main, options_class, args, distributed=distributed, shares_output=shares_output)


def _run(
    main: Callable[[Options], object],
    options_class: type[Options] | UnionType,
    args: Sequence[str] | None,
    *,
    distributed: bool,
    shares_output: bool,
) -> None:
    # What is wrong before the ranks meet is wrong on all of them: said once per host.
    unheard = io.StringIO() if os.environ.get("LOCAL_RANK", "0") != "0" else None
    resumes = ""
    try:
        with contextlib.redirect_stderr(unheard or sys.stderr), contextlib.redirect_stdout(unheard or sys.stdout):
            options = tyro.cli(
                cast("type[Options]", options_class),
                args=args,
                prog=_program_name(),
                description=(None if isinstance(options_class, UnionType) else options_class.__doc__) or main.__doc__,
                config=(tyro.conf.FlagCreatePairsOff,),
            )
        configure_logging(quiet=bool(getattr(options, "quiet", False)))
        resumes = "continue with --resume" if hasattr(options, "resume") else ""
        lock = contextlib.nullcontext() if shares_output else _only_writing_run(options)
        if os.environ.get("WORLD_SIZE", "1") == "1":
            with lock:
                main(options)
            return
        if not distributed:
            # Every rank would do all of the work and write the same files.
            raise ValueError(
                f"this stage runs in one process, and torchrun started {os.environ['WORLD_SIZE']}: "
                "leave out torchrun (NUM_GPUS=1); collect, infer, evaluate and drift run under it"
            )
        from pipeline_parallel import launch  # here, since it imports torch, which not every stage needs

        unheard = None  # from here on what goes wrong may be this rank's alone
        device = getattr(options, "device", "auto")
        with launch.distributed(device, explain=one_line, advice=resumes) as joined:
            joined.check_same(_shared_options(options))
            with lock:
                main(options)
    except BrokenPipeError:
        raise
    except (ValueError, OSError) as error:
        logger.opt(exception=True).debug("the traceback of the error below")
        whose = f"rank {os.environ['RANK']}: " if os.environ.get("RANK", "0") != "0" else ""
        print(f"error: {whose}{one_line(error)}", file=unheard or sys.stderr)
        raise SystemExit(BAD_INPUT) from None
    except KeyboardInterrupt:
        print("interrupted" + (f"; {resumes}" if resumes else ""), file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None


@contextlib.contextmanager
def _only_writing_run(options: object) -> Iterator[None]:
    """Hold the locks of what the options say to write; the first rank does, and fails for all. An OSError for a folder
    in the place of a file, or the other way round, comes before the work instead of after it."""
    with contextlib.ExitStack() as held:
        for name in ("output", "output_dir"):
            output = getattr(options, name, None)
            if isinstance(output, Path) and os.environ.get("RANK", "0") == "0":
                if name == "output" and output.is_dir():
                    raise IsADirectoryError(f"--output {output} is a folder; give a file")
                if name == "output_dir" and output.is_file():
                    raise NotADirectoryError(f"--output-dir {output} is a file; give a folder")
                held.enter_context(only_writer(output))
        yield


def _shared_options(options: Any) -> dict[str, str]:
    """What all ranks must have been given alike, by flag. Of a model and a corpus the contents are compared where they
    are read: hosts may keep them in different places."""
    return {
        f"--{field.name.replace('_', '-')}": str(getattr(options, field.name))
        for field in fields(options)
        if field.name not in ("device", "quiet", "model", "corpus")
    }


def _program_name() -> str:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return f"python -m {spec.name}" if spec is not None else os.path.basename(sys.argv[0])


def one_line(error: BaseException) -> str:
    """The message of an error without line breaks; an OSError of the system as `file: what is wrong`."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}" + (f"; {AGAIN}" if error.errno in NO_SPACE else "")
    return " ".join(str(error).split()) or type(error).__name__


def configure_logging(*, quiet: bool = False) -> None:
    """Logs to stderr: INFO and above (or the level in LOGURU_LEVEL), with `quiet` WARNING and above.

    Of several ranks the first logs so, and the others as if quiet, with their rank before the message.
    """
    rank = os.environ.get("RANK", "0")
    level = "WARNING" if quiet else os.environ.get("LOGURU_LEVEL", "INFO" if rank == "0" else "WARNING")
    prefix = "" if rank == "0" else f"[rank {rank}] "
    logger.remove()
    # Through tqdm, so that a message does not cut a progress bar in two.
    logger.add(
        lambda message: tqdm.write(str(message), file=sys.stderr, end=""),
        level=level,
        format=f"<level>{{level: <7}}</level> {prefix}{{message}}",
        colorize=sys.stderr.isatty(),
    )


@overload
def progress(
    iterable: tuple[()], description: str, *, quiet: bool = ..., total: int | None = ..., unit: str = ...
) -> tqdm[Any]: ...
@overload
def progress(
    iterable: Iterable[Item], description: str, *, quiet: bool = ..., total: int | None = ..., unit: str = ...
) -> tqdm[Item]: ...
def progress(
    iterable: Iterable[Any], description: str, *, quiet: bool = False, total: int | None = None, unit: str = "it"
) -> tqdm[Any]:
    """A progress bar on stderr around `iterable`; none with `quiet`, and of several ranks the first shows its own.
    Long work of a known `total` is also said to be long, in one log line.

    Redrawn rarely where stderr is not a terminal. An empty tuple makes a bar of `total` steps that the caller moves
    with `update`.
    """
    return DurationBar(
        iterable,
        desc=description,
        total=total,
        unit=unit,
        disable=quiet or os.environ.get("RANK", "0") != "0",
        file=sys.stderr,
        dynamic_ncols=True,
        mininterval=0.2 if sys.stderr.isatty() else 15.0,
    )


def show_step(bar: tqdm[Any], step: int, loss: float) -> None:
    """Move a progress bar to a training step that is done, and show its loss."""
    bar.update(step + 1 - bar.n)
    bar.set_postfix_str(f"loss {loss:.4f}", refresh=False)


# Told after so many seconds from the first step that is done (what comes before it compiles and fills caches), and only
# of work that takes longer than that.
EARLIEST_S = 10.0
UNITS = {"tok": "token", "it": "step"}


class DurationBar(tqdm):
    """A tqdm bar of a known total that logs how long the work will take. While it waits for a bar that was opened later
    (text that is written as it is read), only the later one logs: this one's pace would be that of the waiting."""

    _open: ClassVar[list[DurationBar]] = []
    _begun: tuple[float, float] | None = None
    _is_logged = False

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        if not self.disable:
            self._open.append(self)

    def close(self) -> None:
        """As tqdm's."""
        if self in self._open:
            self._open.remove(self)
        super().close()

    def update(self, n: float | None = 1) -> bool | None:
        """As tqdm's."""
        moved = super().update(n)
        if not (self.disable or self._is_logged) and self.total and self._open[-1:] == [self]:
            self._log_duration(self.total)
        return moved

    def _log_duration(self, total: float) -> None:
        now = time.monotonic()
        if self._begun is None:
            if self.n > self.initial:
                self._begun = (now, self.n)
            return
        start_s, start_n = self._begun
        done, elapsed_s = self.n - start_n, now - start_s
        if done <= 0 or elapsed_s < EARLIEST_S:
            return
        self._is_logged = True
        each_s = elapsed_s / done
        left_s = each_s * (total - self.n)
        if left_s > EARLIEST_S:
            unit = UNITS.get(self.unit, self.unit)
            pace = f"{each_s:.1f} s per {unit}" if each_s >= 1 else f"{1 / each_s:.0f} {unit}s per s"
            logger.info(f"{self.desc.removesuffix(': ')}: about {duration(left_s)} to go ({pace})")


def duration(seconds: float) -> str:
    """Two units at most: '2 h 47 min', '5 min', '1 min 40 s', '12 s'."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes_left = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes_left} min"
    if minutes >= 5:
        return f"{minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
