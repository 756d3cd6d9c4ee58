from __future__ import annotations

import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from loguru import logger

from data.files import only_writer
from pipeline_parallel.launch import Launch
from scripts.command_line import _shared_options, progress, run_stage

REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class StageOptions:
    """Does something."""

    mlp_density: float = 1.0
    resume: bool = False
    quiet: bool = False


def raising(error: BaseException) -> None:
    def main(options: StageOptions) -> None:
        raise error

    run_stage(main, StageOptions, [])


def test_fields_become_flags() -> None:
    seen: list[StageOptions] = []
    run_stage(seen.append, StageOptions, ["--mlp-density", "0.5", "--resume"])
    assert seen == [StageOptions(mlp_density=0.5, resume=True)]


@pytest.mark.parametrize("flags", [["--mlp-densty", "0.5"], ["--mlp-density", "much"], ["--no-resume"], ["extra"]])
def test_a_bad_flag_exits_with_2_and_runs_nothing(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[StageOptions] = []
    with pytest.raises(SystemExit) as stopped:
        run_stage(seen.append, StageOptions, flags)
    assert stopped.value.code == 2
    assert flags[0] in capsys.readouterr().err
    assert seen == []


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("density 1.5\nis outside (0, 1]"), "error: density 1.5 is outside (0, 1]\n"),
        (FileNotFoundError("manifest.json is missing"), "error: manifest.json is missing\n"),
        (
            FileNotFoundError(2, "No such file or directory", "a.json"),
            "error: a.json: No such file or directory\n",
        ),
        (PermissionError(13, "Permission denied", "/a"), "error: /a: Permission denied\n"),
        (ValueError(), "error: ValueError\n"),
        (
            OSError(28, "No space left on device", "/a"),
            "error: /a: No space left on device; free space there, then give the same command again\n",
        ),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    error: Exception, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        raising(error)
    assert stopped.value.code == 2
    assert capsys.readouterr().err == message


def test_our_own_faults_keep_their_traceback() -> None:
    with pytest.raises(KeyError, match="ours"):
        raising(KeyError("ours"))


def test_an_interrupt_is_one_line_and_exit_code_130(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        raising(KeyboardInterrupt())
    assert stopped.value.code == 130
    assert capsys.readouterr().err == "interrupted; continue with --resume\n"

    @dataclass(frozen=True, kw_only=True)
    class Brief:
        """Has nothing to resume."""

    def interrupted(options: Brief) -> None:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit):
        run_stage(interrupted, Brief, [])
    assert capsys.readouterr().err == "interrupted\n"


def test_quiet_leaves_warnings_only(capsys: pytest.CaptureFixture[str]) -> None:
    def main(options: StageOptions) -> None:
        logger.info("for your information")
        logger.warning("take care")
        assert list(progress(range(3), "steps", quiet=options.quiet)) == [0, 1, 2]

    run_stage(main, StageOptions, ["--quiet"])
    quiet = capsys.readouterr().err
    assert "take care" in quiet and "information" not in quiet and "steps" not in quiet
    run_stage(main, StageOptions, [])
    loud = capsys.readouterr().err
    assert "for your information" in loud and "steps: 100%" in loud


def test_a_stage_that_does_not_share_its_work_refuses_several_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    seen: list[StageOptions] = []
    for local_rank in ("0", "3"):  # said once per host, not once per rank
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        with pytest.raises(SystemExit) as stopped:
            run_stage(seen.append, StageOptions, [])
        assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: this stage runs in one process, and torchrun started 4: ")
    assert error.count("\n") == 1 and "collect, infer, evaluate and drift run under it" in error
    assert seen == []


