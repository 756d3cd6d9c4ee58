"""The greedy choice: the reference on a CPU, what the kernels compile to, and the kernels on a GPU."""

import re
from pathlib import Path

import pytest
import torch

from modules.kernels import greedy_choice as module
from modules.kernels.greedy_choice import greedy_choice
from tests.modules.kernels import greedy_choice_cases as cases
from tests.modules.kernels.compiled import compiled_ptx, compiles

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocab_size", [*cases.VOCAB_SIZES, 128256, 300001])
def test_choice_is_that_of_pytorch(device: str, vocab_size: int) -> None:
    cases.assert_choice_is_pytorchs(cases.logits_of_every_kind(vocab_size).to(device))


@pytest.mark.parametrize(
    ("logits", "message"),
    [
        (torch.zeros(2, 5).half(), "logits are torch.float16, not torch.float32"),
        (torch.zeros(5), r"logits \(5,\) are not \[rows, V\]"),
        (torch.zeros(2, 0), r"logits \(2, 0\) are not \[rows, V\], contiguous and not empty"),
        (torch.zeros(5, 2).T, r"logits \(2, 5\) are not \[rows, V\], contiguous and not empty"),
    ],
)
def test_what_does_not_fit_is_refused(logits: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        greedy_choice(logits)


@compiles
def test_kernels_read_16_bytes_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert module.piece_of(128256) == 1024 and module.piece_of(300001) == 2048
    types: dict[str, str | None] = {"logits": "*fp32", "pieces": "*fp32", "token_ids": "*i32", "vocab_size": "i32"}
    ptx = compiled_ptx(module.reduce_pieces_kernel, types, {"PIECE": 1024, "PDL": True}, num_warps=4)
    loads = re.findall(r"\bld\.global(\S*)", ptx)
    assert len(loads) == 2 and all(width.endswith(".v4.b32") for width in loads), loads
    assert ".local" not in ptx


@pytest.mark.cuda
def test_a_captured_graph_follows_changed_logits() -> None:
    logits = cases.logits_of_every_kind(5000).cuda()
    greedy_choice(logits)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = greedy_choice(logits)
    for _ in range(2):
        logits.normal_()
        captured.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured, greedy_choice(logits))
