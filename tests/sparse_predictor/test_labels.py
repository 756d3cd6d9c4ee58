"""What counts as active, against the definitions written out."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from modules.families.registry import from_hf_config
from modules.sparsity import num_kept
from sparse_predictor.labels import LabelDefinition, default_definition, true_active
from tests.modules.tiny_kinds import KINDS, LLAMA, OPT

ROWS = st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=24)


@given(ROWS)
def test_positive_means_greater_than_zero(values: list[float]) -> None:
    active = true_active(torch.tensor([values]), torch.ones(len(values)), LabelDefinition(kind="positive"))
    assert active.tolist() == [[value > 0 for value in values]]


@given(st.integers(1, 30), st.floats(0.01, 1.0), st.integers(0, 999))
def test_top_is_the_stated_number_of_neurons_that_write_most(units: int, share: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    activations = torch.randn(3, units, generator=generator)
    norms = torch.rand(units, generator=generator) + 0.1
    active = true_active(activations, norms, LabelDefinition(kind="top", share=share))
    for row, chosen in zip(activations.tolist(), active.tolist(), strict=True):
        sizes = [abs(value) * norm for value, norm in zip(row, norms.tolist(), strict=True)]
        ranked = sorted(range(units), key=lambda j: -sizes[j])
        assert {j for j in range(units) if chosen[j]} == set(ranked[: num_kept(share, units)])


@given(st.integers(1, 30), st.floats(0.05, 0.99), st.integers(0, 999))
def test_energy_is_the_smallest_set_that_holds_the_share(units: int, share: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    activations = torch.randn(1, units, generator=generator)
    norms = torch.rand(units, generator=generator) + 0.1
    active = true_active(activations, norms, LabelDefinition(kind="energy", share=share))[0]
    energy = (activations[0].double() * norms.double()) ** 2
    held = energy.sort(descending=True).values.cumsum(0) / energy.sum()
    smallest = next(count for count in range(1, units + 1) if held[count - 1] >= share - 1e-6)
    assert int(active.sum()) == smallest
    assert energy[active].min() >= energy[~active].max() if smallest < units else bool(active.all())


def test_norms_decide_between_equal_activations() -> None:
    active = true_active(
        torch.tensor([[1.0, -1.0, 1.0]]), torch.tensor([1.0, 3.0, 2.0]), LabelDefinition(kind="top", share=2 / 3)
    )
    assert active.tolist() == [[False, True, True]]


@pytest.mark.parametrize("share", [0.0, -0.5, 1.5, float("nan")])
def test_shares_outside_zero_to_one_are_refused(share: float) -> None:
    with pytest.raises(ValueError, match=r"\(0, 1\]"):
        LabelDefinition(kind="top", share=share)


def test_only_relu_without_a_gate_has_exact_zeros() -> None:
    assert default_definition(from_hf_config(OPT), 0.3) == LabelDefinition(kind="positive", share=0.3)
    for hf in (LLAMA, KINDS["opt-gelu"], LLAMA | {"hidden_act": "relu"}):
        assert default_definition(from_hf_config(hf), 0.3) == LabelDefinition(kind="top", share=0.3)
