"""Result records: one JSON object per line, each with the environment it was measured in.

A record says what was measured (`name`, `metric`, `value`, `unit`), under which conditions (`labels`),
against what (`baseline`, `ratio`), and where (`environment`). Further top-level keys are allowed and kept:
`stderr` (of the value), `achieved` (densities, sparse calls, bytes read), `quality` (recall and precision), `timing`.
Keys and labels that have no type here may hold anything.
"""

from __future__ import annotations

import fcntl
import io
import json
import math
import os
import platform
import subprocess
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from data.files import convert_json, disk_errors
from sparse_predictor.methods.registry import all_methods

Record = dict[str, Any]
Label = str | int | float | bool | None
Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)

REQUIRED_KEYS = ("name", "labels", "metric", "value", "unit", "environment")
# Older records have older names of methods.
RENAMED_METHODS = {method.formerly[0]: name for name, method in all_methods().items() if method.formerly is not None}

# They stand in cells and file names; a table or a plot of a million characters takes minutes to lay out.
MAX_CHARACTERS = 500
Short = Annotated[str, Meta(max_length=MAX_CHARACTERS)]
Name = Annotated[str, Meta(min_length=1, max_length=MAX_CHARACTERS)]
Text, Number, Count, Flag = Short | None, float | None, int | None, bool | None
Interval = Annotated[list[float], Meta(min_length=2, max_length=2)] | None
PerLayer = list[float | None] | None


def _of(kind: Any, names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split(), kind)


def _object(needed: Mapping[str, Any], **optional: Any) -> Any:
    """A JSON object with these keys; what is optional may be missing or, where its type says so, null."""
    fields: list[Any] = [*needed.items(), *((name, kind, msgspec.UNSET) for name, kind in optional.items())]
    return msgspec.defstruct("Object", fields, kw_only=True)


LABELS = _object(
    {},
    **_of(Text, "model method weights phase task dtype corpus block study variant activation norm positions operator"),
    **_of(
        Text, "shape transport execution point text tokens label density_budget predictors converted_from all_reduce"
    ),
    **_of(Number, "density mlp_density head_density"),
    **_of(
        Count, "batch_size num_tokens prompt_tokens new_tokens lookahead seed layer_idx hidden_size window num_fewshot"
    ),
    **_of(Count, "num_samples predictor_rank standin_rank calibration_tokens tp_size pp_size dp_size"),
)
ENVIRONMENT = _object(
    {},
    dirty=Flag,
    **_of(Text, "commit cpu device date cuda driver torch triton"),
    **_of(Count, "num_cores num_devices"),
)
ACHIEVED = _object(
    {},
    **_of(Number, "mlp_density head_density union_mlp_density union_head_density bytes_read_share layer_bytes_share"),
    sparse_calls=Count,
    executions=dict[str, int] | None,
    per_layer=dict[str, PerLayer] | None,
)
QUALITY = _object(
    {}, recall=Number, precision=Number, windows=Count, per_layer=dict[str, dict[str, PerLayer] | None] | None
)
POSITION: Any = _object({"from": int, "below": Count, "value": float})
RECORD = _object(
    {"name": Name, "metric": Name, "unit": Short, "value": float, "labels": LABELS, "environment": ENVIRONMENT},
    baseline=_object({"name": str, "value": float}) | None,
    achieved=ACHIEVED | None,
    text_achieved=ACHIEVED | None,
    quality=QUALITY | None,
    windows=_object({"nll": list[float], "tokens": list[int]}) | None,  # nats and tokens of each
    first_windows=_object({"num": int, "perplexity": float, "dense": float}) | None,
    timing=_object({}, samples=list[float] | None) | None,
    per_layer=PerLayer,
    per_position=list[POSITION] | None,
    massive_channels=dict[str, float] | None,
    answers=list[Any],
    **_of(dict[str, Any] | None, "run sources training"),
    **_of(Interval, "interval ratio_interval above_static_interval"),
    **_of(Number, "ratio share_of_ceiling stderr above_static static true_density union_density predicted_density"),
    **_of(Number, "achieved_gb_per_s ceiling_gb_per_s achieved_gb_per_s_each ceiling_gb_per_s_each tflops_each"),
    **_of(Number, "ceiling_tflops_each bytes_per_call bytes_per_step"),
)


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Items by a key, in order."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def make_record(
    name: str,
    labels: Mapping[str, Label],
    metric: str,
    value: float,
    unit: str,
    *,
    baseline: Mapping[str, Any] | None = None,
    ratio: float | None = None,
    share_of_ceiling: float | None = None,
    environment: Mapping[str, Any] | None = None,
    **extras: Any,
) -> Record:
    """Returns a valid record; raises ValueError for one that `read_records` would refuse.

    `baseline` is `{"name": ..., "value": ...}`. `ratio` defaults to value / baseline value: ours over dense
    for a perplexity, above 1 where we are faster for a speed; for a time, pass its inverse.
    `environment` defaults to `environment_stamp()`. NumPy scalars and arrays become plain numbers and lists.
    """
    if ratio is None and baseline is not None and baseline.get("value"):
        ratio = value / baseline["value"]
    record: Record = {
        "name": name,
        "labels": dict(labels),
        "metric": metric,
        "value": value,
        "unit": unit,
        "baseline": None if baseline is None else dict(baseline),
        "ratio": ratio,
        "share_of_ceiling": share_of_ceiling,
        "environment": dict(environment if environment is not None else environment_stamp()),
        **extras,
    }
    # Through JSON and back: what is returned equals what will be read, NumPy scalars and tuples included.
    record = json.loads(_encode(record))
    validate_record(record)
    return record


