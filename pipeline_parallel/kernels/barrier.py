"""A barrier among the programs of equal index on all ranks, through the signal pads of symmetric memory.

A signal pad is one int32 slot for each program and sender, [programs, WORLD_SIZE], on each rank. A program puts `tag`
into its own slot of every peer's pad (`signal`), then waits for each peer's `tag` in its own pad (`wait`).

Signals (on a GPU). Both steps are compare-and-swap: 0 -> tag with release semantics at the peer, tag -> 0 with acquire
at home. So pads are zero again after every call, a CUDA graph can replay it, and no signal is lost where a peer has not
yet taken the one before. What earlier kernels of this stream have written, and what this thread has (with a barrier of
the program in between: what all its threads have), is visible to whoever takes the signal. A value that is neither 0
nor `tag` is the signal of a different call: the ranks disagree about what they run, and the program traps (a CUDA error
on every rank) where it would wait for ever.

Epochs (under Triton's interpreter, which knows no assembly). Plain loads and stores of counters that only grow, on
memory that all processes have mapped; a slot of a program's own counts its barriers. Never compiled: it relies on the
order in which one process's stores reach another, which x86 keeps.
"""

import torch

from pipeline_parallel.kernels.workspace import Workspace

try:
    import triton
    import triton.language as tl
except ImportError:  # published for Linux on x86-64 only; elsewhere nothing here can run
    triton = None

BEGIN_TAG = 2**31 - 1  # less 2 * T or 2 * T + 1; those of calls of T rows are 2 * T + 1 and 2 * T + 2

