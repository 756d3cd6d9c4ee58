"""Addresses of what all ranks have mapped, as kernels read them."""

try:
    import triton
    import triton.language as tl
except ImportError:  # published for Linux on x86-64 only; elsewhere nothing here can run
    triton = None

if triton is not None:

    @triton.jit
    def pointers_of(table, like, WORLD_SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
        """A tuple of the addresses in `table`, as pointers of the type of `like`."""
        pointers = ()
        for rank in tl.static_range(WORLD_SIZE):
            pointer = tl.load(table + rank).to(like.dtype)
            # A number tells nothing of its alignment, and without that a load takes 2 bytes at a time.
            pointers = pointers + (tl.multiple_of(pointer, 16),)  # type: ignore[assignment]
        return pointers
