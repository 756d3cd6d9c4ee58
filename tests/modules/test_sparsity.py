"""Seam 1: sets, the gathered path, the mask it must equal, and the counters."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from modules.decoder import Decoder
from modules.families.registry import from_hf_config
from modules.sampling import mix_seed
from modules.sparsity import BLOCKS, ActiveSet, BlockStats, SelectionContext, SparsityStats, num_kept
from sparse_predictor.methods.oracle import OracleSelector
from sparse_predictor.methods.random import MAX_DRAWS, RandomSelector
from sparse_predictor.selection import Selection, apply_sparsity, attach_selection, remove_sparsity
from tests.modules.unit_shard_ranks import context_of

LLAMA = {
    "model_type": "llama",
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 136,
    "num_hidden_layers": 3,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "mlp_bias": True,
    "attention_bias": True,
}
OPT = {
    "model_type": "opt",
    "vocab_size": 131,
    "hidden_size": 48,
    "ffn_dim": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "word_embed_proj_dim": 32,
    "do_layer_norm_before": False,
}


def tiny(hf: dict, dtype: torch.dtype = torch.float32) -> Decoder:
    torch.manual_seed(3)
    model = Decoder(from_hf_config(hf)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.to(dtype)


class Everything:
    """All units active, through the sparse path."""

    lookahead = 0

    def __init__(self, num_units: int) -> None:
        self.num_units = num_units

    def select(self, hidden_states: Tensor, context: SelectionContext) -> ActiveSet:
        rows = hidden_states.shape[0] * hidden_states.shape[1]
        return ActiveSet(torch.ones(rows, self.num_units, dtype=torch.bool))


def everything_active(model: Decoder) -> dict:
    units = {"mlp": model.config.intermediate_size, "attention": model.config.num_key_value_heads}
    return {(layer, block): Everything(units[block]) for layer in range(3) for block in BLOCKS}


def decode(model: Decoder, batch: int, steps: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 131, (batch, 6 + steps), generator=generator)
    cache = model.new_cache(batch, 6 + steps)
    with torch.inference_mode():
        out = [model.logits(model(ids[:, :6], cache=cache))]
        for step in range(6, 6 + steps):
            out.append(model.logits(model(ids[:, step : step + 1], cache=cache, phase="decode")))
    return torch.cat(out, 1)


@pytest.mark.parametrize("hf", [LLAMA, OPT], ids=["llama", "opt"])
@pytest.mark.parametrize("batch", [1, 2, 8])
def test_everything_active_equals_dense_bit_for_bit_on_the_gather_path(hf: dict, batch: int) -> None:
    model = tiny(hf)
    dense = decode(model, batch)
    stats = apply_sparsity(model, everything_active(model))
    sparse = decode(model, batch)
    assert stats.executions()["gather"] >= 4 * 6
    assert torch.equal(dense, sparse)


@pytest.mark.parametrize("hf", [LLAMA, OPT], ids=["llama", "opt"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("method", ["oracle", "random"])
def test_gathered_units_equal_the_mask_simulation_in_float64(hf: dict, batch: int, method: str) -> None:
    model = tiny(hf, torch.float64)
    results = []
    for force_mask in (False, True):
        stats = attach_selection(
            model,
            Selection(method=method, mlp_density=0.4, head_density=0.5, sparse_phases="all", seed=1),
        )
        for half_block in model.half_blocks:
            half_block.block.force_mask = force_mask
        results.append(decode(model, batch))
        paths = stats.executions()
        assert (paths["gather"] == 0) == force_mask
    assert (results[0] - results[1]).abs().max() < 1e-12
    remove_sparsity(model)
    assert (results[0] - decode(model, batch)).abs().max() > 1e-6


def test_keeping_one_neuron_changes_the_output_and_is_counted() -> None:
    model = tiny(LLAMA)
    dense = decode(model, 1)
    stats = attach_selection(model, Selection(method="oracle", mlp_density=1e-9, sparse_phases="all"))
    sparse = decode(model, 1)
    assert (dense - sparse).abs().max() > 1e-3
    assert stats.mean_density("mlp") == pytest.approx(1 / 136)
    assert stats.executions()["gather"] + stats.executions()["mask"] == 3 * 5


def test_decode_phase_leaves_the_prompt_dense() -> None:
    model = tiny(LLAMA)
    dense = decode(model, 2)
    attach_selection(model, Selection(method="random", mlp_density=0.2, sparse_phases="decode"))
    sparse = decode(model, 2)
    assert torch.equal(dense[:, :6], sparse[:, :6])
    assert (dense[:, 6:] - sparse[:, 6:]).abs().max() > 1e-3


def test_removing_sparsity_restores_the_dense_model() -> None:
    model = tiny(LLAMA)
    dense = decode(model, 2)
    attach_selection(model, Selection(method="random", mlp_density=0.3, head_density=0.4, sparse_phases="all"))
    remove_sparsity(model)
    assert torch.equal(dense, decode(model, 2))


def test_padding_is_not_counted_in_densities() -> None:
    model = tiny(LLAMA)

    class LastRowsAreFull:
        lookahead = 0

        def select(self, hidden_states: Tensor, context: SelectionContext) -> ActiveSet:
            mask = torch.zeros(2, 5, 136, dtype=torch.bool)
            mask[:, :, :34] = True
            mask[1, 2:] = True  # padding of the second row
            return ActiveSet(mask.flatten(0, 1))

    stats = apply_sparsity(model, {(1, "mlp"): LastRowsAreFull()})
    with torch.inference_mode():
        model(torch.zeros(2, 5, dtype=torch.int64), num_tokens=torch.tensor([5, 2]))
    assert stats.of(1, "mlp").density == pytest.approx(0.25)
    assert stats.of(0, "mlp").density == 1.0


def test_a_bfloat16_model_stays_bfloat16_when_sparse() -> None:
    model = tiny(LLAMA, torch.bfloat16)
    attach_selection(model, Selection(method="oracle", mlp_density=0.5, head_density=0.5, sparse_phases="all"))
    assert decode(model, 2).dtype == torch.bfloat16


@given(st.floats(min_value=1e-6, max_value=1.0), st.integers(1, 4096))
def test_number_kept_is_rounded_half_up_and_never_zero(density: float, units: int) -> None:
    kept = num_kept(density, units)
    assert 1 <= kept <= units
    assert kept == 1 or abs(kept - density * units) <= 0.5 + 1e-9


@pytest.mark.parametrize("density", [0.0, -0.1, 1.01, float("nan")])
def test_density_outside_zero_to_one_is_refused(density: float) -> None:
    with pytest.raises(ValueError, match=r"\(0, 1\]"):
        num_kept(density, 10)


@settings(max_examples=50)
@given(st.integers(1, 9), st.integers(1, 40), st.integers(0, 10_000))
def test_a_list_holds_what_any_row_computes_in_order(rows: int, units: int, seed: int) -> None:
    mask = torch.rand(rows, units, generator=torch.Generator().manual_seed(seed)) < 0.4
    listed = ActiveSet(mask).listed()
    assert listed.indices.shape == (units,) and listed.indices.dtype == torch.int32
    assert listed.indices[: int(listed.length)].tolist() == mask.any(0).nonzero().flatten().tolist()
    assert sorted(listed.indices.tolist()) == list(range(units))
    assert listed.num_active.tolist() == mask.sum(-1).tolist()


def test_oracle_keeps_the_neurons_that_write_most() -> None:
    norms = torch.tensor([1.0, 10.0, 1.0, 0.0])
    activations = torch.tensor([[[3.0, -1.0, 2.0, 50.0]]])
    context = context_of(torch.zeros(1, 1, dtype=torch.int64), dense_output=lambda: activations)
    active = OracleSelector(norms, 0.5, 4).select(torch.zeros(1, 1, 2), context)
    assert active is not None and active.mask.tolist() == [[True, True, False, False]]


def random_mask(positions: list[list[int]], seed: int = 5, num_units: int = 50, **place: Any) -> Tensor:
    context = context_of(torch.tensor(positions), **place)
    active = RandomSelector(0.3, num_units, seed).select(torch.zeros(*context.positions.shape, 2), context)
    assert active is not None
    return active.mask.view(*context.positions.shape, num_units)


def test_random_units_depend_on_seed_layer_block_and_position_and_on_nothing_else() -> None:
    whole = random_mask([list(range(7))])
    assert whole.sum(-1).tolist() == [[15] * 7]
    assert torch.equal(random_mask([[3], [6], [0]])[:, 0], whole[0, [3, 6, 0]]), "one at a time, in any order"
    others = [random_mask([list(range(7))], 6), random_mask([list(range(1, 8))])]
    others += [random_mask([list(range(7))], layer_idx=1), random_mask([list(range(7))], block="attention")]
    assert all(not torch.equal(whole, other) for other in others)
    many = random_mask([list(range(2000))])
    assert (many.float().mean((0, 1)) - 0.3).abs().max() < 0.05, "no unit is preferred"
    assert len({tuple(row) for row in many[0].tolist()}) == 2000


def test_random_units_are_the_largest_elements_of_splitmix64_streams() -> None:
    golden, mask_64 = 0x9E3779B97F4A7C15, (1 << 64) - 1

    def element(seed: int, index: int) -> int:  # in plain integers, read as signed at the end
        bits = (seed + (index + 1) * golden) & mask_64
        bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 & mask_64
        bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB & mask_64
        return bits ^ (bits >> 31)

    for position in (0, 1, 4095):
        stream = element(mix_seed(5, 2 * 3 + 1), position)
        draws = [element(stream, unit) for unit in range(50)]
        signed = sorted(range(50), key=lambda unit: (draws[unit] ^ (1 << 63)) & mask_64)[-15:]
        found = random_mask([[position]], layer_idx=3)[0, 0].nonzero().flatten().tolist()
        assert found == sorted(signed)


def test_a_long_prefill_draws_the_same_random_units_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    positions = [list(range(9)), list(range(9))]
    whole = random_mask(positions)
    assert MAX_DRAWS["cpu"] >= 18 * 50
    monkeypatch.setitem(MAX_DRAWS, "cpu", 120)
    assert torch.equal(random_mask(positions), whole)


def test_density_is_one_where_nothing_ran() -> None:
    assert BlockStats().density == 1.0


def counted(stats: SparsityStats, mask: Tensor | None, valid: Tensor | None, batch: int = 2) -> None:
    rows = torch.zeros(batch, 3, dtype=torch.int64)
    active = None if mask is None else ActiveSet(mask)
    stats.count(context_of(rows, valid=valid), 4, "dense" if mask is None else "mask", active)


def test_each_batch_row_is_counted_for_those_who_ask() -> None:
    stats = SparsityStats()
    counted(stats, None, None)  # before anybody asks
    stats.row_counts = {"mlp": torch.zeros(2, 2, dtype=torch.int64)}
    mask = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1], [0, 1, 0, 1]]) > 0
    counted(stats, mask, None)
    assert stats.row_counts["mlp"].tolist() == [[6, 6], [12, 12]]
    counted(stats, mask, torch.tensor([[True, True, True], [True, False, False]]))
    assert stats.row_counts["mlp"].tolist() == [[12, 6], [24, 16]]
    counted(stats, None, torch.tensor([[True, True, False], [True, False, False]]))
    counted(stats, None, None)
    for _ in range(2):
        assert stats.row_counts["mlp"].tolist() == [[32, 22], [44, 32]]
    stats.row_counts = {}
    counted(stats, None, None)
    assert not stats.row_counts
    found = stats.of(0, "mlp")
    assert (int(found.active), int(found.total)) == (24 + 54 + 24, 24 + 76 + 24)
    assert stats.executions() == {"dense": 4, "gather": 0, "mask": 2}


def test_counting_dense_blocks_asks_nothing_of_the_device() -> None:
    stats = SparsityStats()
    stats.row_counts = {"mlp": torch.zeros(2, 2, dtype=torch.int64)}
    with torch.profiler.profile() as profile:
        for _ in range(3):
            counted(stats, None, None)
    made = [event.key for event in profile.key_averages() if event.key != "aten::zeros"]
    assert [key for key in made if key.startswith("aten::") and "zero" not in key and "empty" not in key] == []
    assert stats.of(0, "mlp").active.device is None and stats.row_counts["mlp"].tolist() == [[36, 36], [36, 36]]
