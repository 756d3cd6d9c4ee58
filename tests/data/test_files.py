"""Files replaced whole, locked by one writer, and JSON of a wrong type, size or depth told in one line."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest

from data.files import (
    check_sums,
    disk_errors,
    holder_of,
    only_writer,
    parse_json,
    read_json,
    replace_file,
    sha256_of,
    write_json,
)


class Entry(msgspec.Struct, forbid_unknown_fields=True):
    bytes: Annotated[int, msgspec.Meta(le=9000)]
    names: list[str] = []


HOLDER = """
import sys, time
from pathlib import Path
from data.files import only_writer
with only_writer(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (b'{"bytes": "1"}', "`bytes`: expected `int`, got `str`"),
        (b'{"bytes": true}', "`bytes`: expected `int`, got `bool`"),
        (b'{"bytes": 1e30}', "`bytes`: expected `int`, got `float`"),
        (b'{"bytes": 1000000}', "`bytes`: expected `int` <= 9000, got 1000000"),
        (b'{"bytes": 1, "names": null}', "`names`: expected `array`, got `null`"),
        (b'{"bytes": 1, "names": ["a", 2]}', "`names[1]`: expected `str`, got `int`"),
        (b'{"bytes": 1, "size": 2}', "object contains unknown field `size`"),
        (b"{}", "object missing required field `bytes`"),
        (b"[]", "expected `object`, got `array`"),
        (b'{"bytes": NaN}', "not JSON"),
        (b"", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b'{"bytes": 1, "names": ["\xff"]}', "not JSON"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_json_that_does_not_fit_is_one_line_that_names_file_and_key(text: bytes, what: str) -> None:
    with pytest.raises(ValueError, match="some/file") as caught:
        parse_json(text, Entry, "some/file")
    if text.startswith(b"[["):  # told apart by depth only where the type allows depth
        with pytest.raises(ValueError, match="nested too deeply"):
            parse_json(text, Any, "some/file")  # type: ignore[arg-type]
    else:
        assert what in str(caught.value)
    assert "\n" not in str(caught.value)


def test_json_is_replaced_whole_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"bytes": 1})
    with pytest.raises(TypeError):
        write_json(path, {"bytes": object()})
    assert read_json(path, Entry) == Entry(bytes=1)
    assert os.listdir(tmp_path) == ["a.json"]
    assert len(sha256_of(path)) == 64


@pytest.mark.parametrize("is_folder", [True, False])
def test_a_second_writer_is_refused_at_once_and_the_first_is_named(tmp_path: Path, is_folder: bool) -> None:
    output = tmp_path / "answers"
    if is_folder:
        output.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(output)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None and holder.stdin is not None
        assert holder.stdout.readline() == "held\n"
        named = rf"answers is being written by process {holder.pid} on "
        with pytest.raises(BlockingIOError, match=named), only_writer(output):
            raise AssertionError("two writers")
        holder.kill()  # a lock ends with its process
        holder.wait()
    with only_writer(output):
        assert (tmp_path / "answers.lock").exists()
    assert not (tmp_path / "answers.lock").exists()


def test_a_pipe_has_nothing_to_protect(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with only_writer(pipe), only_writer(pipe), only_writer("/dev/null"):
        assert os.listdir(tmp_path) == ["pipe"]


def test_files_that_are_not_as_recorded_are_named(tmp_path: Path) -> None:
    for name in ("a.bin", "b.bin", "c.bin"):
        (tmp_path / name).write_bytes(name.encode() * 5000)
    sums = {path.name: sha256_of(path) for path in sorted(tmp_path.iterdir())}
    check_sums(tmp_path, sums, "write it again")
    (tmp_path / "a.bin").unlink()
    (tmp_path / "c.bin").write_bytes(b"c.bin" * 4999 + b"d.bin")
    with pytest.raises(ValueError, match=r"a\.bin, c\.bin: missing, or not as written .*; write it again$"):
        check_sums(tmp_path, sums, "write it again")


def test_who_holds_an_output_is_told_while_it_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "store"
    assert holder_of(output) is None
    with only_writer(output):
        assert holder_of(output) is None, "no other process does"
        monkeypatch.setattr("data.files.os.getpid", lambda: -1)
        assert (holder_of(output) or "").startswith("process ")
    monkeypatch.undo()
    (tmp_path / "store.lock").write_text("process 1 on a host")  # left by a killed run: nobody holds it
    assert holder_of(output) is None


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_names_the_file_and_keeps_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    replace_file(tmp_path / "a.json", b"old")
    monkeypatch.setattr("data.files.os.fsync", full)
    with pytest.raises(OSError, match=r"a\.json: no space left to write it .*; free space there, then") as caught:
        replace_file(tmp_path / "a.json", b"new")
    assert caught.value.errno == code and os.listdir(tmp_path) == ["a.json"]
    assert (tmp_path / "a.json").read_bytes() == b"old"


def test_a_write_that_fails_otherwise_names_the_file_too(tmp_path: Path) -> None:
    with (
        pytest.raises(OSError, match=r"rows\.mmap: Input/output error$"),
        disk_errors(tmp_path / "outer"),
        disk_errors(tmp_path / "rows.mmap"),
    ):
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_reader_that_looks_who_writes_keeps_no_writer_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = tmp_path / "store.lock"
    lock.touch()
    reader = os.open(lock, os.O_RDONLY)
    fcntl.flock(reader, fcntl.LOCK_SH)
    monkeypatch.setattr("time.sleep", lambda seconds: fcntl.flock(reader, fcntl.LOCK_UN))  # it has looked
    with only_writer(tmp_path / "store"):
        assert holder_of(tmp_path / "store") is None  # no other process
    os.close(reader)
