"""The speed benchmarks run, say what they must, and refuse to time what does not agree."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import scripts.benchmark.decode
import scripts.benchmark.first_request
import scripts.benchmark.prefill
from analysis.results import read_records
from analysis.tables import all_tables
from modules.checkpoint import random_model
from modules.config import ModelConfig
from modules.generation import generate
from modules.requests import GenerationRequest
from pipeline_parallel.mesh import ParallelMesh
from scripts.benchmark.engine import Options, check_close, check_decoding, echoed
from scripts.benchmark.shapes import HF_CONFIGS

TINY = {"shape": "tiny", "prompt_tokens": 16, "repetitions": 1, "device": "cpu", "quiet": True}


def test_decode_and_prefill_are_recorded_beside_hugging_face_with_the_same_weights(tmp_path: Path) -> None:
    output = tmp_path / "speed.jsonl"
    options = Options(output=output, batch_size=(1, 3), new_tokens=4, hugging_face=True, **TINY)  # type: ignore[arg-type]
    scripts.benchmark.decode.main(options)
    prefill = scripts.benchmark.prefill.Options(output=output, hugging_face=True, **TINY)  # type: ignore[arg-type]
    scripts.benchmark.prefill.main(replace(prefill, batch_size=(2,)))
    records = read_records(output)
    assert [(record["name"], record["labels"]["batch_size"]) for record in records] == [
        ("decode", 1),
        ("decode", 3),
        ("prefill", 2),
    ]
    for record in records:
        assert record["value"] > 0 and record["baseline"]["name"] == "Hugging Face, one rank"
        assert record["labels"]["weights"] == "random"
    assert records[0]["bytes_per_step"] > 0 and 0 < records[0]["share_of_ceiling"] < 1
    assert set(all_tables(records)) == {"decode", "prefill"}


def test_what_the_first_request_pays_is_recorded(tmp_path: Path) -> None:
    options = scripts.benchmark.first_request.Options(
        output=tmp_path / "first.jsonl",
        new_tokens=3,
        num_requests=3,
        **TINY,  # type: ignore[arg-type]
    )
    records = scripts.benchmark.first_request.main(options)
    assert [record["labels"]["warm_up"] for record in records] == [False, False, True]
    assert all(record["value"] > 0 and record["baseline"]["value"] > 0 for record in records)


def test_speeds_of_models_that_differ_are_refused() -> None:
    check_close([-1.0, -2.0], [-1.0, -2.0005], torch.float32, "these")
    for other in ([-1.0, -3.0], [-1.0, float("nan")]):
        with pytest.raises(ValueError, match="these: log-probabilities of the same tokens differ by"):
            check_close([-1.0, -2.0], other, torch.float32, "these")


def test_another_models_log_probabilities_are_far_from_ours() -> None:
    config = ModelConfig.from_hf(HF_CONFIGS["tiny"])
    prompts = [list(range(3, 40))]
    ours, other = (echoed(random_model(config, seed=seed), ParallelMesh.single("cpu"), prompts) for seed in (0, 1))
    with pytest.raises(ValueError, match="it is not timed"):
        check_close(ours[0], other[0], torch.float32, "two models")


def test_decoding_that_does_not_agree_with_prefill_is_not_timed() -> None:
    config = ModelConfig.from_hf(HF_CONFIGS["tiny"])
    model, mesh = random_model(config), ParallelMesh.single("cpu")
    batch = [GenerationRequest(prompt_token_ids=[5, 6, 7], max_new_tokens=3)]
    heard = dict(enumerate(generate(model, batch, eos_token_ids=())))
    check_decoding(model, mesh, batch, heard)
    spoiled = {0: replace(heard[0], logprobs=[value + 0.1 for value in heard[0].logprobs])}
    with pytest.raises(ValueError, match="decoding and prefill"):
        check_decoding(model, mesh, batch, spoiled)
