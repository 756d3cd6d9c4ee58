"""What kernels of a decode step demand of their arguments."""

from collections.abc import Mapping

import torch
from torch import Tensor

from modules.kernels.add_norm import DTYPES
from modules.kernels.deferred_norm import DeferredNorm

MAX_ROWS = 8  # of a decode step
MAX_QUERIES_PER_GROUP = 16
FLAGS = (torch.bool, torch.uint8)
Expected = tuple[Tensor | None, tuple[int, ...], tuple[torch.dtype, ...]]  # tensor, its shape, the types it may have


def check_tensors(expected: Mapping[str, Expected], device: torch.device) -> None:
    """ValueError on the first tensor that is not contiguous, or not of its shape, a type of its own, or the device."""
    for name, (tensor, shape, dtypes) in expected.items():
        if tensor is None:
            continue
        if tensor.shape != shape:
            raise ValueError(f"{name} {tuple(tensor.shape)} is not of shape {shape}")
        if tensor.dtype not in dtypes:
            raise ValueError(f"{name} is {tensor.dtype}, not one of {dtypes}")
        if tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}, not on {device}")
        if not tensor.is_contiguous():
            raise ValueError(f"{name} is not contiguous: strides {tensor.stride()}")


def check_cache(keys: Tensor, values: Tensor, num_rows: int, dtype: torch.dtype) -> None:
    """ValueError unless both are [num_rows, G, S, H] with heads contiguous, alike, and of the type."""
    for name, cache in (("keys", keys), ("values", values)):
        if cache.dim() != 4 or len(cache) != num_rows or cache.numel() == 0 or cache.shape != keys.shape:
            raise ValueError(
                f"{name} {tuple(cache.shape)}: no [{num_rows}, groups, positions, head_dim] alike for both"
            )
        if cache.stride(-1) != 1 or cache.stride() != keys.stride():
            raise ValueError(f"{name} have strides {cache.stride()}: not keys' {keys.stride()}, or heads in pieces")
        if cache.dtype != dtype:
            raise ValueError(f"{name} are {cache.dtype}, not {dtype}")
        if cache.device != keys.device:
            raise ValueError(f"{name} are on {cache.device}, keys on {keys.device}")


def check_projection(
    states: DeferredNorm,
    weights: dict[str, Tensor],
    biases: dict[str, Tensor | None],
    rotary: Tensor | None,
    cache_seqlens: Tensor,
    keys: Tensor,
    values: Tensor,
    active_groups: Tensor | None,
) -> None:
    """ValueError on the first argument of `qkv_projection.project_qkv` that does not fit the others."""
    if states.partial.dim() != 2 or not 0 < len(states.partial) <= MAX_ROWS or states.dtype not in DTYPES:
        shape = tuple(states.partial.shape)
        raise ValueError(f"states {shape} of {states.dtype}: not [1 to {MAX_ROWS} rows, hidden_size] of {DTYPES}")
    num_rows, hidden_size = states.partial.shape
    check_cache(keys, values, num_rows, states.dtype)
    num_groups, max_seqlen, head_dim = keys.shape[1:]
    num_heads = len(weights["q_weight"]) // head_dim
    if head_dim % 2 or num_heads == 0 or num_heads % num_groups:
        raise ValueError(f"{num_heads} query heads, {num_groups} groups, head_dim {head_dim}: uneven")
    given = [name for name, bias in biases.items() if bias is not None]
    if given and len(given) < len(biases):
        raise ValueError(f"biases must be given for all or none, not for {given}")
    rows = {name: (num_heads if name[0] == "q" else num_groups) * head_dim for name in (*weights, *biases)}
    expected: dict[str, Expected] = {
        "states": (states.partial, (num_rows, hidden_size), DTYPES),
        **{name: (weight, (rows[name], hidden_size), (states.dtype,)) for name, weight in weights.items()},
        **{name: (bias, (rows[name],), (states.dtype,)) for name, bias in biases.items()},
        "rotary": (rotary, (2, max_seqlen, head_dim // 2), (torch.float32,)),
        "cache_seqlens": (cache_seqlens, (num_rows,), (torch.int64,)),
        "active_groups": (active_groups, (num_rows, num_groups), FLAGS),
    }
    check_tensors(expected, keys.device)


def check_attention(
    queries: Tensor, keys: Tensor, values: Tensor, cache_seqlens: Tensor, active_groups: Tensor | None
) -> None:
    """ValueError on the first argument that does not fit the others."""
    if queries.dim() != 3 or queries.numel() == 0 or queries.dtype not in DTYPES:
        raise ValueError(f"queries {tuple(queries.shape)} of {queries.dtype}: not [rows, heads, head_dim] of {DTYPES}")
    num_rows, num_heads, head_dim = queries.shape
    check_cache(keys, values, num_rows, queries.dtype)
    num_groups = keys.shape[1]
    if num_heads % num_groups or num_heads > MAX_QUERIES_PER_GROUP * num_groups:
        raise ValueError(f"{num_heads} heads do not share {num_groups} groups, at most {MAX_QUERIES_PER_GROUP} each")
    expected: dict[str, Expected] = {
        "queries": (queries, (num_rows, num_heads, keys.shape[-1]), DTYPES),
        "cache_seqlens": (cache_seqlens, (num_rows,), (torch.int64,)),
        "active_groups": (active_groups, (num_rows, num_groups), FLAGS),
    }
    check_tensors(expected, keys.device)
