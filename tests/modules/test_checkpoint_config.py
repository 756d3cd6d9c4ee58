"""The way back from a configuration to a config.json: families under their names, mixtures as what they are."""

import dataclasses
import itertools
import json
from typing import Any

import pytest

from modules.checkpoint_config import in_family, to_hf_config
from modules.config import ModelConfig
from tests.modules.tiny_kinds import KINDS, LLAMA, OPT


def mixture(activation: str, positions: str, norm: str, **more: Any) -> ModelConfig:
    """One of the eight kinds of the ablation, tiny."""
    values: dict[str, Any] = {
        "model_type": "decoder", "vocab_size": 131, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "max_position_embeddings": 32,
        "norm": norm, "norm_eps": 1e-5, "activation": activation, "gated_mlp": activation == "silu",
        "positions": positions, "tie_word_embeddings": True, "word_embed_proj_dim": 32, "eos_token_ids": (0,),
    }  # fmt: skip
    return ModelConfig(**{**values, **more})


MIXTURES = list(itertools.product(("relu", "silu"), ("learned", "rotary"), ("layer", "rms")))


@pytest.mark.parametrize("hf_config", KINDS.values(), ids=KINDS.keys())
def test_a_family_is_written_as_it_is_read(hf_config: dict[str, Any]) -> None:
    config = ModelConfig.from_hf(hf_config)
    written = json.loads(json.dumps(to_hf_config(config)))
    assert written["model_type"] == hf_config["model_type"]
    assert ModelConfig.from_hf(written) == config == in_family(config)


@pytest.mark.parametrize(("activation", "positions", "norm"), MIXTURES)
def test_a_mixture_is_a_family_where_there_is_one(activation: str, positions: str, norm: str) -> None:
    config = in_family(mixture(activation, positions, norm))
    families = {("relu", "learned", "layer"): "opt", ("silu", "rotary", "rms"): "llama"}
    assert config.model_type == families.get((activation, positions, norm), "decoder")
    assert dataclasses.replace(config, model_type="decoder") == mixture(activation, positions, norm)
    written = json.loads(json.dumps(to_hf_config(config)))
    assert ModelConfig.from_hf(written | {"torch_dtype": "float32"}) == config


@pytest.mark.parametrize(("spelt", "read"), [(7, (7,)), ([7, 3], (7, 3)), (None, ())])
def test_ends_of_text_of_a_mixture_are_spelt_as_in_a_family(spelt: Any, read: tuple[int, ...]) -> None:
    written = to_hf_config(mixture("relu", "rotary", "layer")) | {"eos_token_ids": spelt}
    assert ModelConfig.from_hf(written).eos_token_ids == read


def test_rope_scaling_of_a_mixture_comes_back() -> None:
    scaled = KINDS["llama-llama3-scaling"]
    config = dataclasses.replace(ModelConfig.from_hf(scaled), norm="layer", eos_token_ids=(2, 5))
    assert in_family(config).model_type == "decoder"
    assert ModelConfig.from_hf(json.loads(json.dumps(to_hf_config(in_family(config))))) == in_family(config)


@pytest.mark.parametrize(
    ("hf_config", "change", "message"),
    [
        (LLAMA, {"norm": "layer"}, "model_type 'llama' cannot have norm='layer'; use model_type 'decoder'"),
        (OPT, {"norm_eps": 1e-6, "gated_mlp": True}, "'opt' cannot have norm_eps=1e-06, gated_mlp=True"),
    ],
)
def test_what_a_family_cannot_be_is_an_error(hf_config: dict[str, Any], change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        to_hf_config(dataclasses.replace(ModelConfig.from_hf(hf_config), **change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gated_mlp": "no"}, "gated_mlp must be true or false, got 'no'"),
        ({"norm_eps": "small"}, "norm_eps must be a number, got 'small'"),
        ({"bos_token_id": 0.5}, "bos_token_id must be an integer or null, got 0.5"),
        ({"eos_token_ids": "end"}, "eos_token_ids must be a list of integers, got"),
        ({"activation": ["relu"]}, r"activation \['relu'\] is not supported"),
        ({"rope_scaling": {"kind": "yarn", "factor": 2.0}}, "kind 'yarn' is not supported; supported: linear, llama3"),
        ({"rope_scaling": {"kind": "linear", "factor": "2"}}, "factor must be a number, got '2'"),
        ({"rope_scaling": {"kind": "linear", "scale": 2.0}}, "rope_scaling must be null or have kind, factor and noth"),
        ({"rope_scaling": {"kind": "linear", "factor": 2.0, "low": 1}}, "nothing else but low_freq_factor, high_freq_"),
        ({"rope_scaling": "linear"}, "rope_scaling must be null or have kind, factor"),
        ({"norm": "batch"}, "norm 'batch' is not supported; supported: rms, layer"),
        ({"positions": "none"}, "positions 'none' is not supported; supported: rotary, learned"),
        ({"activation": "tanh"}, "activation 'tanh' is not supported"),
        ({"head_dim": 0}, "head_dim must be a positive integer, got 0"),
        ({"gated_mlp": None}, "missing gated_mlp"),
    ],
)
def test_a_damaged_config_of_a_mixture_is_an_error(change: dict[str, Any], message: str) -> None:
    written = {**to_hf_config(mixture("relu", "rotary", "layer")), **change}
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf(
            {name: value for name, value in written.items() if value is not None or name == "rope_scaling"}
        )
