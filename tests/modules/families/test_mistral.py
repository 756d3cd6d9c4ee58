"""Mistral: no biases, and one sliding window for all layers, or none."""

from typing import Any

import pytest

from modules.families.registry import from_hf_config
from modules.specs import Sliding
from tests.modules.families.parity import assert_parity
from tests.modules.tiny_kinds import LLAMA

MISTRAL = LLAMA | {"model_type": "mistral", "head_dim": 16}


@pytest.mark.parametrize(
    ("written", "window"), [({}, 4096), ({"sliding_window": 7}, 7), ({"sliding_window": None}, None)]
)
def test_a_missing_window_is_hugging_faces_and_null_is_none(written: dict[str, Any], window: int | None) -> None:
    layers = from_hf_config(MISTRAL | written).layers
    assert {layer.attention.window for layer in layers} == {None if window is None else Sliding(size=window)}


def test_windows_of_single_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="config: layer_types is not supported"):
        from_hf_config(MISTRAL | {"layer_types": ["full_attention"] * 3})


@pytest.mark.parametrize("window", [1, 7, 40, None])
def test_mistral_computes_what_hugging_face_does(window: int | None) -> None:
    assert_parity(MISTRAL | {"sliding_window": window})
