"""The controlled experiment in miniature: two models, a text that a model could have written, records of every kind."""

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from loguru import logger

import scripts.studies.ablation
import scripts.studies.trained_models
from analysis.results import Record, read_records
from data.files import only_writer
from modules.checkpoint.load import load_model
from modules.checkpoint.write import write_model
from scripts.studies.ablation import VARIANTS, Options, main
from scripts.studies.trained_models import TextPlan, is_trained, prepare_text, train_once, train_tokenizer
from tests.modules.tiny_kinds import LLAMA
from tests.modules.tiny_models import tiny_decoder

WORDS = (
    "the", "a", "cat", "dog", "house", "tree", "runs", "sees", "big", "small", "red", "and", "then", "stops", "near",
    "under", "river", "bird", "sings", "old", "man",
)  # fmt: skip
TWO = ("relu-learned-layer", "silu-rotary-rms")


def write_text(folder: Path, documents: int = 900) -> dict[str, Any]:
    """A training corpus and another text; returns the flags that name them."""
    draw = random.Random(0)
    texts = [" ".join(draw.choices(WORDS, k=draw.randint(20, 60))).capitalize() for _ in range(documents)]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (folder / "other.txt").write_text("\n\n".join(" ".join(draw.choices(WORDS[::-1], k=90)) for _ in range(8)))
    return {"corpus": (str(folder / "text.jsonl"),), "test_corpus": str(folder / "other.txt")}


def options(folder: Path, **more: Any) -> Options:
    chosen = Options(
        **write_text(folder),
        output_dir=folder / "ablation",
        output=folder / "records.jsonl",
        variants=TWO,
        seeds=(0,),
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=32,
        vocab_size=300,
        window=16,
        train_tokens=40 * 4 * 16,
        batch_windows=4,
        learning_rate=2e-3,
        calibration_tokens=576,
        test_tokens=64,
        max_lookahead=2,
        perplexity_lookaheads=(0, 1),
        device="cpu",
        quiet=True,
    )
    return replace(chosen, **more)


def measured(records: list[Record]) -> list[Any]:
    """Without what depends on when and where it ran."""
    return [{key: value for key, value in record.items() if key != "environment"} for record in records]


