"""Products of thinned vectors: the reference on a CPU, what the kernel compiles to, and the kernel on a GPU."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from modules.kernels import thinned_rows as module
from modules.kernels.deferred_norm import DeferredNorm
from modules.kernels.sparse_mlp import Tuning
from modules.kernels.thinned_rows import TUNING, Activations, thinned_rows
from tests.modules.kernels import thinned_rows_cases as cases
from tests.modules.kernels.compiled import NORMED, compiled_ptx, compiles

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
SUMS: dict[str, str | None] = dict.fromkeys(("gate_sums", "up_sums", "gate_bias", "up_bias"))
OUTPUTS: dict[str, str | None] = {
    "weight": "*bf16",
    "output": "*fp32",
    "counters": "*i32",
    "list_units": "*i32",
    "list_values": "*fp32",
    "first_threshold": "fp32",
    "second_threshold": "fp32",
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_equation_holds(device: str, dtype: torch.dtype) -> None:
    for case in cases.CASES:
        cases.assert_product_is_right(case, dtype, device=device, launches=device == "cuda")


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("num_inputs", "num_outputs", "num_matrices", "kind"),
    [
        (3072, 8192, 2, "rms"),
        (8192, 3072, 1, "relu"),
        (4096, 14336, 2, "rms"),
        (14336, 4096, 1, "relu"),
        (576, 1536, 2, "rms"),
    ],
)
def test_equation_holds_at_sizes_of_real_models(
    num_inputs: int, num_outputs: int, num_matrices: int, kind: str
) -> None:
    case = (num_inputs, num_outputs, num_matrices, kind, False, TUNING)
    cases.assert_product_is_right(case, torch.float16, device="cuda", launches=True)


@pytest.mark.parametrize("device", DEVICES)
def test_borders_are_drawn_as_by_comparison(device: str) -> None:
    cases.assert_borders_are_drawn_as_by_comparison(device)


@pytest.mark.cuda
def test_parts_add_up_alike() -> None:
    cases.assert_parts_add_up_alike("cuda")


def activations(**changes: Any) -> Activations:
    fitting = {"gate": None, "up": torch.zeros(48), "activation": "silu", "dtype": torch.float32}
    return Activations(**fitting | changes)


PLAIN = DeferredNorm.plain(torch.zeros(1, 48))


@pytest.mark.parametrize(
    ("values", "weight", "changes", "message"),
    [
        (PLAIN, torch.zeros(48, 5), {}, r"weight \(48, 5\) is not \[matrices, inputs, outputs\]"),
        (PLAIN, torch.zeros(1, 5, 48).transpose(1, 2), {}, "weight is not contiguous"),
        (PLAIN, torch.zeros(1, 48, 5).bfloat16(), {}, "values are torch.float32, the weights torch.bfloat16"),
        (PLAIN, torch.zeros(1, 47, 5), {}, r"states \(1, 48\) is not of shape \(1, 47\)"),
        (
            DeferredNorm.plain(torch.zeros(2, 48)),
            torch.zeros(1, 48, 5),
            {},
            r"states \(2, 48\) is not of shape \(1, 48\)",
        ),
        (PLAIN, torch.zeros(1, 48, 5), {"counters": torch.zeros(1)}, "counters is torch.float32"),
        (PLAIN, torch.zeros(1, 48, 5), {"output": torch.zeros(1, 4)}, r"output \(1, 4\) is not of shape \(1, 5\)"),
        (PLAIN, torch.zeros(3, 48, 5), {}, "weight: 3 matrices, where the kernel has thresholds for 1 or 2"),
        (PLAIN, torch.zeros(1, 48, 5), {"thresholds": [0.5, 0.5]}, "2 thresholds for 1 matrices"),
        (activations(activation="tanh"), torch.zeros(1, 48, 5), {}, "activation 'tanh' is not one of"),
        (activations(gate=torch.zeros(47)), torch.zeros(1, 48, 5), {}, r"gate \(47,\) is not of shape \(48,\)"),
        (activations(up=torch.zeros(48).half()), torch.zeros(1, 48, 5), {}, "up is torch.float16"),
    ],
)
def test_what_does_not_fit_is_refused(values: Any, weight: Any, changes: dict[str, Any], message: str) -> None:
    arguments = {"thresholds": [0.5], "counters": torch.zeros(1, dtype=torch.int32), **changes}
    with pytest.raises(ValueError, match=message):
        thinned_rows(values, weight, **arguments)


def compiled(types: dict[str, str | None], num_inputs: int, width: int, num_matrices: int, **constants: Any) -> str:
    block = TUNING.num_warps * 256
    column_blocks = -(-width // block)
    shape = {"HIDDEN_SIZE": num_inputs, "WIDTH": width, "BLOCK": block, "COLUMN_BLOCKS": column_blocks}
    shape |= {"JOBS": column_blocks * num_matrices, "UNITS": TUNING.units, "OWN_BLOCK": 128, "INPUT_BLOCK": 4096}
    return compiled_ptx(
        module.thinned_rows_kernel, types | OUTPUTS, shape | {"PARTS": False, "PDL": True} | constants, TUNING.num_warps
    )


@compiles
def test_kernel_reads_rows_16_bytes_at_a_time_and_waits_before_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    normed: dict[str, str | None] = {**NORMED}
    junction = compiled(normed | SUMS, 3072, 8192, 2, KIND="rms", ACTIVATION="none")
    nothing: dict[str, str | None] = {**dict.fromkeys(NORMED), "eps": "fp32"}
    sums: dict[str, str | None] = {**SUMS, "gate_sums": "*fp32", "up_sums": "*fp32"}
    for ptx in (junction, compiled(nothing | sums, 8192, 3072, 1, KIND="none", ACTIVATION="silu")):
        assert ".local" not in ptx and "griddepcontrol.wait" in ptx
        assert "ld.global" not in ptx[: ptx.index("griddepcontrol.wait")]
        loop = ptx[ptx.index("$L__BB0_2:") : ptx.index("$L__BB0_3:")]
        # Of a row 16 bytes a thread; then 8 units and 8 values of the list, and no thread waits for another.
        assert len(re.findall(r"ld\.global\.L1::evict_first\S*\.v4\.b32", loop)) == TUNING.units
        assert len(re.findall(r"ld\.global\.v4\.b32", loop)) == TUNING.units // 2
        assert loop.count("ld.global") == TUNING.units * 3 // 2 and "bar.sync" not in loop
        assert len(re.findall(r"relaxed\.add\.v4\.f32", ptx)) == 2


@pytest.mark.cuda
def test_a_captured_graph_follows_changed_inputs() -> None:
    states = cases.deferred_states(1, 3072, torch.bfloat16, device="cuda")
    weight = torch.randn(2, 3072, 1000, device="cuda").bfloat16()
    counters = torch.zeros(2, dtype=torch.int32, device="cuda")
    tuning = Tuning(units=8, num_warps=4, programs_per_sm=2)
    thinned_rows(states, weight, thresholds=[0.5, 0.7], counters=counters, tuning=tuning)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = thinned_rows(states, weight, thresholds=[0.5, 0.7], counters=counters, tuning=tuning)
    for _ in range(2):
        states.partial.normal_()
        counters.zero_()
        graph.replay()
        num_kept, again = counters.tolist(), torch.zeros_like(counters)
        expected = thinned_rows(states, weight, thresholds=[0.5, 0.7], counters=again, tuning=tuning)
        torch.testing.assert_close(captured, expected, rtol=1e-4, atol=1e-3)
        assert num_kept == again.tolist() and num_kept[0] > num_kept[1] > 0
