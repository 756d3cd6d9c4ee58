"""What one rank reads of a checkpoint, and the memory it takes to load its part: for tp x pp, from a cold page cache.

Each rank loads in a process of its own, one after the other, with the checkpoint dropped from the page cache before:
the case of a host that holds one rank. (The ranks of one host share their cache, so a page is read once for all.)
"read" is what is then in the page cache of the weight files (mincore); "slices" what the rank's parameters take in
the file's type; memory is the peak of anonymous memory (RssAnon) over that before loading: pages of mapped files are
the kernel's to take back.

What was measured, and what was tried, is in LOG.md.
"""

import ctypes
import itertools
import mmap
import multiprocessing
import os
import re
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from analysis.results import Record, append_record, environment_stamp, make_record
from modules.checkpoint.load import checkpoint_shapes, load_config, load_model
from modules.checkpoint.write import CheckpointWriter
from modules.config import ModelConfig
from modules.decoder import Decoder
from pipeline_parallel.mesh import ParallelMesh
from pipeline_parallel.stage import apply_pipeline
from pipeline_parallel.tensor_parallel import apply_tensor_parallel
from scripts.command_line import progress, run_stage

MIB = 2**20
# The shape of Llama-3.2-1B, but for the vocabulary and the number of layers, which `--size-mib` sets.
SHAPE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 32768,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """What each rank of tp x pp reads of a checkpoint, and the memory that loading takes."""

    output: Path
    """JSON lines; one record for each tp x pp is appended."""
    model: Path | None = None
    """A checkpoint folder; a random one by default, removed again."""
    size_mib: int = 1024
    """Of the random checkpoint, to the nearest layer, at least one per stage."""
    sizes: tuple[int, ...] = (1, 2, 4)
    """tp and pp each take these."""
    work_dir: Path | None = None
    """Where the random checkpoint is written (a disk, or nothing is read); the system's temporary folder by default."""
    quiet: bool = False
    """No progress bar."""


def main(options: Options) -> list[Record]:
    """Load every rank of every tp x pp, append the records and print a table of the worst ranks."""
    with tempfile.TemporaryDirectory(dir=options.work_dir) as folder:
        directory = options.model
        if directory is None:
            directory = Path(folder) / "checkpoint"
            write_random_checkpoint(directory, options.size_mib * MIB, min_layers=max(options.sizes))
        records = []
        cuts = list(itertools.product(options.sizes, options.sizes))
        for tp_size, pp_size in progress(cuts, "loading", quiet=options.quiet):
            records.append(
                measure_cut(directory, tp_size, pp_size, weights="random" if options.model is None else None)
            )
            append_record(options.output, records[-1])
    print(table(records))
    return records


def write_random_checkpoint(directory: Path, num_bytes: int, *, min_layers: int) -> None:
    """A converted checkpoint of about `num_bytes`, drawn and written a part at a time."""

    def size_of(num_layers: int) -> int:
        shapes = checkpoint_shapes(ModelConfig.from_hf(SHAPE | {"num_hidden_layers": num_layers}))
        return sum(2 * torch.Size(shape).numel() for part in shapes.values() for shape in part.values())

    layer = size_of(2) - size_of(1)
    hf_config = SHAPE | {"num_hidden_layers": max(min_layers, round((num_bytes - size_of(1)) / layer) + 1)}
    with CheckpointWriter(directory, hf_config, model_id="random", dtype=torch.bfloat16) as writer:
        for _ in writer.write_parts(RandomSource(writer.shapes)):
            pass


class RandomSource:
    """N(0, 0.02) under the names of a checkpoint, bfloat16."""

    def __init__(self, shapes: Mapping[str, Mapping[str, tuple[int, ...]]]) -> None:
        self._shapes = shapes
        self._generator = torch.Generator().manual_seed(0)

    def read_part(self, part: str) -> dict[str, Tensor]:
        shapes = self._shapes[part]
        return {
            key: torch.empty(shape, dtype=torch.bfloat16).normal_(std=0.02, generator=self._generator)
            for key, shape in shapes.items()
        }

    def where(self, part: str, key: str) -> str:
        return f"random part {part}: {key}"


def measure_cut(directory: Path, tp_size: int, pp_size: int, *, weights: str | None) -> Record:
    """One record: bytes read by the rank that reads most, what its slices take as the baseline, and every rank."""
    files = weight_files(directory)
    ranks = [
        measure_rank(directory, files, tp_rank, tp_size, pp_rank, pp_size)
        for pp_rank, tp_rank in itertools.product(range(pp_size), range(tp_size))
    ]
    worst = max(ranks, key=lambda rank: rank["bytes_read"])
    dtype = {rank.pop("dtype") for rank in ranks}.pop()
    return make_record(
        "load",
        {
            "model": "random" if weights == "random" else directory.name,
            "weights": weights or "trained",
            "tp_size": tp_size,
            "pp_size": pp_size,
            "dtype": dtype,
        },
        "bytes_read",
        worst["bytes_read"],
        "B",
        baseline={"name": "bytes of the slices", "value": worst["slice_bytes"]},
        environment=environment_stamp("cpu"),
        checkpoint_bytes=sum(path.stat().st_size for path in files),
        max_over_ranks={key: max(rank[key] for rank in ranks) for key in worst},
        ranks=ranks,
    )


