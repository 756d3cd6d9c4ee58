from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from analysis.comparison import compare, contradictions, latest_records
from analysis.formatting import Table, format_number, format_ratio, format_share
from analysis.results import make_record, read_records
from analysis.tables import (
    all_tables,
    environment_lines,
    main_tables,
    record_tables,
    replace_snippets,
    summary_markdown,
    update_readmes,
)

Records = list[dict[str, Any]]


def test_the_main_table_lines_quality_up_with_speed(sample_records: Records) -> None:
    (table,) = main_tables(sample_records)
    assert table.title == "Tiny|<b>model</b>, wikitext:test"
    assert len(table.rows) == 19
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    assert rows[0]["method"] == "dense" and rows[0]["perplexity"] == "20.0"
    assert [row["MLP density"] for row in rows] == ["1.0"] + ["0.7"] * 6 + ["0.5"] * 6 + ["0.3"] * 6
    assert [row["method"] for row in rows[7:13]] == ["oracle", "predictor", "cats", "teal", "static", "random"]
    predictor = rows[8]
    assert predictor == {
        "MLP density": "0.5",
        "method": "predictor",
        "perplexity": "25.0",
        "ratio to dense": "1.250×",
        "recall": "90.0 %",
        "precision": "90.0 %",
        "achieved MLP density": "50.4 %",
        "MLP bytes read": "55.0 %",
        "tokens/s dense": "30.0",
        "tokens/s sparse": "42.86",
        "phase": "all",
    }
    assert rows[10]["tokens/s sparse"] == "–"
    assert table.caption == "window 2048, num tokens 4096, batch size 1, dtype float32, seed 0"


def test_rows_that_differ_only_in_a_hidden_label_say_so(sample_records: Records) -> None:
    wanted = {"method": "predictor", "mlp_density": 0.5, "phase": "all"}
    (first,) = (record for record in sample_records if wanted.items() <= record["labels"].items())
    again = {**first, "labels": {**first["labels"], "label": "linear"}}
    found = {row.variant for row in compare([*sample_records, again]) if row.method == "predictor"}
    assert found == {"predictor", "predictor, linear"}
    assert len(compare([*sample_records, again])) == len(compare(sample_records)) + 1


def scored(value: float, sources: dict[str, str] | None = None, **labels: Any) -> dict[str, Any]:
    settings = {
        "model": "m",
        "task": "perplexity:c4",
        "method": "predictor",
        "mlp_density": 0.5,
        "phase": "all",
    } | labels
    more = {} if sources is None else {"sources": sources}
    more |= {"environment": {"device": "cpu", "date": "2026-01-02"}, "baseline": {"name": "dense", "value": 10.0}}
    return make_record("perplexity", settings, "perplexity", value, "", **more)


def variants(*records: dict[str, Any]) -> list[str]:
    return [row.variant for row in compare(records)]


def test_two_sets_of_predictors_are_two_rows_named_by_label_or_folder() -> None:
    first, second = {"predictors": "0123456789ab"}, {"predictors": "ba9876543210"}
    labelled = scored(11.0, first, label="refined"), scored(12.0, second, label="deja vu")
    assert variants(*labelled) == ["predictor, deja vu", "predictor, refined"]
    folders = scored(11.0, first, predictors="a"), scored(12.0, second, predictors="b")
    assert variants(*folders) == ["predictor, predictors a", "predictor, predictors b"]
    same_name = scored(11.0, first, predictors="a"), scored(12.0, second, predictors="a")
    assert variants(*same_name) == ["predictor, predictors 0123456789ab", "predictor, predictors ba9876543210"]
    assert len(compare([scored(11.0, first), scored(12.0, first)])) == 1, "the newest counts"


