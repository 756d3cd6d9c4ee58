"""Tensor parallelism without processes: ranks one after the other, whose parts must add up to the whole model."""

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from modules.cache import Cache
from modules.checkpoint.load import build_on_meta, checkpoint_shapes, load_weights
from modules.config import ModelConfig
from modules.decoder import Decoder
from modules.families.registry import from_hf_config
from modules.sparsity import BLOCKS, Phase
from pipeline_parallel.engine import parallelise
from pipeline_parallel.mesh import ParallelMesh
from pipeline_parallel.tensor_parallel import apply_tensor_parallel, even_range, plan_heads
from tests.modules.tiny_kinds import KINDS, LLAMA, random_tokens
from tests.modules.tiny_models import StateDict, tiny_hf_model

SHAPES = {(24, 8): (1, 2, 3, 4, 8, 16), (9, 3): (1, 2, 3), (14, 2): (2, 4, 8), (15, 5): (2, 3)}
SHAPES |= {(28, 4): (2,), (40, 8): (2, 4), (6, 6): (4,)}
CASES = [(*heads, size) for heads, sizes in SHAPES.items() for size in sizes]
# 50 neurons and 131 tokens: what does not divide by 3, 4, 8 or 16
GROUPED = LLAMA | {"head_dim": 4, "intermediate_size": 50, "attention_bias": True, "mlp_bias": True}
CPU = torch.device("cpu")


@st.composite
def heads_and_ranks(draw: st.DrawFn) -> tuple[int, int, int]:
    """(query heads, key-value groups, ranks) that a model and a launch may have."""
    num_groups, per_group = draw(st.integers(1, 12)), draw(st.integers(1, 9))
    return num_groups * per_group, num_groups, draw(st.integers(1, num_groups * per_group))


