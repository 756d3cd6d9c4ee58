"""Seam 1: sets, the gathered path, the mask it must equal, and the counters."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from modules.config import ModelConfig
from modules.decoder import Decoder
from modules.sparsity import (
    BLOCKS,
    ActiveSet,
    BlockStats,
    OracleSelector,
    RandomSelector,
    SelectionContext,
    num_kept,
)
from sparse_predictor.selection import Selection, apply_sparsity, attach_selection, remove_sparsity

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
    model = Decoder(ModelConfig.from_hf(hf)).eval()
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
    assert stats.of(1, "mlp", 136).density == pytest.approx(0.25)
    assert stats.of(0, "mlp", 136).density == 1.0


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
def test_active_indices_list_the_mask_in_order(rows: int, units: int, seed: int) -> None:
    mask = torch.rand(rows, units, generator=torch.Generator().manual_seed(seed)) < 0.4
    active = ActiveSet(mask)
    assert active.active_indices.shape == (rows, units) and active.active_indices.dtype == torch.int32
    for row in range(rows):
        listed = active.active_indices[row, : active.num_active[row]].tolist()
        assert listed == mask[row].nonzero().flatten().tolist()
        assert sorted(active.active_indices[row].tolist()) == list(range(units))


def test_oracle_keeps_the_neurons_that_write_most() -> None:
    norms = torch.tensor([1.0, 10.0, 1.0, 0.0])
    activations = torch.tensor([[[3.0, -1.0, 2.0, 50.0]]])
    context = SelectionContext(
        layer_idx=0,
        block="mlp",
        phase="decode",
        valid=None,
        earlier_inputs={},
        dense_output=lambda: activations,
    )
    active = OracleSelector(norms, 0.5, 4).select(torch.zeros(1, 1, 2), context)
    assert active is not None and active.mask.tolist() == [[True, True, False, False]]


def test_random_selection_repeats_with_its_seed() -> None:
    context = SelectionContext(
        layer_idx=0,
        block="mlp",
        phase="decode",
        valid=None,
        earlier_inputs={},
        dense_output=lambda: torch.zeros(0),
    )
    states = torch.zeros(1, 7, 2)
    draws = [RandomSelector(0.3, 50, seed).select(states, context).mask for seed in (5, 5, 6)]
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])
    assert draws[0].sum(-1).tolist() == [15] * 7


def test_density_is_one_where_nothing_ran() -> None:
    assert BlockStats(12).density == 1.0
