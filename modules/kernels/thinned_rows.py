"""A product of one vector with a matrix's rows, of those rows only whose entry of the vector is not small.

    out[m, w] = sum over j in kept(m) of v_j * weight[m, j, w],   kept(m) = {j : |v_j| >= threshold(m) and v_j != 0}

TEAL (Liu et al. 2024, section 4): inputs of a matmul that are small in magnitude are dropped, and their weights are not
read, for which these must lie input-major. v [J] is computed on the way, from a junction (`DeferredNorm` of one row) or
from the sums that two such products have left (`Activations`), and rounded to the weights' type, as is the threshold;
weight [M, J, W], M (1 or 2) matrices of the same input, each with its own threshold; out float32 [M, W]. A threshold of
-inf keeps zeros, too.

A program has a block of columns of one matrix and every n-th tile of a few entries. It computes these alone, puts those
that it keeps on a list of its own, close together, and then walks that list: what is dropped costs no step and leaves
no gap among the rows on their way. (Masked loads over all rows would take twice the steps at half of the rows kept,
with half of the bytes in flight.) A list of all entries would even out the programs, but costs one more kernel, or the
whole vector in each program; chance evens out the multiprocessors nearly as well, since rows come in narrow pieces, of
one 16-byte load a thread, and each multiprocessor has hundreds of them. The sums are added up as in sparse_mlp.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from modules.kernels.arguments import ACTIVATION_FUNCTIONS, DTYPES, Expected, check_tensors
from modules.kernels.deferred_norm import DeferredNorm, can_launch, dependent_launch, num_multiprocessors
from modules.kernels.sparse_mlp import Tuning

try:
    import triton
    import triton.language as tl
except ImportError:  # published for Linux on x86-64 only; elsewhere the reference serves
    triton = None

TUNING = Tuning(units=8, num_warps=4, programs_per_sm=4)


@dataclass(frozen=True, kw_only=True)
class Activations:
    """act(gate) * up, or act(up) without a gate, to be computed by whoever reads it: float32 sums gate, up [F] and
    biases [F] or None; sum, activation and product are rounded to `dtype` one by one."""

    gate: Tensor | None
    up: Tensor
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    activation: str
    dtype: torch.dtype

    def computed(self) -> Tensor:
        """[F] of `dtype`, in plain PyTorch."""

        def rounded(sums: Tensor, bias: Tensor | None) -> Tensor:
            return (sums if bias is None else sums + bias.float()).to(self.dtype)

        activate, up = ACTIVATION_FUNCTIONS[self.activation], rounded(self.up, self.up_bias)
        return activate(up) if self.gate is None else activate(rounded(self.gate, self.gate_bias)) * up


def kept_entries(values: Tensor, threshold: float) -> Tensor:
    """Which entries are not dropped: bool, of the shape of `values`; the threshold is rounded to their type."""
    # An exact zero (ReLU) is skipped for free, also where the threshold itself is zero.
    return (values.abs() >= threshold) & ((values != 0) | (threshold == float("-inf")))


def reference_thinned_rows(values: Tensor, weight: Tensor, thresholds: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Plain PyTorch: values [J], weight [M, J, W] -> float32 [M, W] and the numbers of entries kept, int32 [M]."""
    kept = torch.stack([kept_entries(values, threshold) for threshold in thresholds])
    products = torch.einsum("mj,mjw->mw", values.masked_fill(~kept, 0).float(), weight.float())
    return products, kept.sum(-1, dtype=torch.int32)


