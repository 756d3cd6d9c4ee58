"""Symmetric memory: what is asked of it, how it is laid out, and that all ranks agree about it."""

import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline_parallel.kernels import all_reduce_norm, workspace
from pipeline_parallel.kernels.workspace import Workspace, create_workspace, workspace_of

PAD_BYTES = 9216


class FakeSymmetricMemory:
    """Two ranks, of which this is rank 1; what stands for torch.distributed._symmetric_memory on a CPU."""

    def __init__(self, multicast_address: int) -> None:
        self.multicast_address = multicast_address
        self.rendezvoused = False

    def empty(self, *size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.zeros(size, dtype=dtype)

    def rendezvous(self, buffer: Tensor, group: Any) -> Any:
        self.rendezvoused = True
        pad = torch.zeros(PAD_BYTES // 4, dtype=torch.int32)
        self.buffers = [torch.zeros_like(buffer), buffer]
        return SimpleNamespace(
            rank=1,
            buffer_ptrs=[one.data_ptr() for one in self.buffers],
            get_buffer=lambda rank, size, dtype: self.buffers[rank].view(size),
            signal_pad_ptrs=[8192, pad.data_ptr()],
            multicast_ptr=self.multicast_address,
            get_signal_pad=lambda rank, dtype: pad.view(dtype),
        )


@pytest.fixture
def patch(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setenv(workspace.NO_MULTICAST, "0")
    return monkeypatch


def create(patch: pytest.MonkeyPatch, memory: FakeSymmetricMemory, others: dict[str, Any], **changes: Any) -> Workspace:
    """create_workspace on rank 1; rank 0 asks for the same but for `others`, and says `others["multicast"]`."""

    def all_gather_object(values: list[Any], value: Any, group: Any) -> None:
        theirs = value | {key: others[key] for key in others.keys() & value.keys()} if isinstance(value, dict) else None
        values[:] = [others["multicast"] if theirs is None else theirs, value]

    patch.setattr(workspace.dist, "all_gather_object", all_gather_object)
    patch.setitem(sys.modules, "torch.distributed._symmetric_memory", memory)
    patch.setattr(torch.distributed, "_symmetric_memory", memory, raising=False)
    group: Any = SimpleNamespace(size=lambda: 2)
    asked: dict[str, Any] = {"max_tokens": 5, "hidden_size": 24, "dtype": torch.bfloat16, "device": "cuda:0"} | changes
    return create_workspace(group, **asked)


def test_layout_and_addresses(patch: pytest.MonkeyPatch) -> None:
    memory = FakeSymmetricMemory(0)
    made = create(patch, memory, {"multicast": False})
    first = memory.buffers[0].data_ptr()
    assert (made.rank, made.world_size, made.max_tokens, made.hidden_size) == (1, 2, 5, 24)
    assert made.partials.shape == (2, 5, 24) and made.hidden.shape == (5, 24)
    assert made.partial_pointers.tolist() == [first, made.partials.data_ptr()]
    assert made.hidden_pointers.tolist() == [first + 2 * 5 * 24 * 2, made.hidden.data_ptr()]
    assert made.signal_pointers.tolist() == [8192, made.signal_pad.data_ptr()]
    assert made.signal_pad_bytes == PAD_BYTES
    assert made.partial(3).data_ptr() == made.partials.data_ptr()
    made.partial_idx = 1
    assert made.partial(3).data_ptr() == made.partials[1].data_ptr()
    assert made.partial_of(0, 3).data_ptr() == first + 5 * 24 * 2 and made.partial_of(0, 3).shape == (3, 24)
    assert made.hidden_of(0).data_ptr() == made.hidden_pointers[0] and made.hidden_of(0).shape == (5, 24)


@pytest.mark.parametrize(
    ("mine", "theirs", "transport_name"),
    [(0, False, "p2p"), (65536, True, "multimem"), (65536, False, "p2p"), (0, True, "p2p")],
)
def test_multicast_is_used_only_if_every_rank_has_it(
    patch: pytest.MonkeyPatch, mine: int, theirs: bool, transport_name: str
) -> None:
    made = create(patch, FakeSymmetricMemory(mine), {"multicast": theirs})
    assert made.transport == transport_name
    assert made.multicast_address == (mine if transport_name == "multimem" else 0)


def test_a_multicast_object_where_none_may_be_is_noticed(patch: pytest.MonkeyPatch) -> None:
    patch.setenv(workspace.NO_MULTICAST, "1")
    patch.setenv(workspace.NCCL_MULTICAST, "0")
    assert create(patch, FakeSymmetricMemory(0), {"multicast": False}).transport == "p2p"
    with pytest.raises(AssertionError, match="TORCH_SYMM_MEM_DISABLE_MULTICAST=1, but"):
        create(patch, FakeSymmetricMemory(65536), {"multicast": True})


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"max_tokens": 6}, r"the ranks differ in max_tokens: 6, 5 \(ranks 0 to 1\)"),
        ({"multiprocessors": 78}, "differ in multiprocessors: 78, 132"),
        ({workspace.NO_MULTICAST: True}, "differ in TORCH_SYMM_MEM_DISABLE_MULTICAST: True, False"),
    ],
)
def test_ranks_that_differ_are_refused_before_they_meet(
    patch: pytest.MonkeyPatch, others: dict[str, Any], message: str
) -> None:
    memory = FakeSymmetricMemory(0)
    with pytest.raises(ValueError, match=message):
        create(patch, memory, {"multicast": False, **others})
    assert not memory.rendezvoused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"hidden_size": 20}, "hidden_size 20 is not a multiple of 8 up to 16384"),
        ({"hidden_size": 16392}, "hidden_size 16392 is not a multiple of 8 up to 16384"),
        ({"dtype": torch.float32}, "dtype torch.float32 is not one of"),
        ({"device": "cpu"}, "symmetric memory is on GPUs, not on cpu"),
    ],
)
def test_what_the_kernels_do_not_take_is_refused(
    patch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        create(patch, FakeSymmetricMemory(0), {"multicast": False}, **changes)


@pytest.mark.parametrize("size", [1, 9])
def test_number_of_ranks_is_limited(size: int) -> None:
    group: Any = SimpleNamespace(size=lambda: size)
    with pytest.raises(ValueError, match=f"a group of {size} ranks: 2 to 8"):
        create_workspace(group, 5, 24, torch.bfloat16, "cuda")


def test_ranks_do_not_meet_inside_a_capture(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(ValueError, match="while a CUDA graph is captured"):
        create(patch, FakeSymmetricMemory(0), {"multicast": False})


@pytest.mark.parametrize(
    ("error", "peer_is_right", "transport_name"),
    [(0.0, True, "multimem"), (1e-3, True, "multimem"), (0.1, True, "p2p"), (0.0, False, "p2p")],
)
def test_multimem_is_kept_only_if_its_sums_are_right_everywhere(
    monkeypatch: pytest.MonkeyPatch, error: float, peer_is_right: bool, transport_name: str
) -> None:
    made = workspace_of(
        [torch.zeros(15, 24, dtype=torch.bfloat16) for _ in range(2)],
        torch.zeros(64, dtype=torch.int32),
        rank=0,
        signal_addresses=[0, 0],
        num_multiprocessors=132,
        multicast_address=65536,
    )

    def fake_all_reduce_norm(space: Workspace, num_tokens: int, *_: Any, **__: Any) -> tuple[Tensor, None]:
        partial = space.partial(num_tokens)
        return partial * (1 + error) if space.multicast_address else partial.clone(), None

    monkeypatch.setattr(all_reduce_norm, "all_reduce_norm", fake_all_reduce_norm)
    monkeypatch.setattr(all_reduce_norm, "begin", lambda space: None)
    all_reduce_norm.verify_transport(made, lambda mine: [mine, peer_is_right])
    assert made.transport == transport_name


@pytest.mark.parametrize(
    ("disabled", "nvls", "message"),
    [
        (None, "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST is None: set it to 1"),
        ("yes", "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST is 'yes': set it to 1"),
        ("1", None, "forbids multicast, which NCCL uses too: set NCCL_NVLS_ENABLE=0"),
        ("1", "1", "forbids multicast, which NCCL uses too: set NCCL_NVLS_ENABLE=0"),
        ("1", "0", None),
        ("0", None, None),
    ],
)
def test_the_environment_must_say_whether_multicast_is_allowed(
    patch: pytest.MonkeyPatch, disabled: str | None, nvls: str | None, message: str | None
) -> None:
    for name, value in (("TORCH_SYMM_MEM_DISABLE_MULTICAST", disabled), ("NCCL_NVLS_ENABLE", nvls)):
        patch.delenv(name, raising=False)
        if value is not None:
            patch.setenv(name, value)
    memory = FakeSymmetricMemory(0)
    with nullcontext() if message is None else pytest.raises(ValueError, match=message):
        create(patch, memory, {"multicast": False})
    assert memory.rendezvoused == (message is None), "nothing is asked of torch before that is said"
