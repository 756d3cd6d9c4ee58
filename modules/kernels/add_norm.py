"""The residual junction of a pre-norm model in one pass: add a half-block's output to the stream and normalise it.

    new_residual = residual + (partial + bias)                  (or partial + more[0] + more[1] + ... + bias)
    hidden = norm(new_residual) * weight + norm_bias
    norm(x) = x / sqrt(mean(x^2) + eps)                         (rms: Zhang & Sennrich 2019)
    norm(x) = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) (layer: Ba et al. 2016)
    norm(x) = x, without weight and norm_bias                   (none)

partial [..., D] float32, bfloat16 or float16, more [P, ..., D] of the same type; residual, new_residual [..., D]
float32; weight, norm_bias, bias [D] of any of the three types; hidden [..., D] in `out_dtype`, one of the three;
D <= 16384; all contiguous, row-major.
Rounding: operands are widened to float32, all sums and statistics are float32, the stream is stored in float32, and
hidden is rounded once, at the end. One program takes one row, held in registers between the only read and the only
write, and its launch depends on D alone: a row's numbers do not depend on how many rows there are.
"""

import functools

import torch
from loguru import logger
from torch import Tensor
from torch.nn import functional as F

from modules.kernels.arguments import DTYPES, MAX_HIDDEN_SIZE, Expected, check_tensors

try:
    import triton
    import triton.language as tl
except ImportError:  # published for Linux on x86-64 only; elsewhere the reference serves
    triton = None

KINDS = ("rms", "layer", "none")
ELEMENTS_PER_THREAD = 16  # two 16-byte loads of a half-precision row, four of a float32 row


