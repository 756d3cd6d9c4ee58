"""Rows of 16-bit floats at an NVLink multicast address: a load adds up all ranks' memory, a store reaches all of it.

Pointers carry no type at such an address; 16 bytes are moved at a time, so a row begins at a multiple of 16 bytes. The
switch adds in float32 (`.acc::f32`), in an order that is not stated, and rounds the sum to the type of the row. sm_90
and later (PTX ISA, multimem.ld_reduce and multimem.st). Both are relaxed: what orders them are barriers.
"""

try:
    import triton
    import triton.language as tl
except ImportError:  # published for Linux on x86-64 only; elsewhere nothing here can run
    triton = None

if triton is not None:
    # A sum over all ranks of 8 elements, $0 to $3 two each; $4 address, $5 whether to load at all.
    LOAD_SUM_BFLOAT16: tl.constexpr = tl.constexpr("""{
        .reg .pred %inside;
        setp.ne.b32 %inside, $5, 0;
        mov.b32 $0, 0;
        mov.b32 $1, 0;
        mov.b32 $2, 0;
        mov.b32 $3, 0;
        @%inside multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.bf16x2 {$0, $1, $2, $3}, [$4];
    }""")
    LOAD_SUM_FLOAT16: tl.constexpr = tl.constexpr(LOAD_SUM_BFLOAT16.value.replace("bf16x2", "f16x2"))
    # To all ranks: $3 to $6 at address $1 if $2; $0 is never read.
    STORE_TO_ALL: tl.constexpr = tl.constexpr("""{
        .reg .pred %inside;
        setp.ne.b32 %inside, $2, 0;
        @%inside multimem.st.relaxed.sys.global.v4.f32 [$1], {$3, $4, $5, $6};
        mov.b32 $0, 0;
    }""")

    @triton.jit
    def load_sum(address, exists, like, HIDDEN_SIZE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        """float32 [BLOCK]: the row at `address` added up by the switch, rounded to the type of `like`."""
        groups = tl.arange(0, BLOCK // 8)
        words = tl.inline_asm_elementwise(
            LOAD_SUM_BFLOAT16 if like.dtype.element_ty == tl.bfloat16 else LOAD_SUM_FLOAT16,
            "=&r,=&r,=&r,=&r,l,r",
            [address + groups * 16, ((groups * 8 < HIDDEN_SIZE) & exists).to(tl.int32)],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=False,
            pack=1,
        )
        joined = tl.join(tl.join(words[0], words[2]), tl.join(words[1], words[3]))
        halves = tl.reshape(tl.join(joined & 0xFFFF, joined >> 16), [BLOCK])  # the low half comes first in memory
        return halves.to(tl.int16).to(like.dtype.element_ty, bitcast=True).to(tl.float32)

    @triton.jit
    def store_to_all(address, values, exists, HIDDEN_SIZE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        """Write a row of 2-byte values [BLOCK] to every rank."""
        groups = tl.arange(0, BLOCK // 8)
        halves = values.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        low, high = tl.split(tl.reshape(halves, [BLOCK // 8, 2, 2, 2]))
        even, odd = tl.split(low | (high << 16))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        tl.inline_asm_elementwise(
            STORE_TO_ALL,
            "=r,l,r,r,r,r,r",
            [address + groups * 16, ((groups * 8 < HIDDEN_SIZE) & exists).to(tl.int32), first, second, third, fourth],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