def test_a_bad_flag_is_said_once_per_host(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    for flags in (["--mlp-densty", "0.5"], ["--help"]):
        with pytest.raises(SystemExit):
            run_stage(print, StageOptions, flags)
    assert capsys.readouterr() == ("", "")


def test_other_ranks_than_the_first_show_warnings_with_their_rank_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def main(options: StageOptions) -> None:
        logger.info("for your information")
        logger.warning("take care")
        assert list(progress(range(3), "steps")) == [0, 1, 2]

    monkeypatch.setenv("RANK", "2")
    run_stage(main, StageOptions, [])
    assert capsys.readouterr().err == "WARNING [rank 2] take care\n"


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    code = (
        "from dataclasses import make_dataclass; from scripts.command_line import run_stage; "
        "run_stage(lambda _: [print(i) for i in range(100000)], make_dataclass('Nothing', []), [])"
    )
    command = f"{sys.executable} -c {shlex.quote(code)} | head -1"
    done = subprocess.run(
        command, shell=True, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("0\n", "")


@pytest.mark.parametrize(
    ("total", "done", "seconds", "said"),
    [
        (800, 2, 25.2, "refining: about 2 h 47 min to go (12.6 s per step)"),
        (60, 50, 30.0, None),  # nearly done
        (24576, 1500, 20.0, "refining: about 5 min to go (75 steps per s)"),
        (4, 2, 200.0, "refining: about 1 min 40 s to go (100.0 s per step)"),
    ],
)
def test_long_work_says_once_how_long_it_takes(
    total: int, done: int, seconds: float, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    sink = logger.add(lambda message: lines.append(str(message).strip()), level="INFO", format="{message}")
    now = 1000.0
    bar = progress((), "refining", total=total, unit="step")
    monkeypatch.setattr("scripts.command_line.time.monotonic", lambda: now)
    bar.update(0)
    now += 1000.0
    bar.update(1)  # the first step is slower than the others
    now += 5.0
    bar.update(0)  # too early to tell
    now += seconds - 5.0
    bar.update(done)
    now += seconds
    bar.update(1)
    bar.close()
    logger.remove(sink)
    assert lines == ([] if said is None else [said])


@dataclass(frozen=True, kw_only=True)
class Writing:
    """Writes to one file."""

    output: Path
    seed: int = 0
    model: str = "m"
    device: str = "auto"


@dataclass(frozen=True, kw_only=True)
class WritingFolder:
    """Writes to one folder."""

    output_dir: Path


def test_an_output_of_the_wrong_kind_is_told_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, seen = tmp_path / "file", list[object]()
    file.touch()
    for options_class, flag, path, message in (
        (Writing, "--output", tmp_path, "is a folder; give a file"),
        (WritingFolder, "--output-dir", file, "is a file; give a folder"),
    ):
        with pytest.raises(SystemExit) as stopped:
            run_stage(seen.append, options_class, [flag, str(path)])
        assert stopped.value.code == 2
        assert capsys.readouterr().err == f"error: {flag} {path} {message}\n"
    assert seen == []


@pytest.mark.parametrize("options_class", [Writing, WritingFolder])
def test_one_run_at_a_time_writes_an_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options_class: type
) -> None:
    flag = "--output" if options_class is Writing else "--output-dir"
    arguments = [flag, str(tmp_path / "results")]
    seen: list[object] = []
    with only_writer(tmp_path / "results"):
        with pytest.raises(SystemExit) as stopped:
            run_stage(seen.append, options_class, arguments)
        assert stopped.value.code == 2 and not seen
        said = capsys.readouterr().err
        assert f"results is being written by process {os.getpid()} on " in said and said.count("\n") == 1
        run_stage(seen.append, options_class, arguments, shares_output=True)
    run_stage(lambda options: run_stage(seen.append, options_class, [flag, "/dev/null"]), options_class, arguments)
    assert len(seen) == 2 and not list(tmp_path.iterdir())


def test_ranks_compare_what_they_were_given() -> None:
    store = torch.distributed.HashStore()
    ranks = [Launch(rank=rank, world_size=3, store=store) for rank in range(3)]
    given = [Writing(output=Path("o"), seed=seed, model=f"m{seed}") for seed in (3, 3, 4)]
    for rank, options in zip(ranks[:2], given[:2], strict=True):
        rank.check_same(_shared_options(options))
    with pytest.raises(ValueError, match="--seed is 4 here and 3 on rank 0; give all ranks the same options"):
        ranks[2].check_same(_shared_options(given[2]))
    Launch().check_same({"--seed": "3"})  # one process


def test_a_terminal_without_a_character_shows_its_number() -> None:
    code = (
        "from dataclasses import make_dataclass; from loguru import logger; "
        "from scripts.command_line import progress, run_stage\n"
        "def main(_):\n"
        "    print('4 × 8 µs†')\n"
        "    logger.info('4 × 8 µs†')\n"
        "    list(progress(range(2), '4 × 8 µs†'))\n"
        "run_stage(main, make_dataclass('Nothing', []), [])"
    )
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, env=ascii_only, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == b"4 \\xd7 8 \\xb5s\\u2020\n" and done.stderr.count(b"\\xd7") >= 2


def test_work_that_waits_for_other_work_leaves_it_to_that_to_say_how_long_it_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines: list[str] = []
    sink = logger.add(lambda message: lines.append(str(message).strip()), level="INFO", format="{message}")
    now = 1000.0
    monkeypatch.setattr("scripts.command_line.time.monotonic", lambda: now)
    collecting = progress((), "collecting", total=1000, unit="tok")
    with progress((), "writing text", total=1000, unit="tok") as writing:
        for _ in range(3):
            writing.update(20)
            now += 30.0
            for _ in range(2):
                collecting.update(10)
    now += 5.0
    collecting.update(10)
    now += 15.0
    collecting.update(10)
    collecting.close()
    logger.remove(sink)
    assert lines == [
        "writing text: about 24 min to go (1.5 s per token)",
        "collecting: about 23 min to go (1.5 s per token)",
    ]


def test_an_interrupt_while_a_stage_is_imported_is_one_line() -> None:
    command = [sys.executable, "-c", "import scripts; raise KeyboardInterrupt"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0 and done.stderr == "interrupted\n"
