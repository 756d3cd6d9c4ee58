"""JSON-lines files, plain or gzipped, read strictly: every complaint names the file and the line."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
