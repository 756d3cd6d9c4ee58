from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from analysis.results import append_record
from scripts.summarize import SummarizeOptions, main
from tests.sparse_predictor.tiny_stages import one_error_line

ROOT = Path(__file__).parents[2]


def summarize(*flags: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "scripts.summarize", *map(str, flags)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_the_stage_writes_tables_plots_and_a_report(tmp_path: Path, sample_records: list[dict[str, Any]]) -> None:
    for i, record in enumerate(sample_records):
        append_record(tmp_path / f"part{i % 2}.jsonl", record)
    output_dir = tmp_path / "summary"
    done = summarize(
        "--results", tmp_path / "part0.jsonl", tmp_path / "part1.jsonl", "--output-dir", output_dir, "--quiet"
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "found: Tiny|<b>model</b>, " in done.stdout and "It is ahead of CATS" in done.stdout
    assert done.stdout.splitlines()[-1] == f"report: {output_dir / 'report.html'}"
    assert sum(line.lstrip().startswith("0.5") for line in done.stdout.splitlines()) == 6
    assert len(list(output_dir.glob("*.png"))) == 5
    assert "| predictor |" in (output_dir / "summary.md").read_text()
    assert (output_dir / "report.html").read_text().count("data:image/png") == 5


def test_the_readme_is_rewritten_and_a_second_run_changes_nothing(
    tmp_path: Path, sample_records: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    results, readme = tmp_path / "results.jsonl", tmp_path / "README.md"
    for record in sample_records:
        append_record(results, record)
    readme.write_text("<!-- table:main -->\n<!-- /table:main -->\n")
    options = SummarizeOptions(results=(results,), output_dir=tmp_path / "out", readme=(readme,), quiet=True)
    main(options)
    first = {path.name: path.read_bytes() for path in (*tmp_path.glob("out/*"), readme)}
    main(options)
    assert {path.name: path.read_bytes() for path in (*tmp_path.glob("out/*"), readme)} == first
    assert "| predictor |" in readme.read_text()
    assert "report: " in capsys.readouterr().out


def test_only_the_named_tables_are_rewritten(
    tmp_path: Path, sample_records: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scripts.summarize.all_figures", lambda *given: {})  # drawing takes longer than all else here
    results, readme = tmp_path / "results.jsonl", tmp_path / "README.md"
    for record in sample_records:
        append_record(results, record)
    markers = "<!-- table:main -->\n<!-- /table:main -->\n<!-- table:equal_bytes -->\n<!-- /table:equal_bytes -->\n"
    readme.write_text(markers)
    options = SummarizeOptions(
        results=(results,), output_dir=tmp_path / "out", readme=(readme,), tables=("equal_bytes",), quiet=True
    )
    main(options)
    text = readme.read_text()
    assert "<!-- table:main -->\n<!-- /table:main -->\n" in text and "| MLP bytes read |" in text
    with pytest.raises(ValueError, match="tables cooking: these records make main, "):
        main(replace(options, tables=("cooking",)))
    assert readme.read_text() == text


def test_tables_go_to_whichever_file_has_their_markers(
    tmp_path: Path, sample_records: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scripts.summarize.all_figures", lambda *given: {})
    results, first, second = tmp_path / "results.jsonl", tmp_path / "README.md", tmp_path / "results.md"
    for record in sample_records:
        append_record(results, record)
    first.write_text("<!-- table:main_short -->\n<!-- /table:main_short -->\n")
    second.write_text("<!-- table:main -->\n<!-- /table:main -->\n")
    options = SummarizeOptions(results=(results,), output_dir=tmp_path / "out", readme=(first, second), quiet=True)
    main(options)
    assert "| 0.5 | predictor | 1.250× |" in first.read_text() and "| 0.5 | random |" not in first.read_text()
    assert "Measured on Example CPU" in first.read_text() and "| 0.5 | random |" in second.read_text()
    second.write_text("nothing")
    first.write_text("nothing")
    with pytest.raises(ValueError, match="README.md, .*results.md: have none of the markers <!-- table:main -->"):
        main(options)


def test_bad_results_are_one_line_and_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--results", tmp_path / "none.jsonl", "--output-dir", tmp_path / "out"]
    missing = one_error_line(main, SummarizeOptions, flags, capsys)
    assert "none.jsonl: no such file of result records" in missing
    (tmp_path / "bad.jsonl").write_text("not json\n")
    invalid = summarize("--results", tmp_path / "bad.jsonl", "--output-dir", tmp_path / "out")
    assert invalid.returncode == 2
    assert invalid.stderr.count("\n") == 1 and "bad.jsonl, line 1: not a result record" in invalid.stderr
    assert not (tmp_path / "out").exists()
