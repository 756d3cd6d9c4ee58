"""Layers may all differ: in width, heads, gate, rotation and window."""

from dataclasses import replace

import pytest
import torch

from modules.checkpoint.load import build_on_meta, random_model
from modules.config import ModelConfig
from modules.decoder import Decoder
from modules.families.registry import from_hf_config
from modules.generation import prefill
from modules.specs import Dense, Grouped, LayerSpec, Rope, Sliding
from pipeline_parallel.mesh import ParallelMesh
from pipeline_parallel.tensor_parallel import apply_tensor_parallel
from tests.modules.tiny_kinds import LLAMA, random_tokens

WIDE = Grouped(num_attention_heads=6, num_key_value_heads=2, head_dim=8, rope=Rope(), qkv_bias=True)
NARROW = Grouped(num_attention_heads=2, num_key_value_heads=2, head_dim=16, window=Sliding(size=5))
OTHER_TURNS = Grouped(num_attention_heads=4, num_key_value_heads=1, head_dim=8, rope=Rope(theta=500.0))
GATED = Dense(intermediate_size=80, gated=True, activation="silu")
PLAIN = Dense(intermediate_size=52, gated=False, activation="relu", bias=True)


def mixed(*layers: tuple[Grouped, Dense]) -> ModelConfig:
    specs = tuple(LayerSpec(attention=attention, feed_forward=mlp) for attention, mlp in layers)
    return replace(from_hf_config(LLAMA), layers=specs)


ALL_KINDS = mixed((WIDE, GATED), (NARROW, PLAIN), (OTHER_TURNS, GATED))
NO_WINDOW = mixed((WIDE, GATED), (OTHER_TURNS, PLAIN), (WIDE, PLAIN))


@pytest.mark.parametrize("config", [ALL_KINDS, NO_WINDOW], ids=["all-kinds", "no-window"])
@torch.inference_mode()
def test_decoding_equals_prefill_and_a_fused_step_a_plain_one(config: ModelConfig) -> None:
    model = random_model(config, std=0.2, dtype=torch.float32)
    ids = random_tokens(2, 20)
    whole = model.logits(model(ids))
    for fused in (False, True):
        for rows in ((0,), (0, 1)):
            cache = model.new_cache(len(rows), 24)
            prefill(model, ids[list(rows), :11].tolist(), cache)
            cache.has_static_shapes = True
            for place in range(11, 20):
                token_ids = ids[list(rows), place : place + 1]
                plain = model.begin(token_ids, cache=cache, phase="decode")
                stream = model.enter(token_ids, model.begin_step(token_ids, cache) if fused else plain)
                model.run_half_blocks(stream)
                torch.testing.assert_close(model.step_logits(stream), whole[list(rows), place], rtol=0, atol=1e-3)
                cache.advance(torch.ones(len(rows), dtype=torch.int64), 1)


@torch.inference_mode()
def test_what_lies_before_a_window_does_not_matter() -> None:
    model = random_model(mixed((NARROW, GATED)), std=0.2, dtype=torch.float64)
    ids = random_tokens(1, 12)
    changed = ids.clone()
    changed[:, :4] += 1
    before, after = (model(one) for one in (ids, changed))
    seen = NARROW.window.size if NARROW.window is not None else 0
    assert torch.equal(before[:, 3 + seen :], after[:, 3 + seen :])
    assert not torch.equal(before[:, 2 + seen], after[:, 2 + seen])


def test_a_window_keeps_attention_out_of_kernels_unless_all_of_the_cache_lies_within_it() -> None:
    model = random_model(ALL_KINDS)
    found = [model.begin_step(torch.ones(1, 1, dtype=torch.int64), model.new_cache(1, size)) for size in (5, 6)]
    assert [step.fused.fuses_attention for step in found if step.fused is not None] == [True, False]


def test_every_layer_is_cut_as_its_spec_says() -> None:
    whole = build_on_meta(ALL_KINDS)
    ranks: list[Decoder] = []
    for rank in range(2):
        mesh = replace(ParallelMesh.single(torch.device("cpu")), tp_rank=rank, tp_size=2)
        ranks.append(build_on_meta(ALL_KINDS, lambda model, mesh=mesh: apply_tensor_parallel(model, mesh)))  # type: ignore
    for place, block in whole.blocks.items():
        shards = [model.blocks[place].unit_shard for model in ranks]
        held = [shard.local[shard.counted].tolist() for shard in shards if shard is not None]
        assert sorted(unit for units in held for unit in units) == list(range(block.units.number))
