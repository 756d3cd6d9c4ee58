"""Evaluating with several processes: the records are those of one process, however the model was cut."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from analysis.results import Record, read_records
from scripts.evaluate import main
from tests.pipeline_parallel.launching import start_ranks, wait_all
from tests.scripts.sharded_evaluation import CASES, LAST_LAYER, MESHES, MODELS, options
from tests.sparse_predictor.tiny_stages import collect, model_folder, ragged_documents, train, write_corpus


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, predictors, text, and the records that four ranks made of them in one start."""
    made = tmp_path_factory.mktemp("sharded")
    for kind, hf_config in MODELS.items():
        model = model_folder(made / kind / "model", hf_config)
        train(model, collect(model, made / kind / "store"), made / kind / "predictors", standin_rank="4")
    write_corpus(made / "test.jsonl", ragged_documents([40, 64, 2, 33], seed=5))
    (made / "budget.json").write_text(json.dumps(LAST_LAYER))
    for number in range(2):
        write_corpus(made / f"text-{number}.jsonl", ragged_documents([40], seed=number))
    ended = wait_all(start_ranks(["-m", "tests.scripts.sharded_evaluation", str(made)], 4, forked=True), 240)
    assert [rank.exit_code for rank in ended] == [0] * 4, "\n".join(rank.stderr[-2000:] for rank in ended)
    return made


@pytest.fixture(scope="module")
def expected(folder: Path) -> Callable[[str], list[Record]]:
    """The records of one process."""
    known: dict[str, list[Record]] = {}

    def records(run: str) -> list[Record]:
        if run not in known:
            known[run] = main(options(folder, run, folder / f"{run}.jsonl"))
        return known[run]

    return records


def numbers(found: Any, place: str = "") -> dict[str, float]:
    """Every number in nested dictionaries and lists, under the path to it."""
    if isinstance(found, dict | list):
        inner = found.items() if isinstance(found, dict) else enumerate(found)
        return {path: value for name, part in inner for path, value in numbers(part, f"{place}/{name}").items()}
    return {place: found}


@pytest.mark.parametrize(("run", "mesh"), CASES)
def test_records_are_those_of_one_process(
    folder: Path, expected: Callable[[str], list[Record]], run: str, mesh: str
) -> None:
    found, wanted = read_records(folder / f"{run} {mesh}.jsonl"), expected(run)
    assert [record["name"] for record in found] == [record["name"] for record in wanted]
    tp_size, pp_size = MESHES[mesh]
    cut = {"tp_size": tp_size, "pp_size": pp_size, "dp_size": 4 // (tp_size * pp_size)}
    cut |= {"all_reduce": "gloo"} if tp_size > 1 else {}
    for ours, theirs in zip(found, wanted, strict=True):
        where = f"{run} {mesh} {ours['labels']['method']}"
        assert ours["labels"] == {**theirs["labels"], **cut}, where
        if ours["name"] == "decode":
            assert ours["value"] > 0 and ours["baseline"]["value"] > 0, where
            continue
        assert ours["value"] == pytest.approx(theirs["value"], rel=1e-9), where
        assert ours["timing"].keys() == theirs["timing"].keys()
        if ours["baseline"] is None:
            continue  # dense
        assert ours["baseline"]["value"] == pytest.approx(theirs["baseline"]["value"], rel=1e-9), where
        per_rank = ours["achieved"].pop("mlp_density_per_rank")
        assert len(per_rank) == 4, where
        if run in ("neurons", "heads") and mesh != "dp4":
            assert all(0 < density < 1 for density in per_rank), where
        if run in ("neurons", "heads") and mesh == "dp4":
            assert per_rank[3] is None and None not in per_rank[:3], "three batches for four replicas"
        for part in ("achieved", "quality"):
            assert numbers(ours.get(part)) == pytest.approx(numbers(theirs.get(part)), abs=1e-12), f"{where} {part}"


def test_ranks_that_read_different_texts_all_say_so(folder: Path) -> None:
    for rank in range(4):
        said = (folder / f"refused-{rank}").read_text()
        assert f"text-{min(rank, 1)}.jsonl: the text of rank 1, 2, 3 is not that of rank 0" in said
    assert not (folder / "refused.jsonl").exists()
