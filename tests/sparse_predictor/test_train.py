"""Stage A: fitting scores to stored activations, resuming, refusing what is not finite."""

import io
import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loguru import logger

from data.activation_store import ActivationStore, ActivationStoreWriter
from data.store_manifest import StoreLayout
from modules.decoder import Decoder
from modules.feed_forward import unit_norms
from modules.sparsity import Block
from sparse_predictor.labels import LabelDefinition
from sparse_predictor.predictor import PredictorStack
from sparse_predictor.train import FitOptions, fit_scores, validation_metrics
from sparse_predictor.training_data import TrainingRows
from tests.modules.tiny_kinds import LLAMA
from tests.modules.tiny_models import tiny_decoder

TOP_HALF = LabelDefinition(kind="top", share=0.5)
OPTIONS = FitOptions(
    loss="bce", label=TOP_HALF, initialisation="random", steps=60, batch_rows=256, learning_rate=0.02, seed=0
)
TEACHER_RANK = 4


@pytest.fixture(scope="module")
def model() -> Decoder:
    return tiny_decoder(LLAMA)


@pytest.fixture(scope="module")
def store(model: Decoder, tmp_path_factory: pytest.TempPathFactory) -> ActivationStore:
    """Sizes of neurons and heads follow a low-rank map of the normed input, so that a predictor can find them."""
    config = model.config
    layout = StoreLayout(
        model="planted", config_hash=config.config_hash(), dtype="float32", layers=(0, 1, 2), hidden_size=48,
        intermediate_size=80, num_attention_heads=6,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)

    def planted(layer: int, block: Block, x: torch.Tensor, units: int) -> torch.Tensor:
        teacher = torch.Generator().manual_seed(10 * layer + (block == "mlp"))
        second, first = (
            torch.randn(units, TEACHER_RANK, generator=teacher),
            torch.randn(TEACHER_RANK, 48, generator=teacher),
        )
        with torch.no_grad():
            normed = model.norm_before(layer, block)(x.half().float())  # type: ignore[misc]
        return torch.exp(0.03 * normed @ first.T @ second.T)

    directory = tmp_path_factory.mktemp("planted")
    with ActivationStoreWriter(directory, layout) as writer:
        for document in range(20):
            rows: dict[int, dict[str, np.ndarray]] = {}
            for layer in range(3):
                mlp_x, att_x = torch.randn(2, 128, 48, generator=generator)
                sign = torch.randn(128, 80, generator=generator).sign()
                neurons = planted(layer, "mlp", mlp_x, 80) * sign / unit_norms(model.mlp(layer))
                heads = planted(layer, "attention", att_x, 2).repeat_interleave(3, 1)
                arrays = {"mlp_x": mlp_x, "mlp_label": neurons, "att_x": att_x, "att_label": heads}
                rows[layer] = {name: array.detach().numpy().astype(np.float16) for name, array in arrays.items()}
            writer.append_document(str(document), list(range(128)), rows)
    return ActivationStore(directory)


def rows_of(store: ActivationStore, model: Decoder, block: Block = "mlp", lookahead: int = 0) -> TrainingRows:
    return TrainingRows(store, model, block, lookahead=lookahead, device=torch.device("cpu"))


def new_stack(rank: int = 8, units: int = 80) -> PredictorStack:
    return PredictorStack(3, 48, units, rank, densities=(0.5,), seed=3)


@pytest.mark.parametrize(
    ("loss", "initialisation", "rule", "least"),
    [
        ("bce", "random", "topk", 0.9),
        ("energy_bce", "closed_form", "threshold", 0.9),
        ("magnitude", "closed_form", "topk", 0.85),  # a linear map cannot quite follow the teacher's exponential
    ],
)
def test_a_planted_low_rank_teacher_is_found_on_unseen_documents(
    store: ActivationStore, model: Decoder, tmp_path: Path, loss: str, initialisation: str, rule: Any, least: float
) -> None:
    rows, stack = rows_of(store, model), new_stack()
    untrained = validation_metrics(stack, rows, TOP_HALF, [0.5], rule)["at"]["0.5"]
    assert max(untrained["recall"]) < 0.62
    peak = 0.02 if loss == "bce" else 0.002  # the closed form starts near the optimum
    options = replace(OPTIONS, loss=loss, initialisation=initialisation, steps=150, learning_rate=peak)
    losses = fit_scores(stack, rows, options, state_path=tmp_path / "state.pt")
    assert len(losses) == 3
    metrics = validation_metrics(stack, rows, TOP_HALF, [0.5], rule)
    found = metrics["at"]["0.5"]
    assert metrics["rows"] == 256 and metrics["layers"] == [0, 1, 2], "the two validation documents"
    assert min(found["recall"]) >= least and min(found["precision"]) >= 0.85
    assert found["density"] == pytest.approx([0.5] * 3, abs=0.02)


