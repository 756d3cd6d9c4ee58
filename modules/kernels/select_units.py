"""Scores of all units, and the list of those that reach a threshold, in one pass.

    score[r, j] = weight[j] . x[r] + linear_bias[j],    x = norm(residual + partial + bias), see deferred_norm
    value[r, j] = act(score[r, j])
    active(r)   = {j: score[r, j] >= threshold}         without an activation (the second matrix of a predictor)
                  {j: |value[r, j]| >= threshold}       with one (CATS, Lee et al. 2024: the weight is the gate's)

states [rows, D]; weight [U, D] of x's type; linear_bias [U] of any of the three float types or None. Rounding is that
of plain PyTorch in x's type: scores are summed in float32 and rounded to it, so are values, and so is the threshold.
The list holds the union over the rows, each unit once, in no promised order: each program counts what it has found and
reserves that much of the list with one atomic addition; under `torch.use_deterministic_algorithms(True)` it is then
sorted. Skipping rows by such lists is Deja Vu's (Liu et al. 2023, section 4.3).
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from modules.kernels.arguments import ACTIVATION_FUNCTIONS, check_tensors
from modules.kernels.deferred_norm import DeferredNorm, can_launch, dependent_launch, equal_copies
from modules.kernels.weight_tiles import Tuning, check_linear, memory_for_rows, tuning_for
from modules.sparsity import ActiveList

try:
    import triton
    import triton.language as tl
except ImportError:  # published for Linux on x86-64 only; elsewhere the reference serves
    triton = None


def reference_select_units(
    states: DeferredNorm,
    weight: Tensor,
    linear_bias: Tensor | None,
    *,
    threshold: float,
    activation: str | None,
    keep_values: bool,
    counters: Tensor,
) -> ActiveList:
    """Plain PyTorch, with the kernel's arguments and rounding; the list is ascending. The host waits for its length."""
    bias = None if linear_bias is None else linear_bias.float()
    values = F.linear(states.normed().float(), weight.float(), bias).to(states.dtype)
    if activation is not None:
        values = ACTIVATION_FUNCTIONS[activation](values)
    mask = (values if activation is None else values.abs()) >= threshold
    found = mask.any(0).nonzero().squeeze(-1)
    counters[0] += found.shape[0]
    counters[1:] += mask.sum(-1)
    indices = torch.zeros(mask.shape[1], dtype=torch.int32, device=mask.device)
    indices[: found.shape[0]] = found
    return ActiveList(
        indices=indices,
        length=counters[:1],
        num_active=counters[1:],
        mask=mask if mask.shape[0] > 1 else None,
        gate_values=values.float() if keep_values else None,
    )


if triton is not None:
    from modules.kernels.arguments import activated
    from modules.kernels.weight_tiles import await_states, bias_rows, states_of, weight_rows

    @triton.jit
    def select_units_kernel(  # type: ignore[no-untyped-def]
        partial,  # these seven as normed_row has them
        residual,
        bias,
        norm_weight,
        norm_bias,
        new_residual,
        eps,
        weight,  # [num_units, HIDDEN_SIZE]
        linear_bias,  # [num_units] or None
        normed,  # [NUM_ROWS, HIDDEN_SIZE], written where several rows meet several tiles; else None
        threshold,
        counters,  # [1 + NUM_ROWS] int32, added to
        indices,  # [num_units] int32, its beginning written
        mask,  # [NUM_ROWS, num_units] bool, written, or None
        gate_values,  # [NUM_ROWS, num_units] float32, written, or None
        num_units,
        NUM_ROWS: tl.constexpr,
        KIND: tl.constexpr,
        HIDDEN_SIZE: tl.constexpr,
        BLOCK: tl.constexpr,
        ROWS_BLOCK: tl.constexpr,  # NUM_ROWS rounded up to a power of two
        TILE: tl.constexpr,
        PREFETCHES: tl.constexpr,  # see Tuning
        SLOTS: tl.constexpr,  # a power of two, at least as many as a program has tiles
        ACTIVATION: tl.constexpr,
        PDL: tl.constexpr,
    ):
        """Grid: as many programs as there are tiles, or fewer, each of which takes every num_programs-th tile."""
        first_tile = tl.program_id(0)
        num_programs = tl.num_programs(0)
        slots = tl.arange(0, SLOTS)
        rows = tl.arange(0, ROWS_BLOCK)
        states = tl.zeros([BLOCK], tl.float32)
        # Which units of which of this program's tiles any row has: kept until the end, for a single reservation.
        found = tl.zeros([SLOTS, TILE], tl.int32)
        num_active = tl.zeros([ROWS_BLOCK], tl.int32)
        if PREFETCHES:
            ahead = weight_rows(weight, first_tile * TILE, num_units, HIDDEN_SIZE, BLOCK, TILE)
        for tile in range(first_tile, tl.cdiv(num_units, TILE), num_programs):
            shift = bias_rows(linear_bias, tile * TILE, num_units, TILE)
            if PREFETCHES:
                tile_weights = ahead
                ahead = weight_rows(weight, (tile + num_programs) * TILE, num_units, HIDDEN_SIZE, BLOCK, TILE)
            else:
                tile_weights = weight_rows(weight, tile * TILE, num_units, HIDDEN_SIZE, BLOCK, TILE)
            # Here and not ahead of the loop, where the compiler starts the loads of the first tiles.
            if tile == first_tile:
                states = await_states(
                    partial, residual, bias, norm_weight, norm_bias, new_residual, eps, normed, weight,
                    NUM_ROWS, KIND, HIDDEN_SIZE, BLOCK, PDL,
                )  # fmt: skip
            units = tile * TILE + tl.arange(0, TILE)
            inside = units < num_units
            any_row = tl.zeros([TILE], tl.int32)
            for row in tl.static_range(NUM_ROWS):
                row_states = states_of(
                    states, row, partial, residual, bias, norm_weight, norm_bias, new_residual, eps, normed, weight,
                    NUM_ROWS, KIND, HIDDEN_SIZE, BLOCK,
                )  # fmt: skip
                scores = tl.sum(tile_weights.to(tl.float32) * row_states[None, :], axis=1) + shift
                scores = scores.to(weight.dtype.element_ty).to(tl.float32)
                sizes = scores
                if ACTIVATION is not None:
                    scores = activated(scores, ACTIVATION).to(weight.dtype.element_ty).to(tl.float32)
                    sizes = tl.abs(scores)
                active = inside & (sizes >= threshold)
                any_row |= active.to(tl.int32)
                if gate_values is not None:
                    tl.store(gate_values + row * num_units + units, scores, mask=inside)
                if mask is not None:
                    tl.store(mask + row * num_units + units, active, mask=inside)
                num_active += tl.where(rows == row, tl.sum(active.to(tl.int32), axis=0), 0)
            found = tl.where((first_tile + slots * num_programs == tile)[:, None], any_row[None, :], found)
        places = first_tile * TILE + slots[:, None] * (num_programs * TILE) + tl.arange(0, TILE)[None, :]
        found = tl.reshape(found, [SLOTS * TILE])
        start = tl.atomic_add(counters, tl.sum(found, axis=0), sem="relaxed")
        ends = start + tl.cumsum(found, axis=0)
        tl.atomic_add(counters + 1 + rows, num_active, mask=rows < NUM_ROWS, sem="relaxed")
        tl.store(indices + ends - 1, tl.reshape(places, [SLOTS * TILE]), mask=found == 1)


