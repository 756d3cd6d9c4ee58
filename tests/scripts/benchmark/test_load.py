"""The benchmark of loading, on a tiny checkpoint: every rank of tp x pp, each in a process of its own."""

from pathlib import Path

import pytest

from analysis.results import read_records
from modules.checkpoint.write import write_checkpoint
from scripts.benchmark.load import Options, evict, main, weight_files
from tests.modules.tiny_kinds import KINDS
from tests.modules.tiny_models import tiny_hf_model


def test_what_each_rank_reads_is_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hf_config = KINDS["llama-tied"]
    write_checkpoint(tmp_path / "tiny", hf_config, tiny_hf_model(hf_config).state_dict(), model_id="tiny")
    try:
        evict(weight_files(tmp_path / "tiny"), timeout_s=1.0)
    except ValueError as error:
        pytest.skip(str(error))
    main(Options(output=tmp_path / "load.jsonl", model=tmp_path / "tiny", sizes=(2,), quiet=True))
    (record,) = read_records(tmp_path / "load.jsonl")
    assert (record["labels"]["tp_size"], record["labels"]["pp_size"]) == (2, 2)
    assert len(record["ranks"]) == 4 and record["value"] > 0
    total = sum(path.stat().st_size for path in weight_files(tmp_path / "tiny"))
    assert 0 < record["max_over_ranks"]["slice_bytes"] < total / 2
    assert capsys.readouterr().out.count("\n| ") == 1
