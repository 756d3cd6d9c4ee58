"""Tiles of whole weight rows times states whose norm is still to be computed: what kernels of such products share.

A program takes every num_programs-th tile of a weight [N, D]; states are 1 to 8 rows [rows, D]. Its first tiles are on
their way before it waits for the kernel ahead of it (`await_states`); then it has x, see deferred_norm: a single row
in registers, several in memory, or row by row where it has one tile only (`states_of`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from modules.kernels.arguments import DTYPES, MAX_HIDDEN_SIZE, MAX_ROWS, Expected, check_tensors
from modules.kernels.deferred_norm import DeferredNorm, num_multiprocessors

try:
    import triton
    import triton.language as tl
except ImportError:  # published for Linux on x86-64 only; elsewhere the references serve
    triton = None

TILE_BYTES = 32768  # of one tile, padding included: two programs of these keep 64 KB on their way


@dataclass(frozen=True)
class Tuning:
    """Weight rows per tile, warps per program, and programs (each walks over tiles, if there are more tiles than that).

    `prefetches`: whether a program asks for its next tile before it uses the one at hand. `max_registers` of a thread;
    None: the compiler's choice.
    """

    tile: int
    num_warps: int
    num_programs: int
    prefetches: bool = False
    max_registers: int | None = None

    def grid_for(self, num_outputs: int) -> int:
        """Programs, each with a tile at least."""
        return min(self.num_programs, -(-num_outputs // self.tile))

    def options(self) -> dict[str, int]:
        """Launch options."""
        options = {"num_warps": self.num_warps}
        return options if self.max_registers is None else {**options, "maxnreg": self.max_registers}


def tuning_for(rows: int, weight: Tensor) -> Tuning:
    """For `rows` of states and a weight [N, D], on its device."""
    num_outputs, hidden_size = weight.shape
    return tuning_of_shape(rows, num_outputs, hidden_size, weight.itemsize, num_multiprocessors(weight.device))


def tuning_of_shape(rows: int, num_outputs: int, hidden_size: int, itemsize: int, multiprocessors: int) -> Tuning:
    """The smallest tiles with which one tile a program suffices, all of them in flight at once; where no tile is large
    enough for that, programs that stay; the sizes of theirs are measured in whole decode steps of an H200."""
    block = triton.next_power_of_2(hidden_size)
    tile = 1
    while 2 * tile * block * itemsize <= TILE_BYTES and -(-num_outputs // tile) > 4 * multiprocessors:
        tile *= 2
    num_tiles = -(-num_outputs // tile)
    num_warps = min(8, max(1, tile * block // 2048, block // 512))
    if num_tiles <= 4 * multiprocessors:
        return Tuning(tile, num_warps, num_tiles)
    num_programs = 2 * multiprocessors
    if rows == 1:  # many programs cover for each other: faster than tiles ahead of their use
        tile = max(1, (16384 if hidden_size == block else 8192) // block)  # less where lanes are padding
        return Tuning(tile, num_warps=4, num_programs=4 * multiprocessors)
    # Of several rows the compiler would hold more at once than lets two programs share a multiprocessor.
    return Tuning(tile, num_warps, num_programs, prefetches=True, max_registers=128)


if triton is not None:
    from modules.kernels.add_norm import normed_row
    from modules.kernels.deferred_norm import wait_for_inputs

    @triton.jit
    def weight_tile(  # type: ignore[no-untyped-def]
        weight, units, real, HIDDEN_SIZE: tl.constexpr, BLOCK: tl.constexpr
    ):
        """Rows `units` of weight [any, HIDDEN_SIZE], those that are not `real` unread: [len(units), BLOCK]."""
        columns = tl.arange(0, BLOCK)
        offsets = units.to(tl.int64)[:, None] * HIDDEN_SIZE + columns[None, :]
        mask = real[:, None] & (columns < HIDDEN_SIZE)[None, :]
        return tl.load(weight + offsets, mask=mask, other=0.0, eviction_policy="evict_first")

    @triton.jit
    def weight_rows(  # type: ignore[no-untyped-def]
        weight,  # [num_outputs, HIDDEN_SIZE]
        first_row,
        num_outputs,
        HIDDEN_SIZE: tl.constexpr,
        BLOCK: tl.constexpr,  # HIDDEN_SIZE rounded up to a power of two
        TILE: tl.constexpr,
    ):
        """Rows first_row .. first_row + TILE of a matrix [TILE, BLOCK], 0 beyond its edges."""
        rows = first_row + tl.arange(0, TILE)
        return weight_tile(weight, rows, rows < num_outputs, HIDDEN_SIZE, BLOCK)

    @triton.jit
    def bias_rows(linear_bias, first_row, num_outputs, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
        """The bias of rows first_row .. first_row + TILE, float32 [TILE]; 0 beyond, and where there is none."""
        rows = first_row + tl.arange(0, TILE)
        shift = tl.zeros([TILE], tl.float32)
        if linear_bias is not None:
            shift = tl.load(linear_bias + rows, mask=rows < num_outputs, other=0.0).to(tl.float32)
        return shift

    @triton.jit
    def await_states(  # type: ignore[no-untyped-def]
        partial,
        residual,
        bias,
        norm_weight,
        norm_bias,
        new_residual,
        eps,
        normed,  # [NUM_ROWS, HIDDEN_SIZE] of x's type, written, or None
        like,
        NUM_ROWS: tl.constexpr,
        KIND: tl.constexpr,
        HIDDEN_SIZE: tl.constexpr,
        BLOCK: tl.constexpr,
        PDL: tl.constexpr,
    ):
        """Wait for the input; then a single row is returned, float32 [BLOCK], and several go to memory, from which this
        program reads them back: every program writes the same numbers there, so none waits for another."""
        wait_for_inputs(PDL)
        columns = tl.arange(0, BLOCK)
        writes = tl.program_id(0) == 0
        states = tl.zeros([BLOCK], tl.float32)
        if NUM_ROWS == 1 or normed is not None:
            for row in tl.static_range(NUM_ROWS):
                states = normed_row(
                    partial, residual, bias, norm_weight, norm_bias, new_residual, eps, row, writes, like,
                    KIND, HIDDEN_SIZE, BLOCK,
                )  # fmt: skip
                if NUM_ROWS > 1:
                    pointers = normed + row * HIDDEN_SIZE + columns
                    tl.store(pointers, states.to(normed.dtype.element_ty), mask=columns < HIDDEN_SIZE)
            if NUM_ROWS > 1:  # a barrier would keep the compiler from loading the tiles of a single row ahead
                tl.debug_barrier()
        return states

    @triton.jit
    def states_of(  # type: ignore[no-untyped-def]
        states,  # what await_states has returned
        row,
        partial,
        residual,
        bias,
        norm_weight,
        norm_bias,
        new_residual,
        eps,
        normed,
        like,
        NUM_ROWS: tl.constexpr,
        KIND: tl.constexpr,
        HIDDEN_SIZE: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        """Row `row` of x, float32 [BLOCK]: in registers, from memory, or (for a program's only tile) made now."""
        if NUM_ROWS > 1:
            if normed is None:
                states = normed_row(
                    partial, residual, bias, norm_weight, norm_bias, new_residual, eps, row, tl.program_id(0) == 0,
                    like, KIND, HIDDEN_SIZE, BLOCK,
                )  # fmt: skip
            else:
                columns = tl.arange(0, BLOCK)
                kept = tl.load(normed + row * HIDDEN_SIZE + columns, mask=columns < HIDDEN_SIZE, other=0.0)
                states = kept.to(tl.float32)
        return states


def memory_for_rows(states: DeferredNorm, num_outputs: int, tuning: Tuning) -> Tensor | None:
    """[rows, D] for several rows, which do not fit the registers of a program that stays."""
    if states.partial.shape[0] == 1 or -(-num_outputs // tuning.tile) <= tuning.num_programs:
        return None
    return torch.empty(states.partial.shape, dtype=states.dtype, device=states.partial.device)


def check_linear(states: DeferredNorm, weight: Tensor, linear_bias: Tensor | None) -> None:
    """ValueError unless the kernels of this kind can multiply these states [rows, D] with a weight [N, D]."""
    partial = states.partial
    if partial.dim() != 2 or not 1 <= partial.shape[0] <= MAX_ROWS or not 1 <= partial.shape[1] <= MAX_HIDDEN_SIZE:
        raise ValueError(f"states {tuple(partial.shape)}: not 1 to {MAX_ROWS} rows of 1 to {MAX_HIDDEN_SIZE}")
    if states.dtype not in DTYPES:
        raise ValueError(f"states are {states.dtype}, not one of {DTYPES}")
    num_outputs, width = weight.shape[:1].numel(), partial.shape[1:]
    if num_outputs == 0:
        raise ValueError(f"weight {tuple(weight.shape)} has no rows")
    expected: dict[str, Expected] = {
        "partial": (partial, partial.shape, DTYPES),
        "residual": (states.residual, partial.shape, (torch.float32,)),
        "bias of the states": (states.bias, width, DTYPES),
        "norm weight": (states.weight, width, DTYPES),
        "norm bias": (states.norm_bias, width, DTYPES),
        "new_residual": (states.new_residual, partial.shape, (torch.float32,)),
        "weight": (weight, (num_outputs, *width), (states.dtype,)),
        "bias": (linear_bias, (num_outputs,), DTYPES),
    }
    check_tensors(expected, partial.device)