def reference_add_norm(
    partial: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    norm_bias: Tensor | None,
    bias: Tensor | None,
    *,
    kind: str,
    eps: float,
    out_dtype: torch.dtype,
    more: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Plain PyTorch, with the kernel's arguments and rounding. The results alias neither an input nor each other."""
    total = partial.to(torch.float32, copy=True)
    for part in () if more is None else more:
        total = total + part.float()
    total = total if bias is None else total + bias.float()
    total = total if residual is None else residual + total
    weight = None if weight is None else weight.float()
    size = total.shape[-1:]
    if kind == "none":
        return total.to(out_dtype, copy=True), total
    if kind == "rms":
        normed = F.rms_norm(total, size, weight, eps)
        normed = normed if norm_bias is None else normed + norm_bias.float()
    else:
        normed = F.layer_norm(total, size, weight, None if norm_bias is None else norm_bias.float(), eps)
    return normed.to(out_dtype), total


if triton is not None:

    @triton.jit
    def normed_row(  # type: ignore[no-untyped-def]
        partial,  # [rows, HIDDEN_SIZE]
        residual,  # [rows, HIDDEN_SIZE] float32 or None
        bias,  # [HIDDEN_SIZE] or None, as the next two
        norm_weight,
        norm_bias,
        new_residual,  # [rows, HIDDEN_SIZE] float32 or None, written if `writes`
        eps,
        row,
        writes,  # whether this program is the one that writes
        like,  # a pointer of the type that the result is rounded to
        KIND: tl.constexpr,
        HIDDEN_SIZE: tl.constexpr,
        BLOCK: tl.constexpr,  # HIDDEN_SIZE rounded up to a power of two
        more=None,  # [NUM_MORE, rows, HIDDEN_SIZE], `more_stride` elements apart
        more_stride=0,
        NUM_MORE: tl.constexpr = 0,
    ):
        """Row `row` of the junction, rounded to the type of `like` and widened again: float32 [BLOCK], 0 beyond."""
        columns = tl.arange(0, BLOCK)
        inside = columns < HIDDEN_SIZE
        offsets = row * HIDDEN_SIZE + columns
        total = tl.load(partial + offsets, mask=inside, other=0.0).to(tl.float32)
        for part in tl.static_range(NUM_MORE):
            total += tl.load(more + part * more_stride + offsets, mask=inside, other=0.0).to(tl.float32)
        if bias is not None:
            total += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
        if residual is not None:
            total = tl.load(residual + offsets, mask=inside, other=0.0) + total
        # Asked for here and not where they are used: nothing moves a load ahead of a store or of a reduction's barrier,
        # and a few rows of decoding take little more than the latency of memory.
        if norm_weight is not None:
            scale = tl.load(norm_weight + columns, mask=inside, other=0.0)
        if norm_bias is not None:
            shift = tl.load(norm_bias + columns, mask=inside, other=0.0)
        if new_residual is not None:
            tl.store(new_residual + offsets, total, mask=inside & writes)
        normed = total
        if KIND == "layer":
            # Centred before it is squared, which costs no second read here and loses no digits to cancellation.
            normed = tl.where(inside, total - tl.sum(total, axis=0) / HIDDEN_SIZE, 0.0)
        if KIND != "none":
            normed = normed * tl.rsqrt(tl.sum(normed * normed, axis=0) / HIDDEN_SIZE + eps)
        if norm_weight is not None:
            normed = normed * scale.to(tl.float32)
        if norm_bias is not None:
            normed = normed + shift.to(tl.float32)
        return normed.to(like.dtype.element_ty).to(tl.float32)

    @triton.jit
    def add_norm_kernel(  # type: ignore[no-untyped-def]
        partial,  # [rows, D]
        residual,  # [rows, D] float32, or None
        weight,  # [D] or None, as the next two
        norm_bias,
        bias,
        hidden,  # [rows, D], written
        new_residual,  # [rows, D] float32, written
        more,  # [NUM_MORE, rows, D] or None
        more_stride,  # rows * D
        eps,
        HIDDEN_SIZE: tl.constexpr,
        BLOCK: tl.constexpr,  # HIDDEN_SIZE rounded up to a power of two
        KIND: tl.constexpr,
        NUM_MORE: tl.constexpr,
    ):
        """Grid: one program per row."""
        row = tl.program_id(0).to(tl.int64)
        normed = normed_row(
            partial,
            residual,
            bias,
            weight,
            norm_bias,
            new_residual,
            eps,
            row,
            True,
            hidden,
            KIND,
            HIDDEN_SIZE,
            BLOCK,
            more,
            tl.cast(more_stride, tl.int64),
            NUM_MORE,
        )
        columns = tl.arange(0, BLOCK)
        place = hidden + row * HIDDEN_SIZE + columns
        tl.store(place, normed.to(hidden.dtype.element_ty), mask=columns < HIDDEN_SIZE)


def num_warps_of(block: int) -> int:
    """Warps for a row padded to `block` elements, a power of two."""
    return min(32, max(1, block // (32 * ELEMENTS_PER_THREAD)))


def fused_add_norm(
    partial: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    norm_bias: Tensor | None,
    bias: Tensor | None,
    *,
    kind: str,
    eps: float,
    out_dtype: torch.dtype,
    more: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(hidden, new_residual) of the equation above, in fresh memory, or hidden in `out`; records no gradient on a GPU.

    The kernel on a GPU or under Triton's interpreter, else the reference. ValueError on a type, shape, device or layout
    that does not fit. Nothing here waits for the device or tunes itself: a CUDA graph can hold it.
    """
    if kind not in KINDS:
        raise ValueError(f"kind {kind!r} is not one of {', '.join(KINDS)}")
    if out_dtype not in DTYPES:
        raise ValueError(f"out_dtype {out_dtype} is not one of {DTYPES}")
    if partial.dim() == 0 or not 0 < partial.shape[-1] <= MAX_HIDDEN_SIZE:
        raise ValueError(f"partial {tuple(partial.shape)} has no last dim of 1 to {MAX_HIDDEN_SIZE} elements")
    shape, width = tuple(partial.shape), (partial.shape[-1],)
    expected: dict[str, Expected] = {
        "partial": (partial, shape, DTYPES),
        "residual": (residual, shape, (torch.float32,)),
        "weight": (weight, width, DTYPES),
        "norm_bias": (norm_bias, width, DTYPES),
        "bias": (bias, width, DTYPES),
        "more": (more, (0 if more is None else len(more), *shape), (partial.dtype,)),
        "out": (out, shape, (out_dtype,)),
    }
    check_tensors(expected, partial.device)
    # Whether the kernel is interpreted was settled when it was decorated, not by today's value of the variable.
    interpreted = triton is not None and not isinstance(add_norm_kernel, triton.JITFunction)
    if triton is None and partial.is_cuda:
        warn_of_reference()
    if triton is None or not (partial.is_cuda or interpreted):
        hidden, new_residual = reference_add_norm(
            partial, residual, weight, norm_bias, bias, kind=kind, eps=eps, out_dtype=out_dtype, more=more
        )
        return hidden if out is None else out.copy_(hidden), new_residual
    hidden = torch.empty_like(partial, dtype=out_dtype) if out is None else out
    new_residual = torch.empty_like(partial, dtype=torch.float32)
    if partial.numel() == 0:
        return hidden, new_residual
    if kind == "none":
        weight = norm_bias = None
    hidden_size = partial.shape[-1]
    block = triton.next_power_of_2(hidden_size)
    with torch.cuda.device_of(partial):  # a kernel is launched on the current device, not on that of its arguments
        add_norm_kernel[(partial.numel() // hidden_size,)](
            partial,
            residual,
            weight,
            norm_bias,
            bias,
            hidden,
            new_residual,
            more,
            0 if more is None else partial.numel(),
            eps,
            HIDDEN_SIZE=hidden_size,
            BLOCK=block,
            KIND=kind,
            NUM_MORE=0 if more is None else len(more),
            num_warps=num_warps_of(block),
        )
    return hidden, new_residual


@functools.cache  # said once
def warn_of_reference() -> None:
    logger.warning("triton is not installed: the residual junction runs in several passes, as plain PyTorch")
