"""The all-reduce: its reference, its launch, its errors, and what the kernel compiles to for both transports."""

import os
import re
import subprocess
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from modules.kernels.add_norm import KINDS
from pipeline_parallel.kernels import all_reduce_norm as operator
from pipeline_parallel.kernels import barrier
from pipeline_parallel.kernels.all_reduce_norm import (
    MAX_REGISTERS,
    STRATEGIES,
    WARPS_A_MULTIPROCESSOR,
    all_reduce_norm,
    launch_shape,
    owned_rows,
    reference_all_reduce_norm,
)
from pipeline_parallel.kernels.barrier import begin
from pipeline_parallel.kernels.workspace import Workspace, workspace_of
from tests.modules.kernels.kernel_checks import EPS, compiles
from tests.pipeline_parallel.kernels.all_reduce_norm_cases import OPTIONS, Call, assert_right

needs_triton = pytest.mark.skipif(operator.triton is None, reason="triton is not installed")
TOKEN_COUNTS = (0, 1, 2, 3, 4, 5, 63, 64, 77, 255, 257, 1023, 1025, 16384)
POINTERS = ("partial_pointers", "hidden_pointers", "signal_pointers")
VECTORS = ("weight", "norm_bias", "bias")
NO_VECTORS: dict[str, Any] = {**dict.fromkeys(VECTORS), "kind": "none", "eps": 0.0}
INTEGERS = ("first_partial_row", "first_hidden_row", "num_rows", "rank", "tag")


@pytest.mark.parametrize(("world_size", "dtype"), [(2, torch.bfloat16), (4, torch.float16), (8, torch.bfloat16)])
def test_reference_follows_the_equation(world_size: int, dtype: torch.dtype) -> None:
    options = [OPTIONS, (), *((option,) for option in OPTIONS)]
    for index, (kind, num_tokens, present) in enumerate(product(KINDS, (0, 1, 77), options)):
        call = Call(index=index, num_tokens=num_tokens, strategy="one-shot", kind=kind, present=present)
        partials = torch.stack([call.partial(rank, 48, dtype) for rank in range(world_size)])
        result = reference_all_reduce_norm(partials, **call.inputs(48, dtype), kind=kind, eps=EPS)
        assert_right(call, [result] * world_size, 48, dtype)


@pytest.mark.parametrize("world_size", range(2, 9))
def test_every_row_has_one_owner(world_size: int) -> None:
    for num_tokens in TOKEN_COUNTS:
        owned = [owned_rows(num_tokens, rank, world_size) for rank in range(world_size)]
        assert [row for rows in owned for row in rows] == list(range(num_tokens))
        assert max(map(len, owned)) == -(-num_tokens // world_size)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_programs_can_wait_for_each_other_and_have_room_on_a_pad(strategy: str) -> None:
    default_pad = 32 * 72 * 4  # torch's
    hidden_sizes, multiprocessors = (8, 3072, 4096, 8192, 16384), (1, 16, 84, 132, 300)
    for num_tokens, hidden_size, world_size, count in product(TOKEN_COUNTS, hidden_sizes, range(2, 9), multiprocessors):
        programs, num_warps = launch_shape(num_tokens, hidden_size, world_size, strategy, count)
        assert 1 <= programs <= max(1, num_tokens)
        assert num_warps in (1, 2, 4, 8, 16, 32)
        assert programs * num_warps <= WARPS_A_MULTIPROCESSOR * count
        assert programs * world_size * 4 <= default_pad


def test_fewer_programs_can_be_asked_for_and_warps_stay() -> None:
    whole = launch_shape(1024, 4096, 2, "two-shot", 132)
    assert whole[0] > 8 and launch_shape(1024, 4096, 2, "two-shot", 132, 8) == (8, whole[1])
    assert launch_shape(3, 4096, 2, "one-shot", 132, 8)[0] == 3
    assert launch_shape(0, 4096, 2, "one-shot", 132, 8)[0] == 1


def workspace_on_cpu(programs: int = 64) -> Workspace:
    buffers = [torch.zeros(3 * 5, 48, dtype=torch.bfloat16) for _ in range(2)]
    pad = torch.zeros(programs * 2, dtype=torch.int32)
    return workspace_of(buffers, pad, rank=1, signal_addresses=[0, 0], num_multiprocessors=4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "batch"}, "kind 'batch' is not one of rms, layer, none"),
        ({"strategy": "ring"}, "strategy 'ring' is not one of one-shot, two-shot"),
        ({"max_programs": 0}, "max_programs must be at least 1, in two-shot 0, got 0"),
        ({"num_tokens": 6}, "num_tokens 6 is not within the workspace's 0 to 5"),
        ({"own": torch.zeros(3, 47)}, r"own \(3, 47\) is not of shape \(3, 48\)"),
        ({"own": torch.zeros(3, 48), "strategy": "two-shot"}, "own: only one-shot reads what is not in the workspace"),
        ({"residual": torch.zeros(2, 48)}, r"residual \(2, 48\) is not of shape \(3, 48\)"),
        ({"strategy": "two-shot"}, r"residual \(3, 48\) is not of shape \(1, 48\)"),
        ({"residual": torch.zeros(48, 3).T}, "residual is not contiguous"),
        ({"norm_bias": torch.zeros(48, dtype=torch.int32)}, "norm_bias is torch.int32"),
        ({"bias": torch.zeros(48, device="meta")}, "bias is on meta, not on cpu"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"num_tokens": 3, "residual": torch.zeros(3, 48), "kind": "rms", "strategy": "one-shot"}
    arguments |= dict.fromkeys(VECTORS) | changes
    with pytest.raises(ValueError, match=message):
        all_reduce_norm(workspace_on_cpu(), **arguments, eps=1e-5)


