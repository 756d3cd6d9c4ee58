"""The recorder behind collecting: any forward pass, real tokens only."""

import numpy as np
import pytest
import torch

from data.corpora import TokenPiece
from modules.scoring import pad_right
from sparse_predictor.collect import ActivationRecorder, ragged_batches
from tests.modules.tiny_models import KINDS, LLAMA, tiny_decoder
from tests.sparse_predictor.tiny_stages import ragged_documents

KIND_NAMES = ["llama", "opt", "opt-post-norm-projected"]


@pytest.mark.parametrize("kind", KIND_NAMES)
def test_decoding_records_a_row_a_step_equal_to_the_prefills(kind: str) -> None:
    model = tiny_decoder(KINDS[kind])
    (document,) = ragged_documents([12])
    recorder = ActivationRecorder(model, range(3), "both")
    with recorder:
        recorder.run(torch.tensor([document]))
        whole = {layer: dict(arrays) for layer, arrays in recorder.rows.items()}
        cache = model.new_cache(1, 12)
        for step, token in enumerate(document):
            with torch.inference_mode():
                model(torch.tensor([[token]]), cache=cache, phase="decode")
            for layer, arrays in recorder.rows.items():
                for name, rows in arrays.items():
                    assert rows.shape[0] == 1
                    expected = whole[layer][name]
                    np.testing.assert_allclose(rows[0], expected[step], rtol=4e-3, atol=4e-3 * expected.std())


def test_padding_is_dropped_whoever_runs_the_model() -> None:
    model = tiny_decoder(LLAMA)
    documents = ragged_documents([5, 2, 7])
    recorder = ActivationRecorder(model, [1], "both")
    with recorder:
        recorder.run(*pad_right(documents, "cpu"))
        expected = {name: rows.copy() for name, rows in recorder.rows[1].items()}
        cache = model.new_cache(3, 8)
        with torch.inference_mode():
            token_ids, num_tokens = pad_right(documents, "cpu")
            model(token_ids, cache=cache, num_tokens=num_tokens)
            found = dict(recorder.rows[1])
            model(torch.tensor([[1], [2], [3]]), cache=cache, phase="decode")
        assert [len(rows) for rows in recorder.rows[1].values()] == [3] * 4
    for name, rows in expected.items():
        assert len(rows) == 14
        np.testing.assert_allclose(found[name], rows, rtol=2e-3, atol=2e-3)
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())


def test_batches_respect_both_limits() -> None:
    lengths = [4, 4, 9, 1, 1, 1, 1, 30]
    pieces = [TokenPiece(document_id=str(n), token_ids=[0] * n) for n in lengths]
    batches = list(ragged_batches(pieces, batch_size=3, max_batch_tokens=20))
    assert [[len(piece.token_ids) for piece in batch] for batch in batches] == [[4, 4], [9, 1], [1, 1, 1], [30]]
