"""Tiny stores with recognisable contents, and a tokenizer of single characters."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.store_manifest import StoreLayout


@pytest.fixture(scope="session")
def make_layout() -> Callable[..., StoreLayout]:
    """A layout of two layers with an intermediate size that fills no whole number of bytes."""

    def make(**changes: Any) -> StoreLayout:
        options: dict[str, Any] = {
            "model": "tiny",
            "config_hash": "0123abcd",
            "dtype": "float32",
            "layers": (1, 10),
            "hidden_size": 5,
            "intermediate_size": 11,
            "num_attention_heads": 3,
            "definitions": {"corpus": "self:0"},
        }
        return StoreLayout(**{**options, **changes})

    return make


@pytest.fixture(scope="session")
def make_document() -> Callable[..., tuple[np.ndarray, dict[int, dict[str, np.ndarray]]]]:
    """Token ids and activations of one document: always the same for the same id."""

    def make(layout: StoreLayout, document_id: str, num_tokens: int) -> tuple[np.ndarray, dict[int, Any]]:
        generator = np.random.default_rng(zlib.crc32(document_id.encode()))
        token_ids = generator.integers(1, 1000, num_tokens, dtype=np.int32)
        activations: dict[int, dict[str, np.ndarray]] = {}
        for layer_idx in layout.layers:
            arrays: dict[str, np.ndarray] = {}
            for kind, file in layout.kinds.items():
                width = layout.intermediate_size if kind == "mlp_label" else file.width
                arrays[kind] = generator.standard_normal((num_tokens, width)).astype(np.float16)
                if file.dtype == "uint8":
                    arrays[kind] = arrays[kind] > 0
            activations[layer_idx] = arrays
        return token_ids, activations

    return make


@pytest.fixture(scope="session")
def read_folder() -> Callable[[Path], dict[str, bytes]]:
    """All files of a folder with their bytes."""
    return lambda folder: {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def without_fsync() -> Iterator[None]:
    """Spare the disk in tests that write hundreds of stores and kill no process."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("data.store_files.os.fsync", lambda descriptor: None)
        yield


class CharacterTokenizer:
    """One token a character (its code point), in special tokens of its own, as HF tokenizers do it."""

    def __init__(self, prefix: tuple[int, ...] = (), suffix: tuple[int, ...] = ()) -> None:
        self.prefix, self.suffix = prefix, suffix

    def __call__(self, text: str, add_special_tokens: bool = True, verbose: bool = True) -> dict[str, list[int]]:
        token_ids = [ord(character) for character in text]
        if add_special_tokens:
            token_ids = [*self.prefix, *token_ids, *self.suffix]
        return {"input_ids": token_ids}


@pytest.fixture(scope="session")
def make_tokenizer() -> type[CharacterTokenizer]:
    return CharacterTokenizer
