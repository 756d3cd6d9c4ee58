"""Which ways to add up the parts of a layer a benchmark measures, and what it calls them."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from modules.checkpoint.load import build_on_meta
from modules.config import ModelConfig
from modules.decoder import Decoder
from pipeline_parallel.communication import ReducingAddNorm
from pipeline_parallel.fused_add_norm import FusedAddNorm
from pipeline_parallel.mesh import ParallelMesh
from pipeline_parallel.overlap import Overlap
from scripts.benchmark import engine
from scripts.benchmark.engine import Way, measure_ways
from tests.modules.tiny_kinds import LLAMA

MESH = ParallelMesh(tp_size=2, tp_group=cast(Any, object()), device=torch.device("cpu"))
OPERATOR: Any = SimpleNamespace(max_tokens=128, transport="p2p", with_own_memory=lambda: OPERATOR)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Decoder:
    """Of two ranks, one of which is here."""
    monkeypatch.setattr(ParallelMesh, "gather", lambda self, value: [value, value])
    made = build_on_meta(ModelConfig.from_hf(LLAMA))
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
