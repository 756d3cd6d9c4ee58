"""`infer` from a folder on disk to the answers file."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from modules.generation import generate
from modules.requests import GenerationRequest
from modules.sampling import SamplingParams
from scripts.command_line import run_stage
from scripts.infer import Options, main
from scripts.model_loading import ModelOptions, chat_token_ids
from tests.modules.tiny_kinds import LLAMA
from tests.modules.tiny_models import save_hf_folder, tiny_decoder
from tests.scripts.tiny_prompts import WORDS, infer, words_folder, write_prompts


@pytest.fixture(scope="module")
def bare_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without a tokenizer."""
    folder = tmp_path_factory.mktemp("bare")
    save_hf_folder(folder, LLAMA)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return words_folder(tmp_path_factory.mktemp("model"))


def test_token_ids_need_no_tokenizer(bare_folder: Path, tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {"prompt_token_ids": [5, 6, 7]},
        {"prompt_token_ids": [9], "id": "mine", "max_new_tokens": 2},
    ]
    records = infer(bare_folder, tmp_path, *lines, max_new_tokens=5)
    model = tiny_decoder(LLAMA)
    expected = generate(
        model,
        [
            GenerationRequest(prompt_token_ids=[5, 6, 7], max_new_tokens=5),
            GenerationRequest(prompt_token_ids=[9], max_new_tokens=2),
        ],
    )
    assert [record["id"] for record in records] == [1, "mine"]
    for record, result in zip(records, expected, strict=True):
        assert record["token_ids"] == result.token_ids and record["text"] == ""
        assert record["logprobs"] == pytest.approx(result.logprobs, abs=1e-4)
        assert record["finish_reason"] == result.finish_reason and record["error"] is None
        assert (record["mlp_density"], record["head_density"]) == (1.0, 1.0)
    with pytest.raises(ValueError, match="holds no tokenizer .* request 1 is text"):
        infer(bare_folder, tmp_path, {"prompt": "w1 w2"})
    with pytest.raises(ValueError, match="request 1 has stop strings"):
        infer(bare_folder, tmp_path, {"prompt_token_ids": [5]}, stop=("x",))


def test_echo_is_aligned_with_the_prompt(folder: Path, tmp_path: Path) -> None:
    (record,) = infer(folder, tmp_path, {"prompt": "w1 w2 w3 w4"}, echo=True, max_new_tokens=3)
    prompt = [WORDS.index(word) for word in ("w1", "w2", "w3", "w4")]
    token_ids = prompt + record["token_ids"]
    model = tiny_decoder(LLAMA)
    logprobs = model.logits(model(torch.tensor([token_ids])))[0].log_softmax(-1)
    assert record["logprobs"][0] is None and len(record["logprobs"]) == len(token_ids) == 7
    for i in range(1, 7):
        assert record["logprobs"][i] == pytest.approx(float(logprobs[i - 1, token_ids[i]]), abs=1e-4)
    assert record["num_prompt_tokens"] == 4
    assert record["text"] == " ".join(WORDS[token] for token in record["token_ids"])


def test_a_requests_options_win_over_the_flags_for_itself_only(folder: Path, tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {"prompt": "w5", "temperature": 1.0, "seed": 3, "max_new_tokens": 4},
        {"prompt": "w5"},
        {"prompt": "w5", "temperature": 2.0, "top_k": 7, "top_p": 0.9, "seed": 3},
    ]
    records = infer(folder, tmp_path, *lines, max_new_tokens=6)
    model, prompt = tiny_decoder(LLAMA), [WORDS.index("w5")]
    params = [
        SamplingParams(temperature=1.0, seed=3),
        SamplingParams(),
        SamplingParams(temperature=2.0, top_k=7, top_p=0.9, seed=3),
    ]
    for record, sampling, count in zip(records, params, [4, 6, 6], strict=True):
        request = GenerationRequest(prompt_token_ids=prompt, sampling=sampling, max_new_tokens=count)
        assert record["token_ids"] == generate(model, [request])[0].token_ids


def test_the_same_seed_repeats_and_equal_prompts_differ(folder: Path, tmp_path: Path) -> None:
    lines = [{"prompt": "w5 w6"}] * 4

    def answers(**options: Any) -> list[list[int]]:
        records = infer(folder, tmp_path, *lines, temperature=1.0, max_new_tokens=8, **options)
        return [record["token_ids"] for record in records]

    first = answers()
    assert len({tuple(token_ids) for token_ids in first}) == 4
    assert answers(batch_size=1) == first and answers(batch_size=3) == first
    assert answers(seed=1) != first