def select_units(
    states: DeferredNorm,
    weight: Tensor,
    linear_bias: Tensor | None,
    *,
    threshold: float,
    activation: str | None,
    keep_values: bool,
    counters: Tensor,
) -> ActiveList:
    """states [rows, D], weight [U, D], linear_bias [U] -> the units that reach the threshold in any row.

    counters int32 [1 + rows], zeroed by the caller, become the list's `length` and `num_active`. Up to 8 rows. Fills
    `states.new_residual`. The kernel on a GPU or under Triton's interpreter, else the reference. ValueError on a type,
    shape, device or layout that does not fit. Nothing there waits for the device or tunes itself: a CUDA graph can hold
    the kernel.
    """
    check_linear(states, weight, linear_bias)
    if activation is not None and activation not in ACTIVATION_FUNCTIONS:
        raise ValueError(f"activation {activation!r} is not one of {', '.join(ACTIVATION_FUNCTIONS)} or None")
    expected = (counters, (1 + states.partial.shape[0],), (torch.int32,))
    check_tensors({"counters": expected}, weight.device)
    if triton is None or not can_launch(select_units_kernel, weight):
        return reference_select_units(
            states,
            weight,
            linear_bias,
            threshold=threshold,
            activation=activation,
            keep_values=keep_values,
            counters=counters,
        )
    return launch_select_units(
        states,
        weight,
        linear_bias,
        threshold=threshold,
        activation=activation,
        keep_values=keep_values,
        counters=counters,
        tuning=tuning_for(states.partial.shape[0], weight),
    )


def launch_select_units(
    states: DeferredNorm,
    weight: Tensor,
    linear_bias: Tensor | None,
    *,
    threshold: float,
    activation: str | None,
    keep_values: bool,
    counters: Tensor,
    tuning: Tuning,
) -> ActiveList:
    """The kernel, by a given tuning."""
    rows, num_units, device = states.partial.shape[0], weight.shape[0], weight.device
    num_tiles = -(-num_units // tuning.tile)
    fixed_order = torch.are_deterministic_algorithms_enabled()
    indices = torch.empty(num_units, dtype=torch.int32, device=device)
    if fixed_order:
        indices.fill_(num_units)  # what the kernel leaves alone comes last when sorted
    found = ActiveList(
        indices=indices,
        length=counters[:1],
        num_active=counters[1:],
        mask=torch.empty(rows, num_units, dtype=torch.bool, device=device) if rows > 1 else None,
        gate_values=torch.empty(rows, num_units, dtype=torch.float32, device=device) if keep_values else None,
    )
    with torch.cuda.device_of(weight):  # a kernel is launched on the current device, not on that of its arguments
        select_units_kernel[(tuning.grid_for(num_units),)](
            **states.kernel_arguments(),
            weight=weight,
            linear_bias=linear_bias,
            normed=memory_for_rows(states, num_units, tuning),
            # As PyTorch compares: in the tensor's type. On the CPU, so nothing waits for the device.
            threshold=float(torch.tensor(threshold, dtype=weight.dtype)),
            counters=counters,
            indices=found.indices,
            mask=found.mask,
            gate_values=found.gate_values,
            num_units=num_units,
            NUM_ROWS=rows,
            BLOCK=triton.next_power_of_2(weight.shape[1]),
            ROWS_BLOCK=triton.next_power_of_2(rows),
            TILE=tuning.tile,
            PREFETCHES=tuning.prefetches,
            SLOTS=triton.next_power_of_2(-(-num_tiles // tuning.grid_for(num_units))),
            ACTIVATION=activation,
            **tuning.options(),
            **dependent_launch(weight),
            **equal_copies(weight.dtype),
        )
    return replace(found, indices=indices.sort().values) if fixed_order else found
