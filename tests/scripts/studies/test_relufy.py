"""ReLU-fication in miniature: four variants of one model, compared on the same text."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import scripts.benchmark.decode
from analysis.effects import relufied_pairs
from analysis.results import read_records
from modules.checkpoint.load import load_model
from modules.checkpoint.write import write_model
from modules.families.registry import in_family
from scripts.studies.relufy import VARIANTS, Options, main, with_activation
from scripts.studies.trained_models import train_tokenizer
from scripts.studies.training import initialised_model
from tests.modules.families.test_registry import mixture
from tests.scripts.studies.test_ablation import WORDS, measured, write_text


def small_model(folder: Path, activation: str = "silu") -> Path:
    """A Llama that has learnt nothing, with a tokenizer of its own."""
    tokenizer = train_tokenizer(iter([" ".join(WORDS)] * 4), 290)
    shape = {"vocab_size": len(tokenizer), "max_position_embeddings": 64, "eos_token_ids": (0,), "bos_token_id": 0}
    model = initialised_model(in_family(mixture(activation, "rotary", "rms", gated_mlp=True, **shape)))
    tokenizer.save_pretrained(folder / "tokenizer")
    write_model(model, folder / "model", model_id="small", other_files=sorted((folder / "tokenizer").iterdir()))
    return folder / "model"


def options(folder: Path, **more: Any) -> Options:
    flags: dict[str, Any] = {
        **write_text(folder), "model": str(folder / "model"), "output_dir": folder / "relufy",
        "output": folder / "records.jsonl", "train_tokens": 30 * 4 * 16, "window": 16, "batch_windows": 4,
        "learning_rate": 5e-3, "calibration_tokens": 576, "test_tokens": 64, "speed_densities": (), "device": "cpu",
        "quiet": True,
    }  # fmt: skip
    return Options(**{**flags, **more})


def test_relu_and_silu_are_trained_alike_and_compared(tmp_path: Path) -> None:
    source = small_model(tmp_path)
    records = main(options(tmp_path))
    assert measured(read_records(tmp_path / "records.jsonl")) == measured(records)
    assert measured(main(options(tmp_path))) == measured(records)

    def value(variant: str, metric: str) -> float:
        (found,) = [
            record["value"]
            for record in records
            if record["labels"]["variant"] == variant and record["metric"] == metric
        ]
        return found

    assert {record["labels"]["variant"] for record in records} == VARIANTS.keys()
    for activation in ("silu", "relu"):
        assert value(activation, "loss") < value(f"{activation} before training", "loss") - 0.5
        kept = load_model(tmp_path / "relufy" / activation)
        assert kept.config.activation == activation and kept.config.model_type == "llama"
    assert value("relu", "exact_zeros") > 0.3 and value("silu", "exact_zeros") == 0.0
    replaced, whole = (with_activation(source, name, torch.float32, torch.device("cpu")) for name in ("relu", "silu"))
    assert torch.equal(replaced.mlp(1).down_proj.weight, whole.mlp(1).down_proj.weight)
    token_ids = torch.arange(1, 13)[None]
    assert not torch.equal(replaced(token_ids), whole(token_ids))
    told = {pair.title.partition(",")[0]: pair for pair in relufied_pairs(records)}
    assert {"exact zeros", "held-out perplexity", "recall of neurons", "recall of heads"} <= told.keys()
    assert told["held-out perplexity"].relu.value == pytest.approx(math.exp(value("relu", "loss")))


def test_speed_and_quality_of_sparse_runs_come_from_trained_predictors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_model(tmp_path)
    chosen = options(
        tmp_path, train_tokens=64, prompt_tokens=8, decode_tokens=4, speed_densities=(0.5,), predictor_tokens=300
    )
    monkeypatch.setattr(scripts.benchmark.decode, "measure_read_ceiling", lambda device: 1.0)
    train = scripts.train.main
    monkeypatch.setattr(scripts.train, "main", lambda given: train(type(given)(**{**vars(given), "steps": 3})))
    records = main(chosen)
    sparse = [record for record in records if record["labels"].get("method") == "predictor"]
    assert [(record["labels"]["variant"], record["metric"]) for record in sparse] == [
        ("silu", "perplexity"), ("silu", "tokens_per_s"), ("relu", "perplexity"), ("relu", "tokens_per_s")
    ]  # fmt: skip
    assert all(record["baseline"]["name"] == "dense" and record["labels"]["mlp_density"] == 0.5 for record in sparse)
    monkeypatch.setattr(scripts.benchmark.decode, "run", None)
    assert measured(main(chosen)) == measured(records)
    # Where records are lost, predictors of other options are not taken for those that are asked for.
    chosen.output.write_text("".join(json.dumps(record) + "\n" for record in records if record not in sparse))
    for module, name in ((scripts.collect, "collect_documents"), (scripts.train, "fit_block")):
        monkeypatch.setattr(module, name, lambda *given, **more: pytest.fail("made once more"))
    timed = {"value": 1.0, "unit": "tokens/s", "baseline": {"name": "dense", "value": 1.0}, "achieved": None}
    timed |= dict.fromkeys(("bytes_per_step", "achieved_gb_per_s", "ceiling_gb_per_s"))
    monkeypatch.setattr(scripts.benchmark.decode, "run", lambda given: [timed])
    assert len(main(chosen)) == len(records)
    with pytest.raises(FileExistsError, match=r"silu-predictors already holds predictors: densities is \[0.5\] there"):
        main(replace(chosen, speed_densities=(0.4,)))
    # Predictors learn from the training stream, of which nothing is tested on.
    stream = np.load(tmp_path / "relufy/text/train.npy")[:300].tolist()
    windows = (tmp_path / "relufy/predictor-text.jsonl").read_text().splitlines()
    assert [token_id for window in windows for token_id in json.loads(window)["token_ids"]] == stream
    # Speeds of another training are not taken for those of this one.
    for record in sparse:
        record["training"]["learning_rate"] = 0.004
    chosen.output.write_text("".join(json.dumps(record) + "\n" for record in records))
    with pytest.raises(ValueError, match="model that were made otherwise: learning_rate is 0.004 there, 0.005 now"):
        main(chosen)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_tokens": 60, "decode_tokens": 8, "speed_densities": (0.5,)}, "do not fit the context of 64 together"),
        ({"decode_tokens": 1}, "must be at least 2"),
        ({"speed_densities": (1.5,)}, "density must lie in"),
        ({"window": 128}, "--calibration-tokens must be two or more whole windows of 128"),
    ],
)
def test_what_cannot_be_run_is_an_error(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    small_model(tmp_path)
    with pytest.raises(ValueError, match=message):
        main(options(tmp_path, **{"prompt_tokens": 8, "decode_tokens": 4, **change}))


def test_a_model_without_silu_is_refused(tmp_path: Path) -> None:
    small_model(tmp_path, "relu")
    with pytest.raises(ValueError, match="its activation is relu; one with SiLU is needed"):
        main(options(tmp_path))