def test_top_k_zero_and_minus_one_both_mean_all(folder: Path, tmp_path: Path) -> None:
    sampled = {"temperature": 1.0, "max_new_tokens": 6}
    (everything,) = infer(folder, tmp_path, {"prompt": "w5"}, top_k=-1, **sampled)
    (as_option,) = infer(folder, tmp_path, {"prompt": "w5", "top_k": 0}, top_k=2, **sampled)
    (as_flag,) = infer(folder, tmp_path, {"prompt": "w5"}, top_k=0, **sampled)
    assert as_flag == as_option == everything
    assert json.loads((tmp_path / "out.jsonl.manifest.json").read_text())["settings"]["top_k"] == -1


def test_a_prompt_beyond_the_context_fails_alone(folder: Path, tmp_path: Path) -> None:
    lines = [{"prompt": "w1"}, {"prompt": "w2 " * 65, "id": "long"}, {"prompt": "w3"}]
    records = infer(folder, tmp_path, *lines, max_new_tokens=2, echo=True)
    assert [record["finish_reason"] for record in records] == ["length", "error", "length"]
    assert "65 tokens do not fit the model's context of 64" in records[1]["error"]
    assert records[1]["token_ids"] == [] == records[1]["logprobs"] and records[1]["num_prompt_tokens"] == 65


