"""The drift study with several processes: the records are those of one process, however the model was cut."""

import json
from pathlib import Path

import pytest

from analysis.results import Record, read_records
from tests.modules.tiny_kinds import LLAMA
from tests.pipeline_parallel.launching import start_ranks, wait_all
from tests.scripts.studies.sharded_drift import MESHES, options, records
from tests.sparse_predictor.tiny_stages import model_folder, ragged_documents, write_corpus


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("sharded")
    model_folder(made / "model", LLAMA)
    write_corpus(made / "test.jsonl", ragged_documents([100, 200, 150], seed=3))
    ended = wait_all(
        start_ranks(["-m", "tests.scripts.studies.sharded_drift", str(made)], 4, forked=True), timeout_s=120
    )
    assert [rank.exit_code for rank in ended] == [0] * 4, "\n".join(rank.stderr[-2000:] for rank in ended)
    assert "--parts activation, distance: left out" in ended[0].stderr
    return made


def assert_same(found: list[Record], expected: list[Record], mesh: str) -> None:
    tp_size, pp_size = MESHES[mesh]
    cut = {"tp_size": tp_size, "pp_size": pp_size, "dp_size": 4 // (tp_size * pp_size)}
    assert len(found) == len(expected) > 50
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["metric"] == theirs["metric"] and ours["labels"] == {**theirs["labels"], **cut}
        assert numbers(ours) == pytest.approx(numbers(theirs), rel=1e-9, abs=1e-12), ours["labels"]


def numbers(record: Record) -> dict[str, float]:
    found = {"value": record["value"], "low": record["interval"][0], "high": record["interval"][1]}
    return found | {f"layer {i}": value for i, value in enumerate(record["per_layer"]) if value is not None}


def test_records_are_those_of_one_process_however_the_model_is_cut(folder: Path) -> None:
    expected = records(options(folder, "one"))
    assert_same(read_records(folder / "tp2-pp2/drift.jsonl"), expected, "tp2-pp2")
    for rank in range(4):  # all of them are told
        assert_same(json.loads((folder / f"{rank}.json").read_text()), expected, "pp2-dp2")
    assert {path.name for path in (folder / "tp2-pp2").iterdir()} >= {"verdict.md", "report.html", "summary.md"}
