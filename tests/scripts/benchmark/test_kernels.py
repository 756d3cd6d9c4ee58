"""The kernel benchmark on a CPU: what its records say, and that a wrong kernel is not timed."""

from pathlib import Path
from typing import Any

import pytest
import torch

from analysis.results import read_records
from scripts.benchmark import kernels
from scripts.benchmark.kernels import Options, main


@pytest.fixture(autouse=True)
def a_few_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny MLP is out of the cache after thousands of others only."""
    monkeypatch.setattr(kernels, "num_cold_sets", lambda num_bytes, device: 3)


@pytest.fixture
def options(tmp_path: Path) -> Options:
    return Options(
        output=tmp_path / "r.jsonl",
        shape="tiny",
        density=(0.5,),
        batch_size=(1, 3),
        dtype="float32",
        device="cpu",
        quiet=True,
    )


def test_records_count_the_bytes_of_the_union_of_rows(options: Options) -> None:
    records = main(options)
    assert records == list(read_records(options.output))
    assert [(each["labels"]["batch_size"], each["baseline"]["name"]) for each in records[::2]] == [
        (1, "library, dense"),
        (3, "library, dense"),
    ]
    one, three = records[0], records[2]
    assert one["union_density"] == 0.5 and 0.75 < three["union_density"] < 1.0
    assert one["bytes_per_call"] == 80 * 3 * 96 * 4  # half of 160 neurons, three matrices of width 96, float32
    assert all(each["ratio"] == pytest.approx(each["baseline"]["value"] / each["value"]) for each in records)


def test_thinned_rows_read_what_they_keep(options: Options) -> None:
    (record,) = main(Options(**{**vars(options), "operator": "thinned_rows"}))
    assert record["bytes_per_call"] == 48 * 160 * 4 and record["baseline"]["name"] == "library, dense"


def peer(matrix: torch.Tensor) -> Any:
    """Someone else's kernel."""
    return lambda x, threshold: x.masked_fill(x.abs() < threshold, 0) @ matrix


def wrong_peer(matrix: torch.Tensor) -> Any:
    """Which skips nothing."""
    return lambda x, threshold: x @ matrix


def test_a_peer_has_records_under_its_name_and_is_checked_first(
    options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "import_peer", lambda place: {"m:right": peer, "m:wrong": wrong_peer}[place])
    flags = {**vars(options), "operator": "thinned_rows", "peer": "m:right", "peer_name": "TEAL"}
    records = main(Options(**flags))
    assert [record["baseline"]["name"] for record in records] == ["library, dense", "TEAL"]
    assert all(record["ratio"] == pytest.approx(record["baseline"]["value"] / record["value"]) for record in records)
    with pytest.raises(ValueError, match="not timed"):
        main(Options(**{**flags, "peer": "m:wrong"}))
    with pytest.raises(ValueError, match="--peer is timed beside --operator thinned_rows"):
        main(Options(**{**flags, "operator": "sparse_mlp"}))


@pytest.mark.parametrize(("operator", "num_bytes"), [("sparse_mlp", 80 * 3 * 96 * 4), ("thinned_rows", 48 * 160 * 4)])
def test_as_many_cold_sets_are_taken_as_the_cache_asks_for(
    options: Options, monkeypatch: pytest.MonkeyPatch, operator: str, num_bytes: int
) -> None:
    monkeypatch.setattr(kernels, "num_cold_sets", lambda read, device: {num_bytes: 37}[read])
    (record, *_) = main(Options(**{**vars(options), "operator": operator, "batch_size": (1,)}))
    assert record["timing"]["num_argument_sets"] == 37


@pytest.mark.parametrize("wrong", [1.1, float("nan")])
def test_a_wrong_kernel_is_not_timed(options: Options, monkeypatch: pytest.MonkeyPatch, wrong: float) -> None:
    right = kernels.sparse_mlp
    monkeypatch.setattr(kernels, "sparse_mlp", lambda *args, **named: right(*args, **named) * wrong)
    with pytest.raises(ValueError, match="not timed"):
        main(options)


def test_a_density_that_is_none_is_refused(options: Options) -> None:
    with pytest.raises(ValueError, match=r"--density must lie in \(0, 1\], got 0.0"):
        main(Options(**{**vars(options), "density": (0.0,)}))
    assert torch.is_inference_mode_enabled() is False
