"""PTX of a kernel, compiled for sm_90 without a GPU."""

import os
from typing import Any

import pytest

# Triton settles when it is imported whether it compiles or interprets.
compiles = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="nothing compiles under the interpreter"
)

NORMED = {
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
    """Pointers aligned, as from torch's allocator; integers divisible by 16; None: an argument that is not there.
    `options`: further ones of the launch."""
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
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
