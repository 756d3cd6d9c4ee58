"""The hash that names a configuration: as it is now, and as the first version wrote it into stores and predictors."""

import dataclasses
from typing import Any

import pytest

from modules.config import ModelConfig
from modules.families.registry import from_hf_config
from modules.specs import Dense, Grouped, LayerSpec, Rope, Sliding
from tests.modules.families.test_registry import mixture
from tests.modules.tiny_kinds import KINDS

CONFIGS = {name: from_hf_config(hf_config) for name, hf_config in KINDS.items()}
CONFIGS["mixture"] = mixture("relu", "rotary", "rms")


@pytest.mark.parametrize(
    ("kind", "version_1", "version_2"),
    [
        ("llama", "3c411cc5e7f9", "0c8922eb7526"),
        ("llama-biases", "051cd2e1b56d", "13ff11de6ecb"),
        ("llama-llama3-scaling", "3a71097dd5c9", "b6b6ab2c7f8e"),
        ("opt-post-norm-projected", "210b8165eb0d", "3fb648d23e13"),
        ("mixture", "ea15079627fe", "5c1ba3bdb5b5"),
    ],
)
def test_hashes_that_are_on_disks_stay_what_they_are(kind: str, version_1: str, version_2: str) -> None:
    config = CONFIGS[kind]
    assert (config.version_1_hash(), config.config_hash()) == (version_1, version_2)
    assert config.has_hash(version_1) and config.has_hash(version_2) and not config.has_hash("0" * 12)


def test_configurations_that_differ_have_different_hashes() -> None:
    # Two of them say one thing in two ways.
    told = {config: name for name, config in CONFIGS.items()}
    for hash_of in (ModelConfig.config_hash, ModelConfig.version_1_hash):
        assert len({hash_of(config) for config in told}) == len(told)


def test_what_version_1_could_not_say_has_no_hash_of_it() -> None:
    config = CONFIGS["llama"]
    for change in ({"qkv_bias": True}, {"window": Sliding(size=8)}):
        attention = dataclasses.replace(config.layers[1].attention, **change)
        layers = (config.layers[0], dataclasses.replace(config.layers[1], attention=attention), config.layers[2])
        other = dataclasses.replace(config, layers=layers)
        assert other.version_1_hash() is None and not other.has_hash("3c411cc5e7f9")
        assert other.config_hash() != config.config_hash()


def test_a_new_field_with_a_default_changes_no_hash() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Wider(Grouped):
        scale: float | None = None

    Wider.__name__ = "Grouped"
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rope": Rope()}

    def config_of(attention: Grouped) -> ModelConfig:
        layer = LayerSpec(attention=attention, feed_forward=Dense(intermediate_size=8, gated=True, activation="silu"))
        return dataclasses.replace(CONFIGS["llama"], layers=(layer,) * 2)

    assert config_of(Wider(**heads)).config_hash() == config_of(Grouped(**heads)).config_hash()
    assert config_of(Wider(**heads, scale=0.5)).config_hash() != config_of(Grouped(**heads)).config_hash()
