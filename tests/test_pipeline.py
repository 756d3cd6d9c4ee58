"""All stages, one after the other, on tiny models: once through the command lines, once in process."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import convert_llama_checkpoint
import scripts.collect
import scripts.evaluate
import scripts.infer
import scripts.summarize
import scripts.train
from analysis.results import read_records
from data.activation_store import ActivationStore
from modules.checkpoint.load import load_model
from sparse_predictor.store import load_predictors
from tests.modules.tiny_kinds import KINDS, LLAMA
from tests.modules.tiny_models import save_hf_folder
from tests.pipeline_parallel.launching import Ended, start_ranks, wait_all

WORDS = ["<s>", "</s>", "<unk>", *(f"w{i}" for i in range(128))]


def save_with_tokenizer(directory: Path, hf_config: dict[str, Any]) -> None:
    """A Hugging Face folder whose tokens are words."""
    save_hf_folder(directory, hf_config)
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    tokenizer.save_pretrained(directory)


def write_text(path: Path, seed: int, documents: int = 20) -> Path:
    generator = torch.Generator().manual_seed(seed)
    lines = []
    for _ in range(documents):
        words = torch.randint(0, 128, (40,), generator=generator).tolist()
        lines.append(json.dumps({"text": " ".join(f"w{word}" for word in words)}))
    path.write_text("\n".join(lines) + "\n")
    return path


def command(*words: object) -> Ended:
    """`python ...` from the checkout, as the README says; forked, so that nothing is imported again."""
    (ended,) = wait_all(start_ranks([str(word) for word in words], 1, forked=True), 120)
    return ended


def test_the_command_lines_fit_together(tmp_path: Path) -> None:
    save_with_tokenizer(tmp_path / "hf", LLAMA)
    train_text, test_text = write_text(tmp_path / "train.jsonl", 1), write_text(tmp_path / "test.jsonl", 2, 4)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "w1 w2 w3"}\n{"prompt": "w9", "id": "nine", "max_new_tokens": 2}\n')
    model, store, predictors = tmp_path / "checkpoint", tmp_path / "store", tmp_path / "predictors"
    answers, results, summary = tmp_path / "out.jsonl", tmp_path / "results.jsonl", tmp_path / "summary"
    sparse = ["--method", "predictor", "--predictors", predictors, "--mlp-density", "0.5"]
    quick = ["--steps", "3", "--batch-rows", "64", "--refine-steps", "2", "--batch-size", "2"]
    stages: list[list[object]] = [
        ["convert_llama_checkpoint.py", "--source", tmp_path / "hf", "--output-dir", model],
        ["-m", "scripts.collect", "--model", model, "--corpus", train_text, "--output-dir", store],
        ["-m", "scripts.train", "--model", model, "--activations", store, "--output-dir", predictors, *quick],
        ["-m", "scripts.infer", "--model", model, "--input", prompts, "--output", answers, *sparse,
         "--max-new-tokens", "4"],
        ["-m", "scripts.evaluate", "--model", model, "--corpus", test_text, "--output", results, "--window", "32",
         "--method", "dense", "predictor", "static", "--predictors", predictors],
        ["-m", "scripts.summarize", "--results", results, "--output-dir", summary],
    ]  # fmt: skip
    for stage in stages:
        done = command(*stage)
        assert done.exit_code == 0, done.stderr
        assert "Traceback" not in done.stderr

    assert ActivationStore(store).num_rows == 20 * 40
    assert {path.name for path in model.iterdir()} >= {"pytorch_0.pt", "pytorch_embs.pt", "manifest.json"}
    load_predictors(predictors, load_model(model, dtype=None, device="cpu"))
    lines = [json.loads(line) for line in answers.read_text().splitlines()]
    assert [line["id"] for line in lines] == [1, "nine"] and [len(line["token_ids"]) for line in lines] == [4, 2]
    assert all(0.2 < line["mlp_density"] < 0.8 for line in lines)
    methods = [record["labels"]["method"] for record in read_records(results)]
    assert methods == ["dense", "predictor", "static"]
    assert (summary / "report.html").is_file() and "predictor" in (summary / "summary.md").read_text()
    assert list(summary.glob("*.png"))

    failed = command("-m", "scripts.evaluate", "--model", model, "--corpus", test_text, "--output", results)
    assert failed.exit_code == 2
    assert [line for line in failed.stderr.splitlines() if line.startswith("error:")] == [
        "error: window 2048 does not fit the model's context of 64; give a smaller --window"
    ]
    assert len(read_records(results)) == 3


@pytest.mark.parametrize("kind", ["opt", "opt-post-norm-projected"])
def test_the_same_stages_on_an_opt(tmp_path: Path, kind: str) -> None:
    save_with_tokenizer(tmp_path / "hf", KINDS[kind])
    text = write_text(tmp_path / "train.jsonl", 1)
    convert_llama_checkpoint.main(
        convert_llama_checkpoint.Options(source=str(tmp_path / "hf"), output_dir=tmp_path / "checkpoint", quiet=True)
    )
    model: dict[str, Any] = {"model": str(tmp_path / "checkpoint"), "quiet": True}
    store = scripts.collect.main(
        scripts.collect.Options(**model, corpus=str(text), output_dir=tmp_path / "store", max_tokens=500)
    )
    assert store.num_rows == 500
    scripts.train.main(
        scripts.train.Options(
            **model, activations=tmp_path / "store", output_dir=tmp_path / "p", lookahead=1, steps=3, refine_steps=2,
            batch_size=2, batch_rows=64,
        )
    )  # fmt: skip
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "w1 w2 w3"}\n')
    sparse: dict[str, Any] = {"predictors": tmp_path / "p", "head_density": 0.5}
    scripts.infer.main(
        scripts.infer.Options(
            **model, **sparse, input=prompts, output=tmp_path / "out.jsonl", method="predictor", mlp_density=0.5,
            max_new_tokens=6,
        )
    )  # fmt: skip
    (answer,) = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert 0 < answer["mlp_density"] < 1 and answer["head_density"] == 0.5
    test_text = write_text(tmp_path / "test.jsonl", 2, 4)
    records = scripts.evaluate.main(
        scripts.evaluate.Options(
            **model, **sparse, corpus=str(test_text), output=tmp_path / "r.jsonl", window=41, mlp_density=(0.5,),
            method=("predictor", "oracle", "static", "random"),
        )
    )  # fmt: skip
    assert len(records) == 5
    for record in records[1:]:
        assert record["achieved"]["sparse_calls"] > 0 and "head_recall" in record["quality"]
    scripts.summarize.main(
        scripts.summarize.SummarizeOptions(results=(tmp_path / "r.jsonl",), output_dir=tmp_path / "s", quiet=True)
    )
    assert (tmp_path / "s/report.html").is_file()