def test_a_folder_per_density_is_one_method() -> None:
    """As the recipe trains them; each for a budget of its own."""
    rows = [
        scored(11.0 + density, {"predictors": f"{density}"}, predictors=f"p_{density}", mlp_density=density, **trained)
        for density in (0.5, 0.3)
        for trained in ({"density_budget": "trained", "lookahead": 0, "standin_rank": 64},)
    ]
    assert variants(*rows) == ["predictor", "predictor"]
    uniform = scored(13.0, {"predictors": "x"}, predictors="u", mlp_density=0.5, lookahead=0, standin_rank=64)
    assert variants(*rows, uniform) == ["predictor", "predictor, budget trained", "predictor, budget trained"]


def test_qualities_of_one_run_that_differ_are_told() -> None:
    first, again, alike = scored(11.0), scored(12.0), scored(11.001)
    (line,) = contradictions([first, again])
    assert line == (
        "m, perplexity:c4, predictor, 0.5: 2 records of one perplexity lie between 11 and 12; tables show the newest"
    )
    assert (
        contradictions([first, alike, scored(12.0, label="other"), scored(13.0, {"predictors": "0123456789ab"})]) == []
    )


def test_a_look_ahead_or_no_stand_in_is_told_in_the_row() -> None:
    near, far = scored(11.0, lookahead=0, standin_rank=64), scored(12.0, lookahead=1, standin_rank=0)
    assert variants(near, far) == ["predictor, look-ahead 0, stand-in rank 64", "predictor, look-ahead 1, no stand-in"]
    assert variants(near, {**far, "labels": {**far["labels"], "label": "far"}}) == ["predictor", "predictor, far"]


def test_a_speed_of_other_predictors_is_not_the_speed_of_a_row() -> None:
    ours = {"checkpoint": "c", "predictors": "0123456789ab", "density_budget": "b"}
    quality = scored(11.0, ours)
    for changed, expected in (({}, 42.0), ({"predictors": "ba9876543210"}, None), ({"density_budget": "z"}, None)):
        speed = {**quality, "name": "decode", "metric": "tokens_per_s", "value": 42.0, "unit": "tokens/s"}
        speed = {**speed, "sources": {**ours, **changed}}
        assert compare([quality, speed])[0].tokens_per_s == expected
        speed = {**speed, "labels": {**speed["labels"], "phase": "decode"}}
        assert compare([quality, speed])[0].tokens_per_s is None, "another phase"


def test_the_main_table_says_what_each_number_was_measured_on() -> None:
    ours = {"checkpoint": "c", "predictors": "0123456789ab", "density_budget": "b"}
    quality = {
        **scored(12.0, ours, calibration_tokens=16384, converted_from="small.Q4_1.gguf"),
        "ratio_interval": [1.15, 1.26],
        "windows": {"nll": [1.0] * 70, "tokens": [9] * 70},
        "first_windows": {"num": 60, "perplexity": 11.5, "dense": 9.5},
        "achieved": {"mlp_density": 0.5},
        "quality": {"recall": 0.6, "precision": 0.6, "windows": 4},
    }
    speed = {**quality, "name": "decode", "metric": "tokens_per_s", "value": 42.0, "unit": "tokens/s"}
    speed |= {"achieved": {"mlp_density": 0.4}, "timing": {"samples": [41.0, 43.0]}}
    task = {**quality, "name": "accuracy", "metric": "acc", "achieved": {"mlp_density": 0.54}}
    task["labels"] = {**quality["labels"], "task": "boolq"}
    other = {**task, "sources": {**ours, "predictors": "x"}, "achieved": {"mlp_density": 0.1}}
    (table,) = main_tables([quality, speed, task, other])
    row = dict(zip(table.columns, table.rows[0], strict=True))
    assert row["ratio to dense"] == "1.200× [1.150×, 1.260×]" and row["of the first windows"] == "11.50"
    assert (row["achieved MLP density"], row["generating"], row["on tasks"]) == ("50.0 %", "40.0 %", "54.0 %")
    assert row["tokens/s sparse"] == "42.0 [41.0, 43.0]"
    for words in (
        "70 windows scored",
        "95 % intervals over windows",
        "first windows: 60 of them",
        "recall and precision on 4 windows",
        "weights have the values of small.Q4_1.gguf",
        "thresholds set, and refined predictors chosen, on 16384 other tokens",
    ):
        assert words in table.caption


