"""How splits are tuned, without GPUs: what is tried, what is kept, and the file it is written to."""

from pathlib import Path

import pytest
import torch

from modules.normalization import add_norm
from pipeline_parallel.all_reduce_choice import SplitPoint, read_split_points, write_split_points
from pipeline_parallel.overlap import Overlap, split_prefills
from scripts.benchmark.prefill import (
    OFFSETS,
    PROGRAMS,
    Options,
    best_split,
    even_split,
    in_two_passes,
    main,
    problem_of,
)
from tests.modules.tiny_kinds import LLAMA
from tests.modules.tiny_models import tiny_decoder


def cost(point: SplitPoint) -> float:
    """Least at 16 and 64 programs and 256 tokens more in the first half."""
    return abs(point.attention_programs - 16) + abs(point.mlp_programs - 64) + abs(point.offset - 256)


def test_each_value_is_tuned_at_the_best_of_the_others() -> None:
    tried: list[SplitPoint] = []

    def time(point: SplitPoint) -> float:
        tried.append(point)
        return cost(point)

    best = SplitPoint(num_tokens=2048, attention_programs=16, mlp_programs=64, offset=256)
    assert best_split(2048, time, has_programs=True) == (best, 0.0)
    assert len(tried) == 1 + 2 * (len(PROGRAMS) - 1) + len(OFFSETS) - 1 and len(set(tried)) == len(tried)


def test_nccls_junction_has_no_programs_and_no_half_is_empty() -> None:
    tried: list[SplitPoint] = []

    def time(point: SplitPoint) -> float:
        tried.append(point)
        return 1.0

    assert best_split(1024, time, has_programs=False) == (even_split(1024), 1.0)
    assert [point.offset for point in tried] == [0, -256, 256]


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    points = [even_split(1024), SplitPoint(num_tokens=4096, attention_programs=8, mlp_programs=16, offset=-256)]
    path = tmp_path / "splits" / "GPU-2x4096.json"
    write_split_points(path, points)
    assert read_split_points(path) == points
    with pytest.raises(ValueError, match="there is no token count"):
        write_split_points(path, [])
    assert read_split_points(path) == points


def test_split_states_are_those_of_the_halves_one_after_the_other() -> None:
    model = tiny_decoder(LLAMA | {"max_position_embeddings": 1024})
    ids = torch.randint(0, model.config.vocab_size, (1, 1024))
    split_prefills(model, 1, ())
    driver = model.prefill_driver
    assert isinstance(driver, Overlap)
    with torch.inference_mode():
        split = model(ids)
    apart = in_two_passes(driver, ids)
    assert driver.num_split == 1 and model.add_norm is add_norm
    assert problem_of(split, apart) is None
    wrong = apart.clone()
    wrong[:, 900:] = apart.roll(1, 1)[:, 900:]
    for found in (wrong, apart * float("nan")):
        assert "off those of the halves" in (problem_of(found, apart) or "")


def test_one_rank_has_nothing_to_tune(tmp_path: Path) -> None:
    options = Options(output=tmp_path / "s.json", shape="tiny", device="cpu", tune_splits=True, quiet=True)
    with pytest.raises(ValueError, match="--tune-splits needs ranks that share all layers, not --tp-size 1"):
        main(options)
