"""Accuracy records of a sweep become one table, whose means and standard errors are those of hand calculation."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from analysis.accuracy import TaskColumn, accuracy_tables, chance_of, compare_accuracy
from analysis.plots import accuracy_points, plot_accuracy, plot_accuracy_layers
from analysis.results import Record

Make = Callable[..., Record]


def table_rows(records: list[Record]) -> list[dict[str, str]]:
    (table,) = accuracy_tables(records)
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


def test_a_row_holds_every_task_the_mean_and_what_it_loses(accuracy_records: list[Record]) -> None:
    with_intervals = [
        {**record, "ratio_interval": [1.4, 1.6]} if record["name"] == "perplexity" else record
        for record in accuracy_records
    ]
    dense, *sparse = table_rows(with_intervals)
    assert [(row["MLP density"], row["method"]) for row in sparse] == [
        ("0.5", "oracle"), ("0.5", "predictor"), ("0.5", "random"),
        ("0.3", "oracle"), ("0.3", "predictor"), ("0.3", "random"),
    ]  # fmt: skip
    # Counted: 0.60 ± 0.03, 0.60 ± 0.04, 0.40 ± 0.04, 0.10 ± 0.03: mean 0.425, stderr sqrt(0.0050) / 4 = 0.0177.
    assert dense == {
        "MLP density": "1.0", "method": "dense", "arc_easy, acc_norm": "60.0 ± 3.0",
        "arithmetic_words, exact_match": "10.0 ± 3.0", "boolq, acc †": "55.0 ± 3.0",
        "lambada_openai, acc": "40.0 ± 4.0", "winogrande, acc": "60.0 ± 4.0",
        "mean": "42.5 ± 1.8", "to dense, points": "–",
        "small text, perplexity to dense": "1.000×", "achieved MLP density": "–", "MLP bytes read": "–",
        "tokens/s": "–", "speed to dense": "–",
    }  # fmt: skip
    # Each counted task 5 points lower, errors of both sides: sqrt(0.0050 + 0.0050) / 4 = 0.025.
    assert sparse[1] == {
        "MLP density": "0.5", "method": "predictor", "arc_easy, acc_norm": "55.0 ± 3.0",
        "arithmetic_words, exact_match": "5.0 ± 3.0", "boolq, acc †": "55.0 ± 3.0",
        "lambada_openai, acc": "35.0 ± 4.0", "winogrande, acc": "55.0 ± 4.0",
        "mean": "37.5 ± 1.8", "to dense, points": "-5.0 ± 2.5",
        "small text, perplexity to dense": "1.500× [1.400×, 1.600×]",
        "achieved MLP density": "51.0 %", "MLP bytes read": "58.0 %",
        "tokens/s": "500.0", "speed to dense": "1.250×",
    }  # fmt: skip


def test_the_caption_says_what_counts_and_under_which_conditions(accuracy_records: list[Record]) -> None:
    (table,) = accuracy_tables(accuracy_records)
    assert table.title == "Small: accuracy in % ± standard error"
    assert "The mean is over the 4 unmarked tasks" in table.caption
    assert "† dense is less than two standard errors above chance" in table.caption
    assert "Questions: arc_easy 400, arithmetic_words 100, boolq 277" in table.caption
    assert table.caption.endswith("Phase all, batch size 8, dtype bfloat16, weights trained, seed 0.")
    assert sum(table.numeric_columns()) == len(table.columns) - 1


def test_only_tasks_near_their_own_chance_are_marked(accuracy_record: Make) -> None:
    # 0.25 + 2 * 0.04 = 0.33 is the border of four choices, 0.5 + 2 * 0.04 = 0.58 of two.
    records = [
        accuracy_record("arc_challenge_local", "acc", 0.32, 0.04),
        accuracy_record("openbookqa", "acc", 0.34, 0.04),
        accuracy_record("rte", "acc", 0.57, 0.04),
        accuracy_record("winogrande", "acc", 0.59, 0.04),
        accuracy_record("unknown_task", "acc", 0.01, 0.04),
        accuracy_record("arithmetic_words", "exact_match", 0.0, 0.0),
    ]
    (found,) = compare_accuracy(records)
    assert {column.task for column in found.near_chance} == {"arc_challenge_local", "rte", "arithmetic_words"}
    assert {column.task for column in found.counted} == {"openbookqa", "winogrande", "unknown_task"}


@pytest.mark.parametrize(
    ("task", "metric", "chance"),
    [
        ("mmlu_anatomy", "acc", 0.25), ("boolq", "acc", 0.5), ("arc", "acc", None), ("hellaswagger", "acc_norm", None),
        ("gpqa_main_generative", "exact_match", None), ("lambada_openai", "acc", 0.0),
        ("lambada_openai", "perplexity", None),
    ],
)  # fmt: skip
def test_chance_follows_the_family_of_a_task(task: str, metric: str, chance: float | None) -> None:
    assert chance_of(TaskColumn(task=task, metric=metric, num_fewshot=0, num_samples=None)) == chance


def test_a_row_without_every_counted_task_has_no_mean(accuracy_records: list[Record]) -> None:
    kept = [
        record
        for record in accuracy_records
        if not (record["labels"]["task"] == "winogrande" and record["labels"]["method"] == "random")
    ]
    for row in table_rows(kept):
        assert (row["mean"] == "–") == (row["method"] == "random")
        assert (row["winogrande, acc"] == "–") == (row["method"] == "random")


def test_a_task_without_a_standard_error_leaves_the_mean_without_one(accuracy_record: Make) -> None:
    records = [accuracy_record("unknown", "acc", 0.5), accuracy_record("other", "acc", 0.7, 0.02)]
    (row,) = table_rows([*records, accuracy_record("other", "perplexity", 12.34, 0.5)])
    assert (row["unknown, acc"], row["other, acc"], row["mean"]) == ("50.0", "70.0 ± 2.0", "60.0")
    assert row["other, perplexity"] == "12.34"


def test_a_sparse_run_whose_calls_were_all_dense_is_marked(accuracy_record: Make) -> None:
    records = [
        accuracy_record("arc_easy", "acc", 0.6, 0.01),
        accuracy_record("arc_easy", "acc", 0.6, 0.01, method="cats", mlp_density=0.5, achieved={"sparse_calls": 0}),
    ]
    assert table_rows(records)[1]["arc_easy, acc"] == "60.0 ± 1.0 ‡"
    assert "‡ no call was sparse" in accuracy_tables(records)[0].caption


def test_samples_examples_and_settings_are_never_mixed(accuracy_record: Make) -> None:
    records = [
        accuracy_record("arc_easy", "acc", 0.6, 0.01),
        accuracy_record("arc_easy", "acc", 0.9, 0.1, num_samples=10),
        accuracy_record("arc_easy", "acc", 0.7, 0.01, num_fewshot=5),
        accuracy_record("arc_easy", "acc", 0.5, 0.01, dtype="float32"),
    ]
    rows = table_rows(records)
    assert [row["method"] for row in rows] == ["dense, dtype bfloat16", "dense, dtype float32"]
    assert [rows[0][f"arc_easy, acc{more}"] for more in (", 10 questions", ", 400 questions", ", 5-shot")] == [
        "90.0 ± 10.0", "60.0 ± 1.0", "70.0 ± 1.0",
    ]  # fmt: skip


def test_members_of_a_group_are_not_counted_again_and_have_a_table(accuracy_record: Make) -> None:
    records = [
        accuracy_record("arithmetic_words", "exact_match", 0.3, 0.01, num_samples=200, num_fewshot=None),
        accuracy_record("arithmetic_words_1", "exact_match", 0.5, 0.02, num_samples=100, num_fewshot=4),
        accuracy_record("arithmetic_words_2", "exact_match", 0.1, 0.02, num_samples=100, num_fewshot=4),
        accuracy_record("arc_easy", "acc", 0.5, 0.01),
        accuracy_record("arc_easy_local", "acc", 0.5, 0.01),
    ]
    (found,) = compare_accuracy(records)
    assert [column.task for column in found.columns] == ["arc_easy", "arc_easy_local", "arithmetic_words"]
    _, members = accuracy_tables(records)
    assert members.title == "Small: the tasks of arithmetic_words, in % ± standard error"
    names = [f"arithmetic_words_{steps}, exact_match, 4-shot" for steps in (1, 2)]
    assert members.columns == ("MLP density", "method", *names)
    assert members.rows == (("1.0", "dense", "50.0 ± 2.0", "10.0 ± 2.0"),)


def test_agreement_with_the_dense_answers_is_shown_and_not_counted(accuracy_record: Make) -> None:
    sparse = {"method": "predictor", "mlp_density": 0.5}
    records = [
        accuracy_record("arithmetic_words", "exact_match", 0.3, 0.01),
        accuracy_record("arithmetic_words", "exact_match", 0.2, 0.01, **sparse),
        accuracy_record("arithmetic_words", "agreement", 0.6, 0.02, **sparse),
    ]
    dense, row = table_rows(records)
    assert (dense["arithmetic_words, agreement"], row["arithmetic_words, agreement"]) == ("–", "60.0 ± 2.0")
    assert (row["mean"], row["to dense, points"]) == ("20.0 ± 1.0", "-10.0 ± 1.4")


def test_of_two_ways_to_read_an_answer_the_strict_one_counts(accuracy_record: Make) -> None:
    records = [
        accuracy_record("gsm8k", "exact_match", value, 0.01, filter=name)
        for name, value in (("flexible-extract", 0.5), ("strict-match", 0.4))
    ]
    (row,) = table_rows(records)
    assert row["gsm8k, exact_match (strict-match)"] == row["mean"] == "40.0 ± 1.0"


def test_a_resumed_sweep_gives_the_table_of_an_uninterrupted_one(accuracy_records: list[Record]) -> None:
    resumed = [*accuracy_records, *accuracy_records[5:20]]
    random.Random(3).shuffle(resumed)
    assert accuracy_tables(resumed) == accuracy_tables(accuracy_records)


def test_speed_of_another_card_or_precision_is_left_out(accuracy_records: list[Record]) -> None:
    (speed,) = (record for record in accuracy_records if record["name"] == "decode")
    others = [record for record in accuracy_records if record["name"] != "decode"]
    for changed in (
        {**speed, "environment": {**speed["environment"], "device": "Another GPU"}},
        {**speed, "labels": {**speed["labels"], "dtype": "float32"}},
    ):
        assert "tokens/s" not in accuracy_tables([*others, changed])[0].columns


def test_the_plot_holds_the_means_at_the_achieved_densities(accuracy_records: list[Record]) -> None:
    (found,) = compare_accuracy(accuracy_records)
    points = {
        (point.setting.method, round(point.x, 3)): (round(point.y, 3), round(point.stderr or 0, 3))
        for point in accuracy_points(found)
    }
    assert points[("dense", 1.0)] == (42.5, 1.768)
    assert points[("predictor", 0.51)] == (37.5, 1.768)
    assert points[("oracle", 0.31)] == (41.1, 1.768)
    assert len(points) == 7
    figure = plot_accuracy(found)
    assert figure is not None
    axes = figure.axes[0]
    drawn = {str(line.get_label()): line for line in axes.lines}
    assert {"oracle", "predictor", "random"} <= drawn.keys() and len(axes.collections) == 3
    assert list(drawn["predictor"].get_xdata()) == pytest.approx([0.31, 0.51])
    assert list(drawn["predictor"].get_ydata()) == pytest.approx([35.5, 37.5])
    assert any(list(line.get_ydata()) == pytest.approx([42.5, 42.5]) for line in axes.lines)


def test_the_heat_map_keeps_layers_in_place_where_some_stay_dense(accuracy_records: list[Record]) -> None:
    (found,) = compare_accuracy(accuracy_records)
    figure = plot_accuracy_layers(found)
    assert figure is not None
    recall, precision = (axes for axes in figure.axes if axes.images)
    assert recall.get_title(loc="left").startswith("recall, MLP neurons")
    assert [label.get_text() for label in recall.get_yticklabels()] == [
        "oracle, 0.5", "predictor, 0.5", "oracle, 0.3", "predictor, 0.3",
    ]  # fmt: skip
    for axes, shares in ((recall, [0.8, 0.6]), (precision, [0.7, 0.5])):
        drawn = axes.images[0].get_array()
        assert drawn is not None and drawn.shape == (4, 3)
        assert drawn.mask[:, 0].all() and drawn[0, 1:].tolist() == pytest.approx(shares)