def test_speeds_of_several_calls_are_medians_with_ranges() -> None:
    def call(value: float, *samples: float) -> dict[str, Any]:
        environment = {"device": "Example GPU", "date": "2026-01-02"}
        more = {"timing": {"samples": list(samples)}, "baseline": {"name": "dense", "value": 10.0}}
        return make_record(
            "decode", {"method": "x"}, "tokens_per_s", value, "tokens/s", environment=environment, **more
        )

    (merged,) = latest_records([call(20.0, 19.0, 20.0, 25.0), call(30.0, 30.0), call(22.0, 22.0, 21.0)])
    assert (merged["value"], merged["calls"], merged["range"]) == (22.0, 3, [19.0, 30.0])
    assert (merged["ratio"], merged["ratio_range"]) == (2.2, [2.0, 3.0])
    same = call(20.0, 20.0)
    (merged,) = latest_records([same, dict(same)])
    assert (merged["calls"], merged["range"]) == (1, None), "a record that is in two files is one call"
    faster = {**call(40.0, 40.0), "environment": {**same["environment"], "commit": "abc", "date": "2027-01-01"}}
    (merged,) = latest_records([same, faster, call(22.0, 22.0)])
    assert (merged["value"], merged["calls"]) == (40.0, 1), "only the calls of the newest's commit are of one code"


def test_the_newest_counts_whatever_order_files_are_read_in_and_the_last_without_dates(sample_records: Records) -> None:
    kept = latest_records([*sample_records, {**sample_records[0], "value": 21.0}])
    assert len(kept) == len(sample_records) and kept[-1]["value"] == 21.0
    stamp = sample_records[0]["environment"]
    newer = {**sample_records[0], "value": 21.0, "environment": {**stamp, "date": "2026-03-01T00:00:00+00:00"}}
    for order in ([sample_records[0], newer], [newer, sample_records[0]]):
        assert latest_records(order) == [newer]


def test_speeds_of_two_devices_are_two_measurements_and_perplexities_one(sample_records: Records) -> None:
    speed = next(record for record in sample_records if record["name"] == "decode")
    for record, num_kept in ((speed, 2), (sample_records[0], 1)):
        elsewhere = {**record, "environment": {**record["environment"], "cpu": "Another CPU"}}
        assert len(latest_records([record, elsewhere])) == num_kept
    elsewhere = {**speed, "environment": {**speed["environment"], "cpu": "Another CPU"}}
    (table,) = record_tables([speed, elsewhere], "decode")
    assert table.columns[0] == "device"
    assert [row[0] for row in table.rows] == ["Example CPU <1>", "Another CPU"]


def test_a_record_table_has_a_column_for_what_varies_only(sample_records: Records) -> None:
    decodes = [record for record in sample_records if record["name"] == "decode"]
    (table,) = record_tables(decodes, "decode")
    assert table.columns == (
        "method", "mlp_density", "metric", "value", "unit", "baseline", "baseline value", "ratio",
    )  # fmt: skip
    assert "phase decode" in table.caption and "batch_size 1" in table.caption


def test_markdown_escapes_what_would_break_the_table(sample_records: Records) -> None:
    page = summary_markdown(sample_records)
    assert "Tiny\\|&lt;b>model&lt;/b>" in page
    table_lines = [line for line in page.splitlines() if line.startswith("| 0.5 |")]
    assert len(table_lines) == 6
    assert {line.count(" | ") for line in table_lines} == {10}


def test_text_tables_align_their_columns() -> None:
    table = Table(title="", columns=("method", "value"), rows=(("dense", "20.0"), ("predictor", "125.0")))
    assert table.to_text().splitlines() == [
        "method     value",
        "---------  -----",
        "dense       20.0",
        "predictor  125.0",
    ]


