"""Result records -> a Markdown summary, plots and one self-contained HTML report.

python -m scripts.summarize --results outputs/smollm2/results.jsonl --output-dir outputs/smollm2/summary
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from loguru import logger

from analysis.comparison import contradictions
from analysis.report import all_figures, build_report, save_figures
from analysis.results import read_records
from analysis.rivals import findings
from analysis.tables import environment_lines, quality_tables, summary_markdown, update_readmes
from data.files import disk_errors, replace_file
from scripts.command_line import progress, run_stage


@dataclass(frozen=True, kw_only=True)
class SummarizeOptions:
    """Turns result records into tables, plots and a self-contained HTML report."""

    results: tuple[Path, ...]
    """One or more files of result records (JSON lines)."""
    output_dir: Path
    """Folder for summary.md, report.html and the PNG plots."""
    title: str = "dejavu-lab report"
    """Title of the report."""
    readme: tuple[Path, ...] = ()
    """Markdown files whose tables between `<!-- table:NAME -->` and `<!-- /table:NAME -->` are rewritten."""
    tables: tuple[str, ...] = ()
    """Of --readme: rewrite only the tables of these names."""
    quiet: bool = False
    """No progress bars, only warnings."""


def main(options: SummarizeOptions) -> None:
    if not options.results:
        raise ValueError("--results needs at least one file of result records")
    records = read_records(*options.results)
    for line in contradictions(records):
        logger.warning(line)
    output_dir, report = options.output_dir, options.output_dir / "report.html"
    figures = all_figures(records)
    with disk_errors(output_dir):
        output_dir.mkdir(parents=True, exist_ok=True)
        plots = save_figures(progress(figures.items(), "plots", quiet=options.quiet, unit="plot"), output_dir)
        replace_file(output_dir / "summary.md", summary_markdown(records).encode())
        replace_file(report, build_report(records, title=options.title, figures=plots).encode())
    if options.readme:
        for path, names in update_readmes(options.readme, records, options.tables).items():
            logger.info(f"{path}: rewrote {', '.join(names) or 'nothing'}")

    for table in quality_tables(records):
        print(table.to_text(), end="\n\n")
    for line in environment_lines(records):
        print(f"measured on {line}")
    for sentence in findings(records):
        print(f"found: {sentence}")
    print(f"report: {report.resolve()}")


if __name__ == "__main__":
    run_stage(main, SummarizeOptions)
