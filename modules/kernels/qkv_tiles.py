"""How the rows of the query, key and value matrices are numbered, so that one kernel walks all three where they lie.

A tile is some pairs of rows (i, i + H / 2) of one head, which is what a rotation needs. Those of keys and values are
needed whatever is selected and come first; queries follow, only those of groups which any row has active. Numbered
without the others: programs that take every such tile share evenly what is left, and what is skipped is not read.
"""

try:
    import triton
    import triton.language as tl
except ImportError:  # published for Linux on x86-64 only; elsewhere the reference serves
    triton = None


if triton is not None:

    @triton.jit
    def group_ranks(  # type: ignore[no-untyped-def]
        active_groups,  # [NUM_ROWS, NUM_GROUPS] uint8
        NUM_ROWS: tl.constexpr,
        NUM_GROUPS: tl.constexpr,
        GROUP_BLOCK: tl.constexpr,  # NUM_GROUPS rounded up to a power of two
    ):
        """[GROUP_BLOCK]: the place among the active groups of each that any row has active, else -1; their number."""
        groups = tl.arange(0, GROUP_BLOCK)
        flags = tl.zeros((GROUP_BLOCK,), tl.int32)
        for row in tl.static_range(NUM_ROWS):
            flags |= tl.load(active_groups + row * NUM_GROUPS + groups, mask=groups < NUM_GROUPS, other=0).to(tl.int32)
        flags = (flags != 0).to(tl.int32)
        return tl.where(flags != 0, tl.cumsum(flags, axis=0) - 1, -1), tl.sum(flags, axis=0)

    @triton.jit
    def tile_place(  # type: ignore[no-untyped-def]
        tile,
        ranks,  # of `group_ranks`, or None: all are active
        NUM_GROUPS: tl.constexpr,
        QUERIES_PER_GROUP: tl.constexpr,
        TILES_PER_HEAD: tl.constexpr,
        PAIRS: tl.constexpr,
    ):
        """Of a tile: 0 for keys, 1 for values, 2 for queries; which head of those; the first of its pairs."""
        slot = tile // TILES_PER_HEAD
        query = slot - 2 * NUM_GROUPS
        if ranks is not None:
            found = ranks == query // QUERIES_PER_GROUP
            group = tl.sum(tl.where(found, tl.arange(0, ranks.shape[0]), 0), axis=0)
            query = group * QUERIES_PER_GROUP + query % QUERIES_PER_GROUP
        head = tl.where(slot < 2 * NUM_GROUPS, slot % NUM_GROUPS, query)
        return tl.minimum(slot // NUM_GROUPS, 2), head, tile % TILES_PER_HEAD * PAIRS

    @triton.jit
    def of_kind(kind, for_keys, for_values, for_queries):  # type: ignore[no-untyped-def]
        """The one that `tile_place` means."""
        return tl.where(kind == 0, for_keys, tl.where(kind == 1, for_values, for_queries))

    @triton.jit
    def load_pairs(  # type: ignore[no-untyped-def]
        weight,
        head,
        pair,
        wanted,
        HIDDEN_SIZE: tl.constexpr,
        BLOCK: tl.constexpr,  # HIDDEN_SIZE rounded up to a power of two
        HALF: tl.constexpr,
        PAIRS: tl.constexpr,
    ):
        """[2 * PAIRS, BLOCK]: both rows of the first pair, of the second, and so on; zeros if not `wanted`."""
        columns = tl.arange(0, BLOCK)[None, :]
        rows = tl.arange(0, 2 * PAIRS)[:, None]
        start = weight + (head * (2 * HALF) + pair).to(tl.int64) * HIDDEN_SIZE
        offsets = (rows // 2 + rows % 2 * HALF) * HIDDEN_SIZE + columns
        inside = (columns < HIDDEN_SIZE) & wanted
        return tl.load(start + offsets, mask=inside, other=0.0, eviction_policy="evict_first")
