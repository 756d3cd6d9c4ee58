"""What the trainer reads: rows of the right split, layer and norm; batches that a seed decides."""

from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

import sparse_predictor.training_data
from data.activation_store import ActivationStore
from modules.decoder import Decoder
from modules.sparsity import Block
from sparse_predictor.training_data import TrainingRows
from tests.modules.tiny_kinds import KINDS, LLAMA
from tests.modules.tiny_models import tiny_decoder
from tests.sparse_predictor.tiny_stages import collect, model_folder, ragged_documents

KIND_NAMES = ["llama", "opt", "opt-post-norm-projected"]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Decoder, ActivationStore]]:
    found = {}
    for kind in KIND_NAMES:
        folder = tmp_path_factory.mktemp(kind)
        model = model_folder(folder / "model", KINDS[kind])
        found[kind] = (tiny_decoder(KINDS[kind]), collect(model, folder / "store"))
    return found


def rows_of(stores: dict, kind: str = "llama", block: Block = "mlp", lookahead: int = 0) -> TrainingRows:
    model, store = stores[kind]
    return TrainingRows(store, model, block, lookahead=lookahead, device=CPU)


def rows_in(ranges: list[tuple[int, int]]) -> set[int]:
    return {row for start, stop in ranges for row in range(start, stop)}


def test_validation_documents_never_reach_training(stores: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_predictor.training_data, "BLOCK_ROWS", 8)
    rows = rows_of(stores)
    store = rows.store
    train, validation = (rows_in(store.row_ranges(split)) for split in ("train", "validation"))
    assert train and validation and not train & validation and len(train | validation) == store.num_rows
    by_document = {entry.document_id: entry.split for entry in store.documents}
    assert all(by_document[entry.document_id] == entry.split for entry in store.documents)
    for split, allowed in (("train", train), ("validation", validation)):
        seen = set().union(*(rows_in(batch) for batch in islice(rows.batches(split, 32, seed=1), 40)))
        assert seen == allowed, "every row of the split, and none of the other"
        assert rows_in(rows.sample(split, 10**6)) == allowed
        few = rows.sample(split, 20)
        assert rows_in(few) < allowed and sum(stop - start for start, stop in few) == len(rows_in(few))


def test_batches_are_a_function_of_the_seed_and_resume_by_skipping(
    stores: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sparse_predictor.training_data, "BLOCK_ROWS", 8)
    rows = rows_of(stores)
    first = list(islice(rows.batches("train", 32, seed=5), 20))
    assert list(islice(rows.batches("train", 32, seed=5), 20)) == first
    assert list(islice(rows.batches("train", 32, seed=5, skip=13), 7)) == first[13:]
    assert list(islice(rows.batches("train", 32, seed=6), 20)) != first
    assert all(32 <= len(rows_in(batch)) < 40 for batch in first)


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("block", ["mlp", "attention"])
@pytest.mark.parametrize("kind", KIND_NAMES)
def test_inputs_are_what_the_block_sees_when_serving(stores: dict, kind: str, block: Block, lookahead: int) -> None:
    rows = rows_of(stores, kind, block, lookahead)
    batch = rows.load([(0, rows.store.num_rows)])
    seen: dict[int, list[torch.Tensor]] = {layer: [] for layer in range(3)}
    handles = [
        rows.model.half_block(layer, block).block.register_forward_pre_hook(
            lambda module, args, layer=layer: seen[layer].append(args[0][0])
        )
        for layer in range(3)
    ]
    with torch.inference_mode():
        for document in ragged_documents():
            rows.model(torch.tensor([document]))
    for handle in handles:
        handle.remove()
    serving = [torch.cat(seen[layer]) for layer in range(3)]
    source = [0, 0, 1] if lookahead else [0, 1, 2]  # layer 0 has nothing before it and reads its own
    for layer in range(3):
        torch.testing.assert_close(batch.inputs[layer], serving[source[layer]], rtol=5e-3, atol=5e-3)
    assert not torch.allclose(serving[0], serving[1], rtol=5e-3, atol=5e-3)


def test_contributions_are_what_each_unit_writes(stores: dict) -> None:
    model, store = stores["llama"]
    batch = rows_of(stores).load([(3, 11), (40, 44)])
    picked = [*range(3, 11), *range(40, 44)]
    for layer in range(3):
        label = np.array(store.mlp_label(layer)[picked], np.float32)
        norms = np.linalg.norm(model.mlp(layer).down_proj.weight.detach().numpy(), axis=1)
        assert np.array_equal(batch.activations[layer].numpy(), label)
        assert batch.contributions is not None
        np.testing.assert_allclose(batch.contributions[layer].numpy(), np.abs(label) * norms, rtol=1e-4)
    heads = rows_of(stores, block="attention").layer_rows(2, [(0, 5)])
    columns = np.array(store.att_label(2)[:5], np.float32)
    groups = np.stack([np.linalg.norm(columns[:, :3], axis=1), np.linalg.norm(columns[:, 3:], axis=1)], 1)
    np.testing.assert_allclose(heads.activations[0].numpy(), groups, rtol=1e-5)
    assert heads.activations.shape == (1, 5, 2), "the unit is the key-value group"


def test_lookahead_needs_the_layers_it_reads(stores: dict, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", LLAMA)
    some = collect(folder, tmp_path / "store", layers="0,2")
    with pytest.raises(ValueError, match=r"look-ahead 1 reads layers \[1\]"):
        TrainingRows(some, tiny_decoder(LLAMA), "mlp", lookahead=1, device=CPU)
    assert TrainingRows(some, tiny_decoder(LLAMA), "mlp", lookahead=0, device=CPU).layers == [0, 2]


def test_a_store_of_one_document_has_nothing_to_validate_on(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", LLAMA)
    rows = TrainingRows(
        collect(folder, tmp_path / "store", ragged_documents([40])),
        tiny_decoder(LLAMA), "mlp", lookahead=0, device=CPU,
    )  # fmt: skip
    with pytest.raises(ValueError, match="no validation rows; collect more documents"):
        next(rows.batches("validation", 8, seed=0))
