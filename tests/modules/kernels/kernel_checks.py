"""What tests of kernels share: states still to be normed, memory full of NaN, captured graphs, PTX without a GPU."""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from modules.kernels.deferred_norm import DeferredNorm

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NAN, EPS = float("nan"), 1e-5

# Triton settles when it is imported whether it compiles or interprets.
compiles = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="nothing compiles under the interpreter"
)

NORMED: dict[str, str | None] = {
    "partial": "*fp32",
    "residual": "*fp32",
    "bias": None,
    "norm_weight": "*bf16",
    "norm_bias": None,
    "new_residual": "*fp32",
    "eps": "fp32",
}


def compiled_ptx(
    kernel: Any, types: dict[str, str | None], constants: dict[str, Any], num_warps: int, **options: Any
) -> str:
    """PTX for sm_90. Pointers aligned, as from torch's allocator; integers divisible by 16; None: an argument that is
    not there. `options`: further ones of the launch."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = constants | {name: None for name, of in types.items() if of is None}
    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, of in enumerate(signature.values())
        if of == "i32" or str(of).startswith("*")
    }
    source = ASTSource(kernel, signature, constants, aligned)
    options |= {"num_warps": num_warps, "launch_pdl": True}
    with tempfile.TemporaryDirectory() as cache, mock.patch.dict(os.environ, TRITON_CACHE_DIR=cache):
        return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]


@contextmanager
def poisoned() -> Iterator[None]:
    """While it lasts, fresh memory is full of NaN, or of -1: an element that is not written shows."""

    def full(make: Any) -> Any:
        def made(*args: Any, **kwargs: Any) -> Tensor:
            memory = make(*args, **kwargs)
            return memory.fill_(NAN if memory.is_floating_point() else -1)

        return made

    with ExitStack() as stack:
        for owner, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
            stack.enter_context(mock.patch.object(owner, name, full(getattr(owner, name))))
        yield


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def deferred_states(
    rows: int, hidden_size: int, dtype: torch.dtype, *, kind: str = "rms", device: str = "cpu", options: bool = True
) -> DeferredNorm:
    """A junction with everything (`options`: also with both biases), its `new_residual` full of NaN."""
    size = (hidden_size,)

    def made(shape: tuple[int, ...], of: torch.dtype) -> Tensor:
        return torch.randn(shape).to(device, of)

    return DeferredNorm(
        partial=made((rows, hidden_size), torch.float32),
        residual=made((rows, hidden_size), torch.float32) * 3 + 1,
        bias=made(size, dtype) if options else None,
        weight=made(size, dtype) + 1 if kind != "none" else None,
        norm_bias=made(size, dtype) if options and kind != "none" else None,
        kind=kind,
        eps=EPS,
        dtype=dtype,
        new_residual=torch.full((rows, hidden_size), NAN, device=device),
    )


def assert_residual_is_written(states: DeferredNorm) -> None:
    """Bit for bit: it is summed in the kernel's order."""
    assert states.new_residual is not None
    torch.testing.assert_close(states.new_residual, total_of(states), rtol=0, atol=0)


def total_of(states: DeferredNorm) -> Tensor:
    """The new residual, summed in the kernel's order: float32 [rows, D]."""
    total = states.partial.float()
    total = total if states.bias is None else total + states.bias.float()
    return total if states.residual is None else states.residual + total


def normed(total: Tensor, weight: Tensor | None, norm_bias: Tensor | None, kind: str) -> Tensor:
    """The norm's equation in float64."""
    states = total.double()
    if kind == "none":
        return states
    if kind == "layer":
        states = states - states.mean(-1, keepdim=True)
    states = states / (states.square().mean(-1, keepdim=True) + EPS).sqrt()
    states = states if weight is None else states * weight.double()
    return states if norm_bias is None else states + norm_bias.double()


def normed_states(states: DeferredNorm) -> Tensor:
    """x in float64, rounded to its type on the way."""
    return normed(total_of(states), states.weight, states.norm_bias, states.kind).to(states.dtype).double()


def captured(function: Callable[[], Any]) -> tuple[Any, torch.cuda.CUDAGraph]:
    """What a function gives inside a CUDA graph, and the graph."""
    function()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()
    return result, graph


def assert_graph_follows(function: Callable[[], Any], change: Callable[[], object]) -> None:
    """A captured call gives what a fresh one gives, bit for bit, after every change of its inputs."""
    found, graph = captured(function)
    for _ in range(2):
        change()
        for result in found if isinstance(found, tuple) else (found,):
            result.fill_(NAN)
        graph.replay()
        torch.cuda.synchronize()
        assert all(map(torch.equal, found, function()))
