"""What every stage shares that runs a model: finding it, the cores that it takes, the documents that it writes."""

import os
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
import torch

import scripts.model_loading
from modules.checkpoint.write import write_model
from pipeline_parallel.mesh import ParallelMesh
from scripts.model_loading import LoadedModel, ModelOptions, busy_cores, resolve_device, resolve_model, share_cores
from scripts.written_text import self_writer
from tests.modules.tiny_kinds import LLAMA
from tests.modules.tiny_models import save_hf_folder, tiny_decoder
from tests.scripts.tiny_prompts import words_folder


def test_models_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such folder; give a checkpoint folder or a hub id"):
        resolve_model(str(tmp_path / "missing"))
    (tmp_path / "model.gguf").write_text("x")
    with pytest.raises(ValueError, match="is a file; convert it first"):
        resolve_model(str(tmp_path / "model.gguf"))
    with pytest.raises(ValueError, match="no such folder, and not to be had from the hub"):
        resolve_model("nobody/no-such-model")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="offers 0 CUDA devices"):
            resolve_device("cuda")


def test_a_model_writes_the_same_varied_documents_from_a_seed(tmp_path: Path) -> None:
    save_hf_folder(tmp_path / "bare", LLAMA)  # without a tokenizer
    for model in (words_folder(tmp_path / "words"), tmp_path / "bare"):
        loaded = ModelOptions(model=str(model), quiet=True).load()
        first = list(islice(self_writer(loaded, quiet=True)(0), 5))
        assert all(0 < len(document) <= 64 for document in first)
        assert len({tuple(document) for document in first}) == 5
        assert list(islice(self_writer(loaded, quiet=True, max_tokens=100)(0), 5)) == first
        assert list(islice(self_writer(loaded, quiet=True)(1), 5)) != first


def test_records_call_a_model_what_the_converter_found_it_to_be_called(tmp_path: Path) -> None:
    def name(folder: Path) -> str:
        mesh = ParallelMesh.single("cpu")
        return LoadedModel(model=tiny_decoder(LLAMA), directory=folder, model_id="folder", mesh=mesh).name

    assert name(tmp_path) == "folder"
    (tmp_path / "manifest.json").write_text('{"format_version": 1, "model_id": "ORG/Name-1B", "files": {}}')
    assert name(tmp_path) == "ORG/Name-1B"
    (tmp_path / "manifest.json").write_text('{"model_id": 3}')
    with pytest.raises(ValueError, match="manifest.json: `model_id`: expected"):
        name(tmp_path)


def test_verifying_reads_everything_of_a_model_before_it_is_loaded(tmp_path: Path) -> None:
    write_model(tiny_decoder(LLAMA), tmp_path / "model", model_id="tiny")
    ModelOptions(model=str(tmp_path / "model"), quiet=True, verify=True).load()
    with (tmp_path / "model" / "pytorch_1.pt").open("r+b") as file:
        file.seek(8192)
        file.write(bytes(4096))
    with pytest.raises(ValueError, match=r"pytorch_1\.pt: missing, or not as written \(sha256 differs"):
        ModelOptions(model=str(tmp_path / "model"), quiet=True, verify=True).load()


def test_a_tokenizer_that_cannot_be_opened_is_one_line(tmp_path: Path) -> None:
    folder = words_folder(tmp_path / "model")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json: the tokenizer cannot be opened"):
        _ = ModelOptions(model=str(folder), quiet=True).load().tokenizer


ROOT = Path(__file__).parents[2]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the system says of its load, here two threads of others; no variable names a number of threads."""
    for name in scripts.model_loading.THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(scripts.model_loading, "LOAD", tmp_path / "loadavg")
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    (tmp_path / "loadavg").write_text("0.20 0.18 0.12 3/404 1234\n")
    share_cores.cache_clear()
    return tmp_path / "loadavg"


def test_busy_cores_get_fewer_threads(load: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    assert busy_cores() == 2.0
    assert share_cores() == 2 and chosen == [2]
    load.write_text("9.00 9.00 9.00 1/404 1234\n")
    assert share_cores() == 2, "once per process"
    share_cores.cache_clear()
    assert share_cores() == 4 and chosen == [2], "what ran a minute ago does not count"
    load.unlink()
    assert busy_cores() == 0.0


def test_a_number_of_threads_that_is_given_is_kept(load: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setattr(torch, "set_num_threads", lambda count: pytest.fail("changed"))
    assert share_cores() == 4


@pytest.mark.parametrize(
    ("given", "kept"), [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")]
)
def test_idle_threads_of_a_stage_sleep_early_unless_told_otherwise(given: dict[str, str], kept: str) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "KMP_"))}
    code = "import os, scripts; print(os.environ.get('GOMP_SPINCOUNT'))"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment | given, cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == kept
