"""The evaluate stage: perplexity against Hugging Face's loss, what records say, refusals."""

import json
import math
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import scripts.evaluate
from analysis.results import Record, make_record, read_records
from modules.scoring import Likelihood
from pipeline_parallel.mesh import ParallelMesh
from scripts.command_line import run_stage
from scripts.evaluate import Options, main
from scripts.run_records import RecordFile, gguf_source
from tests.modules.tiny_kinds import KINDS, LLAMA
from tests.sparse_predictor.tiny_stages import (
    collect,
    model_folder,
    one_error_line,
    ragged_documents,
    train,
    write_corpus,
)

METHODS = ("predictor", "oracle", "static", "random", "cats", "teal")
TEXT = ragged_documents([40, 64, 2, 33], seed=5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`model`, `predictors` and `test.jsonl` of a tiny Llama."""
    folder = tmp_path_factory.mktemp("llama")
    model = model_folder(folder / "model", LLAMA)
    train(model, collect(model, folder / "store"), folder / "predictors", standin_rank="4")
    write_corpus(folder / "test.jsonl", TEXT)
    return folder


def evaluate(folder: Path, output: Path, **options: Any) -> list[dict[str, Any]]:
    options = {"corpus": str(folder / "test.jsonl"), "window": 32, **options}
    return main(
        Options(model=str(folder / "model"), output=output, predictors=folder / "predictors", quiet=True, **options)
    )


def hugging_face_perplexity(folder: Path, pieces: list[list[int]]) -> float:
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for piece in pieces:
            if len(piece) > 1:
                token_ids = torch.tensor([piece])
                total += float(model(token_ids, labels=token_ids).loss) * (len(piece) - 1)
                count += len(piece) - 1
    return math.exp(total / count)


@pytest.mark.parametrize("kind", ["llama", "opt-post-norm-projected"])
def test_dense_perplexity_is_hugging_faces_loss(tmp_path: Path, kind: str) -> None:
    model_folder(tmp_path / "model", KINDS[kind])
    write_corpus(tmp_path / "test.jsonl", TEXT)
    pieces = [document[start : start + 32] for document in TEXT for start in range(0, len(document), 32)]
    (record,) = evaluate(tmp_path, tmp_path / "r.jsonl")
    assert record["value"] == pytest.approx(hugging_face_perplexity(tmp_path, pieces), rel=1e-4)
    assert record["labels"]["num_tokens"] == sum(len(piece) - 1 for piece in pieces)
    (first,) = evaluate(tmp_path, tmp_path / "r.jsonl", max_windows=3)
    assert first["value"] == pytest.approx(hugging_face_perplexity(tmp_path, pieces[:3]), rel=1e-4)
    (short,) = evaluate(tmp_path, tmp_path / "r.jsonl", max_tokens=50, batch_size=1)
    expected = hugging_face_perplexity(tmp_path, [TEXT[0][:32], TEXT[0][32:], TEXT[1][:10]])
    assert short["value"] == pytest.approx(expected, rel=1e-4)
    (strided,) = evaluate(tmp_path, tmp_path / "r.jsonl", stride=8)
    assert strided["labels"]["num_tokens"] == sum(len(document) - 1 for document in TEXT)
    assert len(read_records(tmp_path / "r.jsonl")) == 4, "records are appended"


def test_records_say_what_every_sparse_run_did(folder: Path, tmp_path: Path) -> None:
    records = evaluate(folder, tmp_path / "r.jsonl", method=("dense", *METHODS), mlp_density=(0.5, 0.3))
    assert read_records(tmp_path / "r.jsonl") == records and len(records) == 1 + 2 * len(METHODS)
    dense, *sparse = records
    assert dense["labels"]["method"] == "dense" and dense["baseline"] is None
    wanted = [(method, density) for method in METHODS for density in (0.5, 0.3)]
    assert [(record["labels"]["method"], record["labels"]["mlp_density"]) for record in sparse] == wanted
    for record in sparse:
        labels, achieved = record["labels"], record["achieved"]
        assert record["baseline"] == {"name": "dense", "value": dense["value"]}
        assert record["ratio"] == pytest.approx(record["value"] / dense["value"])
        assert labels["phase"] == "all" and labels["window"] == 32 and labels["task"].endswith("test.jsonl")
        assert len(achieved["per_layer"]["mlp"]) == 3 and achieved["head_density"] == 1.0
        assert achieved["mlp_density"] == pytest.approx(labels["mlp_density"], abs=0.12)
        assert achieved["bytes_read_share"] >= achieved["mlp_density"] - 1e-9
        assert achieved["sparse_calls"] > 0, labels["method"]
        if labels["method"] == "teal":
            assert "quality" not in record
            continue
        quality = record["quality"]
        assert 0 < quality["recall"] <= 1 and 0 < quality["precision"] <= 1
        assert len(quality["per_layer"]["mlp"]["recall"]) == 3
        if labels["method"] in ("oracle", "random", "static"):
            assert achieved["mlp_density"] == pytest.approx(labels["mlp_density"], abs=1e-6)
        if labels["method"] == "oracle":
            assert quality["recall"] == quality["precision"] == 1.0
        if labels["method"] == "random":
            assert quality["recall"] == pytest.approx(labels["mlp_density"], abs=0.04)
    assert all(record["ratio"] == 1.0 for record in evaluate(folder, tmp_path / "one.jsonl", method=METHODS,
                                                             mlp_density=(1.0,))[1:])  # fmt: skip


def test_every_sparse_run_starts_from_the_same_dense_model(folder: Path, tmp_path: Path) -> None:
    together = evaluate(folder, tmp_path / "a.jsonl", method=METHODS, mlp_density=(0.3,))
    for method, expected in zip(METHODS, together[1:], strict=True):
        (_, alone) = evaluate(folder, tmp_path / "b.jsonl", method=(method,), mlp_density=(0.3,), quality_windows=0)
        assert alone["value"] == expected["value"], method


def test_keeping_one_neuron_wrecks_perplexity_and_the_calls_are_counted(folder: Path, tmp_path: Path) -> None:
    dense, one = evaluate(
        folder, tmp_path / "r.jsonl", corpus="self:1", max_tokens=400, method=("oracle",), mlp_density=(1e-6,)
    )
    assert one["ratio"] > 1.5
    assert one["achieved"]["per_layer"]["mlp"] == pytest.approx([1 / 80] * 3)
    executions = one["achieved"]["executions"]
    assert executions["dense"] > 0 and executions["gather"] + executions["mask"] == one["achieved"]["sparse_calls"]
    assert one["achieved"]["sparse_calls"] == executions["dense"], "each pass has as many MLPs as attentions"


def test_heads_have_their_own_quality(folder: Path, tmp_path: Path) -> None:
    _, record = evaluate(
        folder, tmp_path / "r.jsonl", method=("oracle",), mlp_density=(1.0,), head_density=0.5, quality_windows=2
    )
    assert record["achieved"]["per_layer"]["attention"] == [0.5] * 3 and record["achieved"]["head_density"] == 0.5
    assert record["quality"]["head_recall"] == record["quality"]["head_precision"] == 1.0


def test_phase_decode_warns_and_measures_the_dense_model(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    words = ["--model", str(folder / "model"), "--corpus", str(folder / "test.jsonl"), "--window", "32", "--quiet"]
    words += ["--method", "random", "teal", "--sparse-phases", "decode", "--output", str(tmp_path / "r.jsonl")]
    run_stage(main, Options, [*words, "--predictors", str(folder / "predictors")])
    assert "perplexity never decodes" in capsys.readouterr().err
    for record in read_records(tmp_path / "r.jsonl")[1:]:
        assert record["labels"]["phase"] == "decode" and record["ratio"] == 1.0
        assert record["achieved"]["sparse_calls"] == 0 and "quality" not in record
        assert record["achieved"]["mlp_density"] == 1.0


def test_a_decode_speed_has_its_samples_and_the_density_while_generating(folder: Path, tmp_path: Path) -> None:
    _, quality, speed = evaluate(folder, tmp_path / "r.jsonl", method=("cats",), mlp_density=(0.5,), decode_tokens=6)
    assert (
        speed["value"] == median(speed["timing"]["samples"])
        and len(speed["timing"]["samples"]) == scripts.evaluate.TIMED_RUNS
    )
    assert speed["baseline"]["value"] == median(speed["timing"]["baseline_samples"])
    assert 0 < speed["achieved"]["mlp_density"] < 1 and speed["achieved"]["head_density"] == 1.0
    assert speed["achieved"]["mlp_density"] != quality["achieved"]["mlp_density"], "of another text"
    assert speed["sources"] == quality["sources"], "one configuration"


def test_every_window_is_kept_and_the_ratio_has_an_interval_over_windows(folder: Path, tmp_path: Path) -> None:
    dense, sparse = evaluate(folder, tmp_path / "r.jsonl", method=("static",), mlp_density=(0.3,))
    for record in (dense, sparse):
        nll, tokens = record["windows"]["nll"], record["windows"]["tokens"]
        assert tokens == [31, 7, 31, 31, 1, 31] and sum(tokens) == record["labels"]["num_tokens"]
        assert math.exp(sum(nll) / sum(tokens)) == pytest.approx(record["value"], rel=1e-5)
    low, high = sparse["ratio_interval"]
    assert low < sparse["ratio"] < high and dense["ratio_interval"] == [1.0, 1.0]
    (alone,) = evaluate(folder, tmp_path / "one.jsonl", max_windows=1)
    assert "ratio_interval" not in alone and "first_windows" not in sparse


def test_an_interval_is_of_windows_drawn_alike_for_both_runs(folder: Path, tmp_path: Path) -> None:
    def score(*nll: float) -> scripts.evaluate.Score:
        return scripts.evaluate.Score([Likelihood(one, 10) for one in nll], 0.0)

    # Windows of very different difficulty, of each of which the sparse run loses a tenth of a nat per token.
    dense, sparse = score(5.0, 50.0, 20.0), score(6.0, 51.0, 21.0)
    ends = scripts.evaluate.compared(sparse, dense)["ratio_interval"]
    assert ends == pytest.approx([math.exp(0.1)] * 2)
    assert scripts.evaluate.compared(sparse, score(1.0)) == {}, "of other windows"
    assert "ratio_interval" not in scripts.evaluate.compared(score(1e6, 2e6), score(1.0, 1.0))


def test_the_first_windows_have_their_perplexity_in_the_same_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scripts.evaluate, "FIRST_WINDOWS", 2)
    dense, sparse = evaluate(folder, tmp_path / "r.jsonl", method=("static",), mlp_density=(0.3,))
    few = evaluate(folder, tmp_path / "few.jsonl", method=("static",), mlp_density=(0.3,), max_windows=2)
    assert sparse["first_windows"] == {
        "num": 2,
        "perplexity": pytest.approx(few[1]["value"], rel=1e-5),
        "dense": pytest.approx(few[0]["value"], rel=1e-5),
    }
    assert dense["first_windows"]["perplexity"] == dense["first_windows"]["dense"]
    assert "first_windows" not in few[0]


def test_labels_name_the_run_its_predictors_and_its_budget(folder: Path, tmp_path: Path) -> None:
    budget = tmp_path / "greedy.json"
    budget.write_text(json.dumps({"mlp": [0.4, 0.5, 0.6]}))
    options: dict[str, Any] = {"method": ("predictor", "random"), "label": "refined", "density_budget": budget}
    dense, predictor, random = (
        record["labels"] for record in evaluate(folder, tmp_path / "r.jsonl", **options, max_windows=1)
    )
    names = ("label", "predictors", "density_budget", "lookahead", "standin_rank")
    assert [dense.get(name) for name in (*names, "calibration_tokens")] == [None] * 6
    assert predictor["calibration_tokens"] > 0 and "calibration_tokens" not in random
    assert [predictor[name] for name in names] == ["refined", "predictors", "greedy", 0, 4]
    assert [random.get(name) for name in names] == ["refined", None, "greedy", None, None]


def test_labels_say_that_the_weights_come_from_a_gguf_file(folder: Path, tmp_path: Path) -> None:
    manifest = {"format_version": 1, "model_id": "small", "config_hash": "0" * 12, "dtype": "float32", "files": {}}
    (tmp_path / "manifest.json").write_text(json.dumps({**manifest, "source": "/models/small.Q4_1.gguf"}))
    assert gguf_source(tmp_path) == "small.Q4_1.gguf"
    (tmp_path / "manifest.json").write_text(json.dumps({**manifest, "source": "org/small"}))
    assert gguf_source(tmp_path) is None and gguf_source(folder / "model") is None


def test_what_is_recorded_already_is_recorded_again_only_with_a_warning(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    words = [str(word) for word in flags(folder, tmp_path, method="random", max_windows=1)]
    warned, lines = [], []
    for more in ([], ["--seed", "1"], [], ["--resume"]):
        run_stage(main, Options, [*words, *more])
        warned.append(capsys.readouterr().err.count("r.jsonl holds records of this very run already"))
        lines.append(len(read_records(tmp_path / "r.jsonl")))
    assert warned == [0, 0, 1, 0] and lines == [2, 4, 6, 6]
    (tmp_path / "r.jsonl").write_text("my notes\n\n")
    assert "r.jsonl, line 1: not a result record" in one_error_line(main, Options, words, capsys)


def flags(folder: Path, tmp_path: Path, /, **changes: Any) -> list[object]:
    values = {"model": folder / "model", "corpus": folder / "test.jsonl", "output": tmp_path / "r.jsonl", "window": 32}
    values |= {name.replace("_", "-"): value for name, value in changes.items()}
    return [word for name, value in values.items() for word in (f"--{name}", value)] + ["--quiet"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tasks": ","}, "--tasks"),
        ({"corpus": "nothing"}, "unknown corpus 'nothing'"),
        ({"corpus": "self:1"}, "--max-tokens"),
        ({"window": 65}, "window 65 does not fit the model's context of 64"),
        ({"window": 1}, "window must be at least 2"),
        ({"stride": 40}, "stride lie in [1, window]"),
        ({"max_windows": 0}, "--max-windows must be at least 1, got 0"),
        ({"max_windows": -1}, "--max-windows must be at least 1, got -1"),
        ({"quality_windows": -1}, "--quality-windows"),
        ({"decode_tokens": -1}, "--decode-tokens"),
        ({"method": "random", "decode_tokens": 60}, "--decode-tokens 60"),
        ({"method": "predictor"}, "method predictor needs --predictors"),
        ({"method": "static", "predictors": "nowhere"}, "nowhere/manifest.json is missing"),
        ({"method": "random", "mlp_density": 0.0}, "mlp density must lie in (0, 1], got 0.0"),
        ({"method": "random", "density_budget": "nowhere.json"}, "nowhere.json"),
        ({"model": "nowhere/at/all"}, "nowhere/at/all: no such folder"),
        ({"batch_size": 0}, "--batch-size must be at least 1"),
    ],
)
def test_bad_input_is_one_line_before_anything_is_recorded(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture, changes: dict[str, Any], message: str
) -> None:
    assert message in one_error_line(main, Options, flags(folder, tmp_path, **changes), capsys)
    assert not (tmp_path / "r.jsonl").exists()


def test_weights_that_are_not_finite_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_folder(tmp_path / "model", LLAMA))
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 3] = float("nan")
    model.save_pretrained(tmp_path / "model")
    write_corpus(tmp_path / "test.jsonl", TEXT)
    line = one_error_line(main, Options, flags(tmp_path, tmp_path), capsys)
    assert "mlp.up_proj.weight" in line and not (tmp_path / "r.jsonl").exists()


def test_a_run_ends_with_the_table_of_its_own_records(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluate(folder, tmp_path / "r.jsonl", method=("static",), max_windows=2)
    capsys.readouterr()
    flags = ["--model", str(folder / "model"), "--output", str(tmp_path / "r.jsonl"), "--window", "32"]
    flags += ["--corpus", str(folder / "test.jsonl"), "--max-windows", "2", "--method", "random"]
    run_stage(main, Options, flags)
    said = capsys.readouterr()
    assert "random" in said.out and "dense" in said.out and "static" not in said.out
    assert "2 records in " in said.err.splitlines()[-1]
    run_stage(main, Options, [*flags, "--quiet"])
    assert capsys.readouterr().out == ""


def record(value: float, learning_rate: float) -> Record:
    training = {"learning_rate": learning_rate}
    return make_record("ablation", {"model": "tiny"}, "loss", value, "nats", training=training)


def test_records_of_one_training_are_not_kept_for_those_of_another(tmp_path: Path) -> None:
    def record_file() -> RecordFile:
        return RecordFile(tmp_path / "records.jsonl", ParallelMesh.single("cpu"), resume=True)

    (first,) = record_file().write([record(1.0, 0.1)])
    assert record_file().write([record(5.0, 0.1)]) == [first], "the same run, resumed"
    (second,) = record_file().write([record(2.0, 0.2)])
    assert second["value"] == 2.0 and read_records(tmp_path / "records.jsonl") == [first, second]
