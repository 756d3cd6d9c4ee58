"""The answers of `infer`: whole lines, in input order at the end, never doubled, resumable at any byte."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.completions import CompletionRecord, CompletionWriter, request_identity
from data.files import only_writer


def make_prompts(num_requests: int) -> dict[str | int, str | None]:
    return {idx: f"prompt {idx}" for idx in range(1, num_requests + 1)}


def answer(request_id: str | int, **changes: Any) -> CompletionRecord:
    options: dict[str, Any] = {
        "id": request_id,
        "prompt": f"prompt {request_id}",
        "text": f"answer \u00e9\n {request_id}",
        "token_ids": [1, 2],
        "logprobs": [None, -0.5],
        "finish_reason": "length",
        "error": None,
        "num_prompt_tokens": 3,
        "mlp_density": 0.5,
        "head_density": 1.0,
    }
    return CompletionRecord(**{**options, **changes})


def read_ids(path: Path) -> list[Any]:
    return [json.loads(line)["id"] for line in path.read_text().splitlines()]


def test_a_line_holds_the_keys_of_the_contract(tmp_path: Path) -> None:
    prompts = make_prompts(1)
    with CompletionWriter(tmp_path / "new" / "out.jsonl", prompts) as writer:
        writer.write(answer(1))
    assert json.loads((tmp_path / "new" / "out.jsonl").read_text()) == {
        "id": 1,
        "prompt": "prompt 1",
        "text": "answer \u00e9\n 1",
        "token_ids": [1, 2],
        "logprobs": [None, -0.5],
        "finish_reason": "length",
        "error": None,
        "num_prompt_tokens": 3,
        "mlp_density": 0.5,
        "head_density": 1.0,
    }


def test_answers_are_on_the_disk_at_once_and_in_input_order_at_the_end(tmp_path: Path) -> None:
    path, prompts = tmp_path / "out.jsonl", make_prompts(4)
    writer = CompletionWriter(path, prompts)
    for idx in (2, 0, 3):
        writer.write(answer(idx + 1))
        assert path.read_bytes().endswith(b"\n")
    assert read_ids(path) == [3, 1, 4]
    assert writer.pending == [2]
    writer.close()
    writer.close()
    assert read_ids(path) == [1, 3, 4]
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.jsonl"]


def test_overwriting_does_not_double_the_file(tmp_path: Path) -> None:
    path, prompts = tmp_path / "out.jsonl", make_prompts(3)
    for overwrite in (False, True):
        with CompletionWriter(path, prompts, overwrite=overwrite) as writer:
            for request_id in prompts:
                writer.write(answer(request_id))
    assert read_ids(path) == [1, 2, 3]


def test_answers_are_neither_overwritten_nor_resumed_unasked(tmp_path: Path) -> None:
    path, prompts = tmp_path / "out.jsonl", make_prompts(1)
    path.touch()
    with CompletionWriter(path, prompts) as writer:  # an empty file is nobody's answers
        writer.write(answer(1))
    before = path.read_bytes()
    with pytest.raises(ValueError, match="out.jsonl holds answers already: --resume keeps them .*--overwrite starts"):
        CompletionWriter(path, prompts)
    with pytest.raises(ValueError, match="--resume keeps the answers .* and --overwrite throws them away: give one"):
        CompletionWriter(path, prompts, resume=True, overwrite=True)
    with pytest.raises(IsADirectoryError, match="is a folder; give a file"):
        CompletionWriter(tmp_path, prompts)
    assert path.read_bytes() == before


@settings(deadline=None, max_examples=40)
@given(order=st.permutations(range(5)), data=st.data())
def test_resuming_after_a_crash_at_any_byte_gives_the_uninterrupted_file(
    tmp_path_factory: pytest.TempPathFactory, order: list[int], data: st.DataObject
) -> None:
    path, prompts = tmp_path_factory.mktemp("resume") / "out.jsonl", make_prompts(5)
    with CompletionWriter(path, prompts) as writer:
        for request_id in prompts:
            writer.write(answer(request_id))
    whole = path.read_bytes()
    interrupted = b"".join(answer(idx + 1).to_line() for idx in order)
    num_kept = data.draw(st.integers(0, len(interrupted)), label="bytes on the disk")
    path.write_bytes(interrupted[:num_kept])
    with CompletionWriter(path, prompts, resume=True) as writer:
        num_lines = interrupted[:num_kept].count(b"\n")
        assert set(writer.pending) == {idx + 1 for idx in order[num_lines:]}
        for request_id in writer.pending:
            writer.write(answer(request_id))
    assert path.read_bytes() == whole


def test_resuming_keeps_failed_answers_and_starts_where_there_is_no_file(tmp_path: Path) -> None:
    path, prompts = tmp_path / "out.jsonl", make_prompts(2)
    with CompletionWriter(path, prompts, resume=True) as writer:
        writer.write(answer(1, finish_reason="error", error="prompt too long"))
    assert CompletionWriter(path, prompts, resume=True).pending == [2]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("not json\n", "line 2: not JSON"),
        ("\x00" * 40 + "\n", "line 2: not JSON"),
        ({"id": 9}, "line 2: cannot resume, `id` 9 belongs to no prompt of this run"),
        ({"prompt": "another"}, "line 2: cannot resume, `id` 2 belongs to no prompt of this run"),
        ({"id": 1, "prompt": "prompt 1"}, "line 2: cannot resume, `id` 1 is answered twice"),
        ("{}\n", "line 2: object missing required field `id`"),
        ("[]\n", "line 2: expected `object`, got `array`"),
        ({"text": None}, "line 2: `text`: expected `str`, got `null`"),
        ({"token_ids": [1, 2.5]}, "line 2: `token_ids.*`: expected `int`"),
        ({"token_ids": [1, -2]}, "line 2: `token_ids.*`: expected `int` >= 0"),
        ({"token_ids": [1]}, "line 2: answer 2: 2 log-probabilities for 1 token ids"),
        ({"logprobs": [-0.5]}, "line 2: answer 2: 1 log-probabilities for 2 token ids"),
        ({"logprobs": [-0.5, None]}, "line 2: answer 2: a log-probability after the first is null"),
        ({"logprobs": [-0.5, float("nan")]}, "line 2: answer 2: a log-probability is not finite"),
        ({"finish_reason": "eos"}, "line 2: finish_reason must be one of"),
        ({"finish_reason": "error"}, "line 2: answer 2: an `error` text goes with"),
        ({"mlp_density": 1.5}, "line 2: `mlp_density`: expected `float` <= 1.0"),
        ({"num_prompt_tokens": "3"}, "line 2: `num_prompt_tokens`: expected `int`, got `str`"),
        ({"more": 1}, "line 2: object contains unknown field `more`"),
    ],
)
def test_a_file_of_other_or_damaged_answers_is_neither_resumed_nor_touched(
    tmp_path: Path, line: str | dict[str, Any], message: str
) -> None:
    path, prompts = tmp_path / "out.jsonl", make_prompts(2)
    if isinstance(line, dict):
        line = json.dumps({**json.loads(answer(2).to_line()), **line}) + "\n"
    path.write_bytes(answer(1).to_line() + line.encode() + b'{"half')
    before = path.read_bytes()
    with pytest.raises(ValueError, match=f"out.jsonl {message}.*--overwrite to start afresh"):
        CompletionWriter(path, prompts, resume=True)
    assert path.read_bytes() == before


def test_answers_of_other_settings_are_neither_resumed_nor_touched(tmp_path: Path) -> None:
    path, prompts = tmp_path / "out.jsonl", make_prompts(2)
    settings = {"method": "random", "stop": ("a", "b"), "top_p": 1.0}
    with CompletionWriter(path, prompts, settings=settings) as writer:
        writer.write(answer(1))
    manifest = json.loads((tmp_path / "out.jsonl.manifest.json").read_text())
    assert manifest["format_version"] == 2 and manifest["settings"] == {**settings, "stop": ["a", "b"]}
    before = path.read_bytes()
    with CompletionWriter(path, prompts, resume=True, settings=settings) as writer:
        assert writer.pending == [2]
    other = {"method": "dense", "stop": ("a", "b"), "top_p": 1.0, "top_k": 5}
    differ = "method is 'random' of its answers, 'dense' now; top_k is None of its answers, 5 now; give another --out"
    with pytest.raises(ValueError, match=f"cannot resume .*out.jsonl: {differ}"):
        CompletionWriter(path, prompts, resume=True, settings=other)
    for text, message in (
        ('{"format": "something else", "format_version": 1}', " is not the manifest of answers"),
        ('{"format": "dejavu-lab answers", "format_version": 1, "settings": {}}', ": format_version 1, but this ver"),
        ('{"format": "dejavu-lab answers", "format_version": 2, "settings": null}', ": `settings`: expected `object`"),
        ('{"format": 3}', ": `format`: expected `str`, got `int`"),
        ('{"settings": ' + "[" * 100_000, ": nested too deeply"),
    ):
        (tmp_path / "out.jsonl.manifest.json").write_text(text)
        with pytest.raises(ValueError, match=f"cannot resume .*out.jsonl.manifest.json({message}).*--overwrite"):
            CompletionWriter(path, prompts, resume=True, settings=settings)
    (tmp_path / "out.jsonl.manifest.json").unlink()
    with pytest.raises(ValueError, match="out.jsonl.manifest.json, which says how its answers were made, is not"):
        CompletionWriter(path, prompts, resume=True, settings=settings)
    assert path.read_bytes() == before


@pytest.mark.parametrize("left_over", ["", '{"half'])
def test_without_a_whole_answer_any_settings_may_resume_and_are_those_of_the_manifest(
    tmp_path: Path, left_over: str
) -> None:
    path, prompts = tmp_path / "out.jsonl", make_prompts(1)
    CompletionWriter(path, prompts, settings={"method": "dense"}).close()
    path.write_text(left_over)
    CompletionWriter(path, prompts, resume=True, settings={"method": "oracle"}).close()
    assert json.loads((tmp_path / "out.jsonl.manifest.json").read_text())["settings"] == {"method": "oracle"}
    with CompletionWriter(path, prompts, settings={"method": "random"}) as writer:  # afresh: there is no answer
        writer.write(answer(1))
    assert json.loads((tmp_path / "out.jsonl.manifest.json").read_text())["settings"] == {"method": "random"}


ASKED: dict[str, Any] = {"prompt": "a", "token_ids": [1, 2], "options": {"seed": 3, "stop": ()}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, None),
        ({"prompt": None}, "prompt changed"),
        ({"token_ids": [1, 3]}, r"token ids \(tokenizer, chat template\) changed"),
        ({"options": {"seed": 4, "stop": ()}}, "options or seed changed"),
        ({"prompt": "b", "token_ids": [2]}, r"prompt and token ids \(tokenizer, chat template\) changed"),
    ],
)
@pytest.mark.parametrize("request_id", ["x", 1])
def test_the_answer_to_another_request_of_the_same_id_is_not_kept(
    tmp_path: Path, request_id: str | int, changes: dict[str, Any], message: str | None
) -> None:
    path, request = tmp_path / "out.jsonl", {request_id: f"prompt {request_id}"}
    before: dict[str, Any] = {"settings": {}, "identities": {str(request_id): request_identity(**ASKED)}}
    with CompletionWriter(path, request, **before) as writer:
        writer.write(answer(request_id))
    now: dict[str, Any] = {"settings": {}, "identities": {str(request_id): request_identity(**{**ASKED, **changes})}}
    if message is None:
        assert CompletionWriter(path, request, resume=True, **now).pending == []
        return
    hint = r" \(without `id`, the line number is the id: .*\)" if request_id == 1 else ""
    with pytest.raises(ValueError, match=f"request {request_id!r} is not the one .* answered: {message}{hint}; give"):
        CompletionWriter(path, request, resume=True, **now)


def test_more_prompts_may_follow_and_the_manifest_knows_them_before_they_are_answered(tmp_path: Path) -> None:
    path, prompts = tmp_path / "out.jsonl", make_prompts(2)
    identities = {str(key): request_identity(**{**ASKED, "prompt": prompt}) for key, prompt in prompts.items()}
    with CompletionWriter(path, {1: prompts[1]}, settings={}, identities={"1": identities["1"]}) as writer:
        writer.write(answer(1))
    writer = CompletionWriter(path, prompts, resume=True, settings={}, identities=identities)
    assert json.loads((tmp_path / "out.jsonl.manifest.json").read_text())["answers"] == identities
    assert writer.pending == [2]


def test_a_pipe_gets_each_line_as_it_is_finished_and_nothing_else(tmp_path: Path) -> None:
    prompts = make_prompts(2)
    os.mkfifo(tmp_path / "fifo")
    fifo = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    unnamed = os.pipe()  # what `>(...)` and `/dev/stdout | ...` are: a link to something without a name
    for path, reader in ((tmp_path / "fifo", fifo), (f"/dev/fd/{unnamed[1]}", unnamed[0])):
        with only_writer(path), CompletionWriter(path, prompts, settings={}) as writer:
            for request_id in reversed(prompts):
                writer.write(answer(request_id))
                assert json.loads(os.read(reader, 10_000))["id"] == request_id
        with pytest.raises(ValueError, match="cannot resume .*: it is not a regular file"):
            CompletionWriter(path, prompts, resume=True)
    assert [entry.name for entry in tmp_path.iterdir()] == ["fifo"]


def test_prompts_given_as_token_ids_resume_by_id(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    prompts: dict[str | int, str | None] = {"a": None, "b": None}
    with CompletionWriter(path, prompts) as writer:
        writer.write(answer("a", prompt=None))
    with CompletionWriter(path, prompts, resume=True) as writer:
        assert writer.pending == ["b"]


def test_an_answer_to_no_request_or_a_second_one_is_refused(tmp_path: Path) -> None:
    prompts = make_prompts(1)
    with CompletionWriter(tmp_path / "out.jsonl", prompts) as writer:
        writer.write(answer(1))
        with pytest.raises(ValueError, match="answer with id 1 was answered before"):
            writer.write(answer(1))
        with pytest.raises(ValueError, match="answer with id 7 is no request's"):
            writer.write(answer(1, id=7))


def test_the_prompts_are_never_overwritten(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("{}")
    (tmp_path / "link.jsonl").symlink_to(prompts)
    with pytest.raises(ValueError, match="the answers would overwrite the prompts"):
        CompletionWriter(tmp_path / "link.jsonl", make_prompts(1), prompts_path=prompts)
    assert prompts.read_text() == "{}"


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    prompts = make_prompts(2)
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "out.jsonl")
    with CompletionWriter(tmp_path / "link.jsonl", prompts) as writer:
        for request_id in reversed(prompts):
            writer.write(answer(request_id))
    assert (tmp_path / "link.jsonl").is_symlink()
    assert read_ids(tmp_path / "out.jsonl") == [1, 2]


def test_a_full_disk_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, prompts = tmp_path / "out.jsonl", make_prompts(2)
    write, calls = os.write, iter([5, None])

    def write_some(descriptor: int, content: bytes) -> int:
        num_bytes = next(calls)
        if num_bytes is None:
            raise OSError(28, "No space left on device")
        return write(descriptor, content[:num_bytes])

    with CompletionWriter(path, prompts) as writer:
        writer.write(answer(1))
        monkeypatch.setattr("data.completions.os.write", write_some)
        with pytest.raises(OSError, match="out.jsonl: no space left .* then give the same command with --resume"):
            writer.write(answer(2))
        monkeypatch.undo()
        assert read_ids(path) == [1]
        writer.write(answer(2))
    assert read_ids(path) == [1, 2]


def test_text_that_utf8_cannot_hold_still_makes_a_line() -> None:
    record = answer(1, text="lone \udc80 surrogate")
    assert json.loads(record.to_line())["text"] == "lone \udc80 surrogate"
