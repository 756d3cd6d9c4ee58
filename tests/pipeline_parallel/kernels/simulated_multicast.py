"""A multicast address for kernels under Triton's interpreter: what the switch does with multimem instructions, on the
memory that processes share."""

import ctypes
import re
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

ADDRESS = 1 << 46
GROUP_BYTES = 16
WORDS = GROUP_BYTES // 4


def multicast_over(buffer_addresses: list[int], dtype: torch.dtype) -> Any:
    """A context in which the memory at ADDRESS is that at all of `buffer_addresses` at once."""
    from triton.runtime import interpreter

    type_name = {torch.bfloat16: "bf16x2", torch.float16: "f16x2"}[dtype]
    load = re.compile(rf"multimem\.ld_reduce\.relaxed\.sys\.global\.add\.acc::f32\.v4\.{type_name} ")
    store = re.compile(r"multimem\.st\.relaxed\.sys\.global\.v4\.f32 ")

    def inline_asm(assembly: str, constraints: str, values: list[Any], types: Any, is_pure: bool, pack: int) -> Any:
        assert not is_pure and pack == 1
        addresses, inside, *words = (value.data.reshape(-1) for value in values)
        places = [int(address) - ADDRESS for address in addresses]
        assert all(place % GROUP_BYTES == 0 for place in places), "not aligned to 16 bytes"
        if load.search(assembly):
            found = np.zeros((len(places), WORDS), dtype=np.int32)
            for group, place in enumerate(places):
                if inside[group]:
                    found[group] = added(buffer_addresses, place, dtype)
            results = [found[:, word] for word in range(WORDS)]
        else:
            assert store.search(assembly), assembly
            for group, place in enumerate(places):
                if inside[group]:
                    given = np.array([word[group] for word in words], dtype=np.int32).tobytes()
                    for base in buffer_addresses:
                        ctypes.memmove(base + place, given, GROUP_BYTES)
            results = [np.zeros(len(places), dtype=np.int32)]
        handles = [interpreter.TensorHandle(result, values[1].dtype) for result in results]
        return SimpleNamespace(get_result=handles.__getitem__)

    return mock.patch.object(interpreter.interpreter_builder, "create_inline_asm", inline_asm)


def added(buffer_addresses: list[int], place: int, dtype: torch.dtype) -> np.ndarray:
    """int32 [4]: 16 bytes of 2-byte floats, added up in float32 over all buffers and rounded once."""
    total = torch.zeros(GROUP_BYTES // dtype.itemsize)
    for base in reversed(buffer_addresses):  # an order of its own
        total += torch.frombuffer(bytearray(ctypes.string_at(base + place, GROUP_BYTES)), dtype=dtype).float()
    rounded: Tensor = total.to(dtype)
    return rounded.view(torch.int32).numpy()