@needs_triton
@compiles
def test_a_workspace_on_a_cpu_is_refused() -> None:
    with pytest.raises(
        ValueError, match="the workspace is on cpu: there the kernel runs under TRITON_INTERPRET=1 only"
    ):
        begin(workspace_on_cpu())
    with pytest.raises(ValueError, match="the workspace is on cpu"):
        all_reduce_norm(workspace_on_cpu(), 3, None, **NO_VECTORS, strategy="two-shot", max_programs=0)


def test_a_machine_without_triton_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(barrier, "triton", None)
    with pytest.raises(ValueError, match="triton is not installed"):
        begin(workspace_on_cpu())
    with pytest.raises(ValueError, match="triton is not installed"):
        all_reduce_norm(workspace_on_cpu(), 3, None, **NO_VECTORS, strategy="two-shot", max_programs=0)


@needs_triton
def test_more_programs_than_the_pad_has_room_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(barrier, "is_interpreted", lambda: True)
    with pytest.raises(ValueError, match="4 programs on 2 ranks need a signal pad of 48 bytes, this one has 40"):
        all_reduce_norm(workspace_on_cpu(5), 4, None, **NO_VECTORS, strategy="one-shot")
    with pytest.raises(ValueError, match="0 programs on 2 ranks need a signal pad of 16 bytes, this one has 8"):
        all_reduce_norm(workspace_on_cpu(1), 4, None, **NO_VECTORS, strategy="two-shot", max_programs=0)


