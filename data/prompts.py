"""The prompts of `infer`, one JSON line each.

A line holds `prompt` or `prompt_token_ids` (never both), and optionally `id` (default: the line number) and its own
options (OPTIONS below); an option left out, or null, is the command line's. Anything else on the line is an
error that names the line and the key.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

from data.files import check_token_ids, read_json_lines

OPTIONS = ("max_new_tokens", "temperature", "top_k", "top_p", "seed", "stop")
PROMPT_KEYS = ("id", "prompt", "prompt_token_ids", *OPTIONS)


def check_option(name: str, value: Any, where: str) -> Any:
    """Return the value of one of OPTIONS as requests hold it; ValueError says `where`, and what is allowed.

    max_new_tokens >= 0 (0 only scores the prompt); temperature >= 0 (0 is greedy); top_k >= -1 (-1 and 0: all, as -1);
    0 < top_p <= 1; 0 <= seed < 2**63; stop: a non-empty string or a list of them.
    """
    if name == "stop":
        stops = [value] if isinstance(value, str) else value
        if not isinstance(stops, list | tuple) or not all(isinstance(stop, str) and stop for stop in stops):
            raise ValueError(f"{where}: `stop` must be a non-empty string or a list of them, got {value!r}")
        return tuple(stops)
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if is_integer and value >= 2**63:
        raise ValueError(f"{where}: `{name}` must be below 2**63, got {value}")
    is_number = is_integer or (isinstance(value, float) and math.isfinite(value))
    allowed, holds = {
        "max_new_tokens": ("an integer >= 0", is_integer and value >= 0),
        "temperature": ("a number >= 0", is_number and value >= 0),
        "top_k": ("-1 or 0 (all tokens) or an integer >= 1", is_integer and value >= -1),
        "top_p": ("a number in (0, 1]", is_number and 0 < value <= 1),
        "seed": ("an integer in [0, 2**63)", is_integer and 0 <= value < 2**63),
    }[name]
    if not holds:
        raise ValueError(f"{where}: `{name}` must be {allowed}, got {value!r}")
    if name == "top_k" and value == 0:
        return -1  # the same to Hugging Face, and one value here
    return float(value) if name in ("temperature", "top_p") else value


def seed_of(request_id: str | int, seed: int) -> int:
    """The seed, of a run's `seed`, of a request that has none: it hangs on the id, not on the place among others, so
    that equal prompts differ and a resumed run draws what an uninterrupted one does."""
    digest = hashlib.sha256(f"{seed} {request_id}".encode("utf-8", "backslashreplace")).digest()
    return int.from_bytes(digest[:8]) >> 1


def read_prompts(path: str | Path) -> list[dict[str, Any]]:
    """All lines, read strictly and before any of them is run; blank ones are passed over. Each has its `id` and only
    what it says itself: `prompt` or `prompt_token_ids`, and options as `check_option` gives them.

    ValueError names file, line and key; FileNotFoundError the file.
    """
    path = Path(path)
    requests: list[dict[str, Any]] = []
    lines: dict[str, int] = {}
    for line_number, record in read_json_lines(path):
        where = f"{path} line {line_number}"
        request = _parse_request(record, line_number, where)
        first = lines.setdefault(str(request["id"]), line_number)
        if first != line_number:
            raise ValueError(
                f"{where}: `id` {request['id']!r} is already that of line {first} (default: the line number)"
            )
        requests.append(request)
    if not requests:
        raise ValueError(f"{path} holds no prompts")
    return requests


def _parse_request(record: dict[str, Any], line_number: int, where: str) -> dict[str, Any]:
    unknown = [key for key in record if key not in PROMPT_KEYS]
    if unknown:
        raise ValueError(f"{where}: unknown key `{unknown[0]}`; allowed: {', '.join(PROMPT_KEYS)}")
    given = {"id": line_number} | {key: value for key, value in record.items() if value is not None}
    if ("prompt" in given) == ("prompt_token_ids" in given):
        found = "both" if "prompt" in given else "neither"
        raise ValueError(f"{where}: give either `prompt` or `prompt_token_ids`, found {found}")
    if not isinstance(given["id"], str | int) or isinstance(given["id"], bool):
        raise ValueError(f"{where}: `id` must be a string or an integer, got {given['id']!r}")
    if not isinstance(given.get("prompt", ""), str):
        raise ValueError(f"{where}: `prompt` must be a string, got {type(given['prompt']).__name__}")
    if "prompt_token_ids" in given:
        check_token_ids(given["prompt_token_ids"], where, "prompt_token_ids")
    return given | {name: check_option(name, given[name], where) for name in OPTIONS if name in given}
