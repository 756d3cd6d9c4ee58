"""Prompt files: what a line may say, and the message for everything else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from data.prompts import read_prompts


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_a_line_says_what_it_says_itself(tmp_path: Path) -> None:
    path = write(
        tmp_path / "prompts.jsonl",
        {"prompt": "a", "temperature": 0.7, "top_k": 5, "seed": 3},
        {"prompt": "b"},
        {"prompt": "c", "max_new_tokens": 0, "top_p": 1, "temperature": 0, "stop": ["x", "y"], "top_k": None},
    )
    assert read_prompts(path) == [
        {"id": 1, "prompt": "a", "temperature": 0.7, "top_k": 5, "seed": 3},
        {"id": 2, "prompt": "b"},
        {"id": 3, "prompt": "c", "max_new_tokens": 0, "top_p": 1.0, "temperature": 0.0, "stop": ("x", "y")},
    ]


def test_the_id_is_the_line_number_unless_given(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": ""}\n{"prompt_token_ids": [3, 0], "id": "x"}')
    assert read_prompts(path) == [
        {"id": 1, "prompt": "a"},
        {"id": 3, "prompt": ""},
        {"id": "x", "prompt_token_ids": [3, 0]},
    ]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({}, "give either `prompt` or `prompt_token_ids`, found neither"),
        ({"prompt": None}, "found neither"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "found both"),
        ({"prompt": ["a"]}, "`prompt` must be a string, got list"),
        ({"prompt_token_ids": []}, "`prompt_token_ids` must be a non-empty list"),
        ({"prompt_token_ids": "1 2"}, "`prompt_token_ids` must be a non-empty list"),
        ({"prompt_token_ids": [1, 2.0]}, "`prompt_token_ids` must hold integers >= 0, got 2.0"),
        ({"prompt_token_ids": [-1]}, "`prompt_token_ids` must hold integers >= 0, got -1"),
        (
            {"prompt": "a", "max_tokens": 5},
            "unknown key `max_tokens`; allowed: id, prompt, prompt_token_ids, max",
        ),
        ({"prompt": "a", "id": 1.5}, "`id` must be a string or an integer, got 1.5"),
        ({"prompt": "a", "id": True}, "`id` must be a string or an integer, got True"),
        ({"prompt": "a", "max_new_tokens": -1}, "`max_new_tokens` must be an integer >= 0, got -1"),
        ({"prompt": "a", "max_new_tokens": 5.0}, "`max_new_tokens` must be an integer >= 0, got 5.0"),
        ({"prompt": "a", "max_new_tokens": "5"}, "`max_new_tokens` must be an integer >= 0, got '5'"),
        ({"prompt": "a", "temperature": -0.1}, "`temperature` must be a number >= 0, got -0.1"),
        ({"prompt": "a", "temperature": float("nan")}, "`temperature` must be a number >= 0, got nan"),
        ({"prompt": "a", "temperature": float("inf")}, "`temperature` must be a number >= 0, got inf"),
        ({"prompt": "a", "temperature": True}, "`temperature` must be a number >= 0, got True"),
        ({"prompt": "a", "top_k": -2}, r"`top_k` must be -1 or 0 \(all tokens\) or an integer >= 1, got -2"),
        ({"prompt": "a", "top_k": False}, "`top_k` must be -1"),
        ({"prompt": "a", "top_p": 0}, r"`top_p` must be a number in \(0, 1\], got 0"),
        ({"prompt": "a", "top_p": 1.01}, "`top_p` must be a number in"),
        ({"prompt": "a", "top_p": float("nan")}, "`top_p` must be a number in .* got nan"),
        ({"prompt": "a", "seed": -1}, r"`seed` must be an integer in \[0, 2\*\*63\), got -1"),
        ({"prompt": "a", "seed": 2**63}, "`seed` must be below 2\\*\\*63"),
        ({"prompt": "a", "max_new_tokens": 10**30}, "`max_new_tokens` must be below 2\\*\\*63, got 1000"),
        ({"prompt": "a", "top_k": 10**30}, "`top_k` must be below 2\\*\\*63"),
        ({"prompt": "a", "temperature": 10**400}, "`temperature` must be below 2\\*\\*63"),
        ({"prompt_token_ids": [1, 2**31]}, "`prompt_token_ids` must hold integers below 2\\*\\*31, got 2147483648"),
        ({"prompt": "a", "stop": ""}, "`stop` must be a non-empty string or a list of them, got ''"),
        ({"prompt": "a", "stop": ["x", ""]}, "`stop` must be a non-empty string or a list of them"),
        ({"prompt": "a", "stop": 3}, "`stop` must be a non-empty string or a list of them, got 3"),
    ],
)
def test_a_wrong_value_is_named_by_line_and_key(tmp_path: Path, record: Any, message: str) -> None:
    path = write(tmp_path / "prompts.jsonl", {"prompt": "good"}, record)
    with pytest.raises(ValueError, match=f"prompts.jsonl line 2: .*{message}"):
        read_prompts(path)


def test_two_requests_never_share_an_id(tmp_path: Path) -> None:
    path = write(tmp_path / "prompts.jsonl", {"prompt": "a", "id": "2"}, {"prompt": "b"})
    with pytest.raises(ValueError, match="line 2: `id` 2 is already that of line 1"):
        read_prompts(path)


def test_a_file_without_prompts_or_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="empty.jsonl holds no prompts"):
        read_prompts(tmp_path / "empty.jsonl")
    with pytest.raises(FileNotFoundError, match="absent.jsonl does not exist"):
        read_prompts(tmp_path / "absent.jsonl")


def test_a_line_that_is_not_json_is_numbered(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": "b"\n')
    with pytest.raises(ValueError, match="prompts.jsonl line 3: not JSON"):
        read_prompts(path)


def test_one_stop_string_is_a_list_of_one(tmp_path: Path) -> None:
    assert read_prompts(write(tmp_path / "p.jsonl", {"prompt": "a", "stop": "\n"}))[0]["stop"] == ("\n",)