def _encode(record: Record) -> str:
    try:
        return json.dumps(record, ensure_ascii=False, default=_plain)
    except TypeError as error:
        raise ValueError(f"the record cannot be written as JSON: {error}") from error


def validate_record(record: object) -> None:
    """Raises ValueError naming the keys that are missing, or the first one of the wrong kind."""
    if not isinstance(record, dict):
        raise ValueError(f"a record is a JSON object, not {type(record).__name__}")
    missing = [key for key in REQUIRED_KEYS if key not in record]
    if missing:
        raise ValueError(f"the record lacks {', '.join(map(repr, missing))}")
    convert_json(record, RECORD, "the record")
    for label, setting in record["labels"].items():
        if not isinstance(setting, (str, int, float, bool, type(None))):
            raise ValueError(f"label {label!r} must be a string, a number, a boolean or null, not {setting!r}")
        if isinstance(setting, str) and len(setting) > MAX_CHARACTERS:
            raise ValueError(f"label {label[:50]!r} has {len(setting)} characters, {MAX_CHARACTERS} at most")
    # A perplexity can overflow to infinity and still be a result; NaN is always a fault.
    for key, number in (*record.items(), ("baseline value", (record.get("baseline") or {}).get("value"))):
        if isinstance(number, float) and math.isnan(number):
            raise ValueError(f"{key!r} must be a number that is not NaN")


def append_record(path: str | os.PathLike[str], record: Record) -> None:
    """Appends one line under a lock, so that writers may share a file; creates file and folders.

    A last line that an earlier crash left unfinished is cut off first.
    """
    validate_record(record)
    line = (_encode(record) + "\n").encode()
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with disk_errors(path), path.open("ab+", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        _mend_last_line(file)
        if file.write(line) != len(line):
            raise OSError(f"{path}: the record was written only in part (is the disk full?)")
        os.fsync(file.fileno())


def _plain(value: object) -> object:
    """NumPy and torch scalars and arrays as plain Python, for JSON."""
    for method in ("tolist", "item"):
        if hasattr(value, method):
            return getattr(value, method)()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"{type(value).__name__} is not a JSON value")


