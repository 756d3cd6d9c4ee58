"""The cache's views write into its rows and nowhere else, and each row keeps a length of its own."""

import pytest
import torch
from torch import Tensor

from modules.cache import Cache, KVCache

LAYERS = range(2, 4)  # of a pipeline stage: its first layer is not number 0


def new_cache(batch_size: int = 4, max_seqlen: int = 6) -> Cache:
    """Two key-value heads of three channels, every entry different."""
    shape = (batch_size, 2, max_seqlen, 3)
    blocks = {layer: KVCache(shape, dtype=torch.float32, device="cpu") for layer in LAYERS}
    for place, block in enumerate(blocks.values()):
        block.keys.copy_(torch.arange(block.keys.numel()).view(shape) + place * block.keys.numel())
        block.values.copy_(-block.keys)
    return Cache(blocks, batch_size=batch_size, max_seqlen=max_seqlen, device="cpu")


def keys_of(cache: Cache) -> Tensor:
    """Of both layers, [2, rows, G, S, H]."""
    return torch.stack(cache.states[::2])


def values_of(cache: Cache) -> Tensor:
    return torch.stack(cache.states[1::2])


def states(batch: int, tokens: int, value: float) -> Tensor:
    """[B, G, T, H]: value + token number / 10."""
    return (value + torch.arange(tokens) / 10)[None, None, :, None].expand(batch, 2, tokens, 3).clone()


def unchanged(cache: Cache, before: Tensor, rows: list[int]) -> bool:
    return torch.equal(keys_of(cache)[:, rows], before[:, rows]) and torch.equal(
        values_of(cache)[:, rows], -before[:, rows]
    )


def test_tokens_are_written_where_each_row_ends() -> None:
    cache = new_cache()
    before = keys_of(cache)
    cache.cache_seqlens.copy_(torch.tensor([0, 3, 1, 2]))
    cache.longest = 3
    positions = cache.cache_seqlens[:, None] + torch.arange(2)
    end = cache.reserve(2)
    keys, values = cache.write(3, positions, states(4, 2, 100.0), states(4, 2, 200.0), end)
    assert end == 5 and keys.shape == values.shape == (4, 2, 5, 3)
    assert torch.equal(keys_of(cache)[0], before[0]), "the other layer is untouched"
    for row, length in enumerate((0, 3, 1, 2)):
        assert torch.equal(keys[row, :, length : length + 2], states(1, 2, 100.0)[0])
        assert torch.equal(values[row, :, length : length + 2], states(1, 2, 200.0)[0])
        assert torch.equal(keys_of(cache)[1, row, :, :length], before[1, row, :, :length])
        assert torch.equal(keys_of(cache)[1, row, :, length + 2 :], before[1, row, :, length + 2 :])
    cache.advance(torch.tensor([2, 1, 2, 0]), 2)  # padding moves no length
    assert cache.cache_seqlens.tolist() == [2, 4, 3, 2] and cache.longest == 5 and not cache.is_empty


def test_fresh_rows_are_any_rows_as_if_they_were_empty() -> None:
    cache = new_cache()
    before = keys_of(cache)
    cache.cache_seqlens.copy_(torch.tensor([5, 3, 4, 2]))
    cache.longest = 5
    view = cache.fresh_rows([3, 1])
    assert view.is_empty and view.cache_seqlens.tolist() == [0, 0] and view.reserve(6) == 6
    keys, values = states(2, 3, 100.0), states(2, 3, 200.0)
    keys[1] += 50
    read = view.write(2, torch.arange(3).expand(2, -1), keys, values, 3)
    assert torch.equal(read[0], keys) and torch.equal(read[1], values), "attention needs what the pass itself writes"
    assert torch.equal(keys_of(cache)[0, [3, 1], :, :3], keys) and torch.equal(
        values_of(cache)[0, [3, 1], :, :3], values
    )
    assert unchanged(cache, before, [0, 2])
    view.advance(torch.tensor([3, 1]), 3)
    assert view.cache_seqlens.tolist() == [3, 1]
    assert cache.cache_seqlens.tolist() == [5, 3, 4, 2] and cache.longest == 5, "the cache's own lengths stay"


def test_first_rows_see_the_lengths_that_they_are_given() -> None:
    cache = new_cache()
    before = keys_of(cache)
    view = cache.first_rows(2, torch.tensor([4, 1]), 4)
    end = view.reserve(1)
    keys, _ = view.write(2, view.cache_seqlens[:, None], states(2, 1, 100.0), states(2, 1, 200.0), end)
    assert not view.is_empty and end == 5 and keys.shape == (2, 2, 5, 3)
    assert torch.equal(keys[0, :, 4], torch.full((2, 3), 100.0)) and torch.equal(
        keys[1, :, 1], torch.full((2, 3), 100.0)
    )
    assert torch.equal(keys_of(cache)[0, 0, :, :4], before[0, 0, :, :4])
    assert unchanged(cache, before, [2, 3])


def test_a_moved_row_overwrites_only_its_length() -> None:
    cache = new_cache()
    before = keys_of(cache)
    cache.move_row(3, 1, 4)
    assert torch.equal(keys_of(cache)[:, 1, :, :4], before[:, 3, :, :4])
    assert torch.equal(values_of(cache)[:, 1, :, :4], -before[:, 3, :, :4])
    assert torch.equal(keys_of(cache)[:, 1, :, 4:], before[:, 1, :, 4:])
    assert unchanged(cache, before, [0, 2, 3])


def test_what_a_selector_keeps_of_a_row_moves_with_it_and_stays_in_its_memory() -> None:
    cache = new_cache()
    assert cache.kept("choice") is None
    cache.fresh_rows([3, 1]).keep("choice", torch.tensor([[True, False], [False, True]]))
    memory = cache.row_states["choice"].data_ptr()
    cache.move_row(3, 0, 1)
    view = cache.first_rows(2, torch.tensor([1, 1]), 1)
    kept = view.kept("choice")
    assert kept is not None and kept.tolist() == [[True, False], [False, True]]
    view.keep("choice", torch.tensor([[False, False], [True, True]]))
    assert cache.row_states["choice"].tolist() == [[False, False], [True, True], [False, False], [True, False]]
    assert cache.row_states["choice"].data_ptr() == memory


def test_static_shapes_look_at_everything_except_in_fresh_rows() -> None:
    cache = new_cache()
    cache.has_static_shapes = True
    assert cache.reserve(1) == 6 and not cache.is_empty
    assert cache.first_rows(2, torch.tensor([0, 0]), 0).reserve(1) == 6
    fresh = cache.fresh_rows([0])
    assert fresh.reserve(2) == 2 and fresh.is_empty


def test_what_does_not_fit_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match="7 positions needed, 6 allocated"):
        new_cache().reserve(7)
    with pytest.raises(ValueError, match="5 positions needed, 4 allocated"):
        new_cache(max_seqlen=4).first_rows(1, torch.tensor([4]), 4).reserve(1)
    for sizes in ((0, 6), (4, 0)):
        with pytest.raises(ValueError, match="must be at least 1"):
            new_cache(*sizes)
