"""All that the host needs to know of a greedy step: the likeliest token, its log-probability, are the logits finite.

    token    = argmax_j logits[j], of equals the lowest j; a NaN counts as the largest
    logprob  = logits[token] - log sum_j exp(logits[j])
    finite   = max_j logits[j] is finite: no NaN, no inf, not -inf throughout

logits [rows, V] float32, contiguous; the result float64 [3, rows]: token, logprob (NaN where not finite), finite (1 or
0). Sums are float32, of exp(logits - maximum): the largest term is 1. Two launches: every program reduces one piece of
a row to (maximum, its index, sum relative to that maximum), then one program per row merges the pieces, as in online
softmax (Milakov & Gimelshein 2018).
"""

import torch
from torch import Tensor

from modules.kernels.deferred_norm import can_launch, dependent_launch

try:
    import triton
    import triton.language as tl
except ImportError:  # published for Linux on x86-64 only; elsewhere the reference serves
    triton = None

MIN_PIECE = 1024
MAX_PIECES = 256  # of a row: what one program merges at once


def reference_greedy_choice(logits: Tensor) -> Tensor:
    """Plain PyTorch, with the kernel's argument."""
    largest, token_ids = logits.max(-1).values, logits.argmax(-1)
    finite = largest.isfinite()
    logprobs = -(logits - largest[:, None]).exp().sum(-1).log()
    logprobs = torch.where(finite, logprobs, float("nan"))
    return torch.stack([token_ids.double(), logprobs.double(), finite.double()])


if triton is not None:
    from modules.kernels.deferred_norm import wait_for_inputs

    @triton.jit
    def largest_of(values, indices):  # type: ignore[no-untyped-def]
        """(maximum, lowest index that has it); where there is a NaN, NaN and the lowest index of one."""
        is_nan = values != values
        largest = tl.max(tl.where(is_nan, float("-inf"), values), axis=0)
        num_nan = tl.sum(is_nan.to(tl.int32), axis=0)
        winners = tl.where(num_nan > 0, is_nan, values == largest)
        index = tl.min(tl.where(winners, indices, 2147483647), axis=0)
        return tl.where(num_nan > 0, float("nan"), largest), index

    @triton.jit
    def relative_to(values, largest):  # type: ignore[no-untyped-def]
        """exp(values - largest); 0 for -inf also where that is the largest."""
        return tl.exp(values - tl.where(largest == float("-inf"), 0.0, largest))

    @triton.jit
    def reduce_pieces_kernel(  # type: ignore[no-untyped-def]
        logits,  # [rows, vocab_size] float32
        pieces,  # [2, rows, num_pieces] float32, written: maximum, and sum relative to it
        token_ids,  # [rows, num_pieces] int32, written
        vocab_size,
        PIECE: tl.constexpr,
        PDL: tl.constexpr,
    ):
        """Grid: one program per piece of a row."""
        piece, row, num_pieces = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
        wait_for_inputs(PDL)
        columns = piece * PIECE + tl.arange(0, PIECE)
        row_logits = logits + row.to(tl.int64) * vocab_size
        values = tl.load(row_logits + columns, mask=columns < vocab_size, other=float("-inf"))
        largest, token_id = largest_of(values, columns)
        place = row * num_pieces + piece
        tl.store(pieces + place, largest)
        tl.store(pieces + tl.num_programs(1) * num_pieces + place, tl.sum(relative_to(values, largest), axis=0))
        tl.store(token_ids + place, token_id)

    @triton.jit
    def merge_pieces_kernel(  # type: ignore[no-untyped-def]
        pieces,  # [2, rows, num_pieces] float32
        token_ids,  # [rows, num_pieces] int32
        choice,  # [3, rows] float64, written
        num_pieces,
        BLOCK: tl.constexpr,  # num_pieces rounded up to a power of two
        PDL: tl.constexpr,
    ):
        """Grid: one program per row."""
        row, rows = tl.program_id(0), tl.num_programs(0)
        wait_for_inputs(PDL)
        columns = tl.arange(0, BLOCK)
        inside = columns < num_pieces
        places = row * num_pieces + columns
        values = tl.load(pieces + places, mask=inside, other=float("-inf"))
        sums = tl.load(pieces + rows * num_pieces + places, mask=inside, other=0.0)
        candidates = tl.load(token_ids + places, mask=inside, other=2147483647)
        largest, token_id = largest_of(values, candidates)
        finite = (largest == largest) & (tl.abs(largest) < float("inf"))
        total = tl.sum(relative_to(values, largest) * sums, axis=0)
        logprob = tl.where(finite, 0.0 - tl.log(total), float("nan"))
        tl.store(choice + row, token_id.to(tl.float64))
        tl.store(choice + rows + row, logprob.to(tl.float64))
        tl.store(choice + 2 * rows + row, finite.to(tl.float64))


def piece_of(vocab_size: int) -> int:
    """Entries a piece, a power of two."""
    return max(MIN_PIECE, triton.next_power_of_2(-(-vocab_size // MAX_PIECES)))


def greedy_choice(logits: Tensor) -> Tensor:
    """logits [rows, V] float32 -> float64 [3, rows]: token, log-probability, finite (1 or 0).

    The kernels on a GPU or under Triton's interpreter, else the reference. ValueError on a type, shape or layout that
    does not fit. Nothing here waits for the device or tunes itself: a CUDA graph can hold it.
    """
    if logits.dtype != torch.float32:
        raise ValueError(f"logits are {logits.dtype}, not torch.float32")
    if logits.dim() != 2 or not logits.numel() or not logits.is_contiguous():
        raise ValueError(f"logits {tuple(logits.shape)} are not [rows, V], contiguous and not empty")
    if triton is None or not can_launch(merge_pieces_kernel, logits):
        return reference_greedy_choice(logits)
    (rows, vocab_size), device = logits.shape, logits.device
    piece = piece_of(vocab_size)
    num_pieces = -(-vocab_size // piece)
    pieces = torch.empty(2, rows, num_pieces, dtype=torch.float32, device=device)
    token_ids = torch.empty(rows, num_pieces, dtype=torch.int32, device=device)
    choice = torch.empty(3, rows, dtype=torch.float64, device=device)
    early = dependent_launch(logits)
    with torch.cuda.device_of(logits):  # a kernel is launched on the current device, not on that of its arguments
        reduce_pieces_kernel[(num_pieces, rows)](
            logits, pieces, token_ids, vocab_size, PIECE=piece, num_warps=4, **early
        )
        block = triton.next_power_of_2(num_pieces)
        merge_pieces_kernel[(rows,)](pieces, token_ids, choice, num_pieces, BLOCK=block, num_warps=4, **early)
    return choice
