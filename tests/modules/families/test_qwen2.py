"""Qwen2: biases of queries, keys and values only; windows of the layers that its flags say."""

from typing import Any

import pytest

from modules.families.registry import from_hf_config
from tests.modules.families.parity import assert_parity
from tests.modules.tiny_kinds import LLAMA

QWEN2 = LLAMA | {"model_type": "qwen2", "rope_theta": 1e6}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"tie_word_embeddings": True},
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ],
)
def test_qwen2_computes_what_hugging_face_does(change: dict[str, Any]) -> None:
    assert_parity(QWEN2 | change)


@pytest.mark.parametrize(
    ("change", "windows"),
    [
        ({}, [None, None, None]),
        ({"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 0}, [None, None, None]),
        ({"use_sliding_window": True, "sliding_window": None}, [None, None, None]),
        ({"use_sliding_window": True, "sliding_window": 8}, [None, None, None]),  # from layer 28 on
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, [None, 8, 8]),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            [8, None, 8],
        ),
    ],
)
def test_layers_have_the_windows_that_the_flags_say(change: dict[str, Any], windows: list[int | None]) -> None:
    layers = from_hf_config(QWEN2 | change).layers
    assert [window and window.size for window in (layer.attention.window for layer in layers)] == windows


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["sliding_attention"] * 3}, "layer_types has 'sliding_attention', but use_sliding_window"),
        ({"layer_types": ["full_attention"]}, "layer_types lists 1 layers, num_hidden_layers is 3"),
        ({"layer_types": []}, "layer_types lists 0 layers, num_hidden_layers is 3"),
        ({"layer_types": ["chunked_attention"] * 3}, r"`layer_types\[0\]`: invalid enum value 'chunked_attention'"),
        ({"use_sliding_window": "yes"}, "`use_sliding_window`: expected `bool`, got `str`"),
    ],
)
def test_windows_that_do_not_go_together_are_an_error(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"config: {message}"):
        from_hf_config(QWEN2 | change)
