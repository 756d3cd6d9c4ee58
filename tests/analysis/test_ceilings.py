"""Shares are of one ceiling per card: the highest that it was ever seen to reach."""

from pathlib import Path
from typing import Any

import pytest

import analysis.comparison
from analysis.comparison import CEILINGS_FILE, ceiling_text, ceilings_of, with_one_ceiling
from analysis.results import Record, make_record, read_records
from analysis.tables import all_tables
from data.files import read_json


def record(achieved: float, ceiling: float, name: str = "kernel", device: str = "Example GPU", **more: Any) -> Record:
    return make_record(
        name,
        {"operator": "sparse_mlp"},
        "us",
        10.0,
        "us",
        share_of_ceiling=achieved / ceiling,
        achieved_gb_per_s=achieved,
        ceiling_gb_per_s=ceiling,
        environment={"device": device},
        **more,
    )


def test_shares_are_of_the_highest_ceiling_of_the_card() -> None:
    slow, fast, other = record(2000.0, 4000.0), record(2000.0, 5000.0), record(2000.0, 2500.0, device="Other GPU")
    assert [one["share_of_ceiling"] for one in with_one_ceiling([slow, fast, other])] == [0.4, 0.4, 0.8]
    assert "ceiling 5000 GB/s read, the highest seen on this card" in ceiling_text(with_one_ceiling([slow, fast]))


def test_the_file_holds_where_these_records_are_lower(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text('{"Example GPU": {"read_gb_per_s": 8000.0}}')
    monkeypatch.setattr(analysis.comparison, "CEILINGS_FILE", tmp_path / "c.json")
    (found,) = with_one_ceiling([record(2000.0, 4000.0)])
    assert found["share_of_ceiling"] == 0.25 and found["ceiling_gb_per_s"] == 8000.0
    (table,) = all_tables([record(2000.0, 4000.0)])["kernel"]
    assert table.rows[0][table.columns.index("of the ceiling")] == "25.0 %"


def test_shares_of_links_and_records_without_one_are_left_alone() -> None:
    link = record(200.0, 400.0, name="communication")
    bare = {**record(2000.0, 4000.0), "share_of_ceiling": None}
    assert with_one_ceiling([link, bare, record(1.0, 9000.0)])[:2] == [link, bare]


def test_the_committed_file_is_no_lower_than_any_committed_record() -> None:
    """Raise the number in analysis/results/ceilings.json where a card was seen to be faster."""
    known = read_json(CEILINGS_FILE, dict[str, dict[str, float]])
    records = read_records(*sorted(CEILINGS_FILE.parent.glob("*.jsonl")))
    for device, ceilings in ceilings_of([one for one in records if one["environment"].get("device") != "cpu"]).items():
        for kind, ceiling in ceilings.items():
            assert known[device][kind] >= ceiling, (device, kind)
