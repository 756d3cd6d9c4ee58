"""The infer stage on several real processes: the file of one process, and what is left of it when a rank fails."""

from __future__ import annotations

import json
import re
import shutil
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from scripts.infer import Options, main
from tests.modules.tiny_kinds import KINDS, LLAMA, random_tokens
from tests.modules.tiny_models import save_hf_folder
from tests.pipeline_parallel import launching
from tests.pipeline_parallel.launching import Ended, Started, start_torchrun, wait_all

WORKER = str(Path(__file__).with_name("infer_on_rank.py"))
# Forked ranks: importing transformers in each would take longer than all they do. Fresh ones are those under torchrun.
start_ranks = partial(launching.start_ranks, forked=True)
LIMIT_S = 30.0  # within which a failure has ended all ranks
TOKENS_EACH = 40
NUM_FEW = 30  # answers that are several times as much as 10000 bytes
BROKEN_TOKEN = 77


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose tokens are words."""
    folder = tmp_path_factory.mktemp("model")
    save_hf_folder(folder, LLAMA)
    vocabulary = {word: i for i, word in enumerate(["<s>", "</s>", "<unk>", *(f"w{i}" for i in range(128))])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def many_prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """More than a few seconds' work with a batch of one, half of it sampled."""
    prompts = [
        {"prompt_token_ids": ids[: 1 + place % 9], "id": f"p{place}", "temperature": float(place % 2)}
        for place, ids in enumerate(random_tokens(150, 9).tolist())
    ]
    return write_prompts(tmp_path_factory.mktemp("prompts") / "many.jsonl", prompts)


@pytest.fixture(scope="module")
def uninterrupted(model: Path, many_prompts: Path) -> list[dict[str, Any]]:
    """The answers to `many_prompts` from one process that nothing disturbs."""
    return in_one_process(model, many_prompts, many_prompts.with_name("whole.jsonl"), max_new_tokens=TOKENS_EACH)


