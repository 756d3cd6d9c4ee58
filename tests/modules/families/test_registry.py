"""The way back from a configuration to a config.json: families under their names, mixtures as what they are."""

import contextlib
import dataclasses
import itertools
import json
import re
from copy import deepcopy
from typing import Any

import pytest
from transformers import AutoConfig

from modules.config import FlatFields, ModelConfig, flat_fields
from modules.families.registry import from_hf_config, in_family, to_hf_config
from tests.modules.tiny_kinds import KINDS, LLAMA, LLAMA3_SCALING, OPT


def mixture(activation: str, positions: str, norm: str, **more: Any) -> ModelConfig:
    """One of the eight kinds of the ablation, tiny."""
    values: dict[str, Any] = {
        "model_type": "decoder", "vocab_size": 131, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "max_position_embeddings": 32,
        "norm": norm, "norm_eps": 1e-5, "activation": activation, "gated_mlp": activation == "silu",
        "positions": positions, "tie_word_embeddings": True, "word_embed_proj_dim": 32, "eos_token_ids": (0,),
    }  # fmt: skip
    return FlatFields(**{**values, **more}).config()


MIXTURES = list(itertools.product(("relu", "silu"), ("learned", "rotary"), ("layer", "rms")))


@pytest.mark.parametrize("hf_config", KINDS.values(), ids=KINDS.keys())
def test_a_family_is_written_as_it_is_read(hf_config: dict[str, Any]) -> None:
    config = from_hf_config(hf_config)
    written = json.loads(json.dumps(to_hf_config(config)))
    assert written["model_type"] == hf_config["model_type"]
    assert from_hf_config(written) == config == in_family(config)


@pytest.mark.parametrize(("activation", "positions", "norm"), MIXTURES)
def test_a_mixture_is_a_family_where_there_is_one(activation: str, positions: str, norm: str) -> None:
    config = in_family(mixture(activation, positions, norm))
    families = {("relu", "learned", "layer"): "opt", ("silu", "rotary", "rms"): "llama"}
    assert config.model_type == families.get((activation, positions, norm), "decoder")
    assert dataclasses.replace(config, model_type="decoder") == mixture(activation, positions, norm)
    written = json.loads(json.dumps(to_hf_config(config)))
    assert from_hf_config(written | {"torch_dtype": "float32"}) == config


@pytest.mark.parametrize(("spelt", "read"), [(7, (7,)), ([7, 3], (7, 3)), (None, ())])
def test_ends_of_text_of_a_mixture_are_spelt_as_in_a_family(spelt: Any, read: tuple[int, ...]) -> None:
    written = to_hf_config(mixture("relu", "rotary", "layer")) | {"eos_token_ids": spelt}
    assert from_hf_config(written).eos_token_ids == read


def test_rope_scaling_of_a_mixture_comes_back() -> None:
    scaled = KINDS["llama-llama3-scaling"]
    config = dataclasses.replace(from_hf_config(scaled), norm="layer", eos_token_ids=(2, 5))
    assert in_family(config).model_type == "decoder"
    assert from_hf_config(json.loads(json.dumps(to_hf_config(in_family(config))))) == in_family(config)