def test_heads_are_found_by_the_same_loop(store: ActivationStore, model: Decoder, tmp_path: Path) -> None:
    rows, stack = rows_of(store, model, "attention"), PredictorStack(3, 48, 2, 2, seed=3)
    fit_scores(stack, rows, replace(OPTIONS, steps=150), state_path=tmp_path / "state.pt")
    found = validation_metrics(stack, rows, TOP_HALF, [0.5], "topk")["at"]["0.5"]
    assert min(found["recall"]) >= 0.9 and found["density"] == [0.5] * 3


def test_choosing_everything_shows_in_precision_and_density(store: ActivationStore, model: Decoder) -> None:
    stack = new_stack()
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.zero_()  # all scores alike: a threshold keeps all
    found = validation_metrics(stack, rows_of(store, model), TOP_HALF, [0.5], "threshold")["at"]["0.5"]
    assert (found["recall"], found["precision"], found["density"]) == ([1.0] * 3, [0.5] * 3, [1.0] * 3)


class Killed(Exception):
    pass


def kill_at(step: int) -> Any:
    def on_step(current: int, loss: float) -> None:
        if current == step:
            raise Killed

    return on_step


@pytest.mark.parametrize(("loss", "initialisation"), [("bce", "random"), ("energy_bce", "closed_form")])
def test_an_interrupted_fit_resumes_to_the_same_bits(
    store: ActivationStore, model: Decoder, tmp_path: Path, loss: str, initialisation: str
) -> None:
    options = replace(OPTIONS, loss=loss, initialisation=initialisation, steps=12, batch_rows=64)
    rows = rows_of(store, model)
    whole, parts = new_stack(), new_stack()
    expected = fit_scores(whole, rows, options, state_path=tmp_path / "whole.pt", save_every=4)
    with pytest.raises(Killed):
        fit_scores(parts, rows, options, state_path=tmp_path / "p.pt", save_every=4, on_step=kill_at(9))
    seen: list[int] = []
    resumed = new_stack()
    found = fit_scores(
        resumed, rows, options, state_path=tmp_path / "p.pt", save_every=4, on_step=lambda step, loss: seen.append(step)
    )
    assert seen == [8, 9, 10, 11] and found == expected
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name]), name


def test_a_state_of_another_training_is_not_continued(store: ActivationStore, model: Decoder, tmp_path: Path) -> None:
    options = replace(OPTIONS, steps=6, batch_rows=64)
    with pytest.raises(Killed):
        fit_scores(
            new_stack(), rows_of(store, model), options, state_path=tmp_path / "s.pt", save_every=2, on_step=kill_at(4)
        )
    others: list[tuple[PredictorStack, TrainingRows, FitOptions]] = [
        (new_stack(), rows_of(store, model), replace(options, learning_rate=0.01)),
        (new_stack(), rows_of(store, model, lookahead=1), options),
        (new_stack(rank=16), rows_of(store, model), options),
        (PredictorStack(3, 48, 80, 8, densities=(0.5, 0.3), standin_rank=4, seed=3), rows_of(store, model), options),
    ]
    for place, (stack, rows, changed) in enumerate(others):
        state = tmp_path / f"{place}.pt"
        state.write_bytes((tmp_path / "s.pt").read_bytes())
        seen: list[int] = []
        fit_scores(stack, rows, changed, state_path=state, on_step=lambda step, loss, seen=seen: seen.append(step))
        assert seen == list(range(6)), place


def changed_byte(content: bytes) -> bytes:
    return content[:700] + bytes([content[700] ^ 1]) + content[701:]


def other_contents(content: bytes) -> bytes:
    file = io.BytesIO()
    torch.save({"epoch": 3}, file)
    return file.getvalue()


