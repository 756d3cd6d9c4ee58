from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.results import append_record, environment_stamp, make_record, read_records, validate_record

STAMP = {"device": "cpu", "date": "2026-01-02"}


def a_record(**changes: Any) -> dict[str, Any]:
    record = make_record("decode", {"method": "dense"}, "tokens_per_s", 30.0, "tokens/s", environment=STAMP)
    return {**record, **changes}


def test_records_come_back_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "results.jsonl"
    records = [
        make_record(
            "perplexity",
            {"method": "predictor", "mlp_density": np.float32(0.5), "head_density": 1.0},
            "perplexity",
            np.float32(30.0),
            "",
            baseline={"name": "dense", "value": 20.0},
            environment=STAMP,
            achieved={"per_layer": {"mlp": np.array([0.5, 0.25])}, "path": Path("a/b")},
        ),
        a_record(value=float("inf")),
    ]
    for record in records:
        append_record(path, record)
    assert read_records(path) == records
    assert records[0]["ratio"] == 1.5
    assert records[0]["achieved"] == {"per_layer": {"mlp": [0.5, 0.25]}, "path": "a/b"}
    assert len(path.read_text().splitlines()) == 2


def test_older_records_of_wina_are_read_under_its_right_name(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    for method in ("wina", "teal"):
        append_record(path, a_record(labels={"method": method}))
    assert [record["labels"]["method"] for record in read_records(path)] == ["wina-unrotated", "teal"]


def test_a_full_disk_is_named() -> None:
    with pytest.raises(OSError, match="/dev/full: no space left to write it .*; free space there"):
        append_record("/dev/full", a_record())


def test_several_files_are_read_in_order(tmp_path: Path) -> None:
    append_record(tmp_path / "b", a_record(value=1.0))
    append_record(tmp_path / "a", a_record(value=2.0))
    assert [record["value"] for record in read_records(tmp_path / "b", tmp_path / "a")] == [1.0, 2.0]


def test_a_half_written_last_line_is_dropped_on_the_next_append(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    append_record(path, a_record(value=1.0))
    whole = path.read_bytes()
    path.write_bytes(whole + whole[: len(whole) // 2])
    append_record(path, a_record(value=2.0))
    assert [record["value"] for record in read_records(path)] == [1.0, 2.0]


def test_a_whole_last_line_without_its_line_end_is_kept_on_the_next_append(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    append_record(path, a_record(value=1.0))
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    append_record(path, a_record(value=2.0))
    assert [record["value"] for record in read_records(path)] == [1.0, 2.0]


def append_many(path: Path, value: float) -> None:
    for _ in range(20):
        append_record(path, a_record(value=value, padding="x" * 5000))


def test_processes_may_append_to_one_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=append_many, args=(path, float(i))) for i in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(timeout=60)
    values = [record["value"] for record in read_records(path)]
    assert sorted(values) == [0.0] * 20 + [1.0] * 20 + [2.0] * 20


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"value": None}, "`value`: expected `float`, got `null`"),
        ({"value": "30"}, "`value`: expected `float`, got `str`"),
        ({"value": True}, "`value`: expected `float`, got `bool`"),
        ({"value": float("nan")}, "'value' must be a number that is not NaN"),
        ({"ratio": float("nan")}, "'ratio' must be a number that is not NaN"),
        ({"labels": ["dense"]}, "`labels`: expected `object`, got `array`"),
        ({"labels": {"method": ["dense"]}}, "`labels.method`: expected `str | null`, got `array`"),
        ({"labels": {"other": ["dense"]}}, "label 'other' must be a string, a number, a boolean or null"),
        ({"name": ""}, "`name`: expected `str` of length >= 1"),
        ({"metric": "x" * 1000}, "`metric`: expected `str` of length <= 500"),
        ({"labels": {"model": "x" * 1000}}, "`labels.model`: expected `str` of length <= 500"),
        ({"labels": {"other": "x" * 1000}}, "label 'other' has 1000 characters, 500 at most"),
        ({"baseline": 30.0}, "`baseline`: expected `object | null`"),
        ({"baseline": {"name": "dense", "value": None}}, "`baseline.value`: expected `float`, got `null`"),
        ({"baseline": {"name": "dense", "value": float("nan")}}, "'baseline value' must be a number that is not NaN"),
        ({"ratio": "2x"}, "`ratio`: expected `float | null`, got `str`"),
        ({"quality": [1]}, "`quality`: expected `object | null`, got `array`"),
        ({"sources": ["a"]}, "`sources`: expected `object | null`, got `array`"),
        ({"answers": {}}, "`answers`: expected `array`, got `object`"),
        ({"environment": None}, "`environment`: expected `object`, got `null`"),
        ({"labels": {"batch_size": "2"}}, "`labels.batch_size`: expected `int | null`, got `str`"),
        ({"environment": {"commit": 1}}, "`environment.commit`: expected `str | null`, got `int`"),
        ({"labels": {"converted_from": 1}}, "`labels.converted_from`: expected `str | null`, got `int`"),
        ({"timing": {"samples": -1}}, "`timing.samples`: expected `array | null`, got `int`"),
        ({"first_windows": [1, 2]}, "`first_windows`: expected `object | null`, got `array`"),
        ({"text_achieved": 2.5}, "`text_achieved`: expected `object | null`, got `float`"),
        ({"achieved": {"mlp_density": "x"}}, "`achieved.mlp_density`: expected `float | null`, got `str`"),
        ({"quality": {"per_layer": {"mlp": 1}}}, "`quality.per_layer.*`: expected `object | null`, got `int`"),
        ({"ratio_interval": [1]}, "`ratio_interval`: expected `array` of length >= 2"),
        ({"windows": {"nll": [1.0]}}, "`windows`: object missing required field `tokens`"),
    ],
)
def test_an_invalid_record_is_refused_by_writer_and_reader(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    path = tmp_path / "results.jsonl"
    with pytest.raises(ValueError, match=message):
        append_record(path, a_record(**changes))
    assert not path.exists()
    path.write_text(json.dumps(a_record()) + "\n\n" + json.dumps(a_record(**changes)) + "\n")
    with pytest.raises(ValueError, match=f"results.jsonl, line 3: not a result record: .*{message}"):
        read_records(path)


def test_what_json_cannot_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be written as JSON"):
        make_record("decode", {}, "us", 1.0, "us", environment=STAMP, extra=object())


def test_a_line_that_is_not_json_is_named_by_its_number(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(json.dumps(a_record()) + "\n{broken\n")
    with pytest.raises(ValueError, match="results.jsonl, line 2: not a result record: .*; remove that line"):
        read_records(path)


def test_a_record_names_every_key_it_lacks() -> None:
    with pytest.raises(ValueError, match="lacks 'metric', 'value', 'unit', 'environment'"):
        validate_record({"name": "decode", "labels": {}})


def test_missing_and_empty_files_are_errors(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such file of result records"):
        read_records(tmp_path / "results.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="holds no result records"):
        read_records(tmp_path / "empty.jsonl")


@given(value=st.floats(allow_nan=False), text=st.text(), number=st.integers(-(2**53), 2**53))
def test_any_label_survives_the_file(
    tmp_path_factory: pytest.TempPathFactory, value: float, text: str, number: int
) -> None:
    path = tmp_path_factory.mktemp("records") / "results.jsonl"
    record = make_record("x", {"text": text, "number": number}, "m", value, "", environment=STAMP)
    append_record(path, record)
    assert read_records(path) == [record]


def test_the_environment_stamp_says_where_and_with_what() -> None:
    stamp = environment_stamp()
    assert {
        "device",
        "num_devices",
        "driver",
        "torch",
        "triton",
        "python",
        "cpu",
        "num_cores",
    } <= stamp.keys()
    assert {"commit", "dirty", "date"} <= stamp.keys()
    assert stamp["num_cores"] >= 1
    json.dumps(stamp)
