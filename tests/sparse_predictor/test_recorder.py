"""The recorder behind collecting: any forward pass, real tokens only."""

import numpy as np
import pytest
import torch

from data.corpora import TokenPiece
from modules.decoder import Decoder
from modules.scoring import pad_right
from sparse_predictor.collect import ActivationRecorder, head_columns, neuron_columns, ragged_batches
from sparse_predictor.labels import LabelDefinition
from tests.modules.tiny_kinds import KINDS, LLAMA, random_tokens
from tests.modules.tiny_models import tiny_decoder
from tests.modules.unit_shard_ranks import Ranks, cut_decoders, head_plans
from tests.sparse_predictor.tiny_stages import ragged_documents

LABELS = [None, LabelDefinition(kind="top", share=0.3), LabelDefinition(kind="energy", share=0.9)]
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


@pytest.mark.parametrize("label", LABELS, ids=str)
@pytest.mark.parametrize("plan", head_plans())
def test_tensor_parallel_ranks_record_their_own_columns_without_padding(
    plan: str, label: LabelDefinition | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tiny_decoder(LLAMA)
    ranks = Ranks(len(head_plans()[plan]))
    width = 80 // ranks.size + 3  # the last rank is short of neurons, and padded
    shares = [list(range(80))[rank * width : (rank + 1) * width] for rank in range(ranks.size)]
    monkeypatch.setattr("tests.modules.unit_shard_ranks.neuron_shares", lambda *args: shares)
    models = cut_decoders(whole, ranks, head_plans()[plan])
    batch = pad_right(ragged_documents([5, 2, 7]), "cpu")

    def record(model: Decoder, inputs: bool) -> dict[str, np.ndarray]:
        with ActivationRecorder(model, [1], "both", label, inputs=inputs) as recorder:
            recorder.run(*batch)
        return recorder.rows[1]

    expected = record(whole, True)
    found = ranks.run(lambda rank: record(models[rank], rank == 0))
    assert [set(rows) for rows in found] == [set(expected)] + [{"mlp_label", "att_label"}] * (ranks.size - 1)
    for kind, columns_of, count in (("mlp_label", neuron_columns, 80), ("att_label", head_columns, 6)):
        columns = [columns_of(getattr(model, "mlp" if count == 80 else "attention")(1)) for model in models]
        covered = [column for start, stop in columns for column in range(start, stop)]
        assert covered == list(range(count))
        joined = np.concatenate([rows[kind] for rows in found], axis=1)
        assert joined.dtype == expected[kind].dtype
        np.testing.assert_allclose(joined, expected[kind], rtol=2e-3, atol=2e-3)
    np.testing.assert_allclose(found[0]["att_x"], expected["att_x"], rtol=2e-3, atol=2e-3)


def test_batches_respect_both_limits() -> None:
    lengths = [4, 4, 9, 1, 1, 1, 1, 30]
    pieces = [TokenPiece(document_id=str(n), token_ids=[0] * n) for n in lengths]
    batches = list(ragged_batches(pieces, batch_size=3, max_batch_tokens=20))
    assert [[len(piece.token_ids) for piece in batch] for batch in batches] == [[4, 4], [9, 1], [1, 1, 1], [30]]


def test_only_its_own_passes_are_recorded_by_a_recorder_that_is_not_open() -> None:
    model = tiny_decoder(KINDS["llama"])
    recorder = ActivationRecorder(model, [0, 1, 2], "both")
    recorder.run(random_tokens(2, 6), torch.tensor([6, 4]))
    before = {layer: {name: rows.copy() for name, rows in arrays.items()} for layer, arrays in recorder.rows.items()}
    assert before[0]["mlp_x"].shape[0] == 10
    # Half-blocks run outside of `forward`, as a captured decode step does, between two batches.
    model.run_half_blocks(model.begin_stream(random_tokens(3, 5)))
    for layer, arrays in recorder.rows.items():
        assert all((rows == before[layer][name]).all() for name, rows in arrays.items())
