"""One ceiling per card: the fastest that it was ever seen to read, and to multiply matrices.

A process measures between 4,060 and 4,355 GB/s on one and the same H200, so shares of what each process measured cannot
be compared. `results/ceilings.json` holds the maximum by device name; a test holds it to the committed records.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from analysis.comparison import device_of
from analysis.results import Record
from data.files import read_json

FILE = Path(__file__).parent / "results" / "ceilings.json"
Kind = Literal["read_gb_per_s", "matmul_tflops"]
# What a record measured of the card, and what it is a ceiling of. Of a link between cards there is another.
MEASURED: dict[str, tuple[str, Kind]] = {
    "ceiling_gb_per_s": ("achieved_gb_per_s", "read_gb_per_s"),
    "ceiling_gb_per_s_each": ("achieved_gb_per_s_each", "read_gb_per_s"),
    "ceiling_tflops_each": ("tflops_each", "matmul_tflops"),
}
OF_LINKS = "communication"

Ceilings = dict[str, dict[Kind, float]]


def ceilings_of(records: Iterable[Record]) -> Ceilings:
    """The highest of each kind by device: of the file and of these records."""
    found: Ceilings = {device: dict(known) for device, known in read_json(FILE, Ceilings).items()}
    for record in records:
        known = found.setdefault(device_of(record), {})
        for name, (_, kind) in MEASURED.items():
            if record.get(name) and record["name"] != OF_LINKS:
                known[kind] = max(known.get(kind, 0.0), record[name])
    return found


def with_one_ceiling(records: Sequence[Record]) -> list[Record]:
    """The records, each share of a ceiling taken anew from the one of its card."""
    ceilings = ceilings_of(records)
    return [_of_the_card(record, ceilings) for record in records]


def _of_the_card(record: Record, ceilings: Ceilings) -> Record:
    if record.get("share_of_ceiling") is None or record["name"] == OF_LINKS:
        return record
    for name, (achieved, kind) in MEASURED.items():
        if record.get(name) and record.get(achieved):
            ceiling = ceilings[device_of(record)][kind]
            return {**record, name: ceiling, "share_of_ceiling": record[achieved] / ceiling}
    return record


def ceiling_text(records: Sequence[Record]) -> str:
    """For a caption: the ceilings that the shares of these records are of."""
    found: dict[str, None] = {}
    for record in records:
        for name, (_, kind) in MEASURED.items():
            if record.get("share_of_ceiling") is not None and record.get(name):
                unit = "GB/s read" if kind == "read_gb_per_s" else "TFLOP/s"
                found[f"{record[name]:.0f} {unit}"] = None
    return f"ceiling {' and '.join(found)}, the highest seen on this card" if found else ""