if triton is not None:
    from modules.kernels.arguments import activated
    from modules.kernels.deferred_norm import wait_for_inputs

    @triton.jit
    def row_statistics(  # type: ignore[no-untyped-def]
        partial, residual, bias, new_residual, eps, writes,
        KIND: tl.constexpr, HIDDEN_SIZE: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """Mean (0 for other norms than layer) and inverse deviation of a junction's row; see normed_row."""
        columns = tl.arange(0, BLOCK)
        inside = columns < HIDDEN_SIZE
        total = tl.load(partial + columns, mask=inside, other=0.0).to(tl.float32)
        if bias is not None:
            total += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
        if residual is not None:
            total = tl.load(residual + columns, mask=inside, other=0.0) + total
        if new_residual is not None:
            tl.store(new_residual + columns, total, mask=inside & writes)
        mean = 0.0
        if KIND == "layer":
            mean = tl.sum(total, axis=0) / HIDDEN_SIZE
            total = tl.where(inside, total - mean, 0.0)
        return mean, tl.rsqrt(tl.sum(total * total, axis=0) / HIDDEN_SIZE + eps)

    @triton.jit
    def entry_parts(  # type: ignore[no-untyped-def]
        partial, residual, bias, norm_weight, norm_bias, gate_sums, up_sums, gate_bias, up_bias, places, real
    ):
        """What entries are made of, float32: sum, scale and shift of a junction, or up, gate and nothing."""
        scale = tl.full(places.shape, 1.0, tl.float32)
        shift = tl.zeros(places.shape, tl.float32)
        if up_sums is not None:
            total = tl.load(up_sums + places, mask=real, other=0.0)
            if up_bias is not None:
                total += tl.load(up_bias + places, mask=real, other=0.0).to(tl.float32)
            if gate_sums is not None:
                scale = tl.load(gate_sums + places, mask=real, other=0.0)
            if gate_bias is not None:
                scale += tl.load(gate_bias + places, mask=real, other=0.0).to(tl.float32)
        else:
            total = tl.load(partial + places, mask=real, other=0.0).to(tl.float32)
            if bias is not None:
                total += tl.load(bias + places, mask=real, other=0.0).to(tl.float32)
            if residual is not None:
                total = tl.load(residual + places, mask=real, other=0.0) + total
            if norm_weight is not None:
                scale = tl.load(norm_weight + places, mask=real, other=0.0).to(tl.float32)
            if norm_bias is not None:
                shift = tl.load(norm_bias + places, mask=real, other=0.0).to(tl.float32)
        return total, scale, shift

    @triton.jit
    def finished_entries(  # type: ignore[no-untyped-def]
        total, scale, shift, mean, inverse, gate_sums, up_sums, threshold, real, like,
        KIND: tl.constexpr, ACTIVATION: tl.constexpr,
    ):  # fmt: skip
        """The entries, rounded to the type of `like` and widened again, and which of them are kept."""
        if up_sums is not None:
            values = total.to(like.dtype.element_ty).to(tl.float32)
            if gate_sums is not None:
                gates = activated(scale.to(like.dtype.element_ty).to(tl.float32), ACTIVATION)
                values *= gates.to(like.dtype.element_ty).to(tl.float32)
            else:
                values = activated(values, ACTIVATION)
        else:
            values = total
            if KIND != "none":
                values = (values - mean) * inverse
            values = values * scale + shift
        values = values.to(like.dtype.element_ty).to(tl.float32)
        sizes = tl.where(values != 0.0, tl.abs(values), -3.0e38)  # a zero reaches -inf alone
        kept = real & (sizes >= threshold)
        return tl.where(kept, values, 0.0), kept

    @triton.jit
    def thinned_rows_kernel(  # type: ignore[no-untyped-def]
        partial,  # [HIDDEN_SIZE], this and the next five: see normed_row; None where the input are activations
        residual,
        bias,
        norm_weight,
        norm_bias,
        new_residual,
        gate_sums,  # [HIDDEN_SIZE] float32 or None
        up_sums,  # [HIDDEN_SIZE] float32; None where the input is a junction
        gate_bias,
        up_bias,
        weight,  # [matrices, HIDDEN_SIZE, WIDTH]
        output,  # [matrices, WIDTH] float32, added to; [slices, matrices, WIDTH], written, if PARTS
        counters,  # [matrices] int32, added to: entries kept
        list_units,  # [programs, OWN_BLOCK + 2 * UNITS] int32, memory for the lists
        list_values,  # the same, float32
        eps,
        first_threshold,  # of the first matrix
        second_threshold,  # of a second one
        KIND: tl.constexpr,
        HIDDEN_SIZE: tl.constexpr,  # entries of the input
        INPUT_BLOCK: tl.constexpr,  # that many rounded up to a power of two
        WIDTH: tl.constexpr,
        BLOCK: tl.constexpr,  # columns of a program
        COLUMN_BLOCKS: tl.constexpr,  # of a matrix
        JOBS: tl.constexpr,  # COLUMN_BLOCKS of all matrices
        UNITS: tl.constexpr,  # rows per step
        OWN_BLOCK: tl.constexpr,  # entries of a program, rounded up to a power of two
        ACTIVATION: tl.constexpr,
        PARTS: tl.constexpr,
        PDL: tl.constexpr,
    ):
        """Grid: JOBS * slices programs; a slice takes every slices-th tile of UNITS rows."""
        program = tl.program_id(0)
        job = program % JOBS
        place = program // JOBS
        matrix = job // COLUMN_BLOCKS
        threshold = first_threshold
        if matrix != 0:
            threshold = second_threshold
        stride = (tl.num_programs(0) // JOBS) * UNITS
        columns = (job % COLUMN_BLOCKS) * BLOCK + tl.arange(0, BLOCK)
        inside = columns < WIDTH
        tiles = weight + matrix.to(tl.int64) * HIDDEN_SIZE * WIDTH + columns[None, :]
        own = tl.arange(0, OWN_BLOCK)
        own_units = place * UNITS + (own // UNITS) * stride + own % UNITS
        real = own_units < HIDDEN_SIZE

        wait_for_inputs(PDL)
        total, scale, shift = entry_parts(
            partial, residual, bias, norm_weight, norm_bias, gate_sums, up_sums, gate_bias, up_bias, own_units, real
        )
        mean = 0.0
        inverse = 1.0
        if up_sums is None and (KIND != "none" or new_residual is not None):
            mean, inverse = row_statistics(
                partial, residual, bias, new_residual, eps, program == 0, KIND, HIDDEN_SIZE, INPUT_BLOCK
            )
        own_values, kept = finished_entries(
            total, scale, shift, mean, inverse, gate_sums, up_sums, threshold, real, weight, KIND, ACTIVATION
        )
        slots = tl.cumsum(kept.to(tl.int32), axis=0) - 1
        count = tl.sum(kept.to(tl.int32), axis=0)
        list_units += program * (OWN_BLOCK + 2 * UNITS)
        list_values += program * (OWN_BLOCK + 2 * UNITS)
        tl.store(list_units + slots, own_units, mask=kept)
        tl.store(list_values + slots, own_values, mask=kept)
        tl.atomic_add(counters + matrix, count, mask=job % COLUMN_BLOCKS == 0, sem="relaxed")
        tl.debug_barrier()  # all threads read what each has written

        # One step more than there are tiles: the first only sends for rows. Lists are read beyond their end, unmasked:
        # 16 bytes at a time; what is no row there is dropped afterwards.
        next_slots = tl.arange(0, UNITS)
        next_real = next_slots < count
        next_units = tl.load(list_units + next_slots)
        next_values = tl.where(next_real, tl.load(list_values + next_slots), 0.0)
        rows = tl.zeros((UNITS, BLOCK), dtype=weight.dtype.element_ty)
        values = tl.zeros((UNITS,), dtype=tl.float32)
        sums = tl.zeros((BLOCK,), dtype=tl.float32)
        for _ in range(-UNITS, count, UNITS):
            offsets = next_units.to(tl.int64)[:, None] * WIDTH
            mask = next_real[:, None] & inside[None, :]
            next_rows = tl.load(tiles + offsets, mask=mask, other=0.0, eviction_policy="evict_first")
            next_slots += UNITS
            next_real = next_slots < count
            next_units = tl.load(list_units + next_slots)
            later_values = tl.load(list_values + next_slots)
            sums += tl.sum(values[:, None] * rows.to(tl.float32), axis=0)
            rows, values, next_values = next_rows, next_values, tl.where(next_real, later_values, 0.0)

        target = output + matrix.to(tl.int64) * WIDTH + columns
        if PARTS:
            tl.store(target + place.to(tl.int64) * (JOBS // COLUMN_BLOCKS) * WIDTH, sums, mask=inside)
        else:
            tl.atomic_add(target, sums, mask=inside, sem="relaxed")


def thinned_rows(
    values: DeferredNorm | Activations,
    weight: Tensor,
    *,
    thresholds: Sequence[float],
    counters: Tensor,
    output: Tensor | None = None,
    tuning: Tuning = TUNING,
) -> Tensor:
    """Float32 [M, W] of the equation above: one row of `values`, weight [M, J, W], M `thresholds`. Fills `new_residual`
    of a junction and adds the numbers of entries kept to `counters` int32 [M].

    `output`: float32 zeros [M, W] to add to, else fresh memory. The kernel on a GPU or under Triton's interpreter, else
    the reference. ValueError on what does not fit. Nothing waits for the device: a CUDA graph can hold it.
    """
    check(values, weight, counters, output)
    if len(thresholds) != len(weight):
        raise ValueError(f"{len(thresholds)} thresholds for {len(weight)} matrices")
    # As comparisons with a tensor of that type do.
    thresholds = torch.tensor(list(thresholds), dtype=weight.dtype).tolist()
    if triton is None or not can_launch(thinned_rows_kernel, weight):
        entries = values.computed() if isinstance(values, Activations) else values.normed()[0]
        result, num_kept = reference_thinned_rows(entries, weight, thresholds)
        counters += num_kept
        return result if output is None else output.add_(result)
    num_matrices, num_inputs, width = weight.shape
    block = min(triton.next_power_of_2(width), tuning.num_warps * 32 * 8)  # 16 bytes per thread, in half precision
    column_blocks = triton.cdiv(width, block)
    jobs = num_matrices * column_blocks
    slices = max(1, num_multiprocessors(weight.device) * tuning.programs_per_sm // jobs)
    slices = min(slices, triton.cdiv(num_inputs, tuning.units))
    own = triton.next_power_of_2(triton.cdiv(num_inputs, slices * tuning.units) * tuning.units)
    deterministic = torch.are_deterministic_algorithms_enabled()
    if deterministic:
        target = weight.new_empty((slices, num_matrices, width), dtype=torch.float32)
    else:
        target = weight.new_zeros((num_matrices, width), dtype=torch.float32) if output is None else output
    with torch.cuda.device_of(weight):
        thinned_rows_kernel[(jobs * slices,)](
            **_source_arguments(values),
            weight=weight,
            output=target,
            counters=counters,
            list_units=weight.new_empty((jobs * slices, own + 2 * tuning.units), dtype=torch.int32),
            list_values=weight.new_empty((jobs * slices, own + 2 * tuning.units), dtype=torch.float32),
            first_threshold=thresholds[0],
            second_threshold=thresholds[-1],
            INPUT_BLOCK=triton.next_power_of_2(num_inputs),
            WIDTH=width,
            BLOCK=block,
            COLUMN_BLOCKS=column_blocks,
            JOBS=jobs,
            UNITS=tuning.units,
            OWN_BLOCK=own,
            PARTS=deterministic,
            **dependent_launch(weight),
            num_warps=tuning.num_warps,
            maxnreg=min(255, 2**16 // (tuning.programs_per_sm * tuning.num_warps * 32)),  # all that fit together
        )
    if not deterministic:
        return target
    return target.sum(0) if output is None else output.add_(target.sum(0))


_SUMS = ("gate_sums", "up_sums", "gate_bias", "up_bias")
_JUNCTION = ("partial", "residual", "bias", "norm_weight", "norm_bias", "new_residual")


def _source_arguments(values: DeferredNorm | Activations) -> dict[str, Any]:
    if isinstance(values, DeferredNorm):
        return {**values.kernel_arguments(), **dict.fromkeys(_SUMS), "ACTIVATION": "none"}
    sums = (values.gate, values.up, values.gate_bias, values.up_bias)
    others = {"eps": 0.0, "KIND": "none", "HIDDEN_SIZE": values.up.shape[0], "ACTIVATION": values.activation}
    return {**dict.fromkeys(_JUNCTION), **dict(zip(_SUMS, sums, strict=True)), **others}


def check(values: DeferredNorm | Activations, weight: Tensor, counters: Tensor, output: Tensor | None) -> None:
    """ValueError on the first argument that does not fit `weight`."""
    if weight.ndim != 3:
        raise ValueError(f"weight {tuple(weight.shape)} is not [matrices, inputs, outputs]")
    if len(weight) not in (1, 2):
        raise ValueError(f"weight: {len(weight)} matrices, where the kernel has thresholds for 1 or 2")
    num_matrices, num_inputs, width = weight.shape
    expected: dict[str, Expected] = {
        "weight": (weight, (num_matrices, num_inputs, width), DTYPES),
        "counters": (counters, (num_matrices,), (torch.int32,)),
        "output": (output, (num_matrices, width), (torch.float32,)),
    }
    if values.dtype != weight.dtype:
        raise ValueError(f"values are {values.dtype}, the weights {weight.dtype}")
    if isinstance(values, DeferredNorm):
        expected["states"] = (values.partial, (1, num_inputs), DTYPES)
    elif values.activation not in ACTIVATION_FUNCTIONS:
        raise ValueError(f"activation {values.activation!r} is not one of {', '.join(ACTIVATION_FUNCTIONS)}")
    else:
        for name in ("gate", "up", "gate_bias", "up_bias"):
            expected[name] = (getattr(values, name), (num_inputs,), DTYPES if "bias" in name else (torch.float32,))
    check_tensors(expected, weight.device)