def measure_rank(
    directory: Path, files: list[Path], tp_rank: int, tp_size: int, pp_rank: int, pp_size: int
) -> dict[str, Any]:
    """Load one rank's part in a fresh process, with none of the checkpoint in the page cache."""
    evict(files)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        loaded = pool.apply(load_rank, (directory, tp_rank, tp_size, pp_rank, pp_size))
    return loaded | {"bytes_read": sum(map(resident_bytes, files))}


def load_rank(directory: Path, tp_rank: int, tp_size: int, pp_rank: int, pp_size: int) -> dict[str, Any]:
    """In a process of its own: load, and say what it took."""
    mesh = ParallelMesh(
        tp_rank=tp_rank,
        tp_size=tp_size,
        pp_rank=pp_rank,
        pp_size=pp_size,
        dp_rank=0,
        dp_size=1,
        device=torch.device("cpu"),
    )

    def prepare(model: Decoder) -> None:
        apply_pipeline(model, mesh)
        apply_tensor_parallel(model, mesh)

    checkpoint_shapes(load_config(directory))  # the first decoder imports lazily: not what is timed
    disk_bytes = process_number("io", "read_bytes")
    with peak_anonymous_memory() as peak:
        started = time.perf_counter()
        model = load_model(directory, prepare=prepare)
        seconds = time.perf_counter() - started
    return {
        "slice_bytes": sum(parameter.nbytes for parameter in model.parameters()),
        "peak_memory_bytes": peak[0],
        "seconds": seconds,
        "disk_bytes": process_number("io", "read_bytes") - disk_bytes,
        "dtype": str(model.dtype).removeprefix("torch."),
    }


@contextmanager
def peak_anonymous_memory() -> Iterator[list[int]]:
    """[bytes]: the peak of this process's anonymous memory over what it had, sampled by the millisecond."""
    before = process_number("status", "RssAnon") * 1024
    peak, done = [0], threading.Event()

    def sample() -> None:
        while not done.wait(0.001):
            peak[0] = max(peak[0], process_number("status", "RssAnon") * 1024 - before)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


def process_number(file: str, name: str) -> int:
    """A number that Linux tells about this process, in the unit of its file (kB in `status`, bytes in `io`)."""
    found = re.search(rf"^{name}:\s+(\d+)", Path(f"/proc/self/{file}").read_text(), re.MULTILINE)
    assert found is not None, f"/proc/self/{file} has no {name}"
    return int(found[1])


def weight_files(directory: Path) -> list[Path]:
    """The files that hold the tensors."""
    return sorted(path for pattern in ("*.pt", "*.bin", "*.safetensors") for path in directory.glob(pattern))


def evict(files: list[Path], timeout_s: float = 30.0) -> None:
    """Drop files from the page cache; ValueError where that does not work (memory file systems)."""
    end = time.monotonic() + timeout_s
    while any(map(resident_bytes, files)):  # reads that were under way may still arrive
        if time.monotonic() > end:
            raise ValueError(f"{files[0].parent}: cannot be dropped from the page cache; give a --work-dir on a disk")
        for path in files:
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        time.sleep(0.05)


def resident_bytes(path: Path) -> int:
    """Bytes of a file that are in the page cache, in whole pages."""
    size = path.stat().st_size
    num_pages = -(-size // mmap.PAGESIZE)
    pages = (ctypes.c_ubyte * num_pages)()
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE) as mapped:
        address = ctypes.c_ubyte.from_buffer(mapped)
        failed = ctypes.CDLL(None).mincore(ctypes.byref(address), ctypes.c_size_t(size), pages)
        del address  # a mapping that is referred to cannot be closed
    if failed:
        raise OSError(f"{path}: mincore failed")
    return mmap.PAGESIZE * sum(page & 1 for page in pages)


def table(records: list[Record]) -> str:
    """Markdown: of each tp x pp the worst rank in each column, MiB."""
    lines = ["| tp | pp | slices | read | of the checkpoint | peak memory | s |", "|--:|--:|--:|--:|--:|--:|--:|"]
    for record in records:
        labels, worst = record["labels"], record["max_over_ranks"]
        columns = [f"{worst[key] / MIB:.0f}" for key in ("slice_bytes", "bytes_read")]
        columns += [f"{100 * worst['bytes_read'] / record['checkpoint_bytes']:.0f} %"]
        columns += [f"{worst['peak_memory_bytes'] / MIB:.0f}", f"{worst['seconds']:.2f}"]
        lines.append(f"| {labels['tp_size']} | {labels['pp_size']} | {' | '.join(columns)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    run_stage(main, Options)
