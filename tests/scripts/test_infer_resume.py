"""`infer --resume`: answers are kept if they were made alike, and the rest is done."""

import json
from pathlib import Path
from typing import Any

import pytest

from modules.generation import generate
from modules.requests import GenerationRequest
from tests.modules.tiny_kinds import LLAMA
from tests.modules.tiny_models import save_hf_folder
from tests.scripts.tiny_prompts import infer, words_folder


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
    assert infer(folder, tmp_path, *lines, **options) == whole, "run twice: written anew, not appended"


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
    with pytest.raises(ValueError, match=f"cannot resume .*{message}.*leave out --resume to start afresh"):
        infer(folder, tmp_path, *lines, resume=True, **{**options, **changes})
    assert output.read_bytes() == before


def test_answers_of_another_checkpoint_of_the_same_name_are_not_resumed(tmp_path: Path) -> None:
    line = {"prompt_token_ids": [5, 6, 7]}
    for seed, place in ((0, "here"), (1, "there")):
        save_hf_folder(tmp_path / place / "model", LLAMA, seed)
    infer(tmp_path / "here/model", tmp_path, line)
    with pytest.raises(ValueError, match="cannot resume .*out.jsonl: checkpoint is '"):
        infer(tmp_path / "there/model", tmp_path, line, resume=True)


def test_a_damaged_manifest_of_answers_says_what_to_do(folder: Path, tmp_path: Path) -> None:
    infer(folder, tmp_path, {"prompt": "w1 w2"})
    before = (tmp_path / "out.jsonl").read_bytes()
    (tmp_path / "out.jsonl.manifest.json").write_text('{"settings"')
    with pytest.raises(
        ValueError, match=r"cannot resume .*manifest.json: not JSON .*leave out --resume to start afresh"
    ):
        infer(folder, tmp_path, {"prompt": "w1 w2"}, resume=True)
    assert (tmp_path / "out.jsonl").read_bytes() == before
