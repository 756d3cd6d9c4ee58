"""How all_reduce_norm spreads its rows over ranks and programs: pure functions, so that all ranks launch alike."""

ELEMENTS_PER_THREAD = 8  # 16 bytes of each peer under way at once
# All programs run at once, as they should where they wait for each other: with at most 64 registers a thread, every
# multiprocessor since Volta holds 32 warps.
MAX_REGISTERS = 64
WARPS_A_MULTIPROCESSOR = 32
MAX_PROGRAMS = 256


def owned_rows(num_tokens: int, rank: int, world_size: int) -> range:
    """The rows whose residual a rank keeps in two-shot: equal blocks, of which the last may be short or empty."""
    rows = -(-num_tokens // world_size)
    return range(min(rank * rows, num_tokens), min((rank + 1) * rows, num_tokens))


def launch_shape(
    num_tokens: int,
    hidden_size: int,
    world_size: int,
    strategy: str,
    num_multiprocessors: int,
    max_programs: int | None = None,
) -> tuple[int, int]:
    """(programs, warps of each), the same on all ranks, as barriers need: of nothing but these values.

    `num_multiprocessors` (of every rank's device) limits the programs to those that run at once; `max_programs` leaves
    the rest of the device to what runs beside.
    """
    block = 1 << (hidden_size - 1).bit_length()
    num_warps = min(32, max(1, block // (32 * ELEMENTS_PER_THREAD)))
    rows = num_tokens if strategy == "one-shot" else -(-num_tokens // world_size)
    programs = min(rows, MAX_PROGRAMS, WARPS_A_MULTIPROCESSOR // num_warps * num_multiprocessors)
    return max(1, programs if max_programs is None else min(programs, max_programs)), num_warps
