"""MLP over the active neurons only, of one token per row, in one kernel.

    out[r] = sum over j in active(r) of a_j(r) * down[j]  +  sum over i of
             (standin_in[i] . x[r]) * standin_out[i] + bias
    a_j(r) = act(gate[j] . x[r] + gate_bias[j]) * (up[j] . x[r] + up_bias[j])     (gated)
    a_j(r) = act(up[j] . x[r] + up_bias[j])                                       (not gated)

x [rows, D] (a `DeferredNorm`, so the norm before it is part of the kernel), rows 1 to 8; gate, up, down [F, D]
neuron-major, bfloat16, float16 or float32; the stand-in for what is skipped (see sparse_predictor.standin) is a set of
linear neurons that are always active: standin_in, standin_out [R, D], standin_bias [D]. Deja Vu (Liu et al. 2023),
section 4.3 gathers the rows of active neurons in two kernels; here one program computes a neuron's activation and adds
what it writes, so that nothing goes through memory in between.

A program walks the list of active neurons in strides, the rows of its next neurons on their way while it computes; each
row is read whole, 16 bytes per thread. Sums are float32. Programs add up their parts with float32 atomics, in no fixed
order; under `torch.use_deterministic_algorithms(True)` each writes its part to memory of its own and these are summed
in order (for equal bits the list must have a fixed order, too). Several rows share the list of the union of their sets:
each weight is read once, and a row takes no part in neurons that are not its own.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from modules.kernels.arguments import ACTIVATION_FUNCTIONS, DTYPES, MAX_ROWS, Expected, check_tensors
from modules.kernels.deferred_norm import DeferredNorm, can_launch, dependent_launch, num_multiprocessors
from modules.kernels.early_selection import ExtraRows
from modules.sparsity import ActiveList, ActiveSet, StandIn

try:
    import triton
    import triton.language as tl
except ImportError:  # published for Linux on x86-64 only; elsewhere the reference serves
    triton = None


@dataclass(frozen=True)
class Tuning:
    """How the kernel is launched: neurons per step of a program (more than one for a single row only), warps per
    program, programs per multiprocessor."""

    units: int
    num_warps: int
    programs_per_sm: int


def reference_sparse_mlp(
    x: Tensor,
    gate: Tensor | None,
    up: Tensor,
    down: Tensor,
    active: ActiveSet,
    *,
    activation: str,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
) -> Tensor:
    """Plain PyTorch: gathers the union of the rows' active neurons once, then zeroes what a row does not use.

    With everything active the operands and shapes are those of the dense block, so the result is equal bit for bit.
    """
    union = union_of(active)
    return mlp_of_rows(
        x,
        None if gate is None else gate[union],
        up[union],
        down[union],
        active,
        union,
        activation=activation,
        gate_bias=gate_bias,
        up_bias=up_bias,
    )


def union_of(active: ActiveSet) -> Tensor:
    """The units that any row computes, int64 [A], ascending."""
    return active.mask.any(0).nonzero().squeeze(-1)


def mlp_of_rows(
    x: Tensor,
    gate_rows: Tensor | None,
    up_rows: Tensor,
    down_rows: Tensor,
    active: ActiveSet,
    union: Tensor,
    *,
    activation: str,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
) -> Tensor:
    """`reference_sparse_mlp` with the weights' rows of the union [A, D] in hand; biases are of all units.

    `gate_rows` None: there is no gate, or `active` has its values.
    """
    activate = ACTIVATION_FUNCTIONS[activation]
    values = F.linear(x, up_rows, None if up_bias is None else up_bias[union])
    if active.gate_values is not None:
        values = active.gate_values[:, union].to(values.dtype) * values
    elif gate_rows is None:
        values = activate(values)
    else:
        values = activate(F.linear(x, gate_rows, None if gate_bias is None else gate_bias[union])) * values
    if x.shape[0] > 1:
        values = values.masked_fill(~active.mask[:, union], 0)
    return values @ down_rows


def mlp_in_plain_pytorch(
    states: DeferredNorm,
    gate: Tensor | None,
    up: Tensor,
    down: Tensor,
    active: ActiveList | None,
    activation: str,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    standin: StandIn | None,
) -> Tensor:
    x = states.normed()
    mask = torch.ones(x.shape[0], up.shape[0], dtype=torch.bool, device=x.device)
    gate_values = None
    if active is not None:
        listed = torch.zeros(up.shape[0], dtype=torch.bool, device=x.device)
        listed[active.indices[: int(active.length)].long()] = True
        mask = mask & listed if active.mask is None else active.mask & listed
        gate_values = active.gate_values
    chosen = ActiveSet(mask, gate_values=gate_values)
    result = reference_sparse_mlp(
        x, gate, up, down, chosen, activation=activation, gate_bias=gate_bias, up_bias=up_bias
    ).float()
    if standin is None:
        return result
    return result + of_standin(x, standin).float()


def of_standin(x: Tensor, standin: StandIn) -> Tensor:
    """What a stand-in adds for x [rows, D]: [rows, D]."""
    return F.linear(F.linear(x, standin.inputs), standin.outputs.t(), standin.bias)


if triton is not None:
    from modules.kernels.add_norm import normed_row
    from modules.kernels.arguments import activated
    from modules.kernels.deferred_norm import wait_for_inputs
    from modules.kernels.weight_tiles import weight_tile

    @triton.jit
    def sum_pairs(first, second, more_first, more_second):  # type: ignore[no-untyped-def]
        """Two sums at once, for tl.reduce."""
        return first + more_first, second + more_second

    @triton.jit
    def sparse_mlp_kernel(  # type: ignore[no-untyped-def]
        partial,  # this and the next five: see normed_row
        residual,
        bias,
        norm_weight,
        norm_bias,
        new_residual,
        gate,  # [NUM_UNITS, HIDDEN_SIZE] or None
        up,
        down,
        gate_bias,  # [NUM_UNITS] or None
        up_bias,
        indices,  # [NUM_UNITS] int32, or None: every unit
        length,  # [1] int32
        row_mask,  # [ROWS, NUM_UNITS] bool or None
        gate_values,  # [ROWS, NUM_UNITS] float32 or None
        standin_in,  # [STANDIN_RANK, HIDDEN_SIZE] or None
        standin_out,
        standin_bias,  # [HIDDEN_SIZE] or None
        extra_rows,  # [NUM_EXTRA, HIDDEN_SIZE] or None
        extra_output,  # [NUM_EXTRA], written
        output,  # [ROWS, HIDDEN_SIZE] float32, added to; [programs, ROWS, HIDDEN_SIZE], written, if PARTS
        eps,
        rows,
        KIND: tl.constexpr,
        HIDDEN_SIZE: tl.constexpr,
        BLOCK: tl.constexpr,  # HIDDEN_SIZE rounded up to a power of two
        ROWS: tl.constexpr,  # rows rounded up to a power of two
        UNITS: tl.constexpr,  # units per step; 1 if there are several rows
        NUM_UNITS: tl.constexpr,
        STANDIN_RANK: tl.constexpr,
        NUM_EXTRA: tl.constexpr,
        ACTIVATION: tl.constexpr,
        EARLY: tl.constexpr,  # whether the list, if there is one, was there before the kernel ahead began
        PARTS: tl.constexpr,
        PDL: tl.constexpr,
    ):
        """Grid: any number of programs. Tiles are [UNITS, BLOCK] for one row, [1, BLOCK] against [ROWS, BLOCK] else."""
        program = tl.program_id(0)
        stride = tl.num_programs(0) * UNITS
        columns = tl.arange(0, BLOCK)
        inside = columns < HIDDEN_SIZE
        row_indices = tl.arange(0, ROWS)
        slots = program * UNITS + tl.arange(0, UNITS)

        if extra_rows is not None:
            scored = program * UNITS + tl.arange(0, UNITS)
            scoring = weight_tile(extra_rows, scored, scored < NUM_EXTRA, HIDDEN_SIZE, BLOCK)
            more_scored = scored + stride
            more_scoring = weight_tile(extra_rows, more_scored, more_scored < NUM_EXTRA, HIDDEN_SIZE, BLOCK)
        if not EARLY:
            wait_for_inputs(PDL)
        if indices is None:
            count = NUM_UNITS
            units = slots
        else:
            # Both at once: one wait for memory instead of two.
            count = tl.load(length, cache_modifier=".cg")
            units = tl.load(indices + slots, mask=slots < NUM_UNITS, other=0, cache_modifier=".cg")
        real = slots < count
        if gate is not None:
            gate_rows = weight_tile(gate, units, real, HIDDEN_SIZE, BLOCK)
        up_rows = weight_tile(up, units, real, HIDDEN_SIZE, BLOCK)
        down_rows = weight_tile(down, units, real, HIDDEN_SIZE, BLOCK)
        if EARLY:  # the first rows are on their way before the kernel ahead has ended
            wait_for_inputs(PDL)
        next_slots = slots + stride
        next_real = next_slots < count
        next_units = next_slots
        if indices is not None:
            next_units = tl.load(indices + next_slots, mask=next_real, other=0)

        if ROWS == 1:
            x = normed_row(
                partial, residual, bias, norm_weight, norm_bias, new_residual, eps, 0, program == 0, up,
                KIND, HIDDEN_SIZE, BLOCK,
            )[None, :]  # fmt: skip
        else:
            row_offsets = row_indices[:, None] * HIDDEN_SIZE + columns[None, :]
            row_inside = (row_indices < rows)[:, None] & inside[None, :]
            x = tl.load(partial + row_offsets, mask=row_inside, other=0.0)
        if extra_rows is not None:
            inner = tl.sum(scoring.to(tl.float32) * x, axis=1)
            tl.store(extra_output + scored, inner.to(extra_output.dtype.element_ty), mask=scored < NUM_EXTRA)
            inner = tl.sum(more_scoring.to(tl.float32) * x, axis=1)
            tl.store(extra_output + more_scored, inner.to(extra_output.dtype.element_ty), mask=more_scored < NUM_EXTRA)
            for first in range((2 * tl.num_programs(0) + program) * UNITS, NUM_EXTRA, stride):
                scored = first + tl.arange(0, UNITS)
                scoring = weight_tile(extra_rows, scored, scored < NUM_EXTRA, HIDDEN_SIZE, BLOCK)
                inner = tl.sum(scoring.to(tl.float32) * x, axis=1)
                tl.store(extra_output + scored, inner.to(extra_output.dtype.element_ty), mask=scored < NUM_EXTRA)
        total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)

        for _ in range(program * UNITS, count, stride):
            # Small loads first: they must not queue behind the next rows.
            if up_bias is not None:
                shift = tl.load(up_bias + units, mask=real, other=0.0).to(tl.float32)
            if gate is not None:
                next_gate_rows = weight_tile(gate, next_units, next_real, HIDDEN_SIZE, BLOCK)
            next_up_rows = weight_tile(up, next_units, next_real, HIDDEN_SIZE, BLOCK)
            next_down_rows = weight_tile(down, next_units, next_real, HIDDEN_SIZE, BLOCK)
            later_slots = next_slots + stride
            later_real = later_slots < count
            later_units = later_slots
            if indices is not None:
                later_units = tl.load(indices + later_slots, mask=later_real, other=0)

            products = up_rows.to(tl.float32) * x.to(tl.float32)
            if gate is not None:  # both sums at once: warps have to meet for each
                gate_products = gate_rows.to(tl.float32) * x.to(tl.float32)
                values, gates = tl.reduce((products, gate_products), axis=1, combine_fn=sum_pairs)
            else:
                values = tl.sum(products, axis=1)  # [UNITS], or [ROWS]
            if up_bias is not None:
                values += shift
            if gate is not None:
                if gate_bias is not None:
                    gates += tl.load(gate_bias + units, mask=real, other=0.0).to(tl.float32)
                values *= activated(gates, ACTIVATION)
            elif gate_values is not None:
                known = gate_values + row_indices.to(tl.int64) * NUM_UNITS + units
                values *= tl.load(known, mask=real & (row_indices < rows), other=0.0)
            else:
                values = activated(values, ACTIVATION)
            values = tl.where(real, values, 0.0)
            if row_mask is not None:
                chosen = row_mask + row_indices.to(tl.int64) * NUM_UNITS + units
                values = tl.where(tl.load(chosen, mask=real & (row_indices < rows), other=0) != 0, values, 0.0)
            written = values[:, None] * down_rows.to(tl.float32)
            total += tl.sum(written, axis=0)[None, :] if ROWS == 1 else written

            if gate is not None:
                gate_rows = next_gate_rows
            up_rows, down_rows, units, real = next_up_rows, next_down_rows, next_units, next_real
            next_units, next_slots, next_real = later_units, later_slots, later_real

        if standin_in is not None:
            # Programs that had a unit fewer come first.
            steps = (count + UNITS - 1) // UNITS
            turn = (program + tl.num_programs(0) - steps % tl.num_programs(0)) % tl.num_programs(0)
            for first in range(turn * UNITS, STANDIN_RANK, stride):
                linear = first + tl.arange(0, UNITS)
                in_rows = weight_tile(standin_in, linear, linear < STANDIN_RANK, HIDDEN_SIZE, BLOCK)
                out_rows = weight_tile(standin_out, linear, linear < STANDIN_RANK, HIDDEN_SIZE, BLOCK)
                inner = tl.sum(in_rows.to(tl.float32) * x.to(tl.float32), axis=1)
                written = inner[:, None] * out_rows.to(tl.float32)
                total += tl.sum(written, axis=0)[None, :] if ROWS == 1 else written
        if standin_bias is not None:
            shifts = tl.load(standin_bias + columns, mask=inside & (program == 0), other=0.0)
            total += shifts.to(tl.float32)[None, :]

        offsets = row_indices[:, None] * HIDDEN_SIZE + columns[None, :]
        mask = (row_indices < rows)[:, None] & inside[None, :]
        if PARTS:
            tl.store(output + program.to(tl.int64) * rows * HIDDEN_SIZE + offsets, total, mask=mask)
        else:
            tl.atomic_add(output + offsets, total, mask=mask, sem="relaxed")


def tuning_of(weight: Tensor, rows: int, num_matrices: int) -> Tuning:
    """Fastest in whole steps, H100 and H200 (two wide matrices: H200 only); `num_matrices`: (gate,) up, down."""
    if rows > 1:
        return Tuning(units=1, num_warps=8 if rows <= 2 else 16, programs_per_sm=2 if rows <= 2 else 1)
    if weight.shape[1] * weight.itemsize <= 6144:
        return Tuning(units=2, num_warps=4, programs_per_sm=2)
    return Tuning(4, 8, programs_per_sm=1) if num_matrices == 2 else Tuning(1, 8, programs_per_sm=2)


def sparse_mlp(
    states: DeferredNorm,
    gate: Tensor | None,
    up: Tensor,
    down: Tensor,
    active: ActiveList | None,
    *,
    activation: str,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    standin: StandIn | None = None,
    extra: ExtraRows | None = None,
    output: Tensor | None = None,
    tuning: Tuning | None = None,
) -> Tensor:
    """Float32 [rows, D] of the equation above; `active` None: every neuron. Fills `states.new_residual`.

    `extra` (one row only): further rows that x is multiplied with.

    `output`: float32 zeros [rows, D] to add to, else fresh memory. The kernel on a GPU or under Triton's interpreter,
    else plain PyTorch. ValueError on what does not fit. Nothing waits for the device: a CUDA graph can hold it.
    """
    check(states, gate, up, down, active, activation, gate_bias, up_bias, standin, extra, output)
    if triton is None or not can_launch(sparse_mlp_kernel, up):
        result = mlp_in_plain_pytorch(states, gate, up, down, active, activation, gate_bias, up_bias, standin)
        if extra is not None:
            extra.in_plain_pytorch(states.normed())
        return result if output is None else output.add_(result)
    rows, hidden_size = states.partial.shape
    known_gates = active is not None and active.gate_values is not None
    tuning = tuning or tuning_of(up, rows, 2 if gate is None or known_gates else 3)
    if rows > 1:  # several rows do not fit into a prologue: normed once, by a kernel of its own
        states = DeferredNorm.plain(states.normed())
    num_programs = num_multiprocessors(up.device) * tuning.programs_per_sm
    deterministic = torch.are_deterministic_algorithms_enabled()
    if deterministic:
        target = up.new_empty((num_programs, rows, hidden_size), dtype=torch.float32)
    else:
        target = up.new_zeros((rows, hidden_size), dtype=torch.float32) if output is None else output
    arguments: dict[str, Any] = {
        **states.kernel_arguments(),
        "gate": None if known_gates else gate,
        "up": up,
        "down": down,
        "gate_bias": None if known_gates else gate_bias,
        "up_bias": up_bias,
        "indices": None if active is None else active.indices,
        "length": None if active is None else active.length,
        "row_mask": None if active is None else active.mask,
        "gate_values": None if active is None else active.gate_values,
        "standin_in": None if standin is None else standin.inputs,
        "standin_out": None if standin is None else standin.outputs,
        "standin_bias": None if standin is None else standin.bias,
        "extra_rows": None if extra is None else extra.weight,
        "extra_output": None if extra is None else extra.output,
        "NUM_EXTRA": 0 if extra is None else len(extra.weight),
        "output": target,
        "rows": rows,
        "BLOCK": triton.next_power_of_2(hidden_size),
        "ROWS": triton.next_power_of_2(rows),
        "UNITS": tuning.units if rows == 1 else 1,
        "NUM_UNITS": up.shape[0],
        "STANDIN_RANK": 0 if standin is None else standin.inputs.shape[0],
        "ACTIVATION": activation,
        "EARLY": active is None or active.is_early,
        "PARTS": deterministic,
    }
    with torch.cuda.device_of(up):  # a kernel is launched on the current device, not on that of its arguments
        sparse_mlp_kernel[(num_programs,)](**arguments, **dependent_launch(up), num_warps=tuning.num_warps)
    if not deterministic:
        return target
    return target.sum(0) if output is None else output.add_(target.sum(0))


def check(
    states: DeferredNorm,
    gate: Tensor | None,
    up: Tensor,
    down: Tensor,
    active: ActiveList | None,
    activation: str,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    standin: StandIn | None,
    extra: ExtraRows | None,
    output: Tensor | None,
) -> None:
    """ValueError on the first argument that does not fit `up`."""
    if activation not in ACTIVATION_FUNCTIONS:
        raise ValueError(f"activation {activation!r} is not one of {', '.join(ACTIVATION_FUNCTIONS)}")
    num_units, hidden_size = up.shape
    rows = states.partial.shape[0]
    if states.partial.shape[1:] != (hidden_size,) or not 1 <= rows <= MAX_ROWS:
        raise ValueError(f"states {tuple(states.partial.shape)} are not 1 to {MAX_ROWS} rows of {hidden_size}")
    own = (up.dtype,)
    expected: dict[str, Expected] = {
        "gate": (gate, (num_units, hidden_size), own),
        "up": (up, (num_units, hidden_size), DTYPES),
        "down": (down, (num_units, hidden_size), own),
        "gate_bias": (gate_bias, (num_units,), DTYPES),
        "up_bias": (up_bias, (num_units,), DTYPES),
        "output": (output, (rows, hidden_size), (torch.float32,)),
    }
    if standin is not None:
        rank = standin.inputs.shape[0]
        expected["standin inputs"] = (standin.inputs, (rank, hidden_size), own)
        expected["standin outputs"] = (standin.outputs, (rank, hidden_size), own)
        expected["standin bias"] = (standin.bias, (hidden_size,), DTYPES)
    if active is not None:
        expected["active indices"] = (active.indices, (num_units,), (torch.int32,))
        expected["active length"] = (active.length, (1,), (torch.int32,))
        expected["active mask"] = (active.mask, (rows, num_units), (torch.bool,))
        expected["gate values"] = (active.gate_values, (rows, num_units), (torch.float32,))
        if active.mask is None and rows > 1:
            raise ValueError(f"an active list of {rows} rows needs a mask: which row computes which unit")
    check_tensors(expected, up.device)
    if extra is not None:
        extra.check(rows, hidden_size, up.dtype)
