"""What the campaign does to files and flags: damage to bytes, bad values in JSON, random words on a command line."""

from __future__ import annotations

import gzip
import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

DEEP = 10_000
# A text that stands in for what json.dumps cannot write.
RAW = {
    "@deep list": "[" * DEEP + "]" * DEEP,
    "@deep object": '{"a":' * DEEP + "1" + "}" * DEEP,
    "@nan": "NaN",
    "@infinite": "1e400",
    "@long number": "9" * 5000,
    "@half surrogate": '"\\ud800"',
}
BAD_VALUES: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 0.5, -0.5, 1e30, 10**6, 2**63, -(2**70), "x", "", "../x", "\0", "ééé",
    "x" * 1_000_000, [], {}, [1], [[]], [None], {"a": 1}, {"": None}, *RAW,
)  # fmt: skip
MISSING, EXTRA = "missing key", "extra key"

BAD_NUMBERS = ("nan", "inf", "-inf", "-1", "0", "1", "2", "0.3", "1.5", "1e30", "-1e-9", "9" * 20, "9" * 400)
BAD_INTEGERS = ("-1", "0", "1", "2", "7", "-" + "9" * 20, "9" * 20, "9" * 400)
BAD_WORDS = (
    *BAD_NUMBERS, "", "x", "none", "None", "auto", "True", "[]", "{}", "1,2", "0-1", "0-99999999999", "é☃", "\udcff",
    " ", "--", "-", ".", "..", "/", "/dev/null", "/dev/full", "/proc/self/mem", "no/such/file", "dangling", "hf",
    "tiny", "store", "tasks", "predictors", "prompts.jsonl", "budget.json", "answers.jsonl", "records.jsonl",
    "self", "self:x", "self:-1", "wikitext:", "no/model", "a/b/c", "predictor", "teal", "griffin", "float64", "cuda:99",
)  # fmt: skip


