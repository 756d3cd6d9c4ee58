"""The speed benchmarks run, say what they must, and refuse to time what does not agree."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import scripts.benchmark.prefill
from analysis.results import read_records
from analysis.tables import all_tables
from modules.checkpoint.load import build_on_meta, random_model
from modules.decoder import Decoder
from modules.families.registry import from_hf_config
from modules.generation import generate
from modules.requests import GenerationRequest
from pipeline_parallel.communication import ReducingAddNorm
from pipeline_parallel.fused_add_norm import FusedAddNorm
from pipeline_parallel.mesh import ParallelMesh
from pipeline_parallel.overlap import Overlap
from scripts.benchmark import engine
from scripts.benchmark.engine import Options, Way, check_close, check_decoding, echoed, measure_ways, prefill_flops, run
from scripts.benchmark.random_models import HF_CONFIGS, find_shape
from tests.modules.tiny_kinds import LLAMA

TINY = {"shape": "tiny", "prompt_tokens": 16, "repetitions": 1, "device": "cpu", "quiet": True}


def test_decode_and_prefill_are_recorded_beside_hugging_face_with_the_same_weights(tmp_path: Path) -> None:
    output = tmp_path / "speed.jsonl"
    options = Options(output=output, batch_size=(1, 3), new_tokens=4, hugging_face=True, **TINY)  # type: ignore[arg-type]
    run(options, "decode", lambda timings: timings.decode_tokens_per_s)
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
    assert records[2]["tflops_each"] > 0
    assert records[2]["share_of_ceiling"] == pytest.approx(
        records[2]["tflops_each"] / records[2]["ceiling_tflops_each"]
    )


def test_speeds_of_models_that_differ_are_refused() -> None:
    check_close([-1.0, -2.0], [-1.0, -2.0005], torch.float32, "these")
    for other in ([-1.0, -3.0], [-1.0, float("nan")]):
        with pytest.raises(ValueError, match="these: log-probabilities of the same tokens differ by"):
            check_close([-1.0, -2.0], other, torch.float32, "these")


def test_another_models_log_probabilities_are_far_from_ours() -> None:
    config = from_hf_config(HF_CONFIGS["tiny"])
    prompts = [list(range(3, 40))]
    ours, other = (echoed(random_model(config, seed=seed), ParallelMesh.single("cpu"), prompts) for seed in (0, 1))
    with pytest.raises(ValueError, match="it is not timed"):
        check_close(ours[0], other[0], torch.float32, "two models")


def test_decoding_that_does_not_agree_with_prefill_is_not_timed() -> None:
    config = from_hf_config(HF_CONFIGS["tiny"])
    model, mesh = random_model(config), ParallelMesh.single("cpu")
    batch = [GenerationRequest(prompt_token_ids=[5, 6, 7], max_new_tokens=3)]
    heard = dict(enumerate(generate(model, batch, eos_token_ids=())))
    check_decoding(model, mesh, batch, heard)
    spoiled = {0: replace(heard[0], logprobs=[value + 0.1 for value in heard[0].logprobs])}
    with pytest.raises(ValueError, match="decoding and prefill"):
        check_decoding(model, mesh, batch, spoiled)


def test_the_operations_of_a_prefill_are_two_a_weight_and_the_causal_half_of_attention() -> None:
    config = from_hf_config(HF_CONFIGS["tiny"])
    model = random_model(config)
    body = sum(parameter.numel() for name, parameter in model.named_parameters() if name.endswith("proj.weight"))
    head, queries, tokens = config.vocab_size * config.hidden_size, 8 * 16, 10
    pairs = tokens * (tokens + 1) // 2  # of a query and a key that it sees
    expected = 2 * body * tokens + 4 * config.num_hidden_layers * queries * pairs + 2 * head
    assert prefill_flops(config, tokens) == pytest.approx(expected)


@pytest.mark.parametrize("shape", HF_CONFIGS)
def test_every_shape_is_found_in_lower_case_and_is_one_that_we_run(shape: str) -> None:
    assert find_shape(shape.lower()) == shape
    assert from_hf_config(HF_CONFIGS[shape]).num_hidden_layers > 0


def test_an_unknown_shape_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="--shape 'GPT-5': give one of Llama-3.2-3B"):
        find_shape("GPT-5")


MESH = ParallelMesh(tp_size=2, tp_group=cast(Any, object()), device=torch.device("cpu"))
OPERATOR: Any = SimpleNamespace(max_tokens=128, transport="p2p", with_own_memory=lambda: OPERATOR)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Decoder:
    """Of two ranks, one of which is here."""
    monkeypatch.setattr(ParallelMesh, "gather", lambda self, value: [value, value])
    made = build_on_meta(from_hf_config(LLAMA))
    made.add_norm = ReducingAddNorm(cast(Any, None))
    return made


def ways(model: Decoder, overlap_tokens: int) -> list[Way]:
    """As found; a batch of one is too short to be split, speeds are counted up."""
    heard: list[str] = []

    def measure(batch_size: int) -> float:
        if isinstance(model.prefill_driver, Overlap) and batch_size > 1:
            model.prefill_driver.num_split += 1
        heard.append(f"batch {batch_size}")
        return float(len(heard))

    found = measure_ways(model, MESH, "auto", overlap_tokens, (1, 8), lambda: heard.append("check"), measure)
    assert heard == ["check", "batch 1", "batch 8"] * len(found) and model.prefill_driver is None
    return found


def test_each_junction_is_measured_whole_and_split(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(model: Decoder, mesh: ParallelMesh, choice: str) -> None:
        assert isinstance(model.add_norm, ReducingAddNorm) and choice == "auto"
        model.add_norm = FusedAddNorm(model.add_norm, OPERATOR, lambda tokens: "two-shot", lambda: False)

    monkeypatch.setattr(engine, "choose_all_reduce", choose)
    assert ways(model, 1024) == [
        Way(name="GLOO", all_reduce="gloo", speeds={1: 2.0, 8: 3.0}),
        Way(name="GLOO, split", all_reduce="gloo", overlap_tokens=1024, speeds={8: 6.0}),
        Way(name="fused", all_reduce="two-shot p2p", speeds={1: 8.0, 8: 9.0}),
        Way(name="fused, split", all_reduce="two-shot p2p", overlap_tokens=1024, speeds={8: 12.0}),
    ]


@pytest.mark.parametrize("overlap_tokens", [0, 1024])
def test_where_nothing_is_fused_the_unfused_one_is_measured(model: Decoder, overlap_tokens: int) -> None:
    found = ways(model, overlap_tokens)
    assert [way.name for way in found] == ["GLOO", "GLOO, split"][: 1 + bool(overlap_tokens)]
