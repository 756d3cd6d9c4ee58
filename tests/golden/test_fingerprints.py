"""The golden check's own reading and comparing: a changed bit is found, what is of the run is not."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from tests.golden.fingerprints import differences, read_entries


def written(folder: Path, weight: torch.Tensor, record: dict[str, Any], rows: np.ndarray) -> dict[str, dict[str, Any]]:
    """The entries of a folder that holds these, as a file of fingerprints would."""
    folder.mkdir()
    torch.save({"weight": weight}, folder / "layer.pt")
    save_file({"weight": weight}, folder / "layer.safetensors")
    rows.tofile(folder / "rows.mmap")
    (folder / "records.jsonl").write_text(json.dumps(record) + "\n")
    return json.loads(json.dumps(dict(read_entries(folder, "it"))))


def test_one_changed_bit_is_named_and_what_is_of_the_run_is_not(tmp_path: Path) -> None:
    weight, rows = torch.arange(20, dtype=torch.bfloat16), np.arange(20, dtype=np.float16)
    record = {"value": 1.5, "windows": {"nll": [0.1] * 20}, "config_hash": "a", "environment": {"date": "today"}}
    base = written(tmp_path / "base", weight, record, rows)
    again = record | {"config_hash": "b", "environment": {"date": "tomorrow"}, "added": 3}
    assert not differences(base, written(tmp_path / "again", weight, again, rows))
    last = weight.clone()
    last.view(torch.int16)[-1] ^= 1
    later = record | {"windows": {"nll": [*[0.1] * 19, 0.1000001]}}
    found = differences(base, written(tmp_path / "now", last, later, rows[::-1].copy()))
    named = [line.split(": ")[:2] for line in found]
    assert named == [
        ["it/layer.pt:weight", "sha256"],
        ["it/layer.safetensors:weight", "sha256"],
        ["it/records.jsonl:0", "windows.nll"],
        ["it/rows.mmap", "sha256"],
    ]
    assert differences(base, {}) == [f"{name}: missing" for name in base]