def without_origin(content: bytes) -> bytes:
    file = io.BytesIO()
    torch.save({**torch.load(io.BytesIO(content), weights_only=True), "fingerprint": None}, file)
    return file.getvalue()


def other_options(content: bytes) -> bytes:
    file = io.BytesIO()
    state = torch.load(io.BytesIO(content), weights_only=True)
    torch.save({**state, "fingerprint": {**state["fingerprint"], "seed": 99}}, file)
    return file.getvalue()


@pytest.mark.parametrize(
    ("change", "suffix", "told"),
    [
        (lambda content: b"", "damaged", "training starts from the beginning"),
        (lambda content: bytes(len(content)), "damaged", "training starts from the beginning"),
        (lambda content: content[: len(content) // 2], "damaged", "training starts from the beginning"),
        (changed_byte, "damaged", "damaged"),
        (other_contents, "damaged", "it does not hold stack, optimizer, done, losses"),
        (without_origin, "damaged", "it does not say which training it is of"),
        (other_options, "other", "the state of another training .seed differ"),
    ],
)
def test_a_spoiled_state_is_named_and_set_aside_and_training_starts_over(
    store: ActivationStore, model: Decoder, tmp_path: Path, change: Callable[[bytes], bytes], suffix: str, told: str
) -> None:
    options, path = replace(OPTIONS, steps=6, batch_rows=64), tmp_path / "s.pt"
    fit_scores(new_stack(), rows_of(store, model), options, state_path=path)
    spoiled = change(path.read_bytes())
    path.write_bytes(spoiled)
    seen: list[int] = []
    said: list[str] = []
    sink = logger.add(said.append, format="{message}")
    on_step = lambda step, loss: seen.append(step)  # noqa: E731
    fit_scores(new_stack(), rows_of(store, model), options, state_path=path, on_step=on_step)
    logger.remove(sink)
    assert seen == list(range(6)) and len(said) == 1
    assert re.search(rf"s\.pt: .*{told}", said[0]) and f"it is now s.pt.{suffix}" in said[0]
    assert (tmp_path / f"s.pt.{suffix}").read_bytes() == spoiled


def test_a_state_is_on_the_disk_before_it_replaces_the_one_before(
    store: ActivationStore, model: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, rename = os.fsync, os.replace
    monkeypatch.setattr("data.files.os.fsync", lambda descriptor: (events.append("fsync"), fsync(descriptor)))
    monkeypatch.setattr("data.files.os.replace", lambda *paths: (events.append("replace"), rename(*paths)))
    options = replace(OPTIONS, steps=1, batch_rows=64)
    fit_scores(new_stack(), rows_of(store, model), options, state_path=tmp_path / "s.pt")
    assert events[:2] == ["fsync", "replace"] and events[2:] == ["fsync"], "then the folder"


@pytest.mark.parametrize("initialisation", ["closed_form", "random"])
@pytest.mark.parametrize("name", ["mlp_x", "mlp_label"])
def test_activations_that_are_not_finite_are_refused_with_their_layer(
    store: ActivationStore, model: Decoder, tmp_path: Path, initialisation: str, name: str
) -> None:
    directory = tmp_path / "store"
    directory.mkdir()
    for path in store.directory.iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    spoiled = np.memmap(directory / f"{name}_1.mmap", np.float16, "r+").reshape(store.num_rows, -1)
    start, stop = store.row_ranges("train")[0]
    spoiled[start:stop, 5] = np.nan
    spoiled.flush()
    manifest = json.loads((directory / "manifest.json").read_text())
    for name in ("sums", "samples"):  # an older store, which opens
        del manifest[name]
    (directory / "manifest.json").write_text(json.dumps(manifest))
    options = replace(OPTIONS, loss="energy_bce", initialisation=initialisation)
    with pytest.raises(ValueError, match=r"layers? \[?1\b.*not finite|not finite.*layers? \[?1\b"):
        fit_scores(new_stack(), rows_of(ActivationStore(directory), model), options, state_path=tmp_path / "s.pt")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss": "hinge"}, "--loss 'hinge': choose from"),
        ({"steps": -1}, "--steps must be at least 0"),
        ({"batch_rows": 0}, "--batch-rows at least 1"),
        ({"learning_rate": 0.0}, "--learning-rate positive"),
    ],
)
def test_impossible_fits_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(OPTIONS, **change)
