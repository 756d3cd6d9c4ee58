"""The choice among all-reduces: the nearest measured count decides, and a file that is wrong says where."""

import json
from pathlib import Path
from typing import Any

import pytest
from loguru import logger

from pipeline_parallel import all_reduce_choice
from pipeline_parallel.all_reduce_choice import (
    CONFIGS_DIR,
    ChoiceTable,
    SplitPoint,
    choose,
    find_choice_table,
    nearest_split_point,
    read_choice_tables,
    read_split_points,
    write_choice_tables,
)
from tests.data.spoiled_json import spoiled

FASTEST = {"1": "one-shot", "64": "nccl", "1024": "two-shot"}


def table(**other: Any) -> ChoiceTable:
    fields: dict[str, Any] = {"device": "GPU A", "ranks": 2, "hidden_size": 4096, "transport": "p2p"}
    return ChoiceTable(**fields | {"fastest": FASTEST} | other)


def written(path: Path, content: object) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@pytest.fixture
def warnings() -> Any:
    heard: list[str] = []
    all_reduce_choice.warn_once.cache_clear()
    sink = logger.add(heard.append, level="WARNING", format="{message}")
    yield heard
    logger.remove(sink)


@pytest.mark.parametrize(
    ("num_tokens", "method"),
    [
        (0, "one-shot"),
        (1, "one-shot"),
        (8, "one-shot"),  # 8 times 1 and an eighth of 64: the smaller
        (9, "nccl"),
        (64, "nccl"),
        (256, "nccl"),
        (257, "two-shot"),
        (10**6, "two-shot"),
    ],
)
def test_the_count_nearest_in_ratio_decides(num_tokens: int, method: str) -> None:
    assert choose(table(), num_tokens) == method


@pytest.mark.parametrize("num_tokens", [-1, 1.0, True])
def test_a_number_of_tokens_that_is_none_is_refused(num_tokens: Any) -> None:
    with pytest.raises(ValueError, match=f"num_tokens must be an integer, at least 0, not {num_tokens}"):
        choose(table(), num_tokens)


def test_what_is_written_is_read_and_replaces_only_its_own_key(tmp_path: Path) -> None:
    path = tmp_path / "made" / "choices.json"
    write_choice_tables(path, [table(), table(ranks=4)])
    changed = table(fastest={"1": "nccl"})
    other = table(device="GPU B", transport="multimem")
    write_choice_tables(path, [other, changed])
    assert sorted(read_choice_tables(path), key=lambda found: found.key) == [changed, table(ranks=4), other]
    assert [file.name for file in path.parent.iterdir()] == ["choices.json"]
    assert len(path.read_text().splitlines()) == 5  # a line a table, for people and diffs


def test_a_table_is_found_by_device_ranks_and_transport_and_the_nearest_hidden_size(
    tmp_path: Path, warnings: list[str]
) -> None:
    path = tmp_path / "choices.json"
    tables = [table(hidden_size=size) for size in (1024, 4096, 8192)] + [table(ranks=4), table(transport="multimem")]
    write_choice_tables(path, tables)
    assert find_choice_table("GPU A", 2, 4096, "p2p", [path]) == tables[1]
    assert find_choice_table("GPU A", 2, 4096, "multimem", [path]) == tables[4]
    assert not warnings
    for _ in range(2):
        assert find_choice_table("GPU A", 2, 5120, "p2p", [path]) == tables[1]
    assert len(warnings) == 1 and "for 2 x GPU A, hidden size 5120, p2p: what was for hidden size 4096" in warnings[0]
    for _ in range(2):
        assert find_choice_table("GPU A", 8, 4096, "p2p", [path]) is None
    assert len(warnings) == 1


def test_shipped_files_can_be_read(warnings: list[str]) -> None:
    for path in CONFIGS_DIR.glob("*.json"):
        assert read_choice_tables(path)
    assert find_choice_table("no such device", 2, 4096, "p2p") is None and not warnings


