"""Stores and trained predictors of tiny models, made once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data.activation_store import ActivationStore
from tests.modules.tiny_kinds import KINDS
from tests.sparse_predictor.tiny_stages import Trained, collect, model_folder, train

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"standin_rank": "0"},
    "standin": {"standin_rank": "4"},
    "topk": {"standin_rank": "4", "rule": "topk"},
    "lookahead": {"standin_rank": "4", "lookahead": 1},
    "neurons": {"standin_rank": "0", "units": "mlp"},
}


@pytest.fixture(scope="session")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ActivationStore]:
    found: dict[str, ActivationStore] = {}

    def store(kind: str) -> ActivationStore:
        if kind not in found:
            folder = tmp_path_factory.mktemp(kind)
            found[kind] = collect(model_folder(folder / "model", KINDS[kind]), folder / "store")
        return found[kind]

    return store


@pytest.fixture(scope="session")
def trained(stores: Callable[[str], ActivationStore]) -> Trained:
    """Predictor directory of a kind of model and a variant of training, made once."""

    def directory(variant: str = "standin", kind: str = "llama") -> Path:
        store = stores(kind)
        path = store.directory.parent / variant
        if not path.exists():
            train(store.directory.parent / "model", store, path, **VARIANTS[variant])
        return path

    return directory
