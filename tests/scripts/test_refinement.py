"""Refinement on more text than the store holds: what is read of it, what is left out, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.activation_store import ActivationStore
from scripts.refinement import RefinementFlags, check_refinement, refinement_text
from scripts.train import Options, main
from sparse_predictor.training_data import TrainingRows
from tests.modules.tiny_kinds import LLAMA
from tests.sparse_predictor.tiny_stages import (
    collect,
    model_folder,
    one_error_line,
    ragged_documents,
    train,
    write_corpus,
)

DOCUMENTS = ragged_documents([40] * 30)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`model` and `store` of a tiny Llama."""
    folder = tmp_path_factory.mktemp("llama")
    collect(model_folder(folder / "model", LLAMA), folder / "store", DOCUMENTS)
    return folder


def text_of(folder: Path, **changes: Any) -> tuple[np.ndarray, TrainingRows]:
    flags = RefinementFlags(model=str(folder / "model"), quiet=True, **changes)
    loaded = flags.load()
    rows = TrainingRows(ActivationStore(folder / "store"), loaded.model, "mlp", lookahead=0, device=loaded.model.device)
    return refinement_text(flags, loaded, rows), rows


def test_text_of_the_store_comes_first_and_nothing_of_it_twice(folder: Path, tmp_path: Path) -> None:
    stored, rows = text_of(folder)
    assert stored.tolist() == rows.token_ids("train").tolist() and 0 < len(stored) < 30 * 40, "some validate"
    with pytest.raises(ValueError, match="holds nothing but what the store does"):
        text_of(folder, refine_corpus=str(folder / "store.jsonl"))
    # Longer than what the store kept of it, as short as one token, one that only begins alike, and another.
    longer, short, alike, other = [*DOCUMENTS[3], 5, 6], DOCUMENTS[4][:1], [*DOCUMENTS[5][:39], 7, 8], [9] * 20
    spec = write_corpus(tmp_path / "mixed.jsonl", [longer, short, alike, other])
    text, _ = text_of(folder, refine_corpus=spec)
    assert text.dtype == stored.dtype and text[: len(stored)].tolist() == stored.tolist()
    assert text[len(stored) :].tolist() == [*short, *alike, *other]


def test_a_short_document_of_the_store_does_not_stand_for_all_that_begin_so(tmp_path: Path) -> None:
    documents = [[7, 8], *ragged_documents([40] * 6)]
    collect(model_folder(tmp_path / "model", LLAMA), tmp_path / "store", documents)
    spec = write_corpus(tmp_path / "more.jsonl", [[7, 8], [7, 8, 9]])
    text, rows = text_of(tmp_path, refine_corpus=spec)
    assert text[len(rows.token_ids("train")) :].tolist() == [7, 8, 9]


def test_other_text_is_read_up_to_so_many_tokens(folder: Path, tmp_path: Path) -> None:
    others = ragged_documents([30] * 5, seed=9)
    spec = write_corpus(tmp_path / "more.jsonl", others)
    stored, _ = text_of(folder)
    text, _ = text_of(folder, refine_corpus=spec, refine_tokens=100)
    assert text[len(stored) :].tolist() == [token for ids in others for token in ids][:100]
    written, _ = text_of(folder, refine_corpus="self:3", refine_tokens=64)
    assert len(written) == len(stored) + 64


def test_predictors_say_on_how_many_tokens_they_were_refined(folder: Path, tmp_path: Path) -> None:
    spec = write_corpus(tmp_path / "more.jsonl", ragged_documents([30] * 40, seed=9))
    store = ActivationStore(folder / "store")
    options: dict[str, Any] = {"units": "mlp", "refine_steps": 2, "batch_size": 2}
    found = {}
    for name, more in (("alone", {}), ("more", {"refine_corpus": spec})):
        train(folder / "model", store, tmp_path / name, **options, **more)
        found[name] = json.loads((tmp_path / name / "metrics.json").read_text())["refinement"]["tokens"]
        manifest = json.loads((tmp_path / name / "manifest.json").read_text())
        assert manifest["training"]["refine_corpus"] == more.get("refine_corpus")
    assert found["more"] == found["alone"] + 40 * 30


def test_flags_that_do_not_go_together_are_one_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    given = ["--model", folder / "model", "--activations", folder / "store", "--output-dir", tmp_path / "p"]
    for more, message in (
        (["--refine-tokens", 5], "--refine-tokens: of which text? give --refine-corpus as well"),
        (["--refine-corpus", "self"], "--refine-corpus self has no end, or a far one: give --refine-tokens as well"),
        (["--refine-corpus", "c4"], "--refine-corpus c4 has no end, or a far one"),
        (["--refine-corpus", "self", "--refine-tokens", 9, "--units", "attention"], "only neurons are refined"),
        (["--refine-corpus", "self", "--refine-tokens", 9, "--refine-steps", 0], "only neurons are refined"),
        (["--refine-corpus", "self", "--refine-tokens", 0], "--refine-tokens must be at least 1, got 0"),
        (["--refine-corpus", tmp_path / "none.jsonl"], "none.jsonl"),
    ):
        assert message in one_error_line(main, Options, [*given, *more], capsys)
    assert not (tmp_path / "p" / "manifest.json").exists()
    check_refinement(RefinementFlags(model="m", refine_corpus="self", refine_tokens=8), refines=True)