ROW = {"device": "GPU A", "ranks": 2, "hidden_size": 4096, "transport": "p2p", "fastest": {"1": "nccl"}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "Expecting property name"),
        ({"choices": [], "other": 1}, "object contains unknown field `other`"),
        ({"choices": [ROW, ROW]}, "table 1: there is one already for 2 x GPU A, hidden size 4096, p2p"),
        ({"choices": [{"device": "GPU A"}]}, r"`choices\[0\]`: object missing required field `ranks`"),
        ({"choices": [ROW | {"ranks": 1}]}, r"`choices\[0\].ranks`: expected `int` >= 2"),
        ({"choices": [ROW | {"fastest": {}}]}, "there is no token count"),
        ({"choices": [ROW | {"fastest": {"many": "nccl"}}]}, "'many' is not a token count"),
        ({"choices": [ROW | {"fastest": {"4": "nccl", "1": "nccl"}}]}, "counts must rise, and 1 comes after 4"),
        ({"choices": [ROW | {"fastest": {"1": "ring"}}]}, r"`choices\[0\].fastest\[...\]`: invalid enum value 'ring'"),
        ('{"choices": [{"device": "a", "device": "b"}]}', "'device' stands twice in one object"),
    ],
)
def test_a_wrong_choice_file_is_named_with_what_is_wrong(tmp_path: Path, content: object, message: str) -> None:
    path = written(tmp_path / "wrong.json", content)
    with pytest.raises(ValueError, match=rf"wrong\.json: .*{message}"):
        read_choice_tables(path)


@pytest.mark.parametrize("read", [read_choice_tables, read_split_points])
def test_a_missing_file_is_named(tmp_path: Path, read: Any) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.json: no such file"):
        read(tmp_path / "none.json")


SPLIT = {"attention_ctas": 8, "mlp_ctas": 4, "chunk_offset": 128}


def test_both_forms_of_the_split_files_load(tmp_path: Path) -> None:
    older = {"1024": {"attention_ctas": 2, "mlp_ctas": 4, "chunk_offset": 0}, "4096": SPLIT}
    newer = {
        "1024": {"baseline_ctas": 16, "attention_ctas": 2, "mlp_ctas": 4, "split_offset": 0},
        "4096": {"baseline_ctas": 32, "attention_ctas": 8, "mlp_ctas": 4, "split_offset": 128},
    }
    expected = [
        SplitPoint(num_tokens=1024, attention_programs=2, mlp_programs=4, offset=0),
        SplitPoint(num_tokens=4096, attention_programs=8, mlp_programs=4, offset=128),
    ]
    for content in (older, newer):
        assert read_split_points(written(tmp_path / "split.json", content)) == expected
    assert [nearest_split_point(expected, num_tokens).num_tokens for num_tokens in (1, 2560, 2561)] == [
        1024,
        1024,
        4096,
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "there is no token count"),
        ({"-5": SPLIT}, "'-5' is not a token count"),
        ({"2048": SPLIT, "1024": SPLIT}, "token counts must rise, and 1024 comes after 2048"),
        (
            {"1024": SPLIT | {"split_offset": 0}},
            "expected one of chunk_offset and split_offset, found chunk_offset and",
        ),
        (
            {"1024": {"attention_ctas": 1, "mlp_ctas": 1}},
            "expected one of chunk_offset and split_offset, found neither",
        ),
        ({"1024": SPLIT | {"mlp_ctas": -1}}, "1024 tokens: `mlp_ctas`: expected `int` >= 0"),
        ({"1024": SPLIT | {"chunk_offset": 512}}, "chunk_offset must be an integer, from -511 to 511, not 512"),
        ({"5": SPLIT | {"chunk_offset": 3}}, "from -2 to 2, not 3"),
    ],
)
def test_a_wrong_split_file_is_named_with_what_is_wrong(tmp_path: Path, content: object, message: str) -> None:
    path = written(tmp_path / "wrong.json", content)
    with pytest.raises(ValueError, match=rf"wrong\.json: .*{message}"):
        read_split_points(path)


def test_any_wrong_value_is_told(tmp_path: Path) -> None:
    for read, valid in (
        (read_choice_tables, {"choices": [ROW, ROW | {"ranks": 4}]}),
        (read_split_points, {"1024": SPLIT, "2048": {**SPLIT, "baseline_ctas": 16}}),
    ):
        path = tmp_path / "wrong.json"
        for what, text in spoiled(valid):
            path.write_bytes(text)
            try:
                assert isinstance(read(path), list), what
            except ValueError as error:
                assert str(path) in str(error) and len(str(error)) < 1000, what
