"""The file that a sweep appends to: which of its records are taken for those of a run."""

from pathlib import Path

from analysis.results import Record, make_record, read_records
from pipeline_parallel.mesh import ParallelMesh
from scripts.run_records import RecordFile


def record(value: float, learning_rate: float) -> Record:
    training = {"learning_rate": learning_rate}
    return make_record("ablation", {"model": "tiny"}, "loss", value, "nats", training=training)


def test_records_of_one_training_are_not_kept_for_those_of_another(tmp_path: Path) -> None:
    def record_file() -> RecordFile:
        return RecordFile(tmp_path / "records.jsonl", ParallelMesh.single("cpu"), resume=True)

    (first,) = record_file().write([record(1.0, 0.1)])
    assert record_file().write([record(5.0, 0.1)]) == [first], "the same run, resumed"
    (second,) = record_file().write([record(2.0, 0.2)])
    assert second["value"] == 2.0 and read_records(tmp_path / "records.jsonl") == [first, second]
