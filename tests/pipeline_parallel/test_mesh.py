"""A process's place among all, and sizes that do not fit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline_parallel.mesh import ParallelMesh, check_sizes

CPU = torch.device("cpu")
sizes = st.integers(1, 4)


def all_places(tp_size: int, pp_size: int, dp_size: int) -> list[ParallelMesh]:
    """Every process's mesh, tensor-parallel neighbours next to each other, then stages, then replicas."""
    return [
        ParallelMesh(
            tp_rank=tp_rank,
            tp_size=tp_size,
            pp_rank=pp_rank,
            pp_size=pp_size,
            dp_rank=dp_rank,
            dp_size=dp_size,
            device=CPU,
        )
        for dp_rank in range(dp_size)
        for pp_rank in range(pp_size)
        for tp_rank in range(tp_size)
    ]


@given(sizes, sizes, sizes)
def test_ranks_number_all_places_in_order(tp_size: int, pp_size: int, dp_size: int) -> None:
    places = all_places(tp_size, pp_size, dp_size)
    assert [place.rank for place in places] == list(range(tp_size * pp_size * dp_size))
    assert {place.world_size for place in places} == {len(places)}
    for place in places:
        replica = place.replica_ranks()
        assert place.rank in replica and len(replica) == tp_size * pp_size
        assert {places[rank].dp_rank for rank in replica} == {place.dp_rank}
        assert [rank for rank in replica if places[rank].is_leader] == [replica[0]]
        for pp_rank in range(pp_size):
            other = places[place.rank_at(pp_rank=pp_rank)]
            assert (other.dp_rank, other.pp_rank, other.tp_rank) == (place.dp_rank, pp_rank, place.tp_rank)


def test_one_process_needs_no_group() -> None:
    one = ParallelMesh.from_process_group(1, 1, "cpu")
    assert one == ParallelMesh.single("cpu") and (one.rank, one.world_size, one.is_leader) == (0, 1, True)
    assert one.gather("here") == ["here"] and one.from_rank_0(lambda: 7) == 7
    assert one.describe() == "rank 0"


def test_a_rank_is_described_by_the_axes_that_are_cut() -> None:
    here = all_places(2, 1, 3)[4]
    assert here.describe() == "rank 4 (tp 0, dp 2)" and here.describe(1) == "rank 1 (tp 1, dp 0)"
    assert all_places(1, 4, 1)[0].describe(3) == "rank 3 (pp 3)"


@pytest.mark.parametrize(
    ("tp_size", "pp_size", "world_size", "message"),
    [
        (0, 1, 4, "--tp-size must be at least 1, got 0"),
        (1, -2, 4, "--pp-size must be at least 1, got -2"),
        (2, 2, 1, "--tp-size 2 times --pp-size 2 is 4, but 1 process runs: start a multiple of 4"),
        (2, 2, 6, "--tp-size 2 times --pp-size 2 is 4, but 6 processes run: .*--nproc-per-node 4"),
        (8, 1, 4, "--tp-size 8 times --pp-size 1 is 8, but 4 processes run"),
    ],
)
def test_sizes_that_do_not_fit_the_processes_are_refused_with_both_numbers(
    tp_size: int, pp_size: int, world_size: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_sizes(tp_size, pp_size, world_size)


def test_a_place_outside_of_its_axis_is_refused() -> None:
    with pytest.raises(ValueError, match="tp_rank 2 is not within tp_size 2"):
        ParallelMesh(tp_rank=2, tp_size=2, device=CPU)
