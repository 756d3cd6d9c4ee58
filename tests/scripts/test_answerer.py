"""How many rows run together when nobody says how many."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeline_parallel.mesh import ParallelMesh
from scripts.answerer import ALLOWANCE, CPU_ROWS, MOST_ROWS, USABLE, BatchSizes
from tests.modules.tiny_kinds import LLAMA
from tests.modules.tiny_models import tiny_decoder

FREE, BYTES_PER_TOKEN = 10_000_000, 500.0


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A loaded model on a GPU that is not there, with FREE bytes left."""
    monkeypatch.setattr(BatchSizes, "_measure", lambda self: BYTES_PER_TOKEN)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (FREE, 2 * FREE))
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda device: 0)
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda device: 0)
    cache = SimpleNamespace(num_bytes=200)  # a token
    model = SimpleNamespace(device=torch.device("cuda"), new_cache=lambda rows, tokens: cache)
    return SimpleNamespace(model=model, mesh=ParallelMesh.single("cpu"))


def test_rows_fill_the_free_memory_in_powers_of_two(gpu: Any) -> None:
    sizes = BatchSizes(gpu, fixed=None)
    for num_tokens, above, rows in (
        (3, 4, MOST_ROWS),
        (65, 128, 32),
        (128, 128, 32),
        (1000, 1024, 4),
        (9999, 16384, 1),
    ):
        fit = max(1.0, min(FREE * USABLE / (above * BYTES_PER_TOKEN * ALLOWANCE), MOST_ROWS))
        assert sizes.for_scoring(num_tokens) == rows and rows <= fit < 2 * rows
    assert sizes.taken == {MOST_ROWS, 32, 4, 1}
    assert sizes.for_generation(65, 4096) < sizes.for_scoring(65), "keys and values are kept"
    assert BatchSizes(gpu, fixed=None, most=3).for_scoring(2) == 2


def test_a_given_number_is_taken_and_a_cpu_has_one_of_its_own() -> None:
    model = tiny_decoder(LLAMA)
    loaded: Any = SimpleNamespace(model=model, mesh=ParallelMesh.single("cpu"))
    assert BatchSizes(loaded, fixed=5).for_scoring(1000) == BatchSizes(loaded, fixed=5).for_generation(9, 99) == 5
    assert BatchSizes(loaded, fixed=None).for_scoring(10) == CPU_ROWS
    assert BatchSizes(loaded, fixed=None, most=2).for_scoring(10) == 2


@pytest.mark.cuda
def test_a_token_is_measured_on_the_gpu() -> None:
    model = tiny_decoder(LLAMA | {"max_position_embeddings": 512}).to("cuda")
    loaded: Any = SimpleNamespace(model=model, mesh=ParallelMesh.single("cuda"))
    sizes = BatchSizes(loaded, fixed=None)
    # The states at least; of so small a model most is what libraries take once.
    assert 48 * 4 < sizes._bytes_per_token < 2**20
    assert sizes.for_scoring(512) == sizes.for_generation(256, 512) == MOST_ROWS
