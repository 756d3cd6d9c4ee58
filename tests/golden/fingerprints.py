"""What a file holds as named values that can be compared: tensors, arrays, JSON, JSON lines and text.

An entry is a flat dictionary, field -> value. A tensor's bytes are a sum with the first values beside it, so that a
difference can be read; the values of JSON are themselves, a long list is again a sum with its first values.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

Entry = dict[str, Any]

# What a file says of the run that made it, of its own bytes (its contents are compared instead), or under which
# version it was written. Left out wherever it stands.
OF_THE_RUN = frozenset(
    {"command_line", "git_commit", "commit", "dirty", "environment", "date", "created", "provenance", "training"}
    | {"seconds", "dense_seconds", "timing", "source", "source_fingerprint", "sources", "files", "sums", "samples"}
    | {"format_version", "config_hash", "fingerprint"}
)
LINE_OF_THE_RUN = ", commit "  # of a summary: machine, commit and date
# Hashes of other files, which differ with those files' manifests; as `file name: keys`.
IDENTITIES = {
    "budget": {"predictors"},
    "manifest": {"checkpoint", "predictors", "density_budget"},
    "relu_source": {"source"},
}
LONG = 8  # longer lists are summed


def read_entries(path: Path, name: str) -> Iterator[tuple[str, Entry]]:
    """Everything in a file or folder, by readable name below `name`."""
    if path.is_dir():
        for child in sorted(path.iterdir()):
            if not child.name.endswith((".tmp", ".lock", ".png", ".html")) and child.name != "tokenizer.json":
                yield from read_entries(child, f"{name}/{child.name}")
    elif path.suffix in (".pt", ".safetensors"):
        loaded = torch.load(path, weights_only=True) if path.suffix == ".pt" else load_file(path)
        for key, value in sorted(flat(loaded).items()):
            yield f"{name}:{key}", tensor_entry(value) if isinstance(value, torch.Tensor) else {"value": value}
    elif path.suffix == ".mmap":
        yield name, {"bytes": path.stat().st_size, "sha256": _sum(path.read_bytes())}
    elif path.suffix in (".json", ".gz"):
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        yield name, json_entry(json.loads(raw), path.name)
    elif path.suffix == ".jsonl":
        for number, line in enumerate(path.read_text().splitlines()):
            value = json.loads(line)
            yield f"{name}:{_line_name(value, number)}", json_entry(value, path.name)
    else:
        lines = path.read_text(errors="replace").splitlines(keepends=True)
        text = "".join(line for line in lines if LINE_OF_THE_RUN not in line)
        yield name, {"lines": text.count("\n"), "sha256": _sum(text.encode()), "first": text[:80]}


def tensor_entry(tensor: torch.Tensor) -> Entry:
    """Type, shape, bytes and the first values of a tensor."""
    raw = tensor.detach().contiguous().flatten()
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "sha256": _sum(raw.view(torch.uint8).numpy().tobytes()),
        "first": raw[:4].tolist(),
    }


def json_entry(value: Any, file_name: str = "") -> Entry:
    """The leaves of a JSON value, without what is of the run."""
    left_out = OF_THE_RUN.union(*(keys for part, keys in IDENTITIES.items() if part in file_name))
    return {key: _short(leaf) for key, leaf in flat(value, left_out).items()}


def flat(value: Any, left_out: frozenset[str] = frozenset(), prefix: str = "") -> Entry:
    """Nested dictionaries as one, keys joined by dots; lists of numbers and texts are leaves."""
    if isinstance(value, Mapping):
        children = ((str(key), child) for key, child in value.items() if key not in left_out)
    elif isinstance(value, list) and any(isinstance(child, Mapping | list) for child in value):
        children = ((str(position), child) for position, child in enumerate(value))
    else:
        return {prefix: value}
    found: Entry = {}
    for key, child in children:
        found |= flat(child, left_out, f"{prefix}.{key}" if prefix else key)
    return found


def differences(base: Mapping[str, Entry], now: Mapping[str, Entry]) -> list[str]:
    """A line per entry of `base` that is missing in `now`, and per field that differs; `now` may hold more."""
    lines = []
    for name, entry in base.items():
        if name not in now:
            lines.append(f"{name}: missing")
            continue
        for field, value in entry.items():
            found = now[name].get(field, "(missing)")
            if json.dumps(found) != json.dumps(value):  # as the file holds them: nan equals nan, 0.0 is not -0.0
                lines.append(f"{name}: {field}: {value} -> {found}")
    return lines


def _line_name(value: Any, number: int) -> str:
    return f"{number}" if not isinstance(value, dict) or "id" not in value else f"{value['id']}"


def _short(leaf: Any) -> Any:
    if not isinstance(leaf, list) or len(leaf) <= LONG:
        return leaf
    return f"{len(leaf)} values, {_sum(json.dumps(leaf).encode())[:16]}, first {leaf[:4]}"


def _sum(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()
