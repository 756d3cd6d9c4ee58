"""However a model is cut over processes, the answers are those of one process: dense in float32 to 1e-4 in
log-probability, sparse in float64 to 1e-9 with the very same active sets."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data.activation_store import ActivationStore
from modules.checkpoint.load import load_model
from modules.decoder import Decoder
from pipeline_parallel.mesh import ParallelMesh
from tests.pipeline_parallel.launching import start_ranks, wait_all
from tests.pipeline_parallel.parity_cases import (
    BATCH_SIZES,
    MESHES,
    MODELS,
    SPARSE,
    SPARSE_CASES,
    load_wide,
    run_dense,
    run_sparse,
    sparse_runs,
)
from tests.sparse_predictor.conftest import VARIANTS
from tests.sparse_predictor.tiny_stages import collect, model_folder, train

ONE = ParallelMesh.single("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of all kinds, and the predictors that the sparse cases need."""
    made = tmp_path_factory.mktemp("parity")
    stores: dict[str, ActivationStore] = {}
    for kind, hf_config in MODELS.items():
        model_folder(made / kind / "model", hf_config)
    for kind, name in SPARSE_CASES:
        variant = SPARSE[name][0]
        if not (made / kind / variant).exists():
            if kind not in stores:
                stores[kind] = collect(made / kind / "model", made / kind / "store")
            train(made / kind / "model", stores[kind], made / kind / variant, **VARIANTS[variant])
    return made


@pytest.fixture(scope="module")
def expected(folder: Path) -> Callable[[str], Any]:
    """What one process says to a case (named without its mesh)."""
    known: dict[str, Any] = {}
    wide: dict[str, Decoder] = {}

    def answers(case: str) -> Any:
        if case not in known:
            name, kind, batch = case.split()
            batch_size = int(batch.removeprefix("batch"))
            if name == "dense":
                known[case] = run_dense(load_model(folder / kind / "model"), ONE, batch_size)
            else:
                if kind not in wide:
                    wide[kind] = load_wide(folder / kind / "model", ONE)
                known[case] = run_sparse(wide[kind], ONE, folder / kind / SPARSE[name][0], name, batch_size)
        return known[case]

    return answers


@pytest.fixture(scope="module", params=sorted(MESHES))
def world(request: pytest.FixtureRequest, folder: Path) -> tuple[int, dict[str, Any]]:
    """All cases of one world size, run by its ranks in one start. Those of the smallest, which has a cut of either
    kind, are fresh: nothing that one interpreter orders at will may count."""
    size: int = request.param
    arguments = ["-m", "tests.pipeline_parallel.parity_cases", str(folder)]
    ended = wait_all(start_ranks(arguments, size, forked=size > min(MESHES)), timeout_s=240)
    assert [rank.exit_code for rank in ended] == [0] * size, "\n".join(rank.stderr[-2000:] for rank in ended)
    return size, json.loads((folder / f"world{size}.json").read_text())


def assert_same(found: list[dict[str, Any]], expected: list[dict[str, Any]], tolerance: float, case: str) -> None:
    assert len(found) == len(expected), case
    for idx, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        where = f"{case}, request {idx}"
        for name in ("token_ids", "finish_reason", "error", "num_prompt_tokens"):
            assert ours[name] == theirs[name], f"{where}: {name}"
        for name in ("logprobs", "prompt_logprobs"):
            pairs = zip(ours[name] or [], theirs[name] or [], strict=True)
            for here, there in pairs:
                assert (here is None) == (there is None), where
                assert here is None or math.isclose(here, there, rel_tol=0, abs_tol=tolerance), f"{where}: {name}"
        for name in ("mlp_density", "head_density"):
            assert math.isclose(ours[name], theirs[name], abs_tol=1e-12), f"{where}: {name}"


def test_dense_answers_do_not_depend_on_the_cut(
    world: tuple[int, dict[str, Any]], expected: Callable[[str], Any]
) -> None:
    size, found = world
    for tp_size, pp_size in MESHES[size]:
        for kind in MODELS:
            for batch_size in BATCH_SIZES:
                case = f"dense {kind} tp{tp_size} pp{pp_size} batch{batch_size}"
                assert_same(found[case], expected(f"dense {kind} batch{batch_size}"), 1e-4, case)


def joined_sets(ranks: list[dict[str, Any]], tp_size: int, pp_size: int) -> list[dict[str, list[Any]]]:
    """For each replica: `layer block` -> calls -> rows -> sorted units, over its tensor-parallel ranks."""
    replicas: list[dict[str, list[Any]]] = []
    for rank, chosen in enumerate(ranks):
        replica = rank // (tp_size * pp_size)
        if replica == len(replicas):
            replicas.append({})
        for place, calls in chosen.items():
            joined = replicas[replica].setdefault(place, [[set() for _ in rows] for rows in calls])
            for call, rows in zip(joined, calls, strict=True):
                for row, units in zip(call, rows, strict=True):
                    assert -1 not in units, "padding was chosen"
                    row.update(units)
    return [
        {place: [[sorted(row) for row in call] for call in calls] for place, calls in each.items()} for each in replicas
    ]


def test_sparse_answers_and_active_sets_do_not_depend_on_the_cut(
    world: tuple[int, dict[str, Any]], expected: Callable[[str], Any]
) -> None:
    size, found = world
    for tp_size, pp_size in MESHES[size]:
        dp_size = size // (tp_size * pp_size)
        for kind, name, batch_size in sparse_runs(tp_size, pp_size, dp_size):
            case = f"{name} {kind} tp{tp_size} pp{pp_size} batch{batch_size}"
            answers, ranks = found[case]
            theirs, (whole,) = expected(f"{name} {kind} batch{batch_size}")
            assert_same(answers, theirs, 1e-9, case)
            # One request at a time, in one replica: the calls come in the same order.
            if batch_size == 1 and dp_size == 1 and name != "teal":
                assert joined_sets(ranks, tp_size, pp_size) == joined_sets([whole], 1, 1), case
                assert sum(len(calls) for calls in whole.values()) > 0, case