def compiled(
    hidden_size: int, world_size: int, strategy: str, transport: str, dtype: str, own: str | None = None
) -> dict[str, str]:
    """The kernel for sm_90 with every argument given, in each of the compiler's languages; pointers aligned, as from
    torch's allocator."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants: dict[str, Any] = {"HIDDEN_SIZE": hidden_size, "BLOCK": triton.next_power_of_2(hidden_size)}
    constants |= {"KIND": "rms", "WORLD_SIZE": world_size, "TWO_SHOT": strategy == "two-shot"}
    constants |= {"TRANSPORT": transport, "SIGNALS": True, "PDL": True}
    types = dict.fromkeys(POINTERS, "*i64") | dict.fromkeys(VECTORS, f"*{dtype}") | dict.fromkeys(INTEGERS, "i32")
    types |= {"hidden": f"*{dtype}", "residual": "*fp32", "new_residual": "*fp32", "eps": "fp32"}
    types |= {} if own is None else {"own": f"*{own}"}
    types |= dict.fromkeys(("multicast_partials", "multicast_hidden"), "i64" if transport == "multimem" else "i32")
    names = operator.all_reduce_norm_kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")}
    source = ASTSource(operator.all_reduce_norm_kernel, signature, constants, aligned)
    _, num_warps = launch_shape(64, hidden_size, world_size, strategy, 132)
    options = {"num_warps": num_warps, "maxnreg": MAX_REGISTERS}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm


def assert_assembles_without_spills(ptx: str) -> None:
    """With the assembler that comes with Triton, if it does."""
    import triton

    assembler = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    if not assembler.exists():
        return
    command = [str(assembler), "-v", "-arch", "sm_90a", "-o", os.devnull, "/dev/stdin"]
    done = subprocess.run(command, input=ptx, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in done.stderr, done.stderr


@needs_triton
@compiles
@pytest.mark.parametrize(
    ("hidden_size", "world_size", "strategy", "transport", "dtype"),
    [
        (3072, 2, "one-shot", "p2p", "bf16"),
        (8192, 4, "one-shot", "p2p", "fp16"),
        (4096, 4, "two-shot", "p2p", "fp16"),
        (8192, 4, "two-shot", "p2p", "bf16"),
        (3072, 2, "two-shot", "multimem", "fp16"),
        (8192, 4, "two-shot", "multimem", "bf16"),
    ],
)
def test_kernel_moves_16_bytes_at_a_time_between_acquire_and_release(
    hidden_size: int, world_size: int, strategy: str, transport: str, dtype: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found = compiled(hidden_size, world_size, strategy, transport, dtype)
    ptx = re.sub(r"//.*", "", found["ptx"])  # comments name our own files
    num_barriers = 2 if strategy == "two-shot" else 1
    assert ".target sm_90a" in ptx and ".maxnreg 64" in ptx and ".local" not in ptx
    assert_assembles_without_spills(ptx)

    # Of the pads, at entry and at the exit of two-shot: a signal, its wait, its repetition; and nothing else is atomic.
    atomics = re.findall(r"\batom\S+", ptx)
    assert atomics.count("atom.release.sys.global.cas.b32") == 2 * num_barriers
    assert atomics.count("atom.acquire.sys.global.cas.b32") == num_barriers
    assert len(atomics) == 3 * num_barriers == 3 * len(re.findall(r"\btrap;", ptx))

    # 8 elements a thread: one 16-byte access of each 2-byte operand, two of a float32 one.
    loads = [one for one in re.findall(r"\bld\.global\S*", ptx) if one != "ld.global.b64"]  # those are of tables
    stores = re.findall(r"\bst\.global\S*", ptx)
    assert set(loads) == {"ld.global.v4.b32"} and set(stores) == {"st.global.v4.b32"}
    multimem = re.findall(r"\bmultimem\.(?:ld|st)\S*", ptx)
    if transport == "multimem":
        load_sum = f"multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.{dtype.replace('fp', 'f')}x2"
        assert multimem == [load_sum, "multimem.st.relaxed.sys.global.v4.f32"]
        assert (len(loads), len(stores)) == (3 + 2, 2)
    else:
        assert not multimem
        copies = world_size if strategy == "two-shot" else 1
        assert (len(loads), len(stores)) == (world_size + 3 + 2, copies + 2)

    # In order of the program text: tables, the signal, what is local, the wait, what is not; stores, the exit.
    local = [f"load {name}" for name in ("residual", "bias", "weight", "norm_bias")]
    entry = ["signal", *local, "wait", "barrier"]
    middle = ["load sum"] if transport == "multimem" else ["load peer"] * world_size
    last = {"one-shot": ["store hidden"], "two-shot": ["store peer"] * world_size}[strategy]
    middle += (["store all"] if transport == "multimem" else last) + ["store new_residual"]
    leave = ["barrier", "signal", "wait", "barrier"] if strategy == "two-shot" else []
    assert events_of(found["ttgir"]) == entry + middle + leave


@needs_triton
@compiles
@pytest.mark.parametrize("own", ["fp32", "bf16"])
def test_what_a_rank_hands_over_is_among_the_partials_before_it_signals(
    own: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found = compiled(4096, 2, "one-shot", "p2p", "bf16", own)
    assert_assembles_without_spills(re.sub(r"//.*", "", found["ptx"]))
    ptx = [line for line in found["ptx"].splitlines() if re.search(r"griddepcontrol|\bst\.global|bar\.sync|atom", line)]
    kinds = [re.search(r"griddepcontrol\.\w+|st\.global|bar\.sync|atom\.\w+", line)[0] for line in ptx]  # type: ignore[index]
    signal = kinds.index("atom.release")
    assert kinds[:2] == ["griddepcontrol.wait", "griddepcontrol.launch_dependents"]
    assert "st.global" in kinds[2:signal] and kinds[signal - 1] == "bar.sync"


def events_of(text: str) -> list[str]:
    """Accesses of rows, signals, waits and barriers of a program, by the names of pointers."""
    origins: dict[str, str] = {}  # of a pointer, the argument or table that it was made from
    events = []
    patterns = {
        "signal": r"atom\.release.*\$5;.*finished:",
        "load sum": r"multimem\.ld_reduce",
        "store all": r"multimem\.st",
    }
    for line in text.splitlines():
        made = re.match(r"\s*(%[\w#]+)(?::\d+)? = (tt\.(?:addptr|splat|int_to_ptr|load)) (%\w+)", line)
        if made and made[2] != "tt.load":
            origins[made[1]] = origins.get(made[3], made[3])
        elif made:
            origin = origins.get(made[3], made[3])
            if origin in ("%partial_pointers", "%hidden_pointers"):
                origins[made[1]] = "peer"
            else:
                events.append(f"load {origin.strip('%')}")
        elif "tt.store" in line:
            pointer = re.search(r"tt\.store (%\w+)", line)
            assert pointer
            events.append(f"store {origins.get(pointer[1], pointer[1]).strip('%')}")
        elif "inline_asm" in line and "griddepcontrol" not in line:
            found = "wait" if "atom.acquire" in line else next(n for n, p in patterns.items() if re.search(p, line))
            events.append(found)
        elif re.search(r"\b(ttg|gpu)\.\w*barrier", line):
            events.append("barrier")
    return events
