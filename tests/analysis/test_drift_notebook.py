"""The notebook of the drift study runs on a tiny set of records, and is kept without outputs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from IPython.display import Markdown
from matplotlib.figure import Figure

from analysis.studies import study_records
from tests.analysis.made_up_drift import whole_study

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "analysis" / "notebooks" / "drift.ipynb"


def run(monkeypatch: pytest.MonkeyPatch, **replaced: str) -> tuple[dict[str, Any], list[str]]:
    """Run the cells without a kernel, which takes longer: the names that are left, and the pages shown beside plots."""
    shown: list[object] = []
    monkeypatch.setattr("IPython.display.display", shown.append)
    names: dict[str, Any] = {}
    for cell in nbformat.read(NOTEBOOK, as_version=4).cells:
        if cell.cell_type == "code":
            source = cell.source.replace("%matplotlib inline\n", "")
            for name, choice in replaced.items():
                source = re.sub(rf"^{name} = .*$", f"{name} = {choice}", source, flags=re.MULTILINE)
            exec(source, names)
    assert sum(isinstance(each, Figure) for each in shown) == 7
    return names, [each.data for each in shown if isinstance(each, Markdown)]


def test_the_notebook_runs_on_the_records_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    records = whole_study(num_layers=3, seeds=2)
    other = [
        {**record, "labels": {**record["labels"], "model": "Other"}} for record in records if record["name"] == "drift"
    ]
    lines = "".join(json.dumps(record) + "\n" for record in [*records, *other])
    (tmp_path / "drift.jsonl").write_text(lines, encoding="utf-8")
    monkeypatch.setenv("DRIFT_RESULTS", str(tmp_path))
    _, pages = run(monkeypatch, MODEL="'Other'", LOOKAHEAD="2")
    told = capsys.readouterr().out
    assert "models: Small-135M, Other" in told and "look-aheads of Other: [1, 2]" in told
    assert pages[0].startswith("**Does drift explain it?** ") and "| Other |" in pages[0]
    assert any("Other: what distance costs" in page for page in pages)


def test_the_notebook_runs_on_the_committed_records(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What a fresh clone does, from whatever folder its kernel runs in."""
    monkeypatch.delenv("DRIFT_RESULTS", raising=False)
    monkeypatch.chdir(tmp_path)
    names, pages = run(monkeypatch)
    assert "SmolLM2-135M-Instruct" in names["models"] and {record["name"] for record in names["records"]} == {
        "drift", "ablation", "relufication"
    }  # fmt: skip
    assert "24 models, seeds 0, 1, 2 |" in "".join(pages), "the repeat is not counted as more models"


def test_a_relative_path_of_records_starts_at_the_repository_root(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    everything = study_records()
    assert study_records("analysis/results") == everything
    assert study_records(str(ROOT / "analysis/results/drift_smollm2_cpu.jsonl")) == [
        record for record in everything if record["name"] == "drift"
    ]
    for nothing in ("no/such.jsonl", str(tmp_path)):
        with pytest.raises(FileNotFoundError, match=f"DRIFT_RESULTS={nothing}: .* a relative path starts at {ROOT}"):
            study_records(nothing)


def test_the_committed_notebook_has_no_outputs() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code and all(cell.outputs == [] and cell.execution_count is None for cell in code)