@pytest.mark.parametrize(
    ("hf_config", "change", "message"),
    [
        (LLAMA, {"norm": "layer"}, "model_type 'llama' cannot have norm='layer'; use model_type 'decoder'"),
        (OPT, {"norm_eps": 1e-6, "gated_mlp": True}, "'opt' cannot have norm_eps=1e-06, gated_mlp=True"),
    ],
)
def test_what_a_family_cannot_be_is_an_error(hf_config: dict[str, Any], change: dict[str, Any], message: str) -> None:
    flat = flat_fields(from_hf_config(hf_config))
    assert flat is not None
    with pytest.raises(ValueError, match=message):
        to_hf_config(dataclasses.replace(flat, **change).config())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gated_mlp": "no"}, "`gated_mlp`: expected `bool`, got `str`"),
        ({"norm_eps": "small"}, "`norm_eps`: expected `float`, got `str`"),
        ({"bos_token_id": 0.5}, r"`bos_token_id`: expected `int \\| null`, got `float`"),
        ({"eos_token_ids": "end"}, "`eos_token_ids`: expected `array`, got `str`"),
        ({"activation": ["relu"]}, r"activation \['relu'\] is not supported"),
        ({"rope_scaling": {"kind": "yarn", "factor": 2.0}}, "kind 'yarn' is not supported; supported: linear, llama3"),
        ({"rope_scaling": {"kind": "linear", "factor": "2"}}, "`rope_scaling.factor`: expected `float`, got `str`"),
        ({"rope_scaling": {"kind": "linear"}}, "`rope_scaling`: object missing required field `factor`"),
        ({"rope_scaling": {"kind": "linear", "factor": 2.0, "low": 1}}, "rope_scaling has an unknown key low"),
        ({"rope_scaling": "linear"}, r"`rope_scaling`: expected `object \\| null`, got `str`"),
        ({"norm": "batch"}, "norm 'batch' is not supported; supported: rms, layer"),
        ({"positions": "none"}, "positions 'none' is not supported; supported: rotary, learned"),
        ({"activation": "tanh"}, "activation 'tanh' is not supported"),
        ({"head_dim": 0}, "`head_dim`: expected `int` >= 1, got 0"),
        ({"gated_mlp": None}, "missing required field `gated_mlp`"),
    ],
)
def test_a_damaged_config_of_a_mixture_is_an_error(change: dict[str, Any], message: str) -> None:
    written = {**to_hf_config(mixture("relu", "rotary", "layer")), **change}
    with pytest.raises(ValueError, match=message):
        from_hf_config({name: value for name, value in written.items() if value is not None or name == "rope_scaling"})