if triton is not None:
    # Thread i of the program talks to rank i; $1 table of pads, $2 program, $3 rank, $4 ranks, $5 tag. $0 becomes what
    # was in the peer's slot: 0, unless the peer has not yet taken the signal before.
    SIGNAL: tl.constexpr = tl.constexpr("""{
        .reg .pred %absent, %own;
        .reg .b32 %peer, %index, %found;
        .reg .b64 %place, %theirs, %offset;
        mov.b32 %found, 0;
        mov.u32 %peer, %tid.x;
        setp.ge.u32 %absent, %peer, $4;
        setp.eq.u32 %own, %peer, $3;
        or.pred %absent, %absent, %own;
        @%absent bra finished;
        mad.wide.u32 %place, %peer, 8, $1;
        ld.global.b64 %theirs, [%place];
        mad.lo.u32 %index, $2, $4, $3;
        mul.wide.u32 %offset, %index, 4;
        add.u64 %theirs, %theirs, %offset;
        atom.release.sys.global.cas.b32 %found, [%theirs], 0, $5;
    finished:
        mov.b32 $0, %found;
    }""")
    # The same, and $6 what SIGNAL has found. Where it found the slot taken it signals again, but only after the wait:
    # every peer's first signal is out before it waits, so that nobody waits in a circle. $0 is never read.
    WAIT: tl.constexpr = tl.constexpr("""{
        .reg .pred %absent, %own, %here, %foreign, %taken;
        .reg .b32 %peer, %index, %seen, %found;
        .reg .b64 %place, %theirs, %mine, %offset;
        mov.u32 %peer, %tid.x;
        setp.ge.u32 %absent, %peer, $4;
        setp.eq.u32 %own, %peer, $3;
        or.pred %absent, %absent, %own;
        @%absent bra finished;
        mad.wide.u32 %place, $3, 8, $1;
        ld.global.b64 %mine, [%place];
        mad.lo.u32 %index, $2, $4, %peer;
        mul.wide.u32 %offset, %index, 4;
        add.u64 %mine, %mine, %offset;
    waiting:
        atom.acquire.sys.global.cas.b32 %seen, [%mine], $5, 0;
        setp.eq.u32 %here, %seen, $5;
        @%here bra arrived;
        setp.ne.u32 %foreign, %seen, 0;
        @%foreign trap;
        bra waiting;
    arrived:
        mov.b32 %found, $6;
        mad.wide.u32 %place, %peer, 8, $1;
        ld.global.b64 %theirs, [%place];
        mad.lo.u32 %index, $2, $4, $3;
        mul.wide.u32 %offset, %index, 4;
        add.u64 %theirs, %theirs, %offset;
    repeating:
        setp.ne.u32 %taken, %found, 0;
        @!%taken bra finished;
        atom.release.sys.global.cas.b32 %found, [%theirs], 0, $5;
        bra repeating;
    finished:
        mov.b32 $0, 0;
    }""")

    @triton.jit
    def signal(  # type: ignore[no-untyped-def]
        signal_pointers,  # int64 [WORLD_SIZE], the address of each rank's pad
        program,  # which of the programs of this launch; its peers are those of the same index
        rank,
        tag,  # int32, not 0: what is being run, the same on all ranks
        WORLD_SIZE: tl.constexpr,
        SIGNALS: tl.constexpr,  # False under the interpreter
    ):
        """Tell every peer that this program is here. The result is for `wait`, and of each thread's own."""
        if SIGNALS:
            return tl.inline_asm_elementwise(
                SIGNAL,
                "=r,l,r,r,r,r",
                [signal_pointers.to(tl.int64), program, rank, WORLD_SIZE, tag],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
        else:
            first = program * WORLD_SIZE
            mine = tl.load(signal_pointers + rank).to(tl.pointer_type(tl.int32)) + first + rank
            epoch = tl.load(mine) + 1
            tl.store(mine, epoch)
            for peer in tl.static_range(WORLD_SIZE):
                theirs = tl.load(signal_pointers + peer).to(tl.pointer_type(tl.int32)) + first
                tl.store(theirs + rank, epoch)
            return epoch

    @triton.jit
    def wait(  # type: ignore[no-untyped-def]
        signal_pointers, program, rank, tag, signalled, WORLD_SIZE: tl.constexpr, SIGNALS: tl.constexpr
    ):
        """Return when all peers have signalled too, and what they had written before can be read."""
        if SIGNALS:
            tl.inline_asm_elementwise(
                WAIT,
                "=r,l,r,r,r,r,r",
                [signal_pointers.to(tl.int64), program, rank, WORLD_SIZE, tag, signalled],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
            tl.debug_barrier()  # for the threads that have waited for nobody
        else:
            mine = tl.load(signal_pointers + rank).to(tl.pointer_type(tl.int32)) + program * WORLD_SIZE
            for peer in tl.static_range(WORLD_SIZE):
                while tl.load(mine + peer) < signalled:
                    pass

    @triton.jit
    def barrier(  # type: ignore[no-untyped-def]
        signal_pointers, program, rank, tag, WORLD_SIZE: tl.constexpr, SIGNALS: tl.constexpr
    ):
        """All that this program has written is visible to its peers, and theirs to it, when it returns."""
        tl.debug_barrier()  # what the other threads have written comes before the signal
        signalled = signal(signal_pointers, program, rank, tag, WORLD_SIZE, SIGNALS)
        wait(signal_pointers, program, rank, tag, signalled, WORLD_SIZE, SIGNALS)

    @triton.jit(do_not_specialize=["rank", "tag"])
    def barrier_kernel(  # type: ignore[no-untyped-def]
        signal_pointers, rank, tag, WORLD_SIZE: tl.constexpr, SIGNALS: tl.constexpr
    ):
        """Grid: one program."""
        barrier(signal_pointers, 0, rank, tag, WORLD_SIZE, SIGNALS)


def run_barrier(workspace: Workspace, tag: int) -> None:
    """Wait, on the device, until every rank has come here; what they wrote before can then be read (a collective call).

    `tag`: what is being run, the same on all ranks, not 0. Ranks that differ in it are a CUDA error, not a hang.
    """
    check_launch(1, workspace)
    with torch.cuda.device_of(workspace.hidden):
        barrier_kernel[(1,)](
            workspace.signal_pointers,
            workspace.rank,
            tag,
            WORLD_SIZE=workspace.world_size,
            SIGNALS=not is_interpreted(),
        )


def begin(workspace: Workspace, num_tokens: int = 0, *, copies: bool = False) -> None:
    """Wait until every rank has come here, on the device; the next call reads the first of the two partials.

    A collective call, with which a CUDA graph that holds all_reduce_norm begins, and so does whatever follows a replay.
    `num_tokens`, and whether calls are made of `copies`: of all that follow until the next one. Ranks that differ in
    them are a CUDA error here; among calls made of copies nothing else would show it.
    """
    run_barrier(workspace, BEGIN_TAG - (2 * num_tokens + copies))
    workspace.partial_idx = 0


def check_launch(programs: int, workspace: Workspace) -> None:
    """ValueError where the kernels cannot run, or not so many programs on the workspace's signal pads."""
    if triton is None:
        raise ValueError("triton is not installed: nothing can reduce through symmetric memory")
    if workspace.device.type != "cuda" and not is_interpreted():
        raise ValueError(f"the workspace is on {workspace.device}: there the kernel runs under TRITON_INTERPRET=1 only")
    workspace.check_programs(programs)


def is_interpreted() -> bool:
    """Settled when the kernels were decorated, not by today's value of the variable."""
    return not isinstance(barrier_kernel, triton.JITFunction)