@given(heads_and_ranks())
def test_every_query_head_is_on_one_rank_together_with_its_group(case: tuple[int, int, int]) -> None:
    num_heads, num_groups, tp_size = case
    plan = plan_heads(num_heads, num_groups, tp_size)
    assert len(plan) == tp_size
    assert [head for share in plan for head in range(*share.query_heads)] == list(range(num_heads))
    for share in plan:
        own_groups = {head // (num_heads // num_groups) for head in range(*share.query_heads)}
        assert set(share.groups) == own_groups and list(share.groups) == sorted(own_groups)


@given(heads_and_ranks())
def test_padding_makes_all_ranks_alike_and_no_rank_holds_more_than_it_must(case: tuple[int, int, int]) -> None:
    num_heads, num_groups, tp_size = case
    plan = plan_heads(num_heads, num_groups, tp_size)
    assert len({(share.num_groups, share.queries_per_group) for share in plan}) == 1
    for share in plan:
        start, stop = share.query_heads
        assert 0 < stop - start <= share.num_groups * share.queries_per_group and len(share.groups) <= share.num_groups
    assert plan[0].num_groups == max(len(share.groups) for share in plan)
    assert plan[0].num_groups == max(1, -(-num_groups // tp_size))
    if plan[0].num_groups > 1:  # only whole groups lie beside each other: their queries must not be torn apart
        assert plan[0].queries_per_group == num_heads // num_groups


@given(heads_and_ranks())
def test_each_group_has_one_first_holder(case: tuple[int, int, int]) -> None:
    seen: set[int] = set()
    for share in plan_heads(*case):
        assert share.is_first_holder == seen.isdisjoint(share.groups)
        seen.update(share.groups)
    assert seen == set(range(case[1]))


def grouped(num_heads: int, num_groups: int) -> dict[str, Any]:
    heads = {"num_attention_heads": num_heads, "num_key_value_heads": num_groups, "hidden_size": 4 * num_heads}
    return GROUPED | heads | {"num_hidden_layers": 2}


def place(rank: int, tp_size: int, pp_size: int = 1) -> ParallelMesh:
    """A rank's mesh without groups: it tells shapes and slices."""
    return ParallelMesh(tp_rank=rank % tp_size, tp_size=tp_size, pp_rank=rank // tp_size, pp_size=pp_size, device=CPU)


def on_meta(config: ModelConfig, mesh: ParallelMesh) -> Decoder:
    """A rank's part, without storage."""
    return build_on_meta(config, lambda model: parallelise(model, mesh))


def cut_model(hf_config: dict[str, Any], tp_size: int, pp_size: int = 1) -> list[Decoder]:
    """Every rank's part of one model, in float64, loaded as from a checkpoint."""
    config = from_hf_config(hf_config)
    weights = tiny_hf_model(hf_config).state_dict()
    source = StateDict(weights, config, checkpoint_shapes(config), "tiny")
    ranks = []
    for rank in range(tp_size * pp_size):
        ranks.append(on_meta(config, place(rank, tp_size, pp_size)))
        load_weights(ranks[-1], source, dtype=torch.float64)
    return ranks


def add_up_and_compare(
    ranks: list[Decoder], whole: Decoder, token_ids: Tensor, caches: list[Cache], num_tokens: Tensor, phase: Phase
) -> Tensor:
    """One pass of all ranks and of the whole model (whose cache is the last) in step; at each half-block the sum of
    the ranks' parts must be the whole's. Returns the hidden states."""
    models = [*ranks, whole]
    passes = [
        model.begin(token_ids, cache=cache, num_tokens=num_tokens, phase=phase)
        for model, cache in zip(models, caches, strict=True)
    ]
    parts = [model.embeddings(token_ids, one.positions) for model, one in zip(models, passes, strict=True)]
    torch.testing.assert_close(sum(parts[:-1]), parts[-1], rtol=0, atol=1e-12)
    stream = whole.enter(token_ids, passes[-1])
    for layer, block in ((layer, block) for layer in whole.layers for block in BLOCKS):
        halves = [model.half_block(layer, block) for model in models]
        parts = [half.block(stream.hidden_states, one) for half, one in zip(halves, passes, strict=True)]
        torch.testing.assert_close(sum(parts[:-1]), parts[-1], rtol=0, atol=1e-12)
        sums = [stream.branch() for _ in models]
        for half, one in zip(halves, sums, strict=True):
            one.add(parts[-1], half.norm, half.bias)
        stream = sums[-1]
        same = [torch.equal(one.hidden_states, stream.hidden_states) for one in sums]
        assert all(same), "what is added once is whole on every rank"
    for cache in caches:
        cache.advance(num_tokens, token_ids.shape[1])
    return stream.hidden_states


def assert_parts_add_up(hf_config: dict[str, Any], tp_size: int) -> None:
    """Ragged prompts, then decode steps."""
    ranks, (whole,) = cut_model(hf_config, tp_size), cut_model(hf_config, 1)
    caches = [model.new_cache(3, 16) for model in (*ranks, whole)]
    assert len({states.shape for cache in caches[:-1] for states in cache.states}) == 1
    tokens = random_tokens(3, 10)
    add_up_and_compare(ranks, whole, tokens[:, :7], caches, torch.tensor([7, 1, 4]), "prefill")
    for step in (7, 8):
        add_up_and_compare(ranks, whole, tokens[:, step : step + 1], caches, torch.ones(3, dtype=torch.int64), "decode")


@pytest.mark.parametrize(("num_heads", "num_groups", "tp_size"), CASES)
def test_the_ranks_parts_of_every_block_add_up(num_heads: int, num_groups: int, tp_size: int) -> None:
    assert_parts_add_up(grouped(num_heads, num_groups), tp_size)


@pytest.mark.parametrize(
    ("kind", "tp_size"), [("opt", 5), ("opt-post-norm-projected", 3), ("llama-tied", 2), ("llama-explicit-head-dim", 3)]
)
def test_so_they_do_in_models_of_other_kinds(kind: str, tp_size: int) -> None:
    assert_parts_add_up(KINDS[kind], tp_size)


def joined(monkeypatch: pytest.MonkeyPatch, parts: list[Tensor]) -> None:
    """Let what the ranks gather be `parts`."""
    monkeypatch.setattr("pipeline_parallel.tensor_parallel.all_gather_last", lambda *_: torch.cat(parts, -1))


@pytest.mark.parametrize("tp_size", [2, 3, 6])
def test_joined_logits_are_the_whole_models_and_padding_never_wins(
    tp_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks, (whole,) = cut_model(KINDS["llama"], tp_size), cut_model(KINDS["llama"], 1)
    states = torch.randn(4, 48, dtype=torch.float64)
    whole.lm_head.weight.copy_(-whole.lm_head.weight.abs())
    states = states.abs()  # so that all logits are negative, and one of padding (0) the largest
    parts = []
    for model in ranks:
        model.lm_head.weight.copy_(-model.lm_head.weight.abs())
        parts.append(F.linear(states, model.lm_head.weight))
    joined(monkeypatch, parts)
    for model in ranks:
        assert isinstance(model.join_logits, partial)
        model.join_logits = partial(model.join_logits, group=object())
        logits = model.logits(states)
        assert logits.shape == (4, 131) and bool((logits < 0).all())
        torch.testing.assert_close(logits, whole.logits(states), rtol=0, atol=1e-12)
        assert torch.equal(logits.argmax(-1), whole.logits(states).argmax(-1))


@pytest.mark.parametrize(("num_heads", "num_groups", "tp_size"), [case for case in CASES if case[2] > 1])
def test_what_ranks_say_of_their_units_becomes_one_score_a_unit(
    num_heads: int, num_groups: int, tp_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = from_hf_config(grouped(num_heads, num_groups))
    ranks = []
    for rank in range(tp_size):
        mesh = ParallelMesh(tp_rank=rank, tp_size=tp_size, device=CPU, tp_group=object())  # type: ignore[arg-type]
        ranks.append(on_meta(config, mesh))
    for blocks in ([model.attention(1) for model in ranks], [model.mlp(1) for model in ranks]):
        shards = [block.unit_shard for block in blocks]
        assert [block.num_units for block in blocks] == [len(shards[0].local)] * tp_size  # type: ignore[union-attr]
        num_units, parts = shards[0].num_units, []  # type: ignore[union-attr]
        scores = torch.rand(5, num_units, dtype=torch.float64)
        squares = torch.zeros_like(scores)
        counted: list[int] = []
        for shard in shards:
            assert shard is not None and shard.num_units == num_units
            counted += shard.local[shard.counted].tolist()
            part = scores[:, shard.local.clamp(min=0)].masked_fill(shard.local < 0, 1e9)  # padding says anything
            parts.append(part)
            own = part.square().masked_fill(shard.local < 0, 0)
            squares.index_add_(1, shard.local.clamp(min=0), own)
        assert sorted(counted) == list(range(num_units)), "each unit is counted once"
        joined(monkeypatch, parts)
        for shard, part in zip(shards, parts, strict=True):
            assert shard is not None
            assert torch.equal(shard.gather(part), scores)
            torch.testing.assert_close(shard.gather_norms(part), squares.sqrt())


def held_rows(ranks: list[Decoder], name: str) -> Counter[int]:
    """How many ranks hold each row of the dim in which a parameter is cut (of a whole one: row 0 for all)."""
    found: Counter[int] = Counter()
    for model in ranks:
        parameter = dict(model.named_parameters(remove_duplicate=False)).get(name)
        if parameter is None:
            continue
        shard = model.shards.get(name)
        if shard is None:
            found[0] += 1
        else:
            assert parameter.shape[shard.dim_idx] == shard.size
            found.update(row for start, stop in shard.ranges for row in range(start, stop))
    return found


@pytest.mark.parametrize(("tp_size", "pp_size"), [(3, 1), (2, 2), (4, 2)])
@pytest.mark.parametrize("kind", ["llama-9-heads-3-groups", "llama-tied", "opt", "opt-post-norm-projected"])
def test_each_row_of_each_parameter_is_where_it_is_needed(kind: str, tp_size: int, pp_size: int) -> None:
    config = from_hf_config(KINDS[kind])
    whole = build_on_meta(config)
    ranks = []
    for rank in range(tp_size * pp_size):
        ranks.append(on_meta(config, place(rank, tp_size, pp_size)))
    plan = plan_heads(config.num_attention_heads, config.num_key_value_heads, tp_size)
    holders = Counter(group for share in plan for group in share.groups)
    for name, parameter in whole.named_parameters(remove_duplicate=False):
        found = held_rows(ranks, name)
        if ".k_proj." in name or ".v_proj." in name:
            rows = range(config.num_key_value_heads * config.head_dim)
            assert found == {row: holders[row // config.head_dim] for row in rows}, name
        elif "_proj." in name or name in ("embeddings.tokens.weight", "lm_head.weight"):
            assert found == dict.fromkeys(range(parameter.shape[0]), 1), name
        else:  # norms, biases of sums, projections around the embeddings
            assert found == {0: 1 if name == "embeddings.positions.weight" else tp_size}, name
    names = [{name for name, _ in model.named_parameters(remove_duplicate=False)} for model in ranks]
    if pp_size > 1:
        assert not any({"embeddings.tokens.weight", "lm_head.weight"} <= here for here in names)
    for model in ranks:  # and so many bytes: no more than a share of what is cut (with padding), and what is not
        cut = [parameter.numel() for name, parameter in model.named_parameters() if name in model.shards]
        assert sum(cut) <= 1.5 * sum(parameter.numel() for parameter in whole.parameters()) / min(tp_size, 3)


def test_a_tied_head_is_one_parameter_unless_a_pipeline_parts_them() -> None:
    for model in cut_model(KINDS["llama-tied"], 2):
        assert model.lm_head.weight is model.embeddings.tokens.weight
        assert "lm_head.weight" not in dict(model.named_parameters())
    first, last = cut_model(KINDS["llama-tied"], 1, 2)
    assert torch.equal(first.embeddings.tokens.weight, last.lm_head.weight)


def test_tensor_parallelism_is_refused_where_it_cannot_be() -> None:
    config = from_hf_config(LLAMA)
    with pytest.raises(ValueError, match="--tp-size 7: this model has 6 attention heads"):
        build_on_meta(config, lambda model: apply_tensor_parallel(model, place(0, 7)))
    model = build_on_meta(config, lambda model: apply_tensor_parallel(model, place(0, 2)))
    with pytest.raises(ValueError, match="but 48 in dim 0 was expected"):
        apply_tensor_parallel(model, place(0, 2))


@pytest.mark.parametrize(("total", "size"), [(131, 4), (5, 4), (1, 3), (7, 7)])
def test_even_ranges_follow_each_other_in_equal_blocks(total: int, size: int) -> None:
    ranges = [even_range(total, rank, size) for rank in range(size)]
    assert [unit for start, stop, _ in ranges for unit in range(start, stop)] == list(range(total))
    for rank, (start, stop, width) in enumerate(ranges):  # blocks join without gaps: padding only behind the end
        assert start == min(rank * width, total) and stop - start <= width
