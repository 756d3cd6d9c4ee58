"""The drift stage: its numbers on Hugging Face's own states, of a model and of a store; files, texts, refusals."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import scripts.drift as drift_stage
from analysis.embedding_drift import StateRows
from analysis.results import Record, read_records
from data.activation_store import ActivationStore
from modules.checkpoint import load_model
from scripts.command_line import run_stage
from scripts.drift import Options, main
from scripts.drift_records import PARTS, DriftSettings, drift_records
from scripts.drift_sources import StoredStates, WindowStates
from scripts.drift_text import read_texts
from scripts.model_loading import ModelOptions
from tests.modules.tiny_kinds import KINDS, LLAMA, random_tokens
from tests.modules.tiny_models import save_hf_folder, tiny_decoder
from tests.sparse_predictor.tiny_stages import collect, model_folder, one_error_line, ragged_documents, write_corpus

LABELS = {"model": "tiny", "dtype": "float64", "seed": 0}
DRIFT = DriftSettings(parts=("drift",))
PAIR = ((1, 3), (1, 1), (3, 3))  # states after attention in layers 0 and 1: with each other and with themselves


def states_of_hugging_face(model: PreTrainedModel, windows: torch.Tensor) -> np.ndarray:
    """[S, W, T, D]: the stream before and between the half-blocks, and after the last one."""
    config, states = model.config, []
    is_llama, post_norm = config.model_type == "llama", not getattr(config, "do_layer_norm_before", True)
    decoder = model.model if is_llama else model.model.decoder

    def keep(module: torch.nn.Module, args: Any, kwargs: Any = None) -> None:
        states.append((args[0] if args else kwargs["hidden_states"]).detach().reshape(*windows.shape, -1).numpy())

    for layer in decoder.layers:
        if is_llama:
            points = (layer.input_layernorm, layer.post_attention_layernorm)
        elif post_norm:
            points = (layer, layer.fc1)
        else:
            points = (layer.self_attn_layer_norm, layer.final_layer_norm)
        for point in points:
            point.register_forward_pre_hook(keep, with_kwargs=True)
    final = decoder.norm if is_llama else decoder.final_layer_norm
    if post_norm:
        decoder.layers[-1].final_layer_norm.register_forward_hook(lambda module, args, output: keep(module, (output,)))
    else:
        final.register_forward_pre_hook(keep, with_kwargs=True)
    with torch.no_grad():
        model.double()(windows)
    return np.stack(states)


def one(records: list[Record], metric: str, **labels: Any) -> Record:
    (found,) = [
        record
        for record in records
        if record["metric"] == metric and all(record["labels"].get(name) == value for name, value in labels.items())
    ]
    return found


def cosine(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return (x * y).sum(-1) / np.linalg.norm(x, axis=-1) / np.linalg.norm(y, axis=-1)


def hsic(x: np.ndarray, y: np.ndarray) -> float:
    """Unbiased, of the rows after the first: Song et al. 2012, equation 4."""
    k, m = (rows[1:] @ rows[1:].T for rows in (x, y))
    for products in (k, m):
        np.fill_diagonal(products, 0)
    n = len(k)
    return (k * m).sum() + k.sum() * m.sum() / ((n - 1) * (n - 2)) - 2 / (n - 2) * (k.sum(0) * m.sum(0)).sum()


@pytest.mark.parametrize("kind", ["llama", "opt", "opt-post-norm-projected"])
def test_measures_are_those_of_a_few_lines_on_hugging_faces_states(kind: str, tmp_path: Path) -> None:
    theirs = save_hf_folder(tmp_path / "model", KINDS[kind])
    model, windows = load_model(tmp_path / "model", dtype=torch.float64), random_tokens(9, 12)
    records = drift_records(model, windows, windows, labels=LABELS, settings=DRIFT, batch_size=4)
    states = states_of_hugging_face(theirs, windows)
    assert len(states) == 7
    ordinary = states[:, :, 1:].reshape(7, -1, 48)
    standardised = (states - ordinary.mean(1)[:, None, None]) / ordinary.std(1)[:, None, None]
    for variant, chosen in (("raw", states), ("standardised", standardised)):
        for point, first in (("block_input", 0), ("after_attention", 1), ("after_mlp", 2)):
            for lookahead in (1, 2):
                pairs = [(2 * layer + first, 2 * (layer + lookahead) + first) for layer in range(3 - lookahead)]
                expected = [cosine(chosen[a], chosen[b])[:, 1:].mean() for a, b in pairs]
                labels = {"point": point, "lookahead": lookahead, "variant": variant, "tokens": "ordinary"}
                found = one(records, "cosine", **labels)
                assert found["per_layer"] == pytest.approx(
                    [*expected, *[None] * lookahead], abs=2e-5 if kind == "llama" else 1e-9
                )
                assert found["interval"][0] < found["value"] < found["interval"][1]
    steps = np.linalg.norm(states[1:] - states[:-1], axis=-1) / np.linalg.norm(states[:-1], axis=-1)
    for point, first in (("after_attention", 0), ("after_mlp", 1)):
        found = one(records, "relative_update", point=point, tokens="all")
        assert found["per_layer"] == pytest.approx(steps[first::2].mean((1, 2)), abs=1e-4)
    # Each window is a minibatch here: nine of them are not more than one a set.
    cross, own, other = (sum(hsic(x, y) for x, y in zip(states[a], states[b], strict=True)) for a, b in PAIR)
    found = one(records, "cka", point="after_attention", lookahead=1, variant="raw")
    assert found["per_layer"][0] == pytest.approx(cross / np.sqrt(own * other), abs=1e-4)
    assert {record["labels"]["num_tokens"] for record in records} == {108}


def test_large_models_are_measured_at_fewer_tokens_of_each_window_within_the_memory() -> None:
    model, windows = tiny_decoder(LLAMA, dtype=torch.float32), random_tokens(10, 33)
    row_bytes = 7 * 48 * 4
    thinned = WindowStates(model, windows, batch_size=4, state_bytes=9 * row_bytes)
    rows: list[StateRows] = list(thinned)
    assert all(some.states.numel() * 4 <= 9 * row_bytes for some in rows)
    assert [some.positions.tolist() for some in rows] == [[0, 1, 5, 10, 14, 19, 23, 28, 32]] * 10
    assert thinned.ordinary_weight == 32 / 8 and thinned.num_rows == 90
    whole = list(WindowStates(model, windows, batch_size=4))
    assert len(whole) == 10, "sets of windows are small enough for resampling"
    for some, all_of_them in zip(rows, whole, strict=True):
        torch.testing.assert_close(some.states, all_of_them.states[:, some.positions])
        assert some.groups.unique().tolist() == all_of_them.groups.unique().tolist() == [some.unit]


def test_a_store_gives_the_numbers_of_the_model_that_it_was_collected_from(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", LLAMA)
    documents = ragged_documents([12] * 8)
    collect(folder, tmp_path / "store", documents)
    options = Options(activations=tmp_path / "store", output_dir=tmp_path / "drift", quiet=True)
    records = main(options)
    model = load_model(folder, dtype=torch.float32)
    windows = torch.tensor(documents)
    wanted = drift_records(model, windows, windows, labels=LABELS, settings=DRIFT)
    for record in wanted:
        labels = {name: value for name, value in record["labels"].items() if name not in (*LABELS, "num_tokens")}
        if labels["point"] == "after_mlp" and labels.get("lookahead") == 2:
            assert not [one for one in records if labels.items() <= one["labels"].items()], "one pair, which lacks s_2L"
            continue
        found = one(records, record["metric"], **labels)
        expected = list(record["per_layer"])
        if labels["point"] == "after_mlp":
            expected[2 - labels.get("lookahead", 0)] = None  # the state after the last MLP is not stored
        assert found["per_layer"] == pytest.approx(expected, abs=2e-3), labels
    assert {record["labels"]["corpus"] for record in records} == {"store.jsonl"}


def test_a_store_is_read_in_documents_taken_evenly_and_pieces_of_one_are_a_group(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", LLAMA)
    collect(folder, tmp_path / "store", ragged_documents([30] * 12), max_document_tokens=20, layers="0-1")
    store = ActivationStore(tmp_path / "store")
    room = 16 * 7 * 48 * 4
    states = StoredStates(store, num_layers=3, max_rows=120, device=torch.device("cpu"), state_bytes=room)
    assert list(states.present) == [True] * 4 + [False] * 3
    assert (states.num_groups, states.num_rows) == (4, 120)
    seen: dict[int, list[int]] = {}
    for some in states:
        assert len(some.positions) <= 16
        for group, position in zip(some.groups.tolist(), some.positions.tolist(), strict=True):
            seen.setdefault(group, []).append(position)
    pieces = sorted([*range(20), *range(10)])
    assert {group: sorted(positions) for group, positions in seen.items()} == dict.fromkeys(range(4), pieces)


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Record]]:
    """Folder and records of the whole stage on a tiny model."""
    root = tmp_path_factory.mktemp("study")
    folder = model_folder(root / "tiny" / "checkpoint", LLAMA)
    corpus = write_corpus(root / "text.jsonl", ragged_documents([400, 300, 500]))
    arguments = ["--model", folder, "--corpus", corpus, "--output-dir", root / "drift", "--window", "16", "--quiet"]
    arguments += ["--test-tokens", "192", "--calibration-tokens", "320", "--max-lookahead", "2"]
    arguments += ["--perplexity-lookaheads", "0", "1", "2"]
    for parts in (["activation"], PARTS):  # the second run replaces what the first one wrote
        run_stage(main, Options, [str(argument) for argument in (*arguments, "--parts", *parts)])
    return root / "drift", read_records(root / "drift/drift.jsonl")


def test_the_stage_leaves_records_verdict_plots_and_a_report(study: tuple[Path, list[Record]]) -> None:
    output_dir, records = study
    assert {record["name"] for record in records} == {"drift"}
    assert {record["metric"] for record in records} >= {
        *("cosine", "cka", "relative_update"),
        *("recall", "precision", "recall_drop", "perplexity", "loss_rise"),
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
    assert list(output_dir.glob("*.png")) and "data:image/png" in (output_dir / "report.html").read_text()
    assert (output_dir / "summary.md").is_file()


def test_what_distance_costs_is_recall_at_no_distance_minus_recall(study: tuple[Path, list[Record]]) -> None:
    _, records = study
    for block in ("mlp", "attention"):
        own = one(records, "recall", study="lookahead", block=block, lookahead=0)["per_layer"]
        for lookahead in (1, 2):
            far = one(records, "recall", study="lookahead", block=block, lookahead=lookahead)
            drop = one(records, "recall_drop", study="lookahead", block=block, lookahead=lookahead)
            assert drop["value"] == pytest.approx(np.mean(own[lookahead:]) - np.mean(far["per_layer"][lookahead:]))
            assert far["baseline"]["name"] == "static"
            sparse = one(records, "perplexity", study="lookahead", block=block, lookahead=lookahead)
            there = one(records, "perplexity", study="lookahead", block=block, lookahead=0)
            rise = one(records, "loss_rise", study="lookahead", block=block, lookahead=lookahead)
            assert rise["value"] == pytest.approx(np.log(sparse["value"] / there["value"]))
            assert sparse["baseline"]["name"] == "dense" and sparse["ratio_interval"][0] <= sparse["ratio"]


def test_reuse_is_compared_with_chance_and_with_frequent_neurons(study: tuple[Path, list[Record]]) -> None:
    found = one(study[1], "reuse_tokens")
    assert found["baseline"] == {"name": "chance", "value": pytest.approx(0.3)}
    assert found["above_static"] == pytest.approx(found["value"] - found["static"])


def loaded_model(tmp_path: Path) -> Any:
    return ModelOptions(model=str(model_folder(tmp_path / "model", LLAMA)), quiet=True).load()


def test_calibration_and_test_windows_share_no_token(tmp_path: Path) -> None:
    loaded = loaded_model(tmp_path)
    numbers = [list(range(start, start + 10)) for start in range(0, 120, 10)]
    one_file = write_corpus(tmp_path / "one.jsonl", numbers)
    amounts: dict[str, Any] = {"window": 4, "calibration_tokens": 12, "test_tokens": 8}
    calibration, test = read_texts(loaded, one_file, None, **amounts)
    assert calibration.tolist() == [[0, 1, 2, 3], [28, 29, 30, 31], [56, 57, 58, 59]]
    assert test.tolist() == [[60, 61, 62, 63], [116, 117, 118, 119]]
    other = write_corpus(tmp_path / "other.jsonl", numbers[::-1])
    calibration, test = read_texts(loaded, one_file, other, **amounts)
    assert test[0].tolist() == [0, 1, 2, 3] and calibration[0].tolist() == [110, 111, 112, 113]
    nothing, test = read_texts(loaded, one_file, other, **{**amounts, "calibration_tokens": None})
    assert nothing.shape == (0, 4) and test[0].tolist() == [0, 1, 2, 3]
    calibration, test = read_texts(loaded, "self", None, quiet=True, **amounts)
    assert calibration.shape == (3, 4) and test.shape == (2, 4) and not torch.equal(calibration[:2], test)


Arguments = Callable[[Path], list[object]]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (lambda root: [], "give --model, or --activations"),
        (lambda root: ["--activations", root / "store", "--parts", "drift", "distance"], "there is only drift"),
        (lambda root: ["--activations", root / "nowhere"], "nowhere"),
        (lambda root: ["--activations", root / "store", "--model", root / "other"], "which is not --model"),
        (lambda root: ["--model", root / "model", "--corpus", "nonsense"], "unknown corpus 'nonsense'"),
        (lambda root: ["--model", root / "model", "--window", "65"], "context of 64, got 65"),
        (lambda root: ["--model", root / "model", "--window", "60"], "at least 2 are needed"),
        (lambda root: ["--model", root / "model", "--max-lookahead", "0"], "--max-lookahead must be at least 1"),
        (lambda root: ["--model", root / "model", "--mlp-density", "1.5"], "--mlp-density must lie in (0, 1], got 1.5"),
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


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("refused")
    model = model_folder(root / "model", LLAMA)
    model_folder(root / "other", LLAMA, seed=1)
    collect(model, root / "store", ragged_documents([20, 20]))
    write_corpus(root / "text.jsonl", ragged_documents([60, 60]))
    return root


def test_the_shell_stage_takes_the_small_model_by_itself_and_samples_it_without_a_gpu(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    for name in ("presets.sh", "usage.sh", "drift.sh"):
        shutil.copy(Path(drift_stage.__file__).parent / name, tmp_path / "scripts" / name)
    for run in ("smollm2", "opt-125m"):
        (tmp_path / "outputs" / run / "checkpoint").mkdir(parents=True)
        (tmp_path / "outputs" / run / "checkpoint/config.json").write_text("{}")

    def commanded(*arguments: str) -> str:
        environment = {**os.environ, "PYTHON": "echo"}
        command = ["bash", str(tmp_path / "scripts/drift.sh"), *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    of_small = commanded("--seed", "7")
    assert of_small.startswith("-m scripts.drift --model outputs/smollm2/checkpoint --corpus self ")
    assert " --calibration-corpus self --output-dir outputs/smollm2/drift " in of_small
    assert " --test-tokens " in of_small and of_small.endswith(" --seed 7\n")
    assert commanded("SmolLM2", "--seed", "7") == of_small
    of_opt = commanded("OPT-125M")
    assert " --corpus wikitext --calibration-corpus c4 " in of_opt and "--test-tokens" not in of_opt