def test_failed_prompts_are_counted_and_all_failed_is_an_error(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", {"prompt": "w1"}, {"prompt": ""}, {"prompt": "w2 " * 65})
    arguments = ["--model", str(folder), "--input", str(prompts), "--output", str(tmp_path / "out.jsonl")]
    run_stage(main, Options, arguments)
    assert "3 answers written to " in (said := capsys.readouterr().err) and "out.jsonl, 2 of all 3 failed" in said
    write_prompts(prompts, {"prompt": "", "id": "empty"})
    for more in (["--overwrite"], ["--resume"]):
        with pytest.raises(SystemExit) as stop:
            run_stage(main, Options, [*arguments, *more])
        assert stop.value.code == 2
        assert "out.jsonl: all 1 prompts failed, the first because: " in capsys.readouterr().err.splitlines()[-1]
    assert json.loads((tmp_path / "out.jsonl").read_text())["finish_reason"] == "error"


def test_a_missing_input_is_told_before_the_model_is_loaded(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Options, "load", lambda options: pytest.fail("a model is loaded"))
    with pytest.raises(FileNotFoundError, match="--input .*nowhere.jsonl does not exist"):
        main(Options(model=str(folder), input=tmp_path / "nowhere.jsonl", output=tmp_path / "out.jsonl"))
    (tmp_path / "out.jsonl").write_text("earlier answers")
    prompts = write_prompts(tmp_path / "prompts.jsonl", {"prompt": "w1"})
    with pytest.raises(ValueError, match="holds answers already"):
        main(Options(model=str(folder), input=prompts, output=tmp_path / "out.jsonl"))


def test_sparse_runs_report_what_they_computed(folder: Path, tmp_path: Path) -> None:
    lines = [{"prompt": "w1 w2"}, {"prompt": "w3"}]
    dense = infer(folder, tmp_path, *lines, max_new_tokens=5)
    full = infer(folder, tmp_path, *lines, max_new_tokens=5, method="oracle", mlp_density=1.0)
    assert full == dense
    half = infer(folder, tmp_path, *lines, max_new_tokens=5, method="random", mlp_density=0.5, head_density=0.5)
    assert [record["mlp_density"] for record in half] == [0.5, 0.5]
    assert [record["head_density"] for record in half] == [0.5, 0.5]


def test_generation_config_decides_where_no_flag_does(folder: Path, bare_folder: Path, tmp_path: Path) -> None:
    config = {"eos_token_id": [2, 50], "do_sample": True, "temperature": 0.6, "top_p": 0.9}
    model = tmp_path / "sampling-model"
    model.mkdir()
    for file in bare_folder.iterdir():
        (model / file.name).symlink_to(file)
    (model / "generation_config.json").unlink(missing_ok=True)
    (model / "generation_config.json").write_text(json.dumps(config))
    line = {"prompt_token_ids": [5, 6], "seed": 4}

    def expected(sampling: SamplingParams) -> list[int]:
        request = GenerationRequest(prompt_token_ids=[5, 6], max_new_tokens=20, sampling=sampling)
        return generate(tiny_decoder(LLAMA), [request], eos_token_ids=[2, 50])[0].token_ids

    (theirs,) = infer(model, tmp_path, line, max_new_tokens=20)
    assert theirs["token_ids"] == expected(SamplingParams(temperature=0.6, top_k=50, top_p=0.9, seed=4))
    (ours,) = infer(model, tmp_path, line, max_new_tokens=20, temperature=0.0)
    assert ours["token_ids"] == expected(SamplingParams())
    (model / "generation_config.json").write_text(json.dumps(config | {"eos_token_id": ours["token_ids"][1]}))
    (stopped,) = infer(model, tmp_path, line, max_new_tokens=20, temperature=0.0)
    assert stopped["token_ids"] == ours["token_ids"][:2] and stopped["finish_reason"] == "stop"


def test_chat_puts_the_prompt_into_the_template(folder: Path, bare_folder: Path, tmp_path: Path) -> None:
    tokenizer = ModelOptions(model=str(folder), quiet=True).load().tokenizer
    assert tokenizer is not None
    token_ids = chat_token_ids(tokenizer, "w5 w6")
    assert token_ids == [WORDS.index(word) for word in ("<s>", "w5", "w6", "w1")]
    (record,) = infer(folder, tmp_path, {"prompt": "w5 w6"}, chat=True, max_new_tokens=3)
    (plain,) = infer(folder, tmp_path, {"prompt_token_ids": token_ids}, max_new_tokens=3)
    assert record["num_prompt_tokens"] == 4 and record["token_ids"] == plain["token_ids"]
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        chat_token_ids(tokenizer, "w5")


@pytest.mark.parametrize("template", ["{{ raise_exception('no') }}", "{% for %}", "{{ messages[7].content }}"])
def test_a_chat_template_that_fails_is_one_line_with_the_requests_id(template: str, tmp_path: Path) -> None:
    model = words_folder(tmp_path / "model")
    (model / "chat_template.jinja").write_text(template)
    with pytest.raises(ValueError, match=r"^request 'first': the chat template fails \((\w+): .*\)$"):
        infer(model, tmp_path, {"prompt": "w5", "id": "first"}, chat=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp_size": 2}, "--tp-size 2 times --pp-size 1 is 2, but 1 process runs"),
        ({"pp_size": 3}, "--tp-size 1 times --pp-size 3 is 3, but 1 process runs"),
        ({"tp_size": 0}, "--tp-size must be at least 1, got 0"),
        ({"temperature": -1.0}, "--temperature"),
        ({"top_k": -2}, "--top-k"),
        ({"top_p": 1.5}, "--top-p"),
        ({"max_new_tokens": -1}, "--max-new-tokens"),
        ({"stop": ("",)}, "--stop"),
        ({"batch_size": 0}, "--batch-size must be at least 1"),
        ({"seed": -1}, "--seed must lie in"),
        ({"method": "random", "mlp_density": 1.5}, "density must lie in"),
        ({"device": "tpu"}, "--device 'tpu': give auto, cpu, cuda"),
    ],
)
def test_impossible_flags_are_refused_before_the_output_is_touched(
    folder: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    (tmp_path / "out.jsonl").write_text("earlier answers\n")
    with pytest.raises(ValueError, match=message):
        infer(folder, tmp_path, {"prompt": "w1"}, **options)
    assert (tmp_path / "out.jsonl").read_text() == "earlier answers\n"


def test_a_head_density_that_is_rounded_is_told_before_running(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", {"prompt": "w1"})
    begin = ["--model", str(folder), "--input", str(prompts), "--output", str(tmp_path / "out.jsonl"), "--overwrite"]
    begin += ["--quiet", "--max-new-tokens", "2"]
    for density, told in (("0.3", True), ("0.5", False)):
        run_stage(main, Options, [*begin, "--method", "random", "--mlp-density", "1", "--head-density", density])
        warning = f"{density} of 2 key-value groups is not a whole number of them, so 0.5 are kept"
        assert (warning in capsys.readouterr().err) == told
