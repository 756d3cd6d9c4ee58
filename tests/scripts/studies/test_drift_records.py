"""Drift measures as records: those of Hugging Face's own states, of a model and of a store."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loguru import logger
from transformers import PreTrainedModel

from analysis.results import Record
from modules.checkpoint.load import load_model
from scripts.studies.drift import Options, main
from scripts.studies.drift_records import DriftSettings, drift_records
from tests.modules.tiny_kinds import KINDS, LLAMA, random_tokens
from tests.modules.tiny_models import save_hf_folder, tiny_decoder
from tests.sparse_predictor.tiny_stages import collect, model_folder, ragged_documents

LABELS = {"model": "tiny", "dtype": "float64", "seed": 0}
DRIFT = DriftSettings(parts=("drift",))
PAIR = ((1, 3), (1, 1), (3, 3))  # states after attention in layers 0 and 1: with each other and with themselves


def states_of_hugging_face(model: PreTrainedModel, windows: torch.Tensor) -> np.ndarray:
    """[S, W, T, D]: the stream before and between the half-blocks, and after the last one."""
    config, states = model.config, []
    is_llama, post_norm = config.model_type == "llama", not getattr(config, "do_layer_norm_before", True)
    decoder = model.model if is_llama else model.model.decoder

    def keep(module: torch.nn.Module, args: Any, kwargs: Any = None) -> None:
        states.append((args[0] if args else kwargs["hidden_states"]).detach().reshape(*windows.shape, -1).numpy())

    for layer in decoder.layers:
        if is_llama:
            points = (layer.input_layernorm, layer.post_attention_layernorm)
        elif post_norm:
            points = (layer, layer.fc1)
        else:
            points = (layer.self_attn_layer_norm, layer.final_layer_norm)
        for point in points:
            point.register_forward_pre_hook(keep, with_kwargs=True)
    final = decoder.norm if is_llama else decoder.final_layer_norm
    if post_norm:
        decoder.layers[-1].final_layer_norm.register_forward_hook(lambda module, args, output: keep(module, (output,)))
    else:
        final.register_forward_pre_hook(keep, with_kwargs=True)
    with torch.no_grad():
        model.double()(windows)
    return np.stack(states)


def one(records: list[Record], metric: str, **labels: Any) -> Record:
    (found,) = [
        record
        for record in records
        if record["metric"] == metric and all(record["labels"].get(name) == value for name, value in labels.items())
    ]
    return found


def cosine(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return (x * y).sum(-1) / np.linalg.norm(x, axis=-1) / np.linalg.norm(y, axis=-1)


def hsic(x: np.ndarray, y: np.ndarray) -> float:
    """Unbiased, of the rows after the first: Song et al. 2012, equation 4."""
    k, m = (rows[1:] @ rows[1:].T for rows in (x, y))
    for products in (k, m):
        np.fill_diagonal(products, 0)
    n = len(k)
    return (k * m).sum() + k.sum() * m.sum() / ((n - 1) * (n - 2)) - 2 / (n - 2) * (k.sum(0) * m.sum(0)).sum()


@pytest.mark.parametrize("kind", ["llama", "opt", "opt-post-norm-projected"])
def test_measures_are_those_of_a_few_lines_on_hugging_faces_states(kind: str, tmp_path: Path) -> None:
    theirs = save_hf_folder(tmp_path / "model", KINDS[kind])
    model, windows = load_model(tmp_path / "model", dtype=torch.float64), random_tokens(9, 12)
    records = drift_records(model, windows, windows, labels=LABELS, settings=DRIFT, batch_size=4)
    states = states_of_hugging_face(theirs, windows)
    assert len(states) == 7
    ordinary = states[:, :, 1:].reshape(7, -1, 48)
    standardised = (states - ordinary.mean(1)[:, None, None]) / ordinary.std(1)[:, None, None]
    for variant, chosen in (("raw", states), ("standardised", standardised)):
        for point, first in (("block_input", 0), ("after_attention", 1), ("after_mlp", 2)):
            for lookahead in (1, 2):
                pairs = [(2 * layer + first, 2 * (layer + lookahead) + first) for layer in range(3 - lookahead)]
                expected = [cosine(chosen[a], chosen[b])[:, 1:].mean() for a, b in pairs]
                labels = {"point": point, "lookahead": lookahead, "variant": variant, "tokens": "ordinary"}
                found = one(records, "cosine", **labels)
                assert found["per_layer"] == pytest.approx(
                    [*expected, *[None] * lookahead], abs=2e-5 if kind == "llama" else 1e-9
                )
                assert found["interval"][0] < found["value"] < found["interval"][1]
    steps = np.linalg.norm(states[1:] - states[:-1], axis=-1) / np.linalg.norm(states[:-1], axis=-1)
    for point, first in (("after_attention", 0), ("after_mlp", 1)):
        found = one(records, "relative_update", point=point, tokens="all")
        assert found["per_layer"] == pytest.approx(steps[first::2].mean((1, 2)), abs=1e-4)
    # Each window is a minibatch here: nine of them are not more than one a set.
    cross, own, other = (sum(hsic(x, y) for x, y in zip(states[a], states[b], strict=True)) for a, b in PAIR)
    found = one(records, "cka", point="after_attention", lookahead=1, variant="raw")
    assert found["per_layer"][0] == pytest.approx(cross / np.sqrt(own * other), abs=1e-4)
    assert {record["labels"]["num_tokens"] for record in records} == {108}


def test_a_store_gives_the_numbers_of_the_model_that_it_was_collected_from(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", LLAMA)
    documents = ragged_documents([12] * 8)
    collect(folder, tmp_path / "store", documents)
    options = Options(activations=tmp_path / "store", output_dir=tmp_path / "drift", quiet=True)
    records = main(options)
    model = load_model(folder, dtype=torch.float32)
    windows = torch.tensor(documents)
    wanted = drift_records(model, windows, windows, labels=LABELS, settings=DRIFT)
    for record in wanted:
        labels = {name: value for name, value in record["labels"].items() if name not in (*LABELS, "num_tokens")}
        if labels["point"] == "after_mlp" and labels.get("lookahead") == 2:
            assert not [one for one in records if labels.items() <= one["labels"].items()], "one pair, which lacks s_2L"
            continue
        found = one(records, record["metric"], **labels)
        expected = list(record["per_layer"])
        if labels["point"] == "after_mlp":
            expected[2 - labels.get("lookahead", 0)] = None  # the state after the last MLP is not stored
        assert found["per_layer"] == pytest.approx(expected, abs=2e-3), labels
    assert {record["labels"]["corpus"] for record in records} == {"store.jsonl"}


def test_lookaheads_that_the_model_has_no_layers_for_are_left_out_and_named() -> None:
    model, windows = tiny_decoder(LLAMA), random_tokens(24, 16)
    settings = DriftSettings(
        parts=("distance",), max_lookahead=4, perplexity_lookaheads=(0, 2, 3), perplexity_windows=2, distance_layers=1
    )
    said: list[str] = []
    heard = logger.add(said.append, level="WARNING", format="{message}")
    records = drift_records(model, windows, windows[:2], labels=LABELS, settings=settings)
    logger.remove(heard)
    assert said == ["--perplexity-lookaheads 3: the model has 3 layers; left out\n"]
    lookaheads = {record["labels"]["lookahead"] for record in records if record["metric"] == "perplexity"}
    assert lookaheads == {0, 2}
