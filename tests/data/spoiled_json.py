"""Valid JSON with one value after another replaced by what a damaged or a strange file may hold there."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

# As JSON text, since Python's writer would refuse some.
BAD_VALUES = (
    "null", "true", "-1", "0", "1.5", "1e30", "1" + "0" * 30, "NaN", "Infinity", '""', '"x"', '"../x"', "[]", "[1]",
    "[null]", '["1"]', "{}", '{"a": 1}', "[" * 3000 + "]" * 3000, '{"a":' * 3000 + "1" + "}" * 3000,
    "[" + "0," * 5000 + "0]",
)  # fmt: skip
MARK = "<spoiled>"


def spoiled(valid: Any, *, max_items: int = 2) -> Iterator[tuple[str, bytes]]:
    """(which key has which value, the text) for each key in `valid`, of long lists the first few, and for each bad
    value; and with each key left out."""
    for path in _paths(valid, max_items):
        marked = copy.deepcopy(valid)
        *parents, last = path
        place = marked
        for key in parents:
            place = place[key]
        place[last] = MARK
        text = json.dumps(marked)
        for value in BAD_VALUES:
            yield f"{path}: {value[:30]}", text.replace(f'"{MARK}"', value, 1).encode()
        del place[last]
        yield f"{path}: left out", json.dumps(marked).encode()


def _paths(value: Any, max_items: int) -> Iterator[tuple[Any, ...]]:
    keys = (
        list(value)
        if isinstance(value, dict)
        else list(range(len(value)))[:max_items]
        if isinstance(value, list)
        else []
    )
    for key in keys:
        yield (key,)
        for rest in _paths(value[key], max_items):
            yield (key, *rest)