def test_environments_are_named_once_with_the_span_of_dates(sample_records: Records) -> None:
    later = {
        **sample_records[0],
        "environment": {**sample_records[0]["environment"], "date": "2026-02-01T00:00:00"},
    }
    assert environment_lines([*sample_records, later]) == [
        "Example CPU <1>, 2 cores, torch 2.13.0, triton 3.7.1, python 3.11.7, "
        "commit 0123456789ab with local changes; 2026-01-02 to 2026-02-01"
    ]


def test_readme_tables_are_rewritten_between_their_markers(tmp_path: Path, sample_records: Records) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(
        "# Title\n<!-- table:main -->\nold\n<!-- /table:main -->\ntext\n"
        "<!-- table:kernel -->\nkept\n<!-- /table:kernel -->\nend\n"
    )
    assert update_readmes([readme], sample_records) == {readme: ["main"]}
    once = readme.read_text()
    assert "old" not in once and "| 0.5 | predictor | 25.0 | 1.250× |" in once and "Measured on" in once
    assert once.startswith("# Title\n<!-- table:main -->\n**") and once.endswith("kept\n<!-- /table:kernel -->\nend\n")
    update_readmes([readme], sample_records)
    assert readme.read_text() == once


def test_a_readme_table_names_the_machines_of_its_own_records(tmp_path: Path, sample_records: Records) -> None:
    elsewhere = {**sample_records[0]["environment"], "cpu": "Another CPU"}
    prefill = make_record("prefill", {"tp_size": 2}, "tokens_per_s", 5.0, "tokens/s", environment=elsewhere)
    readme = tmp_path / "README.md"
    readme.write_text("<!-- table:main -->\n<!-- /table:main -->\n<!-- table:prefill -->\n<!-- /table:prefill -->\n")
    update_readmes([readme], [*sample_records, prefill])
    main, _, other = readme.read_text().partition("<!-- table:prefill -->")
    assert "Example CPU" in main and "Another CPU" not in main
    assert "Another CPU" in other and "Example CPU" not in other


def test_readme_faults_are_named(tmp_path: Path, sample_records: Records) -> None:
    readme = tmp_path / "README.md"
    with pytest.raises(FileNotFoundError, match="no such Markdown file"):
        update_readmes([readme], sample_records)
    readme.write_text("nothing")
    with pytest.raises(ValueError, match="has none of the markers <!-- table:main -->"):
        update_readmes([readme], sample_records)
    for text in ("<!-- table:main -->", "<!-- /table:main --><!-- table:main -->"):
        with pytest.raises(ValueError, match="one <!-- /table:main --> after it"):
            replace_snippets(text, {"main": "x"})
    text, _ = replace_snippets("a <!-- table:x -->\n<!-- /table:x --> b", {"x": r"\1 \g<0> |"})
    assert text == "a <!-- table:x -->\n\\1 \\g<0> |\n<!-- /table:x --> b", "taken literally"


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (None, "–"), (0, "0"), (0.0, "0.0"), (1.0, "1.0"), (0.5, "0.5"), (0.0123, "0.0123"),
        (27.1349, "27.13"),
        (1.00004, "1.000"), (388418.0, "388418"), (2048, "2048"), (3.2e9, "3.2e+09"), (1e-5, "1e-05"),
        (float("inf"), "inf"),
    ],
)  # fmt: skip
def test_numbers_are_shown_with_four_digits(number: float | None, text: str) -> None:
    assert format_number(number) == text


def test_ratios_and_shares() -> None:
    assert [format_ratio(1.25), format_ratio(19421.0), format_ratio(None)] == ["1.250×", "1.942e+04×", "–"]
    assert [format_share(0.5), format_share(None), format_share(float("nan"))] == ["50.0 %", "–", "–"]


def test_all_committed_records_together_make_every_table() -> None:
    committed = Path(__file__).parents[2] / "analysis" / "results"
    tables = all_tables(read_records(*sorted(committed.glob("*.jsonl"))))
    assert {"main", "accuracy", "decode", "drift", "ablation", "relufication"} <= tables.keys()
