"""The drift stage: its files, what its records say of each other, its refusals, its shell file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from analysis.results import Record, read_records
from scripts.command_line import run_stage
from scripts.model_loading import ModelOptions
from scripts.studies.drift import Options, main
from scripts.studies.drift_records import PARTS
from tests.modules.tiny_kinds import LLAMA
from tests.sparse_predictor.tiny_stages import collect, model_folder, one_error_line, ragged_documents, write_corpus


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Record]]:
    """Folder and records of the whole stage on a tiny model."""
    root = tmp_path_factory.mktemp("study")
    folder = model_folder(root / "tiny" / "checkpoint", LLAMA)
    corpus = write_corpus(root / "text.jsonl", ragged_documents([400, 300, 500]))
    arguments = ["--model", folder, "--corpus", corpus, "--output-dir", root / "drift", "--window", "16", "--quiet"]
    arguments += ["--test-tokens", "192", "--calibration-tokens", "384", "--max-lookahead", "2"]
    arguments += ["--perplexity-lookaheads", "0", "1", "2"]
    for parts in (["activation"], PARTS):  # the second run replaces what the first one wrote
        run_stage(main, Options, [str(argument) for argument in (*arguments, "--parts", *parts)])
    return root / "drift", read_records(root / "drift/drift.jsonl")


def test_the_stage_leaves_records_verdict_plots_and_a_report(study: tuple[Path, list[Record]]) -> None:
    output_dir, records = study
    assert {record["name"] for record in records} == {"drift"}
    assert {record["metric"] for record in records} >= {
        *("cosine", "cka", "relative_update"),
        *("recall", "precision", "r_precision", "recall_drop", "perplexity", "loss_rise"),
        *("energy_share", "exact_zeros", "boundary_margin", "reuse_tokens", "reuse_layers"),
    }
    for record in records:
        labels = record["labels"]
        assert (labels["model"], labels["dtype"], labels["seed"]) == ("tiny", "float32", 0)
        low, high = record["interval"]
        assert low <= record["value"] <= high or record["metric"] == "cka"
    identities = [(record["metric"], json.dumps(record["labels"], sort_keys=True)) for record in records]
    assert len(set(identities)) == len(identities), "labels tell every record from the others; nothing is there twice"
    verdict = (output_dir / "verdict.md").read_text()
    assert "Does drift explain it?" in verdict and "tiny" in verdict
    assert list(output_dir.glob("plots/*.png")) and "data:image/png" in (output_dir / "report.html").read_text()
    assert (output_dir / "summary.md").is_file()


Arguments = Callable[[Path], list[object]]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (lambda root: [], "give --model, or --activations"),
        (lambda root: ["--activations", root / "store", "--parts", "drift", "distance"], "there is only drift"),
        (lambda root: ["--activations", root / "nowhere"], "nowhere"),
        (
            lambda root: ["--activations", root / "store", "--model", root / "other", "--window", "32"],
            "was collected from other weights of the same configuration",
        ),
        (lambda root: ["--model", root / "model", "--corpus", "nonsense"], "unknown corpus 'nonsense'"),
        (lambda root: ["--model", root / "model", "--window", "65"], "context of 64, got 65"),
        (lambda root: ["--model", root / "model", "--window", "60"], "at least 2 are needed"),
        (lambda root: ["--model", root / "model", "--max-lookahead", "0"], "--max-lookahead must be at least 1"),
        (lambda root: ["--model", root / "model", "--mlp-density", "1.5"], "--mlp-density must lie in (0, 1], got 1.5"),
        (
            lambda root: ["--model", root / "model", "--max-lookahead", "2", "--perplexity-lookaheads", "0", "3"],
            "--perplexity-lookaheads must lie between 0 and --max-lookahead 2, got 3",
        ),
        (
            lambda root: ["--model", root / "model", "--window", "8", "--calibration-tokens", "300"],
            "--calibration-tokens: 300 tokens are too few to fit predictors on; with 48 hidden channels",
        ),
        (lambda root: ["--model", root / "model", "--test-tokens", "0"], "--test-tokens must be at least 1, got 0"),
        (lambda root: ["--model", root / "model", "--output-dir", root / "text.jsonl"], "text.jsonl is a file"),
    ],
)
def test_refusals_are_one_line(
    refused: Path, arguments: Arguments, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--corpus", refused / "text.jsonl", "--output-dir", refused / "out", "--quiet", *arguments(refused)]
    assert said in one_error_line(main, Options, given, capsys)
    assert not (refused / "out").exists()


def test_what_does_not_fit_the_model_is_told_before_its_weights_are_read(
    refused: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ModelOptions, "load", lambda options: pytest.fail("a model is loaded"))
    shared = ["--model", refused / "model", "--corpus", refused / "text.jsonl", "--output-dir", refused / "out"]
    for flags, said in (
        (["--window", 65], "context of 64"),
        (["--window", 32, "--calibration-tokens", 100], "--calibration-tokens: 100"),
    ):
        assert said in one_error_line(main, Options, [*shared, *flags], capsys)


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("refused")
    model = model_folder(root / "model", LLAMA)
    model_folder(root / "other", LLAMA, seed=1)
    collect(model, root / "store", ragged_documents([20, 20]))
    write_corpus(root / "text.jsonl", ragged_documents([60, 60]))
    return root
