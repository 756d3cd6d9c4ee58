"""A shard is a part of a tensor: the parts of all ranks joined are the tensor again."""

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from modules.shards import READ_AHEAD_BYTES, Shard, own_tensor, read_ahead, take_part


@st.composite
def cuts(draw: st.DrawFn) -> tuple[Tensor, int, list[Shard]]:
    """A tensor (plain, transposed, or a view into the middle of memory), a dim, and every rank's shard of it."""
    shape = draw(st.lists(st.integers(1, 7), min_size=1, max_size=3))
    dim_idx = draw(st.integers(0, len(shape) - 1))
    full_size = shape[dim_idx]
    order = draw(st.permutations(range(len(shape))))
    numel = torch.Size(shape).numel()
    memory = torch.arange(1, numel + 4, dtype=draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64])))
    stored = memory[draw(st.integers(0, 3)) :][:numel].view([shape[place] for place in order])
    tensor = stored.permute([order.index(place) for place in range(len(shape))])
    edges = sorted({0, full_size, *draw(st.lists(st.integers(0, full_size), max_size=5))})
    pieces = list(zip(edges[:-1], edges[1:], strict=True))
    num_ranks = draw(st.integers(1, 4))
    owner = [draw(st.integers(0, num_ranks - 1)) for _ in pieces]
    shards = []
    for rank in range(num_ranks):
        ranges = tuple(piece for piece, holder in zip(pieces, owner, strict=True) if holder == rank)
        size = sum(stop - start for start, stop in ranges) + draw(st.integers(0, 3))
        shards.append(Shard(dim_idx, ranges, size, full_size))
    return tensor, dim_idx, shards


@given(cuts())
def test_the_shards_of_all_ranks_joined_are_the_tensor_and_the_rest_is_zero(
    cut: tuple[Tensor, int, list[Shard]],
) -> None:
    tensor, dim_idx, shards = cut
    joined = torch.zeros_like(tensor)
    for shard in shards:
        taken = shard.take(tensor)
        assert taken.dtype == tensor.dtype and shard.local_shape(tensor.shape) == taken.shape
        assert shard.full_shape(taken.shape) == tensor.shape
        position = 0
        for start, stop in shard.ranges:
            piece = taken.narrow(dim_idx, position, stop - start)
            joined.narrow(dim_idx, start, stop - start).add_(piece)
            position += stop - start
        assert not taken.narrow(dim_idx, position, shard.size - position).any()
        assert taken.untyped_storage().nbytes() == taken.nbytes
    assert torch.equal(joined, tensor)


def test_a_shard_of_a_transpose_keeps_the_order_of_the_memory_that_it_reads() -> None:
    stored = torch.arange(12.0).view(3, 4)
    taken = Shard(0, ((3, 4), (0, 1)), 3, 4).take(stored.t())
    assert taken.t().is_contiguous()
    assert taken.tolist() == [[3, 7, 11], [0, 4, 8], [0, 0, 0]]


def test_ranges_that_repeat_and_ranks_of_nothing_but_padding() -> None:
    tensor = torch.arange(1.0, 5.0)
    assert Shard(0, ((2, 4), (2, 3), (1, 1)), 5, 4).take(tensor).tolist() == [3, 4, 3, 0, 0]
    assert Shard(0, (), 2, 4).take(tensor).tolist() == [0, 0]
    assert Shard(0, (), 0, 4).take(tensor).tolist() == []


@pytest.mark.parametrize(
    ("shard", "message"),
    [
        ((0, ((0, 9),), 9, 8), "range (0, 9) is not within (0, 8)"),
        ((0, ((-1, 2),), 4, 8), "range (-1, 2) is not within (0, 8)"),
        ((0, ((3, 2),), 4, 8), "range (3, 2) is not within"),
        ((1, ((0, 4), (4, 8)), 7, 8), "ranges of 8 in all do not fit size 7 of dim 1"),
        ((-1, (), 7, 8), "dim -1"),
    ],
)
def test_ranges_that_cannot_be_are_errors(
    shard: tuple[int, tuple[tuple[int, int], ...], int, int], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Shard(*shard)


def test_a_tensor_of_another_size_is_an_error() -> None:
    shard = Shard(1, ((0, 2),), 2, 4)
    with pytest.raises(ValueError, match=r"shape \(4, 3\), but 4 in dim 1 was expected"):
        shard.take(torch.ones(4, 3))
    with pytest.raises(ValueError, match=r"shape \(4,\), but 4 in dim 1"):
        shard.take(torch.ones(4))
    with pytest.raises(ValueError, match=r"shape \(3, 4\), but 2 in dim 1"):
        shard.full_shape((3, 4))


def test_an_owned_tensor_is_contiguous_and_shares_no_memory() -> None:
    original = torch.arange(12.0).view(3, 4)
    for view in (original, original.t(), original[1:], original.t()[1:3]):
        owned = own_tensor(view, original)
        assert owned.is_contiguous() and torch.equal(owned, view)
        assert owned.untyped_storage().data_ptr() != original.untyped_storage().data_ptr()
    fresh = original.double()
    assert own_tensor(fresh, original) is fresh


def test_reading_ahead_changes_nothing_wherever_the_view_lies(tmp_path: Path) -> None:
    """Rows narrower and wider than a page, a view longer than one request, ordinary memory, a mapped file, nothing."""
    stored = torch.arange(6 * READ_AHEAD_BYTES, dtype=torch.int16).view(24, -1)
    torch.save(stored, tmp_path / "stored.pt")
    mapped = torch.load(tmp_path / "stored.pt", mmap=True, weights_only=True)
    for tensor in (stored, mapped):
        for view in (
            tensor,
            tensor[:, 5:9],
            tensor[3:, 5:5000],
            tensor.t()[7:],
            tensor[0],
            tensor[:0],
            tensor.view(-1, 2),
        ):
            read_ahead(view)
    assert torch.equal(mapped, stored)
    assert take_part(mapped, None) is mapped
    assert torch.equal(take_part(mapped, Shard(1, ((5, 7000),), 6995, stored.shape[1])), stored[:, 5:7000])