def test_the_experiment_in_miniature_and_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = main(options(tmp_path))
    assert measured(read_records(tmp_path / "records.jsonl")) == measured(records)
    assert {record["name"] for record in records} == {"ablation"}
    for name in TWO:
        mine = [record for record in records if record["labels"]["model"] == name]
        assert {
            "cosine",
            "cka",
            "relative_update",
            "recall",
            "recall_drop",
            "precision",
            "r_precision",
            "energy_share",
            "exact_zeros",
        } <= {record["metric"] for record in mine}
        assert all(VARIANTS[name].items() <= record["labels"].items() for record in mine)
        assert {(record["labels"]["seed"], record["labels"]["dtype"]) for record in mine} == {(0, "float32")}
        (loss,) = [record for record in mine if record["metric"] == "loss"]
        assert loss is mine[-1] and loss["interval"][0] < loss["value"] < loss["interval"][1]
        assert loss["value"] < 5.0 < torch.tensor(300.0).log() - 0.5  # it learns
        assert loss["num_parameters"] == sum(
            parameter.numel() for parameter in load_model(tmp_path / f"ablation/{name}-0").parameters()
        )
        other = [record for record in mine if record["labels"].get("corpus") == "other.txt"]
        assert [record["metric"] for record in other] == ["perplexity"]

    # Interrupted while the second model's records are being made; then its records are there in part.
    monkeypatch.setattr(scripts.studies.trained_models, "train_model", None)  # both are trained
    cut = tmp_path / "cut.jsonl"
    study = scripts.studies.ablation.drift_records

    def interrupted(*arguments: Any, **more: Any) -> list[Record]:
        if more["labels"]["model"] == TWO[1]:
            raise KeyboardInterrupt
        return study(*arguments, **more)

    monkeypatch.setattr(scripts.studies.ablation, "drift_records", interrupted)
    with pytest.raises(KeyboardInterrupt):
        main(options(tmp_path, output=cut))
    monkeypatch.setattr(scripts.studies.ablation, "drift_records", study)
    lines = (tmp_path / "records.jsonl").read_text().splitlines(keepends=True)
    with cut.open("a") as file:
        file.writelines(lines[len(lines) // 2 : len(lines) // 2 + 3])
    for _ in range(2):
        assert measured(main(options(tmp_path, output=cut))) == measured(records) == measured(read_records(cut))
    with pytest.raises(ValueError, match="was trained otherwise .* choose another --output-dir"):
        main(options(tmp_path, learning_rate=1e-3, output=tmp_path / "other.jsonl"))
    other = {"learning_rate": 1e-3, "output_dir": tmp_path / "other"}  # not taken for what is recorded, nor trained
    with pytest.raises(ValueError, match=r"relu-.* made otherwise: learning_rate is 0.002 there, 0.001 now; choose"):
        main(options(tmp_path, output=cut, **other))
    assert {record["training"]["learning_rate"] for record in records} == {0.002}
    # Killed while it wrote: what is there of another training is not mixed with this one's.
    (tmp_path / "killed.jsonl").write_text("".join(lines[:3]))
    with pytest.raises(ValueError, match=r"relu-.* made otherwise: learning_rate is 0.002 there, 0.001 now; choose"):
        main(options(tmp_path, **other, output=tmp_path / "killed.jsonl"))
    with pytest.raises(ValueError, match=r"made otherwise: mlp_density is 0.5 there, 0.2 now; choose another --output"):
        main(options(tmp_path, output=cut, mlp_density=0.2))
    with pytest.raises(ValueError, match="holds another text"):
        main(options(tmp_path, output=cut, vocab_size=290))


def test_documents_are_held_out_whole_and_each_token_is_somewhere(tmp_path: Path) -> None:
    flags = write_text(tmp_path)
    plan = TextPlan(
        corpora=flags["corpus"], other_corpus=flags["test_corpus"], vocab_size=300, train_tokens=10**6,
        calibration_tokens=64, test_tokens=64, window=16,
    )  # fmt: skip
    text = prepare_text(tmp_path / "text", plan, quiet=True)
    again = prepare_text(tmp_path / "text", plan, quiet=True)
    assert torch.equal(text.train, again.train) and text.identity == again.identity
    assert text.calibration.shape == text.held_out.shape == text.other.shape == (4, 16)
    assert int(text.calibration[0, 0]) == int(text.held_out[0, 0]) == int(text.train[0]) == 0  # a text begins
    trained = text.train.tolist()
    starts = [i for i, token_id in enumerate(trained) if token_id == 0]
    assert len(starts) == 900 - 29
    documents = [tuple(trained[start:stop]) for start, stop in zip(starts, [*starts[1:], None], strict=True)]
    held = tuple(text.held_out.flatten().tolist())
    assert not any(document[:16] == held[:16] for document in documents)


def test_a_damaged_text_is_told_and_prepared_again(tmp_path: Path) -> None:
    flags, folder = write_text(tmp_path, documents=200), tmp_path / "text"
    plan = TextPlan(
        corpora=flags["corpus"], other_corpus=flags["test_corpus"], vocab_size=300, train_tokens=10**4,
        calibration_tokens=64, test_tokens=64, window=16,
    )  # fmt: skip
    text = prepare_text(folder, plan, quiet=True)
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    without_sums = json.dumps({**json.loads(whole["manifest.json"]), "sums": {}}).encode()
    changed = whole["train.npy"][:-1] + bytes([whole["train.npy"][-1] ^ 1])
    said: list[str] = []
    sink = logger.add(said.append, format="{message}")
    for spoiled in (
        {"train.npy": b""},
        {"train.npy": bytes(len(whole["train.npy"]))},
        {"train.npy": changed},
        {"tokenizer.json": b"{}"},
        {"manifest.json": b""},
        {"manifest.json": b'{"identity": null}'},
        {"manifest.json": without_sums, "other.npy": whole["other.npy"][:-8]},
    ):
        for name, content in spoiled.items():
            (folder / name).write_bytes(content)
        assert torch.equal(prepare_text(folder, plan, quiet=True).train, text.train)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == whole
        assert f"{folder} is damaged (" in said.pop() and not said
    (folder / "manifest.json").write_bytes(without_sums)  # of an older version
    assert torch.equal(prepare_text(folder, plan, quiet=True).other, text.other) and not said
    logger.remove(sink)


@pytest.mark.parametrize("name", ["pytorch_1.pt", "config.json", "manifest.json"])
@pytest.mark.parametrize("damage", [lambda content: b"", lambda content: bytes(len(content))], ids=["empty", "zeroed"])
def test_a_trained_model_that_is_damaged_is_trained_again(
    tmp_path: Path, name: str, damage: Callable[[bytes], bytes]
) -> None:
    folder, identity = tmp_path / "silu-0", {"seed": 0}
    model = tiny_decoder(LLAMA)
    write_model(model, folder, model_id="silu-0", manifest={"training": identity})
    assert is_trained(folder, identity)
    with pytest.raises(ValueError, match="was trained otherwise .seed is 0 there, 1 now.; choose another --output-dir"):
        is_trained(folder, {"seed": 1})
    (folder / name).write_bytes(damage((folder / name).read_bytes()))
    assert not is_trained(folder, identity)
    write_model(model, folder, model_id="silu-0", manifest={"training": identity})
    assert is_trained(folder, identity)


def test_one_process_at_a_time_trains_a_model(tmp_path: Path) -> None:
    folder: Any = tmp_path / "silu-0"
    nothing: Any = None
    with (
        only_writer(tmp_path / "silu-0.training"),
        pytest.raises(BlockingIOError, match="silu-0.training is being written by process"),
    ):
        train_once(lambda: pytest.fail("it began"), folder, nothing, nothing, {}, title="", quiet=True)


def test_a_tokenizer_that_was_moved_is_the_same_and_one_that_was_changed_is_not(tmp_path: Path) -> None:
    flags = write_text(tmp_path, documents=10)
    train_tokenizer(iter([" ".join(WORDS)]), 280).save_pretrained(tmp_path / "here")
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    sizes: dict[str, Any] = {"train_tokens": 100, "calibration_tokens": 32, "test_tokens": 32, "window": 16}

    def identity(folder: str) -> str:
        plan = TextPlan(
            corpora=flags["corpus"], other_corpus=flags["test_corpus"], tokenizer_dir=str(tmp_path / folder), **sizes
        )
        return plan.identity()

    assert identity("here") == identity("there")
    train_tokenizer(iter([" ".join(WORDS[::2])]), 270).save_pretrained(tmp_path / "there")
    assert identity("here") != identity("there")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"variants": ("relu-none",)}, "--variants relu-none: choose from relu-learned-layer, "),
        ({"seeds": ()}, "--variants and --seeds: give at least one each"),
        ({"corpus": ("self",)}, "write one with python -m scripts.write_text"),
        ({"corpus": ("c4",)}, "corpus 'c4': all documents are read and mixed; give c4:validation, or a file"),
        ({"corpus": ("missing.jsonl",)}, "missing.jsonl does not exist"),
        ({"test_tokens": 24}, "--test-tokens must be two or more whole windows of 16 tokens; got 24"),
        ({"calibration_tokens": 160_000}, "of calibration text, 160000 are needed; give more text"),
        ({"learning_rate": 2.0}, r"learning_rate must lie in \(0, 1\)"),
        ({"mlp_density": 0.0}, "--mlp-density must lie in"),
        ({"train_tokens": -5}, "--train-tokens must be at least 1, got -5"),
        ({"batch_windows": 0}, "--batch-windows must be at least 1, got 0"),
        ({"window": 0}, "--window must be at least 1, got 0"),
        ({"hidden_size": 30}, "--hidden-size 30 must be an even number of channels for each of --num-attention-"),
        ({"num_attention_heads": 0}, "for each of --num-attention-heads 0"),
        ({"perplexity_windows": 1}, "--perplexity-windows must be at least 2, got 1"),
        (
            {"perplexity_lookaheads": (0, -1)},
            "--perplexity-lookaheads must lie between 0 and --max-lookahead 2, got -1",
        ),
        ({"perplexity_lookaheads": (0, 3)}, "--perplexity-lookaheads must lie between 0 and --max-lookahead 2, got 3"),
        ({"calibration_tokens": 64}, "--calibration-tokens: 64 tokens are too few to fit .* at least 256 are needed"),
    ],
)
def test_what_cannot_be_run_is_an_error(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        main(options(tmp_path, **change))
