"""`infer --resume`: answers are kept if they were made alike, and the rest is done."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from modules.generation import generate
from modules.requests import GenerationRequest
from tests.modules.tiny_kinds import LLAMA
from tests.modules.tiny_models import save_hf_folder
from tests.scripts.tiny_prompts import CHAT_TEMPLATE, infer, words_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return words_folder(tmp_path_factory.mktemp("model"))


def test_resume_keeps_the_answers_and_completes_the_rest(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [{"prompt": f"w{i}"} for i in range(5)]
    options: dict[str, Any] = {"max_new_tokens": 4, "temperature": 1.0, "batch_size": 1}  # to the last bit
    whole = infer(folder, tmp_path, *lines, **options)
    output = tmp_path / "out.jsonl"
    complete = output.read_text().splitlines(keepends=True)
    output.write_text("".join(complete[:2]) + complete[2][:20])
    generated: list[int] = []

    def counting_generate(model: Any, requests: list[GenerationRequest], **arguments: Any) -> Any:
        generated.append(len(requests))
        return generate(model, requests, **arguments)

    monkeypatch.setattr("pipeline_parallel.engine.generate", counting_generate)
    assert infer(folder, tmp_path, *lines, resume=True, **options) == whole
    assert generated == [3]
    assert infer(folder, tmp_path, *lines, resume=True, **options) == whole, "nothing left to do"
    assert infer(folder, tmp_path, *lines, **options) == whole, "overwritten: written anew, not appended"
    with pytest.raises(ValueError, match="out.jsonl holds answers already: --resume keeps them"):
        infer(folder, tmp_path, *lines, overwrite=False, **options)
    assert read_lines(output) == whole


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("then", "now", "message"),
    [
        ([{"prompt_token_ids": [5]}], [{"prompt_token_ids": [6]}], "request 1 is not .*: token ids"),
        ([{"prompt": "w1", "id": "a"}], [{"prompt_token_ids": [4], "id": "a"}], "`id` 'a' belongs to no prompt"),
        ([{"prompt": "w1"}], [{"prompt": "w1", "temperature": 2.0}], "request 1 is not .*: options or seed changed"),
        ([{"prompt": "w1"}], [{"prompt": "w1", "seed": 7}], "request 1 is not .*: options or seed changed"),
        (
            [{"prompt_token_ids": [5]}, {"prompt_token_ids": [6]}],
            [{"prompt_token_ids": [7]}, {"prompt_token_ids": [5]}, {"prompt_token_ids": [6]}],
            "request 1 is not .*was a line put in",
        ),
    ],
)
def test_answers_to_other_requests_are_not_kept(
    folder: Path, tmp_path: Path, then: list[dict[str, Any]], now: list[dict[str, Any]], message: str
) -> None:
    infer(folder, tmp_path, *then, max_new_tokens=2)
    before = (tmp_path / "out.jsonl").read_bytes()
    with pytest.raises(ValueError, match=message):
        infer(folder, tmp_path, *now, max_new_tokens=2, resume=True)
    assert (tmp_path / "out.jsonl").read_bytes() == before


def test_another_chat_template_tokenizer_or_end_of_text_is_noticed(folder: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(folder, model)
    line: dict[str, Any] = {"prompt": "w5 w6"}
    infer(model, tmp_path, line, max_new_tokens=2, chat=True)
    (model / "chat_template.jinja").write_text(CHAT_TEMPLATE + " w2")
    with pytest.raises(
        ValueError, match=r"request 1 is not the one .*: token ids \(tokenizer, chat template\) changed"
    ):
        infer(model, tmp_path, line, max_new_tokens=2, chat=True, resume=True)
    infer(model, tmp_path, line, max_new_tokens=2)
    (model / "generation_config.json").write_text('{"eos_token_id": [2, 60]}')
    with pytest.raises(ValueError, match=r"eos_token_ids is \[2, 1\] of its answers, \[2, 60, 1\] now"):
        infer(model, tmp_path, line, max_new_tokens=2, resume=True)
    (model / "generation_config.json").unlink()
    tokenizer = (model / "tokenizer.json").read_text()
    (model / "tokenizer.json").write_text(tokenizer.replace('"w99"', '"other"'))  # in no prompt, but in answers
    with pytest.raises(ValueError, match="tokenizer is '"):
        infer(model, tmp_path, line, max_new_tokens=2, resume=True)


def test_a_draw_hangs_on_the_id_and_not_on_the_line(folder: Path, tmp_path: Path) -> None:
    first: dict[str, Any] = {"prompt": "w5", "id": "first"}
    second: dict[str, Any] = {"prompt": "w5", "id": "second"}
    options = {"temperature": 1.0, "max_new_tokens": 8}
    one, two = infer(folder, tmp_path, first, second, **options)
    assert one["token_ids"] != two["token_ids"]
    assert infer(folder, tmp_path, second, first, resume=True, **options) == [two, one]
    assert infer(folder, tmp_path, second, first, **options) == [two, one]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "oracle"}, "method is 'random' of its answers, 'oracle' now"),
        ({"mlp_density": 0.3}, "mlp_density is 0.5 of its answers, 0.3 now"),
        ({"sparse_phases": "all"}, "phase is 'decode' of its answers, 'all' now"),
        ({"temperature": 0.7}, "temperature is 1.0 of its answers, 0.7 now"),
        ({"max_new_tokens": 5}, "max_new_tokens is 4 of its answers, 5 now"),
        ({"seed": 1}, "seed is 0 of its answers, 1 now"),
        ({"echo": True}, "echo is False of its answers, True now"),
        ({"dtype": "bfloat16"}, "dtype is 'float32' of its answers, 'bfloat16' now"),
        ({"density_budget": "budget.json"}, "density_budget is None of its answers, '"),
        ({"batch_size": 1, "overlap_tokens": 0}, None),
    ],
)
def test_answers_made_with_other_options_are_not_resumed(
    folder: Path, tmp_path: Path, changes: dict[str, Any], message: str | None
) -> None:
    lines = [{"prompt": "w1 w2"}, {"prompt": "w3"}]
    options: dict[str, Any] = {"max_new_tokens": 4, "temperature": 1.0, "method": "random", "dtype": "float32"}
    infer(folder, tmp_path, *lines, **options)
    output = tmp_path / "out.jsonl"
    output.write_text(output.read_text().splitlines(keepends=True)[0])
    before = output.read_bytes()
    if "density_budget" in changes:
        (tmp_path / "budget.json").write_text(json.dumps({"mlp": [0.4, 0.5, 0.6]}))  # the same mean
        changes = {"density_budget": tmp_path / "budget.json"}
    if message is None:  # how the work is cut changes nothing
        assert len(infer(folder, tmp_path, *lines, resume=True, **options, **changes)) == 2
        return
    with pytest.raises(ValueError, match=f"cannot resume .*{message}.*--overwrite to start afresh"):
        infer(folder, tmp_path, *lines, resume=True, **{**options, **changes})
    assert output.read_bytes() == before


def test_answers_of_another_checkpoint_of_the_same_name_are_not_resumed(tmp_path: Path) -> None:
    line = {"prompt_token_ids": [5, 6, 7]}
    for seed, place in ((0, "here"), (1, "there")):
        save_hf_folder(tmp_path / place / "model", LLAMA, seed)
    infer(tmp_path / "here/model", tmp_path, line)
    with pytest.raises(ValueError, match="cannot resume .*out.jsonl: checkpoint is '"):
        infer(tmp_path / "there/model", tmp_path, line, resume=True)