@pytest.mark.parametrize(
    "hf_config", [LLAMA, OPT, to_hf_config(mixture("relu", "rotary", "layer"))], ids=lambda hf: hf["model_type"]
)
def test_a_value_of_a_wrong_type_size_or_depth_is_one_line_that_names_its_key(hf_config: dict[str, Any]) -> None:
    read = {name for name in hf_config if name not in ("architectures", "dropout", "model_type")}
    deep: Any = []
    for _ in range(500):
        deep = [deep]
    wrong: tuple[Any, ...] = (
        None,
        "x",
        True,
        -7,
        0.5,
        1e30,
        10**30,
        float("nan"),
        float("inf"),
        [None],
        [[2]],
        {},
        {"a": deep},
        deep,
    )
    for name in read:
        for value in wrong:
            with contextlib.suppress(ValueError):  # anything else is a fault of ours; some are right for some keys
                from_hf_config({**hf_config, name: value})
    sizes = [name for name in read if name.endswith(("_size", "_layers", "_heads", "_dim"))]
    for name in sizes:
        for value in ("x", True, 0, -7, 0.5, 1e30, 10**30, float("nan"), [2], {}):
            with pytest.raises(ValueError, match=f"^config: `{name}`: expected `int"):
                from_hf_config({**hf_config, name: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 1_000_000}, "`num_hidden_layers`: expected `int` <= 1000, got 1000000"),
        ({"eos_token_id": {}}, r"`eos_token_id`: expected `int | array | null`, got `object`"),
        ({"eos_token_id": [2, "x"]}, r"`eos_token_id[1]`: expected `int`, got `str`"),
        ({"rope_theta": -1.0}, "`rope_theta`: expected `float` > 0.0, got -1.0"),
        ({"rope_theta": float("nan")}, "`rope_theta`: expected `float`"),
        ({"rope_theta": 1e30}, "`rope_theta`: expected `float` <= 1000000000000.0, got 1e+30"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope type 'linear' needs factor"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "`rope_scaling.factor`: expected `float` > 0.0, got 0"),
        ({"rope_scaling": LLAMA3_SCALING | {"high_freq_factor": 1.0}}, "low_freq_factor=1.0 must be below high_freq"),
        ({"num_attention_heads": 7}, "hidden_size=48 is not a multiple of num_attention_heads=7"),
        ({"num_key_value_heads": 4}, "num_attention_heads=6 is not a multiple of num_key_value_heads=4"),
        ({"rms_norm_eps": "1e-5"}, "`rms_norm_eps`: expected `float`, got `str`"),
        ({"tie_word_embeddings": "no"}, "`tie_word_embeddings`: expected `bool | null`, got `str`"),
        ({"hidden_act": {}}, "`hidden_act`: expected `str`, got `object`"),
        ({"vocab_size": None}, "`vocab_size`: expected `int`, got `null`"),
        ({"rope_parameters": {"rope_theta": 5e5}}, "rope_theta is 10000.0, but 500000.0 in rope_parameters"),
        ({"rope_parameters": {}, "rope_scaling": LLAMA3_SCALING}, "rope_scaling differs from rope_parameters"),
        ({"rope_scaling": {"rope_theta": 777.0}}, "rope_theta is 10000.0, but 777.0 in rope_scaling; make them one"),
        ({"rope_scaling": {"factor": 4.0}}, "factor=4.0, but no rope_type; say linear or llama3"),
        ({"rope_scaling": {"type": "yarn", "rope_type": "linear", "factor": 2.0}}, "type is 'yarn', but 'linear' as"),
        ({"rope_scaling": {"rope_type": "default", "mrope_section": [2, 2]}}, "has an unknown key mrope_section"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "has an unknown key full_attention"),
        ({"rope_scaling": {"rope_type": "yarn", "beta_fast": 32}}, "rope type 'yarn' is not supported; supported:"),
        ({"is_causal": False}, "is_causal=false is not supported"),
        ({"attention_chunk_size": 4}, "attention_chunk_size=4 is not supported"),
        ({"sliding_window": 4}, "sliding_window=4 is not supported of model_type 'llama'; set it to null"),
        ({"layer_types": ["sliding_attention"] * 3}, "layer_types has 'sliding_attention', which is not supported of"),
    ],
)
def test_what_is_wrong_in_a_hugging_face_config_is_said(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        from_hf_config(LLAMA | change)


@pytest.mark.parametrize("hf_config", [LLAMA, OPT], ids=lambda hf: hf["model_type"])
def test_windows_of_a_family_that_has_none_may_be_said_to_be_none(hf_config: dict[str, Any]) -> None:
    harmless = {"sliding_window": 64, "attention_chunk_size": 64, "layer_types": ["full_attention"] * 3}
    assert from_hf_config(hf_config | harmless | {"is_causal": True}) == from_hf_config(hf_config)
    assert from_hf_config(hf_config | {"sliding_window": None, "layer_types": None}) == from_hf_config(hf_config)
    with pytest.raises(
        ValueError, match=f"sliding_window=63 is not supported of model_type '{hf_config['model_type']}'"
    ):
        from_hf_config(hf_config | {"sliding_window": 63})


def test_a_written_config_is_read_alike_by_older_and_newer_transformers() -> None:
    for kind in ("llama", "llama-llama3-scaling", "llama-linear-scaling", "llama-rope-parameters"):
        config = from_hf_config(KINDS[kind])
        written = json.loads(json.dumps(to_hf_config(config)))
        older = {name: value for name, value in written.items() if name != "rope_parameters"}
        newer = {name: value for name, value in written.items() if name not in ("rope_theta", "rope_scaling")}
        assert from_hf_config(older) == from_hf_config(newer) == config
        theirs = AutoConfig.for_model(**deepcopy(older)).rope_parameters
        assert theirs["rope_theta"] == written["rope_theta"]
        assert theirs == AutoConfig.for_model(**deepcopy(written)).rope_parameters
