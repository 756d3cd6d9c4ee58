"""Files that a killed run, a second run or a bad disk must not spoil: replaced whole, written by one process, checked.

JSON is read into a type (`msgspec.Struct`, dataclass or annotation), so that a value of another type, size or depth is
one line that names the file and the key; JSON lines are read strictly, and every complaint names the file and the line.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import socket
import stat
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

LOCK_SUFFIX = ".lock"
# Of a disk, of a user's quota, of the size that a file may have.
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
AGAIN = "free space there, then give the same command again"


def parse_json(text: bytes | str, kind: type[T], where: str | Path) -> T:
    """`text` as a value of `kind`; ValueError begins with `where` and names the key that does not fit.

    NaN and infinities are refused: they are not JSON.
    """
    try:
        return msgspec.json.decode(text, type=kind)
    except RecursionError as error:
        raise ValueError(f"{where}: nested too deeply to be read") from error
    except msgspec.ValidationError as error:
        raise ValueError(f"{where}: {_sentence(error, lambda: msgspec.json.decode(text))}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{where}: not JSON ({error})") from error


def convert_json(value: Any, kind: type[T], where: str | Path) -> T:
    """As `parse_json`, of a value that is parsed already."""
    try:
        return msgspec.convert(value, kind, strict=True)
    except RecursionError as error:
        raise ValueError(f"{where}: nested too deeply to be read") from error
    except msgspec.ValidationError as error:
        raise ValueError(f"{where}: {_sentence(error, lambda: value)}") from error


def read_json(path: Path, kind: type[T]) -> T:
    """The value in a JSON file; FileNotFoundError, IsADirectoryError or ValueError names it."""
    return parse_json(path.read_bytes(), kind, path)


def _sentence(error: msgspec.ValidationError, read: Callable[[], Any]) -> str:
    """msgspec's message, with the key before what is wrong with it: `files.a: expected object, got null`. Where it
    says what was allowed only, the value follows."""
    what, _, place = str(error).partition(" - at `")
    key = place.rstrip("`").removeprefix("$").removeprefix(".")
    what = what[:1].lower() + what[1:]
    if re.fullmatch(r"expected `\w+` [<>]=? \S+", what):
        with contextlib.suppress(RecursionError, LookupError):  # a value too deep stands elsewhere, or a key has a dot
            value = read()
            for name in re.findall(r"\w+", key):
                value = value[int(name) if isinstance(value, list | tuple) else name]
            what = f"{what}, got {value!r}"
    return f"`{key}`: {what}" if key else what


def write_json(path: Path, value: Any, *, indent: int = 1, sort_keys: bool = False) -> None:
    """Replace a JSON file whole: a kill at any moment leaves the old one or the new one."""
    text = json.dumps(value, indent=indent, sort_keys=sort_keys, ensure_ascii=False, allow_nan=False)
    replace_file(path, (text + "\n").encode("utf-8", "backslashreplace"))


def replace_file(path: Path, content: bytes | memoryview, remedy: str = AGAIN) -> None:
    """Write a file beside `path`, make it durable, and put it in the place of `path`; OSError as `disk_errors`."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with disk_errors(path, remedy):
        try:
            with open(temporary, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


@contextlib.contextmanager
def disk_errors(path: Path, remedy: str = AGAIN) -> Iterator[None]:
    """An OSError of what is written to `path` within names it, and where the disk is full says what to do.

    Python's own says no file name where a write fails, only where opening does.
    """
    try:
        yield
    except OSError as error:
        if error.strerror is None or isinstance(error, BrokenPipeError):  # in words already; a reader that has gone
            raise
        if error.errno in NO_SPACE:
            free = shutil.disk_usage(next(one for one in path.absolute().parents if one.exists())).free
            text = f"{path}: no space left to write it ({free / 1e6:.0f} MB are free, or a limit is reached); {remedy}"
        elif error.filename is None:
            text = f"{path}: {error.strerror}"
        else:
            raise
        named = OSError(text)
        named.errno = error.errno
        raise named from error


def is_stream(path: str | Path) -> bool:
    """Whether `path` is a pipe, a terminal or a device: written once from front to back, and never replaced."""
    try:  # as it is given: the target of /dev/stdout or /dev/fd/63 may have no name
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def sync_folder(folder: Path) -> None:
    """Make what was renamed or removed in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:  # some network file systems cannot
        pass
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    """The sha256 of a file, as 64 hex digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def changed_files(folder: Path, sums: Mapping[str, str]) -> list[str]:
    """Names of the files whose sha256 is not the recorded one, missing files among them. Reads them all."""
    return [name for name, sum_ in sums.items() if not (folder / name).is_file() or sha256_of(folder / name) != sum_]


def check_sums(folder: Path, sums: Mapping[str, str], advice: str) -> None:
    """What `--verify` does with a folder: ValueError names the files that are not as their manifest says (name ->
    sha256), and gives the advice."""
    if changed := changed_files(folder, sums):
        more = f" and {len(changed) - 4} more" if len(changed) > 4 else ""
        raise ValueError(
            f"{folder}: {', '.join(changed[:4])}{more}: missing, or not as written (sha256 differs from the "
            f"manifest's); {advice}"
        )


@contextlib.contextmanager
def only_writer(output: str | Path) -> Iterator[None]:
    """Hold the one lock of an output, a file or a folder, while it is written; BlockingIOError names who holds it.

    The lock is `OUTPUT.lock` beside the output, held by the kernel (flock): it ends with the process, however that
    ends. A pipe, a terminal or a device has nothing to protect and is not locked.
    """
    if is_stream(output):
        yield
        return
    output = Path(os.path.realpath(output))
    output.parent.mkdir(parents=True, exist_ok=True)
    path = output.with_name(output.name + LOCK_SUFFIX)
    descriptor = _locked(path, output)
    try:
        yield
    finally:
        # Removed while it is held: whoever opened it meanwhile sees that it is gone, and makes a new one.
        path.unlink(missing_ok=True)
        os.close(descriptor)


def holder_of(output: str | Path) -> str | None:
    """Which other process writes an output now, in words, as `only_writer` knows it; None: none does."""
    output = Path(os.path.realpath(output))
    try:
        descriptor = os.open(output.with_name(output.name + LOCK_SUFFIX), os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = _holder(descriptor)
        return None if holder.startswith(_this_process()) else holder
    finally:
        os.close(descriptor)
    return None


def _holder(descriptor: int) -> str:
    return os.read(descriptor, 500).decode("utf-8", "replace") or "another process"


def _locked(path: Path, output: Path) -> int:
    looks_left = 3  # `holder_of` in another process holds the lock for a moment, too
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_same_file(descriptor, path):
                with disk_errors(path):
                    os.ftruncate(descriptor, 0)
                    os.write(descriptor, f"{_this_process()} ({_command()})".encode())
                return descriptor
        except BlockingIOError as error:
            holder = _holder(descriptor)
            os.close(descriptor)
            if looks_left := looks_left - 1:
                time.sleep(0.02)
                continue
            raise BlockingIOError(
                f"{output} is being written by {holder}; wait until that has ended, or give another output"
            ) from error
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # the holder before us removed it as it ended


def _is_same_file(descriptor: int, path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    return False


def _this_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def _command() -> str:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return f"python -m {spec.name}" if spec is not None else os.path.basename(sys.argv[0] or "python")


NUM_TOKEN_IDS = 2**31  # no vocabulary has more


def require_file(path: Path, what: str) -> Path:
    """Return `path` unless it is a folder or missing: IsADirectoryError / FileNotFoundError name it."""
    if path.is_dir():
        raise IsADirectoryError(f"{what} {path} is a folder; give a file")
    if not path.exists():
        raise FileNotFoundError(f"{what} {path} does not exist")
    return path


def parse_object(line: bytes, where: str) -> dict[str, Any]:
    """Parse one line as a JSON object, or raise ValueError that begins with `where` (file and line)."""
    try:
        value = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not UTF-8 text (byte {error.start} of the line)") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON ({error})") from error
    # JSON's escapes can spell half of a surrogate pair, which no tokenizer or file can take.
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}: holds half of a surrogate pair, which is no text") from error
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected a JSON object such as {{...}}, got {type(value).__name__}")
    return value


def read_json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number from 1, object) for each line that is not blank; `.gz` is decompressed on the way.

    Raises ValueError naming file and line for text that is not UTF-8, not JSON or not an object, and for a
    damaged gzip file; FileNotFoundError / IsADirectoryError if there is nothing to read.
    """
    require_file(path, "JSON-lines file")
    opener = gzip.open if path.suffix == ".gz" else open
    line_number = 0
    with opener(path, "rb") as file:
        try:
            for line_number, line in enumerate(file, start=1):
                if line.strip():
                    yield line_number, parse_object(line, f"{path} line {line_number}")
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"{path}: damaged gzip data after line {line_number} ({error})") from error


def whole_lines(path: Path, start: int = 0) -> Iterator[bytes]:
    """The lines of a file that grows by lines, from byte `start` on, with their ends. A last one without its end, which
    a kill left or another process is writing, is left out; FileNotFoundError if there is no file."""
    with open(path, "rb") as file:
        file.seek(start)
        for line in file:
            if not line.endswith(b"\n"):
                return
            yield line


def check_token_ids(value: Any, where: str, key: str) -> list[int]:
    """Return `value` if it is a non-empty list of integers in [0, 2**31), else raise ValueError naming `key`."""
    if not isinstance(value, list) or not value:
        raise ValueError(f"{where}: `{key}` must be a non-empty list of token ids")
    for token_id in value:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
            raise ValueError(f"{where}: `{key}` must hold integers >= 0, got {token_id!r}")
        if token_id >= NUM_TOKEN_IDS:
            raise ValueError(f"{where}: `{key}` must hold integers below 2**31, got {token_id}")
    return value


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


def differences(stored: Mapping[str, Any], wanted: Mapping[str, Any], where: str) -> list[str]:
    """One phrase, `NAME is OLD WHERE, NEW now`, for each setting in which the two differ; one that is not there is
    None."""
    return [
        f"{name} is {stored.get(name)!r} {where}, {wanted.get(name)!r} now"
        for name in sorted(stored.keys() | wanted.keys())
        if stored.get(name) != wanted.get(name)
    ]