def _mend_last_line(file: io.FileIO) -> None:
    size = file.seek(0, os.SEEK_END)
    if size == 0:
        return
    file.seek(size - 1)
    if file.read(1) == b"\n":
        return
    file.seek(0)
    content = file.readall()
    last_line = content[content.rfind(b"\n") + 1 :]
    try:
        validate_record(json.loads(last_line))
    except (ValueError, RecursionError):
        file.truncate(size - len(last_line))
    else:  # a whole record, which only lacks its line end
        file.write(b"\n")


def read_records(*paths: str | os.PathLike[str]) -> list[Record]:
    """Returns the records of all files in order.

    Raises FileNotFoundError for a missing file, and ValueError for an empty file or, naming its number, for a
    line that is not JSON or not a valid record.
    """
    records: list[Record] = []
    for path in map(Path, paths):
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file of result records (scripts.evaluate --output writes one)")
        found = _records_of(path)
        if not found:
            raise ValueError(f"{path}: holds no result records (scripts.evaluate --output writes them)")
        records += found
    return records


def finished_records(path: str | os.PathLike[str]) -> list[Record]:
    """As `read_records` of a file that a killed run may have left with half a last line, which `append_record` will cut
    off; [] if there is none."""
    path = Path(path)
    return _records_of(path, may_end_unfinished=True) if path.is_file() else []


def _records_of(path: Path, *, may_end_unfinished: bool = False) -> list[Record]:
    records: list[Record] = []
    lines = path.read_bytes().split(b"\n")
    for line_number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            validate_record(record)
        except (ValueError, RecursionError) as error:
            if may_end_unfinished and line_number == len(lines):
                break
            raise ValueError(
                f"{path}, line {line_number}: not a result record: {error}; remove that line (--resume then makes its "
                "record again)"
            ) from error
        labels = record["labels"]
        if labels.get("method") in RENAMED_METHODS:
            labels["method"] = RENAMED_METHODS[labels["method"]]
        if "recipe" in labels:  # the name that older records have for it
            labels["label"] = labels.pop("recipe")
        records.append(record)
    return records


def environment_stamp(device: str | None = None) -> dict[str, Any]:
    """Where and with what a number is measured; what cannot be found out (no GPU, no git) is None.

    `device`: the one that was used, as torch names it, where it need not be the machine's first GPU.
    """
    stamp = dict(_fixed_environment())
    if device is not None and device.startswith("cpu"):
        stamp |= {"device": "cpu", "num_devices": 0}
    elif device is not None:
        import torch

        stamp |= {"device": torch.cuda.get_device_name(device), "num_devices": 1}
    return {**stamp, "date": datetime.now(UTC).isoformat(timespec="seconds")}


@cache
def _fixed_environment() -> dict[str, Any]:
    import torch  # here, since reading records must not cost the import

    has_gpu = torch.cuda.is_available()
    status = _output_of(["git", "status", "--porcelain"])
    return {
        "device": torch.cuda.get_device_name() if has_gpu else "cpu",
        "num_devices": torch.cuda.device_count() if has_gpu else 0,
        "driver": _first_line(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": _version_of("triton"),
        "transformers": _version_of("transformers"),
        "python": platform.python_version(),
        "cpu": _cpu_model(),
        "num_cores": _num_usable_cores(),
        "num_threads": torch.get_num_threads(),
        "platform": f"{platform.system()} {platform.machine()}",
        "commit": _first_line(["git", "rev-parse", "HEAD"]),
        "dirty": None if status is None else bool(status.strip()),
    }


def _output_of(command: Sequence[str]) -> str | None:
    """What the command prints, run in this checkout; None where it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, cwd=Path(__file__).parent)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _first_line(command: Sequence[str]) -> str | None:
    return next(iter((_output_of(command) or "").splitlines()), None)


def _version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _num_usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
