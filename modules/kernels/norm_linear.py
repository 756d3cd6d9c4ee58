"""A matrix-vector product whose input is a residual junction that is not computed yet: the product computes it, too.

    outputs[r, j] = weight[j] . x[r] + linear_bias[j],    x = norm(residual + partial + bias), see deferred_norm

states [rows, D]; weight [N, D] of x's type; linear_bias [N] of any of the three types or None; outputs [rows, N] in
`out_dtype`: float32, bfloat16 or float16; all contiguous, row-major. Rounding: x once to its own type, products and
sums in float32, the result once. Reading the weights is all that takes time: a persistent grid walks over tiles of
whole weight rows, the next tiles on their way while one is multiplied, the first before the input is there. The launch
depends on shapes, types and the number of multiprocessors alone. A decode step's products with one vector, as in Deja
Vu (Liu et al. 2023, section 4.3); the head and the first matrix of a predictor use this one.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from modules.kernels.arguments import DTYPES
from modules.kernels.deferred_norm import DeferredNorm, can_launch, dependent_launch
from modules.kernels.weight_tiles import Tuning, check_linear, memory_for_rows, tuning_for

try:
    import triton
    import triton.language as tl
except ImportError:  # published for Linux on x86-64 only; elsewhere the reference serves
    triton = None


def reference_norm_linear(
    states: DeferredNorm, weight: Tensor, linear_bias: Tensor | None, *, out_dtype: torch.dtype
) -> Tensor:
    """Plain PyTorch, with the kernel's arguments and rounding."""
    bias = None if linear_bias is None else linear_bias.float()
    return F.linear(states.normed().float(), weight.float(), bias).to(out_dtype)


if triton is not None:
    from modules.kernels.weight_tiles import await_states, bias_rows, states_of, weight_rows

    @triton.jit
    def norm_linear_kernel(  # type: ignore[no-untyped-def]
        partial,  # these seven as normed_row has them
        residual,
        bias,
        norm_weight,
        norm_bias,
        new_residual,
        eps,
        weight,  # [num_outputs, HIDDEN_SIZE]
        linear_bias,  # [num_outputs] or None
        normed,  # [NUM_ROWS, HIDDEN_SIZE], written where several rows meet several tiles; else None
        outputs,  # [NUM_ROWS, num_outputs], written
        num_outputs,
        NUM_ROWS: tl.constexpr,
        KIND: tl.constexpr,
        HIDDEN_SIZE: tl.constexpr,
        BLOCK: tl.constexpr,
        TILE: tl.constexpr,
        PREFETCHES: tl.constexpr,  # see Tuning
        PDL: tl.constexpr,
    ):
        """Grid: as many programs as there are tiles, or fewer, each of which takes every num_programs-th tile."""
        first_tile = tl.program_id(0)
        num_programs = tl.num_programs(0)
        states = tl.zeros([BLOCK], tl.float32)
        if PREFETCHES:
            ahead = weight_rows(weight, first_tile * TILE, num_outputs, HIDDEN_SIZE, BLOCK, TILE)
        for tile in range(first_tile, tl.cdiv(num_outputs, TILE), num_programs):
            shift = bias_rows(linear_bias, tile * TILE, num_outputs, TILE)
            if PREFETCHES:
                tile_weights = ahead
                ahead = weight_rows(weight, (tile + num_programs) * TILE, num_outputs, HIDDEN_SIZE, BLOCK, TILE)
            else:
                tile_weights = weight_rows(weight, tile * TILE, num_outputs, HIDDEN_SIZE, BLOCK, TILE)
            # Here and not ahead of the loop, where the compiler starts the loads of the first tiles.
            if tile == first_tile:
                states = await_states(
                    partial, residual, bias, norm_weight, norm_bias, new_residual, eps, normed, weight,
                    NUM_ROWS, KIND, HIDDEN_SIZE, BLOCK, PDL,
                )  # fmt: skip
            units = tile * TILE + tl.arange(0, TILE)
            for row in tl.static_range(NUM_ROWS):
                row_states = states_of(
                    states, row, partial, residual, bias, norm_weight, norm_bias, new_residual, eps, normed, weight,
                    NUM_ROWS, KIND, HIDDEN_SIZE, BLOCK,
                )  # fmt: skip
                sums = tl.sum(tile_weights.to(tl.float32) * row_states[None, :], axis=1) + shift
                pointers = outputs + row * num_outputs + units
                tl.store(pointers, sums.to(outputs.dtype.element_ty), mask=units < num_outputs)


def norm_linear(states: DeferredNorm, weight: Tensor, linear_bias: Tensor | None, *, out_dtype: torch.dtype) -> Tensor:
    """states [rows, D], weight [N, D], linear_bias [N] -> [rows, N] of `out_dtype`; fills `states.new_residual`.

    Up to 8 rows. The kernel on a GPU or under Triton's interpreter, else the reference. ValueError on a type, shape,
    device or layout that does not fit. Nothing here waits for the device or tunes itself: a CUDA graph can hold it.
    """
    check_linear(states, weight, linear_bias)
    if out_dtype not in DTYPES:
        raise ValueError(f"out_dtype {out_dtype} is not one of {', '.join(map(str, DTYPES))}")
    if triton is None or not can_launch(norm_linear_kernel, weight):
        return reference_norm_linear(states, weight, linear_bias, out_dtype=out_dtype)
    tuning = tuning_for(states.partial.shape[0], weight)
    return launch_norm_linear(states, weight, linear_bias, out_dtype=out_dtype, tuning=tuning)


def launch_norm_linear(
    states: DeferredNorm, weight: Tensor, linear_bias: Tensor | None, *, out_dtype: torch.dtype, tuning: Tuning
) -> Tensor:
    """The kernel, by a given tuning."""
    rows, num_outputs = states.partial.shape[0], weight.shape[0]
    outputs = torch.empty(rows, num_outputs, dtype=out_dtype, device=weight.device)
    with torch.cuda.device_of(weight):  # a kernel is launched on the current device, not on that of its arguments
        norm_linear_kernel[(tuning.grid_for(num_outputs),)](
            **states.kernel_arguments(),
            weight=weight,
            linear_bias=linear_bias,
            normed=memory_for_rows(states, num_outputs, tuning),
            outputs=outputs,
            num_outputs=num_outputs,
            NUM_ROWS=rows,
            BLOCK=triton.next_power_of_2(weight.shape[1]),
            TILE=tuning.tile,
            PREFETCHES=tuning.prefetches,
            **tuning.options(),
            **dependent_launch(weight),
        )
    return outputs