def damage(folder: Path, other: Path, draw: random.Random) -> tuple[str, Path, bool]:
    """Damage one file of an artefact (a file or a folder); `other` is another model's of the same kind.

    Returns what was done, the file, and whether only values may have changed: rows of JSON lines, bytes within a file
    of tensors, a whole one put in its place.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else [folder]
    file = draw.choice(files)
    way = draw.choice((*WAYS, "another model's", *(["swapped"] if len(files) > 1 else [])))
    # metrics.json and metrics.md are for people: nothing is computed from them.
    holds_values = file.suffix in (".pt", ".bin", ".mmap", ".safetensors", ".jsonl") or file.stem == "metrics"
    if way == "swapped":
        partner = draw.choice([path for path in files if path != file])
        alike = [path for path in files if path != file and path.stat().st_size == file.stat().st_size]
        partner = draw.choice(alike) if alike and draw.random() < 0.8 else partner
        first, second = file.read_bytes(), partner.read_bytes()
        file.write_bytes(second)
        partner.write_bytes(first)
        return f"{file.name} and {partner.name} swapped", file, holds_values
    if way == "another model's":
        source = other / file.relative_to(folder) if folder.is_dir() else other
        if source.is_file():
            shutil.copyfile(source, file)
        return f"{file.name}: {way}", file, holds_values
    WAYS[way](file, draw)
    return f"{file.name} {way}", file, holds_values and (file.suffix in (".jsonl", ".md", ".json") or way in IN_PLACE)


def _truncate(path: Path, draw: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: draw.randrange(max(1, path.stat().st_size))])


def _zero(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    start = draw.randrange(max(1, len(content)))
    content[start : start + 4096] = bytes(len(content[start : start + 4096]))
    path.write_bytes(content)


def _flip(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(draw.choice((1, 8)) if content else 0):
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def _append(path: Path, draw: random.Random) -> None:
    path.write_bytes(path.read_bytes() + draw.choice((b"garbage", b"\n{}\n", b"\0" * 4096, draw.randbytes(100))))


WAYS: dict[str, Callable[[Path, random.Random], Any]] = {
    "truncated": _truncate,
    "emptied": lambda path, _: path.write_bytes(b""),
    "removed": lambda path, _: path.unlink(),
    "4 KiB zeroed": _zero,
    "bits flipped": _flip,
    "garbage appended": _append,
}
IN_PLACE = ("4 KiB zeroed", "bits flipped")


def change_json(path: Path, draw: random.Random) -> str:
    """Give one key of a JSON file, or of one line of JSON lines, a bad value; returns what was done."""
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    lines = raw.decode().splitlines() if path.suffix == ".jsonl" else [raw.decode()]
    number = draw.randrange(len(lines))
    value = json.loads(lines[number])
    bad = draw.choice((*BAD_VALUES, MISSING, MISSING, EXTRA))
    where, changed = _change(value, bad, draw)
    text = json.dumps(changed)
    for mark, stands_for in RAW.items():
        text = text.replace(json.dumps(mark), stands_for)
    lines[number] = text
    raw = ("\n".join(lines) + "\n").encode()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    line = f" line {number + 1}" if path.suffix == ".jsonl" else ""
    return f"{path.name}{line}: {where or 'all of it'} = {repr(bad)[:40]}"


def _change(value: Any, bad: Any, draw: random.Random) -> tuple[str, Any]:
    """Where the change was made, and the value with it."""
    if not isinstance(value, dict | list) or not value:
        return "", bad
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key = draw.choice(keys)
    if isinstance(value[key], dict | list) and value[key] and draw.random() < 0.7:
        where, value[key] = _change(value[key], bad, draw)
        return f"{key}.{where}" if where else str(key), value
    if bad == MISSING:
        del value[key]
    elif bad == EXTRA:
        value.update(unheard_of=1) if isinstance(value, dict) else value.append(value[key])
    elif draw.random() < 0.03:
        return "", bad
    else:
        value[key] = bad
    return str(key), value


def flags_of(help_text: str) -> dict[str, str]:
    """What `--help` says of each flag's value: INT, FLOAT, {a,b}, ...; nothing for one without a value."""
    return dict(re.findall(r"^\W*(--[a-z][a-z0-9-]+) ?([A-Z{][^ ]*)?", help_text, re.MULTILINE))


def change_words(words: list[str], flags: dict[str, str], draw: random.Random) -> tuple[list[str], str]:
    """Between one and three changes to a command line: another value, no value, a flag more, twice or less."""
    words, done = list(words), []
    for _ in range(draw.choice((1, 1, 2, 3))):
        way = draw.choice(("value", "value", "value", "more", "more", "more", "less", "twice", "no value"))
        if way == "more":
            flag = draw.choice(sorted(flags))
            words += [flag, *_values(flags[flag], draw)]
            done.append(f"{flag} more")
            continue
        place = draw.choice([i for i, word in enumerate(words) if word.startswith("--") and word != "--quiet"] or [0])
        stop = next((i for i in range(place + 1, len(words)) if words[i].startswith("--")), len(words))
        flag, given = words[place], words[place + 1 : stop]
        done.append(f"{flag}: {way}")
        if way == "value":
            words[place + 1 : stop] = _values(flags.get(flag, ""), draw)
        elif way == "twice":
            words += [flag, *given]
        else:
            del words[place + (way == "no value") : stop]
    return words, "; ".join(done)


def _values(kind: str, draw: random.Random) -> list[str]:
    """A value that a flag of this kind takes and its stage may refuse; sometimes anything."""
    if draw.random() < 0.2:
        return [draw.choice(BAD_WORDS)]
    if kind.startswith("{") and "|" not in kind:
        return [draw.choice(kind.strip("{}[]").split(","))]
    if not kind:
        return []
    numbers = BAD_INTEGERS if "INT" in kind else BAD_NUMBERS
    return [draw.choice(numbers if "INT" in kind or "FLOAT" in kind else BAD_WORDS)]
