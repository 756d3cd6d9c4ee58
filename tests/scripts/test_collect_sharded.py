"""Collecting by several processes: the store is the one of a single process, killed and resumed or not."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from data.activation_store import ActivationStore
from modules.checkpoint.load import load_model
from modules.sparsity import BLOCKS
from scripts.collect import file_fingerprint, main
from sparse_predictor.training_data import TrainingBatch, TrainingRows
from tests.modules.tiny_models import save_hf_folder
from tests.pipeline_parallel.launching import Ended, start_ranks, wait_all
from tests.scripts.sharded_collection import CASES, LAST_DOCUMENT, MODELS, options
from tests.sparse_predictor.tiny_stages import ragged_documents, write_corpus


def run_on_ranks(folder: Path, *cases: str) -> list[Ended]:
    arguments = ["-m", "tests.scripts.sharded_collection", str(folder), *cases]
    return wait_all(start_ranks(arguments, 4, forked=True), timeout_s=240)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of all cases: the stores that four processes collected, one of them killed in between."""
    made = tmp_path_factory.mktemp("sharded")
    for kind, hf_config in MODELS.items():
        save_hf_folder(made / kind, hf_config)
    write_corpus(made / "corpus.jsonl", ragged_documents())
    killed = run_on_ranks(made, "resumed-killed")
    assert all(rank.exit_code != 0 for rank in killed)
    interrupted = ActivationStore(made / "resumed")
    assert 0 < interrupted.num_rows < 302 and not interrupted.manifest.complete
    assert LAST_DOCUMENT not in {entry.document_id for entry in interrupted.documents}
    ended = run_on_ranks(made, *CASES, "resumed")
    assert [rank.exit_code for rank in ended] == [0] * 4, "\n".join(rank.stderr[-2000:] for rank in ended)
    return made


@pytest.mark.parametrize("case", CASES)
def test_the_joined_store_is_that_of_one_process(folder: Path, tmp_path: Path, case: str) -> None:
    joined = ActivationStore(folder / case)
    whole = main(replace(options(folder, case, tp_size=1, pp_size=1), output_dir=tmp_path / "whole"))
    assert whole is not None
    assert len(list(joined.directory.glob("shard_*"))) == 4
    assert joined.layout == whole.layout, "its definitions, the sample of weights among them"
    assert joined.manifest.complete and list(joined.documents) == list(whole.documents)
    np.testing.assert_array_equal(joined.token_ids, whole.token_ids)
    for layer in whole.layers:
        for kind in whole.layout.kinds:
            if kind == "mlp_label" and whole.layout.label_format == "packed":
                found, expected = (store.read_mlp_label(layer, 0, store.num_rows) for store in (joined, whole))
                assert found.dtype == bool and (found == expected).mean() > 0.999
            else:
                found, expected = (np.array(getattr(store, kind)(layer), np.float32) for store in (joined, whole))
                np.testing.assert_allclose(found, expected, rtol=2e-3, atol=2e-3 * expected.std(), err_msg=kind)


@pytest.mark.parametrize("case", ["tp4", "pp2-dp2"])
def test_training_reads_the_same_batches_from_shards(folder: Path, tmp_path: Path, case: str) -> None:
    model = load_model(folder / "llama")
    joined = ActivationStore(folder / case)
    whole = main(replace(options(folder, case, tp_size=1, pp_size=1), output_dir=tmp_path / "whole"))
    assert whole is not None
    for block in BLOCKS:
        rows, expected = (
            TrainingRows(store, model, block, lookahead=1, device=torch.device("cpu")) for store in (joined, whole)
        )
        assert (
            rows.blocks("train") == expected.blocks("train") and rows.identity()["text"] == expected.identity()["text"]
        )
        ranges = rows.sample("train", 100)
        for found, wanted in zip(batches(rows, ranges), batches(expected, ranges), strict=True):
            assert found.activations.dtype == wanted.activations.dtype
            torch.testing.assert_close(found.inputs, wanted.inputs, rtol=1e-2, atol=1e-2)
            assert (found.activations.float() - wanted.activations.float()).abs().mean() < 1e-2


def batches(rows: TrainingRows, ranges: list[tuple[int, int]]) -> list[TrainingBatch]:
    return [rows.load(ranges), rows.layer_rows(2, ranges)]


def test_two_versions_of_a_corpus_are_told_apart(tmp_path: Path) -> None:
    texts = [b"one", b"two", b"one" * 2**20, b"one" * 2**20 + b"!", b"one"]
    found = []
    for number, text in enumerate(texts):
        (tmp_path / str(number)).write_bytes(text)
        found.append(file_fingerprint(tmp_path / str(number)))
    assert len(set(found)) == 4 and found[0] == found[-1]