def write_prompts(path: Path, prompts: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    return path


def read_answers(path: Path) -> list[dict[str, Any]]:
    """The lines of an output file, each of which must be whole."""
    text = path.read_text()
    assert text == "" or text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def in_one_process(model: Path, prompts: Path, output: Path, **options: Any) -> list[dict[str, Any]]:
    main(Options(model=str(model), input=prompts, output=output, device="cpu", quiet=True, **options))
    return read_answers(output)


def arguments(model: Path | str, prompts: Path, output: Path | str, *more: str) -> list[str]:
    files = ["--model", str(model), "--input", str(prompts), "--output", str(output)]
    return [*files, "--device", "cpu", "--quiet", "--max-new-tokens", str(TOKENS_EACH), *more]


def wait_for_answers(path: Path, number: int, ranks: list[Started]) -> None:
    deadline = time.monotonic() + 60
    while not path.exists() or path.read_bytes().count(b"\n") < number:
        assert time.monotonic() < deadline and all(one.exit_code is None for one in ranks), wait_all(ranks, 1)
        time.sleep(0.01)


def only_error(ended: list[Ended]) -> str:
    """The one line that all ranks together have said; none of them has ended well."""
    assert 0 not in [one.exit_code for one in ended]
    lines = "".join(one.stderr for one in ended).splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def assert_same(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Equal answers in equal order; of log-probabilities 1e-4 may differ."""
    assert [answer["id"] for answer in found] == [answer["id"] for answer in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["logprobs"] == pytest.approx(theirs["logprobs"], abs=1e-4)
        assert {**ours, "logprobs": None} == {**theirs, "logprobs": None}


def assert_part_of(answers: list[dict[str, Any]], whole: list[dict[str, Any]]) -> None:
    """Each answer is that of the whole run, none is there twice, and some are missing."""
    known = {answer["id"]: answer for answer in whole}
    assert_same(answers, [known[answer["id"]] for answer in answers])
    assert 0 < len({answer["id"] for answer in answers}) == len(answers) < len(whole)


def test_under_torchrun_the_file_is_that_of_one_process(model: Path, tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {"prompt": "w1 w2 w3"},
        {"prompt": "w4", "id": "sampled", "temperature": 1.0, "seed": 7},
        {"prompt": "w5 " * 65, "id": "too long"},
        {"prompt_token_ids": [9, 8, 7, 6, 5], "top_k": 5, "temperature": 0.7},
        {"prompt": "w6 w7", "id": "scored only", "max_new_tokens": 0},
        {"prompt": "w7", "id": "stopped"},
        {"prompt": "w8 w9", "max_new_tokens": 1},
    ]
    plain = in_one_process(model, write_prompts(tmp_path / "prompts.jsonl", lines), tmp_path / "plain.jsonl")
    words = plain[5]["text"].split()
    lines[5]["stop"] = f"{words[2]} {words[3]}"  # of two tokens
    prompts = write_prompts(tmp_path / "prompts.jsonl", lines)
    expected = in_one_process(model, prompts, tmp_path / "one.jsonl", echo=True, max_new_tokens=TOKENS_EACH)
    reasons = {answer["id"]: answer["finish_reason"] for answer in expected}
    assert (reasons["too long"], reasons["stopped"], reasons["scored only"]) == ("error", "stop", "length")
    more = ["--tp-size", "2", "--echo", "--batch-size", "2", "--warmup", "--overlap-tokens", "480"]
    given = [one for one in arguments(model, prompts, tmp_path / "out.jsonl", *more) if one != "--quiet"]
    (ended,) = wait_all([start_torchrun(["-m", "scripts.infer", *given], 2)], 90)
    assert ended.exit_code == 0, ended.stderr
    assert "prefills of 480 tokens or more are split in two" in ended.stderr
    # Nor does the interpreter's own end complain, which ranks that are forked do not have.
    assert not re.search(r"error|warning|exception", ended.stderr, re.IGNORECASE), ended.stderr
    assert_same(read_answers(tmp_path / "out.jsonl"), expected)


def test_a_killed_rank_is_named_answers_of_both_replicas_stay_and_resume_completes_them(
    model: Path, many_prompts: Path, uninterrupted: list[dict[str, Any]], tmp_path: Path
) -> None:
    output = tmp_path / "out.jsonl"
    more = ["--tp-size", "2", "--batch-size", "1"]
    ranks = start_ranks(["-m", "scripts.infer", *arguments(model, many_prompts, output, *more)], 4)
    wait_for_answers(output, 8, ranks)
    ranks[2].process.kill()
    ended = wait_all(ranks, LIMIT_S)
    assert ended[2].exit_code == -signal.SIGKILL
    assert only_error(ended).startswith("error: rank 2 (tp 0, dp 1): has not been heard of for ")
    answers = read_answers(output)
    assert_part_of(answers, uninterrupted)
    assert {int(answer["id"].removeprefix("p")) % 2 for answer in answers} == {0, 1}, "answers of both replicas"
    assert_same(in_one_process(model, many_prompts, output, resume=True, max_new_tokens=TOKENS_EACH), uninterrupted)


def test_a_request_that_breaks_in_mid_run_is_named_with_its_rank(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    save_hf_folder(broken, KINDS["opt-untied"])
    weights = load_file(broken / "model.safetensors")
    weights["model.decoder.embed_tokens.weight"][BROKEN_TOKEN] = 1e38  # finite, but not the sum of a row
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    lines = [{"prompt_token_ids": [5 + place], "max_new_tokens": 1} for place in range(6)]
    lines[4]["prompt_token_ids"] = [BROKEN_TOKEN]
    prompts, output = write_prompts(tmp_path / "prompts.jsonl", lines), tmp_path / "out.jsonl"
    more = ["--pp-size", "2", "--batch-size", "2"]
    ended = wait_all(start_ranks(["-m", "scripts.infer", *arguments(broken, prompts, output, *more)], 2), 60)
    assert only_error(ended).startswith("error: rank 1 (pp 1): request 5: ")
    answers = read_answers(output)
    assert [answer["id"] for answer in answers] in ([1, 2], [1, 2, 3], [1, 2, 3, 4])


def test_on_a_full_disk_rank_0_names_the_file_and_resume_completes_it(
    model: Path, many_prompts: Path, uninterrupted: list[dict[str, Any]], tmp_path: Path
) -> None:
    """With answers of another replica, too, which rank 0 writes."""
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text("".join(many_prompts.read_text().splitlines(keepends=True)[:NUM_FEW]))
    expected = uninterrupted[:NUM_FEW]
    limit = {"MAX_FILE_BYTES_RANK_0": "10000"}
    error = only_error(wait_all(start_ranks([WORKER, *arguments(model, prompts, output)], 2, limit), 60))
    assert error.startswith(f"error: rank 0 (dp 0): {output}: no space left to write it (")
    assert error.endswith("; free space there, then give the same command with --resume")
    assert output.stat().st_size <= 10000
    assert_part_of(read_answers(output), expected)
    assert_same(in_one_process(model, prompts, output, resume=True, max_new_tokens=TOKENS_EACH), expected)


def test_another_checkpoint_on_one_rank_is_refused(model: Path, many_prompts: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "model0")
    save_hf_folder(tmp_path / "model1", LLAMA, seed=1)
    given = arguments(tmp_path / "model{rank}", many_prompts, tmp_path / "out.jsonl", "--tp-size", "2")
    error = only_error(wait_all(start_ranks([WORKER, *given], 2), 60))
    assert "the checkpoint of rank 1 is not that of rank 0" in error
    assert not (tmp_path / "out.jsonl").exists()
